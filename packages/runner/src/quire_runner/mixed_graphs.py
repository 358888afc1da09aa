"""`CapturedMixed`: steps in which some rows read prompts while others decode, by graphs that hold the whole step.

Launched kernel by kernel, such a step takes the host longer than it takes the device, as long as it has few tokens. A
graph is made for a number of tokens, and for as many sequences as there are rows, whatever each has of the tokens:
where each begins is read on the device. What is missing to the number is read by a row that nobody has, into the null
block.

Shape legend: T tokens of the graph, S sequences, padding among them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_interfaces import FEW_TOKENS
from quire_interfaces.platforms import platform_of
from quire_ops import LoraTokens, OpFunction, torch_device
from quire_runner.config import RunnerConfig
from quire_runner.graphs import CaptureStep, DecodeGraph, DecodeGraphs
from quire_runner.inputs import HostPlan, Layers, make_batch
from quire_runner.output import PendingResult
from quire_runner.protocols import RunnableNetwork, StepAdapters
from quire_runner.row_pooling import RowPooling
from quire_runner.step import Step
from quire_runner.step_sampling import StepSampling
from quire_sampling import SampleMode

__all__ = ["CapturedMixed"]

Ints = NDArray[np.int64]


class CapturedMixed:
    """A `StepPath`.

    Args:
        network: The network.
        sampling: Rows, sampler and grammars.
        layers: The KV caches, without states.
        config: Lengths.
        capture: Captures.
        decode_inputs: Op `decode_inputs`.
        adapters: The network's; steps with rows that have one are not served. None without any.
        pooling: Steps with rows that are pooled are not served.
        has_memory: As `DecodeGraphs` takes it.
        pause_s: Likewise.
    """

    def __init__(
        self,
        network: RunnableNetwork,
        sampling: StepSampling,
        layers: Layers,
        config: RunnerConfig,
        capture: CaptureStep,
        decode_inputs: OpFunction,
        adapters: StepAdapters | None,
        pooling: RowPooling,
        *,
        has_memory: Callable[[], bool],
        pause_s: float,
    ) -> None:
        self._network = network
        self._sampling = sampling
        self._rows = sampling.rows
        self._layers = layers
        self._longest = config.max_model_len
        self._decode_inputs = decode_inputs
        self._adapters = adapters
        self._pooling = pooling
        self._padding_row = config.max_num_seqs
        modes = [mode for mode in (SampleMode.ARGMAX, *sampling.sampler.device_modes) if mode <= SampleMode.SAMPLED]
        has_graphs = platform_of(config.device).has_graphs
        self.graphs = DecodeGraphs(
            self._compute,
            config.mixed_graph_sizes,
            modes,
            padding_row=self._padding_row,
            device=torch_device(config.device),
            capture=capture,
            in_background=adapters is None and has_graphs,
            has_memory=has_memory,
            pause_s=pause_s,
            pad=self._padding,
            steps="steps with prompts",
        )

    def try_run(self, step: Step) -> PendingResult | None:
        """Start the step if there is a graph for its number of tokens, and nothing else is wanted of it than tokens."""
        if not self._is_served(step):
            return None
        plan, sampling = step.plan, self._sampling
        wanted = plan.logits
        mode = sampling.mode(wanted.rows.tolist()) if len(wanted.rows) else SampleMode.ARGMAX
        num_tokens = int(plan.query_start_loc[-1])
        size = self.graphs.size_for(num_tokens)
        if size is None or len(plan.rows) >= size:
            return None
        graph = self.graphs.find(num_tokens, mode)
        if graph is None:
            return None
        sampling.rows.check(plan.rows, plan.ends)
        chosen = self._run(graph, size, plan, step.output.samples)
        sampled = sampling.sampler.output(chosen, wanted.rows.tolist())
        return sampling.read(step, sampled, {}, step.empty_result())

    def _is_served(self, step: Step) -> bool:
        output, rows = step.output, self._rows
        is_plain = not (output.draft_token_ids or output.forced_rows or rows.prompt_logprobs or rows.media)
        if not is_plain or step.needs_features or self._pooling or self._sampling.grammars.has_any(output.rows):
            return False
        return self._adapters is None or not (rows.lora_slots[output.rows] >= 0).any()

    def _run(self, graph: DecodeGraph, size: int, plan: HostPlan, samples: Sequence[bool]) -> tuple[Tensor, ...]:
        # Those that sample come first, in their order: what they get is the first of what the graph gives.
        order = np.argsort(~np.asarray(samples, dtype=bool), kind="stable")
        rows, starts, ends = plan.rows[order], plan.start[order], plan.ends[order]
        num_sampling = len(plan.logits.rows)
        spans = self._padding(size, int((ends - starts).sum()), len(rows))
        spans[0, : len(rows)], spans[1, : len(rows)], spans[2, : len(rows)] = rows, starts, ends
        spans[3, 1 : len(rows)] = np.cumsum(ends - starts)[:-1]
        spans[4, :num_sampling] = rows[:num_sampling] * self._rows.row_len + ends[:num_sampling]
        return graph.run_spans(spans, num_sampling)

    def _num_seqs(self, size: int) -> int:
        return min(self._padding_row + 1, size)

    def _padding(self, size: int, num_tokens: int = 0, num_rows: int = 0) -> Ints:
        """The numbers of a graph [5, size], of which the first S columns count, behind `num_rows` rows with
        `num_tokens` tokens: rows, first positions, ends, first tokens, and where in all rows' tokens a token is
        written."""
        spans = np.zeros((5, size), dtype=np.int64)
        last = self._num_seqs(size) - 1
        spans[0, num_rows:] = self._padding_row
        spans[2, last] = size - num_tokens
        spans[3, num_rows:] = num_tokens
        spans[4] = self._padding_row * self._rows.row_len
        return spans

    def _compute(
        self, spans: Tensor, mode: SampleMode, features: Tensor | None, lora: LoraTokens | None = None
    ) -> tuple[Tensor, ...]:
        """A `ComputeStep` of numbers as `_padding` lays them out; gives what it chose for each sequence."""
        rows, size = self._rows, spans.shape[1]
        num_seqs = self._num_seqs(size)
        numbers = spans[:, :num_seqs].contiguous()
        inputs = self._decode_inputs(rows.token_ids, rows.row_tables, numbers[:4], size)
        # Bounds: sequences of few tokens, and of many.
        query_lens = [FEW_TOKENS] * (num_seqs - 1) + [size]
        batch = make_batch(inputs, rows, self._layers, query_lens, [self._longest] * num_seqs)
        hidden = self._network.forward(batch)
        ends = (inputs.query_start_loc[1:].long() - 1).clamp_min_(0)
        hidden = hidden.index_select(0, ends)
        sampled: tuple[Tensor, ...]
        if mode is SampleMode.ARGMAX:
            sampled = self._network.argmax(hidden)
        else:
            logits, places = self._network.compute_logits(hidden), (numbers[2] - 1).clamp_min_(0)
            sampled = self._sampling.sampler.sample_in_mode(mode, logits, numbers[0], places)
        rows.token_ids.view(-1).index_copy_(0, numbers[4], sampled[0].to(torch.int32))
        return sampled
