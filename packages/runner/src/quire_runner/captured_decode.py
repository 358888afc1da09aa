"""`CapturedDecode`: decode steps, drafts to verify among them, by graphs that hold the whole step.

Knows which steps a graph can serve and what it has to be given; how graphs are captured and kept, `graphs.py` knows.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from quire_interfaces.platforms import platform_of
from quire_ops import LoraTokens, OpFunction, OpRequest, bind, ops, torch_device
from quire_runner.config import RunnerConfig
from quire_runner.graphs import AgreeOnAll, CaptureStep, DecodeGraphs
from quire_runner.inputs import Layers, write_drafts
from quire_runner.mixed_graphs import CapturedMixed
from quire_runner.output import PendingResult
from quire_runner.padded_decode import PaddedDecode
from quire_runner.protocols import RunnableNetwork, StepAdapters
from quire_runner.row_pooling import RowPooling
from quire_runner.step import Step
from quire_runner.step_sampling import StepSampling
from quire_sampling import SampleMode

__all__ = ["CapturedDecode"]

WARM_UP_PROMPTS = ([1], [2], [3], [5], [9], [16], [33], [64], [100], [129], [512], [16, 1], [2, 3])
"""Tokens of each sequence of steps that differ in how their work is cut."""
CAPTURE_PAUSE_S = 1.0
"""Least time between two captures that hold up steps, where capturing takes time: each makes one gap between tokens
longer, by some 30 ms."""
MIN_FREE_BYTES = 256 << 20
"""Memory of the device that graphs leave to steps kernel by kernel, which reserve anew what they need."""


class CapturedDecode:
    """A `StepPath`. Every token of a step has an entry of its own in the graph: keys and values of all are stored
    before any attends, and a draft sees as far as its position.

    Args:
        network: The network.
        sampling: Rows, sampler and grammars.
        layers: The KV caches.
        config: Sizes of graphs, and lengths.
        capture: Captures.
        adapters: The network's; None without any.
        features: [largest size of all graphs, width] where steps leave what a drafter reads of them; None without such
            a drafter.
        feature_layers: Layers whose input that is; none for the hidden states.
        pooling: The rows that are pooled.
    """

    def __init__(
        self,
        network: RunnableNetwork,
        sampling: StepSampling,
        layers: Layers,
        config: RunnerConfig,
        capture: CaptureStep,
        adapters: StepAdapters | None,
        features: Tensor | None = None,
        feature_layers: tuple[int, ...] = (),
        pooling: RowPooling | None = None,
    ) -> None:
        self._config = config
        self._sampling = sampling
        self._has_states = bool(layers.states)
        self._adapters = adapters
        sizes, device = config.graph_sizes, torch_device(config.device)
        decode_inputs = bind(ops.decode_inputs, OpRequest(device=device.type))
        self._padded = PaddedDecode(
            network,
            sampling.rows,
            decode_inputs,
            sampling.sampler,
            layers,
            config.max_model_len,
            max(*sizes, config.mixed_logit_rows),
            feature_layers,
        )
        self.graphs = DecodeGraphs(
            self._padded,
            sizes,
            self._padded.modes,
            padding_row=config.max_num_seqs,
            device=device,
            capture=capture,
            features=features,
            # Which adapters the network runs with belongs to the thread that runs steps; a CPU has no time beside them.
            in_background=adapters is None and platform_of(config.device).has_graphs,
            has_memory=self._has_memory,
            pause_s=CAPTURE_PAUSE_S if platform_of(config.device).has_graphs else 0.0,
        )

        self.mixed: CapturedMixed | None = None
        """Steps with prompts; None where the network does not allow graphs of them."""
        takes_prompts = not getattr(network, "host_query_lens", ("the network",))
        rows = sampling.rows
        if (
            takes_prompts
            and config.mixed_graph_sizes
            and not (
                self._has_states or rows.encoder_tables or rows.device_position_deltas is not None or pooling is None
            )
        ):
            self.mixed = CapturedMixed(
                self._padded, sampling, layers, config, capture, decode_inputs, adapters, pooling, features=features,
                has_memory=self._has_memory, pause_s=self.graphs.pause_s,
            )  # fmt: skip

    def try_run(self, step: Step) -> PendingResult | None:
        """Start the step if there is a graph for its number of tokens and the way they are chosen. A step for which
        there is none yet brings it nearer."""
        # What layers keep besides keys and values would be stored for drafts that turn out wrong.
        if not step.is_single and (self._has_states or not step.is_verifying):
            return None if self.mixed is None else self.mixed.try_run(step)
        output, plan, sampling = step.output, step.plan, self._sampling
        wanted = plan.logits
        mode, size = sampling.mode(output.rows), self.graphs.size_for(len(wanted.rows))
        if mode is SampleMode.HOST or size is None:
            return None
        slots, lora = sampling.rows.lora_slots[wanted.rows], None
        if self._adapters is not None and (slots >= 0).any():
            lora = self._adapters.captured_tokens_of(slots, size)
            if lora is None:
                return None
        graph = self.graphs.find(len(wanted.rows), mode, lora)
        if graph is None:
            return None
        sampling.rows.check(plan.rows, plan.ends)
        masks, failures = sampling.grammars.masks(output, wanted.entry_ends)
        mask_of = self._padded.set_masks(masks, len(wanted.rows))
        if plan.num_drafts is not None:
            write_drafts(output, plan, sampling.rows)
        chosen = graph.run(wanted.rows, wanted.positions, mask_of)
        sampled = sampling.sampler.output(chosen, wanted.rows.tolist())
        step.features = self.graphs.features
        return sampling.read(step, sampled, failures, step.empty_result())

    @torch.inference_mode()
    def warm_up(self, step_inputs: OpFunction, capture_s: float, agree: AgreeOnAll | None) -> None:
        """Run steps of many sizes on padding, prompts by `step_inputs` among them: what they need to have compiled is
        there when the first request comes. Then capture graphs, for up to `capture_s` seconds; `agree`, of ranks that
        share a network, leaves all of them to steps (`DecodeGraphs.follow_steps`)."""
        self.graphs.warm_up()
        if self.mixed is not None:
            self.mixed.graphs.warm_up()
        most = min(self._config.max_num_batched_tokens, self._config.max_model_len)
        for query_lens in (*WARM_UP_PROMPTS, [most]):
            if sum(query_lens) <= most:
                for num_computed in {0, self._config.max_model_len - max(query_lens)}:
                    self._padded.run_prompt(step_inputs, query_lens, num_computed)
        if agree is not None:
            for graphs in self._all_graphs():
                graphs.follow_steps(agree)
            return
        begin_s = time.monotonic()
        lora_of = None if self._adapters is None else self._lora_of
        self.graphs.capture(capture_s, lora_of)
        if self.mixed is not None:
            self.mixed.graphs.capture(capture_s - (time.monotonic() - begin_s), lora_of)

    @property
    def has_left(self) -> bool:
        """Whether graphs are left for `capture_left`."""
        return any(graphs.has_left for graphs in self._all_graphs())

    def capture_left(self) -> None:
        """Capture one of the graphs that are left, while no step waits."""
        for graphs in self._all_graphs():
            if graphs.has_left:
                graphs.capture_left()
                return

    def _all_graphs(self) -> list[DecodeGraphs]:
        return [self.graphs] if self.mixed is None else [self.graphs, self.mixed.graphs]

    def _lora_of(self, size: int) -> LoraTokens | None:
        assert self._adapters is not None
        return self._adapters.captured_tokens_of(np.empty(0, dtype=np.int32), size)

    def _has_memory(self) -> bool:
        free_bytes = platform_of(self._config.device).free_bytes(self._config.device)
        return free_bytes is None or free_bytes >= MIN_FREE_BYTES

    def close(self) -> None:
        """Let go of all graphs. Idempotent; `try_run` must not follow."""
        for graphs in self._all_graphs():
            graphs.close()
