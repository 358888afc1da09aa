"""`CapturedMixed`: steps in which some rows read prompts while others decode, by graphs that hold the whole step.

Launched kernel by kernel, such a step takes the host longer than it takes the device, as long as it has few tokens. A
graph is made for a number of tokens, and for as many sequences as there are rows, whatever each has of the tokens:
where each begins is read on the device. What is missing to the number is read by a row that nobody has, into the null
block.

Drafts are tokens behind a row's last known one, as those of a prompt are, and have logit rows of their own.

Shape legend: T tokens of the graph, S sequences, L logit rows, padding among them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire_interfaces import FEW_TOKENS
from quire_interfaces.platforms import platform_of
from quire_ops import LoraTokens, OpFunction, torch_device
from quire_runner.config import RunnerConfig
from quire_runner.graphs import CaptureStep, DecodeGraphs
from quire_runner.inputs import HostPlan, Layers, make_batch, write_drafts
from quire_runner.output import PendingResult
from quire_runner.padded_decode import PaddedDecode
from quire_runner.protocols import StepAdapters
from quire_runner.row_pooling import RowPooling
from quire_runner.step import Step
from quire_runner.step_sampling import StepSampling
from quire_sampling import SampleMode

__all__ = ["CapturedMixed"]

Ints = NDArray[np.int64]


class CapturedMixed:
    """A `StepPath`.

    Args:
        padded: From a batch to its tokens.
        sampling: Rows, sampler and grammars.
        layers: The KV caches, without states.
        config: Lengths.
        capture: Captures.
        decode_inputs: Op `decode_inputs`.
        adapters: The network's; None without any.
        pooling: Steps with rows that are pooled are not served.
        features: As `DecodeGraphs` takes it.
        has_memory: Likewise.
        pause_s: Likewise.
    """

    def __init__(
        self,
        padded: PaddedDecode,
        sampling: StepSampling,
        layers: Layers,
        config: RunnerConfig,
        capture: CaptureStep,
        decode_inputs: OpFunction,
        adapters: StepAdapters | None,
        pooling: RowPooling,
        *,
        features: Tensor | None,
        has_memory: Callable[[], bool],
        pause_s: float,
    ) -> None:
        self._padded = padded
        self._sampling = sampling
        self._rows = sampling.rows
        self._layers = layers
        self._longest = config.max_model_len
        self._decode_inputs = decode_inputs
        self._adapters = adapters
        self._pooling = pooling
        self._padding_row = config.max_num_seqs
        self._most_logit_rows = config.mixed_logit_rows
        has_graphs = platform_of(config.device).has_graphs
        self.graphs = DecodeGraphs(
            self._compute,
            config.mixed_graph_sizes,
            padded.modes,
            padding_row=self._padding_row,
            device=torch_device(config.device),
            capture=capture,
            features=features,
            in_background=adapters is None and has_graphs,
            has_memory=has_memory,
            pause_s=pause_s,
            pad=self._padding,
            steps="steps with prompts",
        )

    def try_run(self, step: Step) -> PendingResult | None:
        """Start the step if there is a graph for its number of tokens and the way they are chosen, and nothing else is
        wanted of it."""
        if not self._is_served(step):
            return None
        output, plan, sampling = step.output, step.plan, self._sampling
        wanted = plan.logits
        mode = sampling.mode(wanted.rows.tolist()) if len(wanted.rows) else SampleMode.ARGMAX
        num_tokens = int(plan.query_start_loc[-1])
        size = self.graphs.size_for(num_tokens)
        if size is None or len(plan.rows) >= size or len(wanted.rows) > self._num_logit_rows(size):
            return None
        slots, lora = self._rows.lora_slots[plan.rows], None
        if self._adapters is not None and (slots >= 0).any():
            lora = self._adapters.captured_tokens_of(np.repeat(slots, plan.query_lens), size)
            if lora is None:
                return None
        graph = self.graphs.find(num_tokens, mode, lora)
        if graph is None:
            return None
        self._rows.check(plan.rows, plan.ends)
        masks, failures = sampling.grammars.masks(output, wanted.entry_ends)
        mask_of = self._padded.set_masks(masks, len(wanted.rows))
        if plan.num_drafts is not None:
            write_drafts(output, plan, self._rows)
        chosen = graph.run_spans(self._spans(size, plan, mask_of), len(wanted.rows))
        sampled = sampling.sampler.output(chosen, wanted.rows.tolist())
        step.features = self.graphs.features
        return sampling.read(step, sampled, failures, step.empty_result())

    def _is_served(self, step: Step) -> bool:
        output, rows, adapters = step.output, self._rows, self._adapters
        if output.draft_parents or rows.prompt_logprobs or self._pooling:
            return False
        if rows.media and any(map(rows.has_media_from, output.rows, output.num_computed_tokens)):
            return False
        return adapters is None or not adapters.changes_vocabulary(rows.lora_slots[output.rows])

    def _num_seqs(self, size: int) -> int:
        return min(self._padding_row + 1, size)

    def _num_logit_rows(self, size: int) -> int:
        return min(self._most_logit_rows, size)

    def _spans(self, size: int, plan: HostPlan, mask_of: Ints | None) -> Ints:
        """The numbers of a graph for a step, as `_padding` lays them out."""
        num_rows, wanted = len(plan.rows), plan.logits
        spans = self._padding(size, int(plan.query_start_loc[-1]), num_rows)
        spans[0, :num_rows], spans[1, :num_rows], spans[2, :num_rows] = plan.rows, plan.start, plan.ends
        spans[3, :num_rows] = plan.query_start_loc[:-1]
        logits = spans[4:, : len(wanted.rows)]
        logits[0], logits[1], logits[2], logits[3] = (
            wanted.rows,
            wanted.positions,
            wanted.positions + 1,
            wanted.token_index,
        )
        if mask_of is not None:
            logits[4] = mask_of
        return spans

    def _padding(self, size: int, num_tokens: int = 0, num_rows: int = 0) -> Ints:
        """The numbers of a graph [9, size] behind `num_rows` rows with `num_tokens` tokens. Of the first S columns:
        rows, first positions, ends, first tokens; of the first L: rows, positions, the positions behind, tokens, which
        mask they get."""
        spans = np.zeros((9, size), dtype=np.int64)
        last = self._num_seqs(size) - 1
        spans[0, num_rows:] = self._padding_row
        spans[2, last] = size - num_tokens
        spans[3, num_rows:] = num_tokens
        spans[4], spans[6], spans[8] = self._padding_row, 1, -1
        return spans

    def _compute(
        self, spans: Tensor, mode: SampleMode, features: Tensor | None, lora: LoraTokens | None = None
    ) -> tuple[Tensor, ...]:
        """A `ComputeStep` of numbers as `_padding` lays them out; gives what it chose for each logit row."""
        rows, size = self._rows, spans.shape[1]
        num_seqs = self._num_seqs(size)
        inputs = self._decode_inputs(rows.token_ids, rows.row_tables, spans[:4, :num_seqs].contiguous(), size)
        # Bounds: sequences of few tokens, and of many.
        query_lens = [FEW_TOKENS] * (num_seqs - 1) + [size]
        batch = make_batch(inputs, rows, self._layers, query_lens, [self._longest] * num_seqs)
        batch.lora = lora
        hidden = self._padded.hidden(batch, features)
        owners, places, ends, tokens, mask_of = spans[4:, : self._num_logit_rows(size)].unbind(0)
        return self._padded.sample(mode, hidden.index_select(0, tokens), owners, places, ends, mask_of)
