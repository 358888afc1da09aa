"""`ModelRunner`: one step on the device, from the scheduler's plan to sampled tokens.

Knows rows, inputs, network and sampler, and the order in which they act. Knows no request beyond its row, no text, no
queue, and nothing of how blocks are given out. The code is the same for every device.

A step is started (`launch`) and read: its tokens stay on the device, where the next step finds them, and go to the host
beside it. Between two plain steps nobody waits for the device. Drafts and grammars are the exception: what follows
depends on which tokens came, so that such a step is read before it counts as started.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from quire_interfaces.device import Drafter, LogitsProcessor, RequestDrafter
from quire_interfaces.encoder_cache import EncoderCacheConnector
from quire_interfaces.errors import ConfigError
from quire_interfaces.grammar import GrammarSource
from quire_interfaces.kv_cache import KVCachePlan
from quire_interfaces.kv_transfer import BlockMemory, KVTransferWorker
from quire_interfaces.platforms import platform_of
from quire_interfaces.step import ModelRunnerOutput, RequestFailure, SchedulerOutput
from quire_models import Network
from quire_ops import Op, OpRequest, bind, kv_cache_shape, op_table, ops, torch_device
from quire_runner.affinity import bind_team, choose_cores
from quire_runner.block_bytes import BlockBytes
from quire_runner.captured_decode import CapturedDecode
from quire_runner.config import RunnerConfig
from quire_runner.fused_decode import FusedDecode, FusedLogits
from quire_runner.general_step import GeneralStep
from quire_runner.grammars import RowGrammars
from quire_runner.graph_choice import choose_capture
from quire_runner.graphs import AgreeOnAll, CaptureStep, DecodeGraphs
from quire_runner.inputs import Layers
from quire_runner.kv_cache import CacheShape, allocate_kv_caches, give_back_pages, layer_states
from quire_runner.media import EncodedMedia, EncoderCache
from quire_runner.output import Failures, PendingResult, ReadyResult, without_entries
from quire_runner.paced_drafting import PacedDrafting
from quire_runner.protocols import LogitsTap, RunnableNetwork, StepAdapters
from quire_runner.row_pooling import RowPooler, RowPooling
from quire_runner.rows import Rows
from quire_runner.step import Step, StepPath
from quire_runner.step_sampling import StepSampling
from quire_sampling import Sampler, SamplingConfig, SamplingState
from quire_spec_decode import DraftController
from quire_spec_decode.row_drafter import DraftLimits, RowDrafter, TextDrafting

__all__ = ["ModelRunner"]

_logger = logging.getLogger(__name__)

SAMPLING_OPS: tuple[Op[..., Any], ...] = (ops.sample, ops.sample_masked, ops.penalize)

MakeTransferWorker = Callable[[BlockMemory], KVTransferWorker]


class ModelRunner:
    """Runs steps, in order, on one device. Not thread-safe: one thread at a time.

    Args:
        network: The network, on the device, weights loaded.
        plan: The KV cache; allocated here.
        config: Rows, lengths, threads.
        vocab_size: Width of the logits.
        cache_shape: The attention backend's shape of a layer's KV cache.
        layer_names: Names of the layers in the network's order. None reads them from the plan, which is possible while
            it has one group.
        drafter: Proposes draft tokens after each step; None drafts nothing.
        draft_network: Proposes them instead: a draft model, or a head of this network, which is then one of
            `quire_models`.
        draft_controller: Says how much to draft, from what steps cost and bring; None drafts as much as configured.
        logits_processors: Name -> processor that requests may ask for.
        always_processors: Names of those that run for every request.
        sampling_config: Limits of the sampler.
        grammars: Makes the matchers of requests whose output has a form; None takes no such requests.
        on_logits: Sees the logits of every step, for tests and tools.
        make_transfer_worker: Makes what moves blocks between this KV cache and a tier; None without a tier.
        encoder_connector: Keeps encoder outputs beyond memory; closed with the runner. None keeps them in memory alone.
        adapters: The network's adapters; None takes no rows that have one.
        pooler: Makes outputs of hidden states, on the network's device; None takes no requests that are pooled.
        capture: Captures decode steps in graphs; None takes the device's own way, where it has one.

    Raises:
        ConfigError: the plan does not fit the network, or a tier cannot reach the cache.
    """

    def __init__(
        self,
        network: RunnableNetwork,
        plan: KVCachePlan,
        config: RunnerConfig,
        *,
        vocab_size: int,
        cache_shape: CacheShape,
        layer_names: Sequence[str] | None = None,
        drafter: Drafter | RequestDrafter | None = None,
        draft_network: Network | None = None,
        draft_controller: DraftController | None = None,
        logits_processors: Mapping[str, LogitsProcessor] | None = None,
        always_processors: Sequence[str] = (),
        sampling_config: SamplingConfig | None = None,
        grammars: GrammarSource | None = None,
        on_logits: LogitsTap | None = None,
        make_transfer_worker: MakeTransferWorker | None = None,
        encoder_connector: EncoderCacheConnector | None = None,
        adapters: StepAdapters | None = None,
        pooler: RowPooler | None = None,
        capture: CaptureStep | None = None,
    ) -> None:
        self._config = config
        self._plan = plan
        self._device, self._platform = torch_device(config.device), platform_of(config.device)
        self._cores = choose_cores(config.cpu_affinity, config.num_threads) if self._device.type == "cpu" else ()
        self._bind_first = bool(self._cores)
        num_threads = len(self._cores) or config.num_threads
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        names = _layer_names(plan, layer_names)
        group_of = {name: i for i, group in enumerate(plan.groups) for name in group.layer_names}
        caches = allocate_kv_caches(plan, device=self._device, cache_shape=cache_shape)
        states = layer_states(plan, caches)
        self._layers = Layers(
            tuple(group_of[name] for name in names),
            tuple(caches[name] for name in names),
            tuple(states.get(name, ()) for name in names) if states else (),
        )
        capture, self.graph_refusal = choose_capture(capture, network, config)
        state = SamplingState(
            config.max_num_seqs + (capture is not None),  # the last row is padding
            vocab_size,
            self._device,
            logits_processors=logits_processors,
            always=always_processors,
            config=sampling_config,
        )
        row_grammars = RowGrammars(grammars, vocab_size, self._device)
        self._rows = Rows(config, plan.groups, state, row_grammars, self._device)
        self._adapters = adapters
        self._pooling = RowPooling(pooler)
        self._media = EncoderCache(network.encode_media, self._rows.media, self._device, encoder_connector)
        self._step_inputs = bind(ops.step_inputs, OpRequest(device=self._device.type))
        sampler = self._make_sampler(state, is_captured=capture is not None)
        self._sampling = StepSampling(self._rows, sampler, row_grammars, self._layers, on_logits)
        proposes: RowDrafter | None = None if drafter is None else TextDrafting(drafter, self._rows)
        if draft_network is not None:
            proposes = self._network_drafter(draft_network, cast(Network, network))
        self._drafting: PacedDrafting | None = None
        if proposes is not None:
            self._drafting = PacedDrafting(proposes, draft_controller, self._rows, config, vocab_size)
        self._captured = None if capture is None else self._make_captured(network, capture, proposes)
        self._paths = self._make_paths(network)
        self._transfers = None if make_transfer_worker is None else make_transfer_worker(self._block_memory(caches))

    def _block_memory(self, caches: Mapping[str, Tensor]) -> BlockMemory:
        if self._platform.is_host:
            return BlockBytes(self._plan, caches)
        from quire_runner.device_blocks import DeviceBlocks

        return DeviceBlocks(self._plan, caches, self._platform, self._config.device)

    @classmethod
    def for_model(
        cls,
        model: Network,
        plan: KVCachePlan,
        config: RunnerConfig,
        *,
        drafter: Drafter | RequestDrafter | None = None,
        draft_network: Network | None = None,
        draft_controller: DraftController | None = None,
        logits_processors: Mapping[str, LogitsProcessor] | None = None,
        always_processors: Sequence[str] = (),
        sampling_config: SamplingConfig | None = None,
        grammars: GrammarSource | None = None,
        on_logits: LogitsTap | None = None,
        make_transfer_worker: MakeTransferWorker | None = None,
        encoder_connector: EncoderCacheConnector | None = None,
        adapters: StepAdapters | None = None,
        pooler: RowPooler | None = None,
        capture: CaptureStep | None = None,
    ) -> ModelRunner:
        """A runner for a network of `quire_models`, which says itself what the constructor asks about networks."""
        return cls(
            model,
            plan,
            config,
            vocab_size=model.config.vocab_size,
            cache_shape=kv_cache_shape,
            layer_names=tuple(model.config.kv_cache_specs(block_size=1, dtype="bfloat16")),
            drafter=drafter,
            draft_network=draft_network,
            draft_controller=draft_controller,
            logits_processors=logits_processors,
            always_processors=always_processors,
            sampling_config=sampling_config,
            grammars=grammars,
            on_logits=on_logits,
            make_transfer_worker=make_transfer_worker,
            encoder_connector=encoder_connector,
            adapters=adapters,
            pooler=pooler,
            capture=capture,
        )

    def _make_sampler(self, state: SamplingState, *, is_captured: bool) -> Sampler:
        """The sampler, with the ops that this device has more than the reference of."""
        wanted = (*SAMPLING_OPS, ops.edit_logits) if is_captured else SAMPLING_OPS
        backends = [op_table().choose(op, OpRequest(device=self._device.type)) for op in wanted]
        return Sampler(state, *(None if each.name == "reference" else each.function for each in backends))

    def _network_drafter(self, draft_network: Network, network: Network) -> RowDrafter:
        """What drafts by a network of its own."""
        from quire_spec_decode.network_drafting import network_drafting  # many modules, for who drafts by networks

        config = self._config
        limits = DraftLimits(
            depth=config.draft_depth or config.num_speculative_tokens,
            num_nodes=config.num_speculative_tokens,
            topk=config.draft_topk,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        allocate = partial(allocate_kv_caches, device=draft_network.device, cache_shape=kv_cache_shape)
        return network_drafting(draft_network, network, self._rows, self._plan, limits, self._step_inputs, allocate)

    def _make_captured(
        self, network: RunnableNetwork, capture: CaptureStep, drafter: RowDrafter | None
    ) -> CapturedDecode:
        """The graphs, with a place for what the drafter reads of their steps."""
        config, features, feature_layers = self._config, None, tuple[int, ...]()
        if drafter is not None and drafter.wants_features:
            target, feature_layers = cast(Network, network), drafter.feature_layers
            shape = (
                max((*config.graph_sizes, *config.mixed_graph_sizes)),
                max(1, len(feature_layers)) * target.config.hidden_size,
            )
            features = torch.zeros(shape, dtype=target.dtype, device=self._device)
        return CapturedDecode(
            network,
            self._sampling,
            self._layers,
            config,
            capture,
            self._adapters,
            features,
            feature_layers,
            self._pooling,
        )

    def _make_paths(self, network: RunnableNetwork) -> list[StepPath]:
        """The ways to run a step, the quickest first; the last one runs any."""
        sampling, layers = self._sampling, self._layers
        fused = network.bind_decode(self._rows.for_decode(layers.group_of_layer, layers.kv_caches, layers.states))
        paths: list[StepPath] = [] if fused is None else [FusedDecode(fused, sampling)]
        if self._captured is not None:
            paths.append(self._captured)
        if fused is not None:
            paths.append(FusedLogits(fused, sampling))
        general = GeneralStep(
            network,
            sampling,
            layers,
            self._step_inputs,
            self._adapters,
            self._media,
            self._pooling,
            self._config.logits_chunk_tokens,
        )
        paths.append(general)
        return paths

    @property
    def rows(self) -> Rows:
        """The persistent rows; for tools and tests, read only."""
        return self._rows

    @property
    def encoder_cache(self) -> EncoderCache:
        """The embeddings of media; for tools and tests, read only."""
        return self._media

    @property
    def cores(self) -> tuple[int, ...]:
        """Cores that the threads of a step are bound to, one each; none where they are not."""
        return self._cores

    @property
    def graphs(self) -> DecodeGraphs | None:
        """Graphs of decode steps; None where none are captured, and `graph_refusal` says why."""
        return None if self._captured is None else self._captured.graphs

    def warm_up(self, capture_s: float = 0.0, agree: AgreeOnAll | None = None) -> None:
        """Run steps of many sizes on padding, where decode steps are captured: what they need to have compiled is there
        when the first request comes. Then capture graphs of decode steps. Before the first step.

        Args:
            capture_s: Time for capturing, in seconds. What is left is captured while no step waits (`use_slack`), or
                when steps want it.
            agree: Of runners that share a network: steps alone decide what is captured, and a graph that one of them
                cannot capture is captured by none.
        """
        self._platform.use(self._config.device)
        if self._captured is not None:
            self._captured.warm_up(self._step_inputs, capture_s, agree)

    @property
    def has_deferred_work(self) -> bool:
        """Whether `use_slack` has something to do."""
        return self._captured is not None and self._captured.has_left

    def use_slack(self) -> None:
        """Do one piece of the work that was deferred until no step waits: capture a graph. In the thread that runs
        steps."""
        if self._captured is not None:
            self._platform.use(self._config.device)
            self._captured.capture_left()

    def learn_draft_costs(self) -> None:
        """Let the controller of drafts know what they cost, by steps for nobody that take a moment. Before the first
        step, in the thread that runs steps."""
        if self._drafting is None:
            return
        on_logits, self._sampling.on_logits = self._sampling.on_logits, None
        try:
            self._drafting.learn_costs(self._plan, self.launch)
        except Exception:
            _logger.exception("the cost of drafts could not be measured; it is learned from requests")
        finally:
            self._sampling.on_logits = on_logits

    def execute(self, output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Run one step in the caller's thread: a runner is an `Executor` without threads. The future is done."""
        future: Future[ModelRunnerOutput] = Future()
        try:
            future.set_result(self.run(output))
        except Exception as error:
            future.set_exception(error)
        return future

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step; raises as `launch` does."""
        result = self.launch(output)()
        self._rows.take_late_failures()
        return result

    def launch(self, output: SchedulerOutput) -> PendingResult:
        """Start one step.

        Rows are freed, filled and extended first, and stay so even if the step then fails; token history changes only
        after everything that can fail has been done.

        Returns:
            What waits for the step's results, to be called once, in the order of the steps. Another thread may call it
            while this one launches the next step.

        Raises:
            RuntimeError: the step is impossible (a step before it failed), or the network raised it.
            Exception: whatever the network raises.
        """
        self._platform.use(self._config.device)
        if self._bind_first:  # now, because the team belongs to the thread that runs the steps
            self._bind_first = False
            bind_team(self._cores)
        # Before everything else: blocks to store may be overwritten by this step, and a step that fails must not lose
        # what was asked of the worker.
        if output.kv_transfer is not None and self._transfers is not None:
            self._transfers.begin(output.kv_transfer)
        with torch.inference_mode():
            rows = self._rows
            rows.take_late_failures()
            rows.apply(output)
            self._place_adapters(output)
            self._begin_pooling(output)
            encoded = self._encode_media(output)
            if self._drafting is not None:
                self._drafting.drafter.begin(output)
            dropped = {row: rows.failed[row] for row in output.rows if row in rows.failed} if rows.failed else {}
            step = without_entries(output, dropped) if dropped else output
            if step.rows and self._adapters is not None:
                rows.hide_slot(self._adapters.merge_for_step(rows.adapter_slots[step.rows]))
            planned = step
            if self._pooling:
                step = self._pooling.without_samples(step)
            if not step.rows:
                read: PendingResult = ReadyResult(ModelRunnerOutput(step_id=output.step_id, sampled_token_ids=[]))
            elif self._drafting is None:
                read = self._run(step)
            else:
                read = self._drafting.run(step, self._run)
            put_pooled = self._pooling.finish(planned) if self._pooling else None
        return lambda: self._completed(read(), output, step, dropped, encoded, put_pooled)

    def _completed(
        self,
        result: ModelRunnerOutput,
        output: SchedulerOutput,
        step: SchedulerOutput,
        dropped: Failures,
        encoded: EncodedMedia | None,
        put_pooled: Callable[[ModelRunnerOutput], None] | None,
    ) -> ModelRunnerOutput:
        """The result with what was pooled, with the entries that were left out, and with news of transfers."""
        if put_pooled is not None:
            put_pooled(result)
        if dropped:
            by_row = dict(zip(step.rows, result.sampled_token_ids, strict=True))
            result.sampled_token_ids = [by_row.get(row, []) for row in output.rows]
            result.failed_rows |= dropped
        if encoded is not None:
            result.failed_media, result.encoded_media = encoded.failed, encoded.items
            result.encode_seconds = encoded.timer.seconds()
        if self._transfers is not None:
            result.kv_transfer = self._transfers.poll(output.kv_transfer is not None and output.kv_transfer.waits)
        return result

    def release_kv_cache(self) -> int:
        """Give the cache's memory back between steps (`give_back_pages`); later steps must not read what it held."""
        return give_back_pages(self._layers.kv_caches)

    def close(self) -> None:
        """Give the KV cache and the network back. Idempotent; `execute` must not follow."""
        if self._transfers is not None:
            self._transfers.close()
        self._media.close()
        if self._captured is not None:
            self._captured.close()
        self._layers = self._sampling.layers = Layers((), ())
        self._captured, self._paths = None, []

    def _place_adapters(self, output: SchedulerOutput) -> None:
        """Put the adapters of new rows into their slots."""
        for new in output.new_rows:
            if new.adapter_slot >= 0 and new.row not in self._rows.failed:
                try:
                    if self._adapters is None:
                        raise ValueError("this runner was made without adapters")
                    self._adapters.place(new.adapter_slot, new.adapter_version)
                except Exception as error:
                    self._rows.free(new.row)
                    self._rows.failed[new.row] = RequestFailure.of(error)

    def _begin_pooling(self, output: SchedulerOutput) -> None:
        """Note which rows are pooled from now on."""
        if self._pooling:
            for row in output.freed_rows:
                self._pooling.free(row)
        for new in output.new_rows:
            if new.pooling_params is not None and new.row not in self._rows.failed:
                try:
                    self._pooling.fill(new)
                except Exception as error:
                    self._rows.free(new.row)
                    self._rows.failed[new.row] = RequestFailure.of(error)

    def _encode_media(self, output: SchedulerOutput) -> EncodedMedia | None:
        """Encode what the step says; rows whose items could not be encoded have failed. None where it says nothing."""
        encoded = self._media.update(output) if output.encode or output.freed_media else None
        if self._rows.media:
            self._rows.failed |= self._media.missing(output, {} if encoded is None else encoded.failed)
        return encoded

    def _run(self, output: SchedulerOutput) -> PendingResult:
        """Start a step by the first path that takes it, and propose drafts behind it."""
        drafting = self._drafting
        step = Step(output, self._rows, self._adapters, None if drafting is None else drafting.present)
        for path in self._paths:
            pending = path.try_run(step)
            if pending is not None:
                return pending if drafting is None or step.drafter is None else drafting.with_drafts(step, pending)
        raise RuntimeError("the runner is closed")


def _layer_names(plan: KVCachePlan, layer_names: Sequence[str] | None) -> tuple[str, ...]:
    planned = [name for group in plan.groups for name in group.layer_names]
    if layer_names is None:
        if len(plan.groups) > 1:
            raise ConfigError(
                f"the KV cache has {len(plan.groups)} groups, which do not tell the order of the layers; "
                "pass layer_names in the network's order"
            )
        return tuple(planned)
    if sorted(planned) != sorted(layer_names):
        odd = sorted(set(planned) ^ set(layer_names)) or sorted(planned)
        raise ConfigError(
            f"the KV cache plan and the network speak of different layers: {', '.join(odd[:5])}; "
            "plan the cache from this network's own kv_cache_specs"
        )
    return tuple(layer_names)
