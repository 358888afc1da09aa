"""`CapturedDecode`: decode steps, drafts to verify among them, by graphs that hold the whole step.

Knows which steps a graph can serve and what it has to be given; how graphs are captured and kept, `graphs.py` knows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire_interfaces.platforms import platform_of
from quire_ops import OpFunction, OpRequest, bind, ops, torch_device
from quire_runner.config import RunnerConfig
from quire_runner.graphs import CaptureStep, DecodeGraphs
from quire_runner.inputs import Layers, write_drafts
from quire_runner.output import PendingResult
from quire_runner.padded_decode import PaddedDecode
from quire_runner.protocols import RunnableNetwork, StepAdapters
from quire_runner.step import Step
from quire_runner.step_sampling import StepSampling
from quire_sampling import SampleMode

__all__ = ["CapturedDecode"]

WARM_UP_PROMPTS = ([1], [2], [3], [5], [9], [16], [33], [64], [100], [129], [512], [16, 1], [2, 3])
"""Tokens of each sequence of steps that differ in how their work is cut."""


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
        features: [largest size, width] where steps leave what a drafter reads of them; None without such a drafter.
        feature_layers: Layers whose input that is; none for the hidden states.
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
    ) -> None:
        self._config = config
        self._sampling = sampling
        self._has_states = bool(layers.states)
        self._adapters = adapters
        sizes, device = config.graph_sizes, torch_device(config.device)
        self._padded = PaddedDecode(
            network,
            sampling.rows,
            bind(ops.decode_inputs, OpRequest(device=device.type)),
            sampling.sampler,
            layers,
            config.max_model_len,
            max(sizes),
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
        )

    def try_run(self, step: Step) -> PendingResult | None:
        """Start the step if there is a graph for its number of tokens and the way they are chosen. A step for which
        there is none yet brings it nearer."""
        # What layers keep besides keys and values would be stored for drafts that turn out wrong.
        if not step.is_single and (self._has_states or not step.is_verifying):
            return None
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
        mask_of = None
        if masks is not None:
            mask_of = masks.mask_of(len(wanted.rows)).numpy()
            self._padded.bitmask[: len(masks.indices)].copy_(masks.bitmask)
        if plan.num_drafts is not None:
            write_drafts(output, plan, sampling.rows)
        chosen = graph.run(wanted.rows, wanted.positions, mask_of)
        sampled = sampling.sampler.output(chosen, wanted.rows.tolist())
        step.features = self.graphs.features
        return sampling.read(step, sampled, failures, step.empty_result())

    @torch.inference_mode()
    def warm_up(self, step_inputs: OpFunction) -> None:
        """Run steps of many sizes on padding, prompts by `step_inputs` among them: what they need to have compiled is
        there when the first request comes."""
        self.graphs.warm_up()
        most = min(self._config.max_num_batched_tokens, self._config.max_model_len)
        for query_lens in (*WARM_UP_PROMPTS, [most]):
            if sum(query_lens) <= most:
                for num_computed in {0, self._config.max_model_len - max(query_lens)}:
                    self._padded.run_prompt(step_inputs, query_lens, num_computed)

    def close(self) -> None:
        """Let go of all graphs. Idempotent; `try_run` must not follow."""
        self.graphs.close()
