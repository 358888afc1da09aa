"""`GeneralStep`: any step, op by op: inputs, encoder, forward, logits, sampling."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire_attention.batch import ForwardBatch
from quire_interfaces.step import ModelRunnerOutput
from quire_ops import LoraTokens, OpFunction, to_device
from quire_runner.encoder_inputs import encoder_slots
from quire_runner.inputs import Layers, forward_batch, write_drafts
from quire_runner.media import EncoderCache
from quire_runner.output import PendingResult, ReadyResult
from quire_runner.prompt_logprobs import step_prompt_logprobs
from quire_runner.protocols import RunnableNetwork, StepAdapters
from quire_runner.row_pooling import RowPooling
from quire_runner.step import Step
from quire_runner.step_sampling import StepSampling
from quire_sampling import SamplerOutput

__all__ = ["GeneralStep"]


class GeneralStep:
    """A `StepPath` that runs every step: prompts, drafts, trees, encoders, log probabilities of prompts.

    Args:
        network: The network.
        sampling: From logits to results, and the rows.
        layers: The KV caches.
        step_inputs: Op `step_inputs`.
        adapters: The network's; None without any.
        media: The embeddings of what stands among the tokens of prompts.
        pooling: The rows that are pooled.
        logits_chunk_tokens: Most prompt positions whose logits are alive at once.
    """

    def __init__(
        self,
        network: RunnableNetwork,
        sampling: StepSampling,
        layers: Layers,
        step_inputs: OpFunction,
        adapters: StepAdapters | None,
        media: EncoderCache,
        pooling: RowPooling,
        logits_chunk_tokens: int,
    ) -> None:
        self._network = network
        self._sampling = sampling
        self._rows = sampling.rows
        self._layers = layers
        self._step_inputs = step_inputs
        self._adapters = adapters
        self._media = media
        self._pooling = pooling
        self._logits_chunk_tokens = logits_chunk_tokens

    def try_run(self, step: Step) -> PendingResult:
        """Start the step, whatever it is."""
        output, plan = step.output, step.plan
        if plan.num_drafts is not None:
            write_drafts(output, plan, self._rows)
        batch = forward_batch(plan, self._rows, self._step_inputs, self._layers, output.new_rows)
        self._add_adapters(step, batch)
        if self._rows.media:
            self._media.add_to(batch, plan)
        if batch.encoder is not None:
            self._network.encode(batch)
        hidden = self._forward(step, batch)
        if self._pooling:
            self._pooling.add(output.rows, plan.query_lens, hidden, batch.input_ids)
        result = step.empty_result()
        if self._rows.prompt_logprobs:
            result.prompt_logprobs = step_prompt_logprobs(
                plan, self._rows, hidden, self._logits_of_row, self._logits_chunk_tokens
            )
        return self._sample(step, hidden, result) if len(plan.logits.rows) else ReadyResult(result)

    def _add_adapters(self, step: Step, batch: ForwardBatch) -> None:
        """Say in the batch which tokens have adapters."""
        if self._adapters is None:
            return
        batch.lora = self._adapters.tokens_of(np.repeat(self._rows.lora_slots[step.plan.rows], step.plan.query_lens))
        if batch.encoder is not None:
            slots = encoder_slots(step.output.new_rows, self._rows, batch.encoder.lens)
            batch.encoder.lora = self._adapters.tokens_of(slots)

    def _forward(self, step: Step, batch: ForwardBatch) -> Tensor:
        """Hidden states [T, hidden_size]; the step gets the features that its drafter wants."""
        drafter = step.drafter
        if drafter is not None and drafter.feature_layers:
            hidden, step.features = self._network.forward_with_features(batch, drafter.feature_layers)
            return hidden
        hidden = self._network.forward(batch)
        if drafter is not None and drafter.wants_hidden:
            step.features = hidden
        return hidden

    def _sample(self, step: Step, hidden: Tensor, result: ModelRunnerOutput) -> PendingResult:
        """Sample the tokens behind the logit rows, by logits or by their largest one alone."""
        wanted = step.plan.logits
        if len(wanted.rows) < hidden.shape[0]:
            hidden = hidden.index_select(0, to_device(wanted.token_index, hidden.device))
        lora, rows = self._logit_tokens(wanted.rows), wanted.rows.tolist()
        if not self._sampling.is_argmax(rows):
            return self._sampling.sample(step, self._network.compute_logits(hidden, lora), result)
        token_ids, max_logits = self._network.argmax(hidden, lora)
        return self._sampling.write(step, SamplerOutput(token_ids, rows, max_logits), {}, result)

    def _logit_tokens(self, rows: NDArray[np.int64]) -> LoraTokens | None:
        """Which of the hidden states of rows [N] have adapters that change their logits; None for none."""
        return None if self._adapters is None else self._adapters.logit_tokens_of(self._rows.lora_slots[rows])

    def _logits_of_row(self, row: int, hidden: Tensor) -> Tensor:
        """[N, vocab_size] of hidden states [N, hidden_size] of one row."""
        return self._network.compute_logits(hidden, self._logit_tokens(np.full(len(hidden), row)))
