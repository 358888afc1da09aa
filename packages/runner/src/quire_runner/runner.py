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
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_attention.batch import ForwardBatch
from quire_interfaces.device import Drafter, LogitsProcessor, RequestDrafter
from quire_interfaces.errors import ConfigError
from quire_interfaces.grammar import GrammarSource
from quire_interfaces.kv_cache import KVCachePlan
from quire_interfaces.kv_transfer import BlockMemory, KVTransferWorker
from quire_interfaces.step import ModelRunnerOutput, RequestFailure, SchedulerOutput
from quire_models import Network as QuireNetwork
from quire_ops import LoraTokens, Op, OpRequest, bind, op_table, ops, to_device
from quire_runner.affinity import bind_team, choose_cores
from quire_runner.block_bytes import BlockBytes
from quire_runner.config import RunnerConfig
from quire_runner.draft_network import network_drafting
from quire_runner.drafting import RowDrafter, TextDrafting
from quire_runner.encoder_inputs import encoder_slots
from quire_runner.fused_decode import fused_decode
from quire_runner.grammars import RowGrammars
from quire_runner.graph_choice import choose_capture
from quire_runner.graphs import CaptureStep, DecodeGraphs
from quire_runner.inputs import HostPlan, Layers, forward_batch, plan_step, write_drafts
from quire_runner.kv_cache import CacheShape, allocate_kv_caches, give_back_pages, layer_states
from quire_runner.output import Failures, PendingResult, ReadyResult, plain_output, verified_output, without_entries
from quire_runner.paced_drafting import PacedDrafting
from quire_runner.padded_decode import PaddedDecode
from quire_runner.prompt_logprobs import step_prompt_logprobs
from quire_runner.protocols import LogitsTap, Network, StepAdapters
from quire_runner.rows import Rows
from quire_runner.trees import compact_accepted_kv
from quire_sampling import SampleMode, Sampler, SamplerOutput, SamplingConfig, SamplingState
from quire_spec_decode import DraftController

__all__ = ["ModelRunner"]

_logger = logging.getLogger(__name__)

REHEARSED_PROMPTS = ([1], [2], [3], [5], [9], [16], [33], [64], [100], [129], [512], [16, 1], [2, 3])
"""Tokens of each sequence of steps that differ in how their work is cut."""
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
        adapters: The network's adapters; None takes no rows that have one.
        capture: Captures decode steps in graphs; None takes the device's own way, where it has one.

    Raises:
        ConfigError: the plan does not fit the network, or a tier cannot reach the cache.
    """

    def __init__(
        self,
        network: Network,
        plan: KVCachePlan,
        config: RunnerConfig,
        *,
        vocab_size: int,
        cache_shape: CacheShape,
        layer_names: Sequence[str] | None = None,
        drafter: Drafter | RequestDrafter | None = None,
        draft_network: QuireNetwork | None = None,
        draft_controller: DraftController | None = None,
        logits_processors: Mapping[str, LogitsProcessor] | None = None,
        always_processors: Sequence[str] = (),
        sampling_config: SamplingConfig | None = None,
        grammars: GrammarSource | None = None,
        on_logits: LogitsTap | None = None,
        make_transfer_worker: MakeTransferWorker | None = None,
        adapters: StepAdapters | None = None,
        capture: CaptureStep | None = None,
    ) -> None:
        self._config = config
        self._plan = plan
        self._device = torch.device(config.device)
        self._cores = choose_cores(config.cpu_affinity, config.num_threads) if self._device.type == "cpu" else ()
        self._bind_first = bool(self._cores)
        num_threads = len(self._cores) or config.num_threads
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        names = _layer_names(plan, layer_names)
        group_of = {name: i for i, group in enumerate(plan.groups) for name in group.layer_names}
        caches = allocate_kv_caches(plan, device=self._device, cache_shape=cache_shape)
        self._group_of_layer = tuple(group_of[name] for name in names)
        self._kv_caches = tuple(caches[name] for name in names)
        states = layer_states(plan, caches)
        self._states = tuple(states.get(name, ()) for name in names) if states else ()
        self._network: Network | None = network
        self._adapters = adapters
        self._step_inputs = bind(ops.step_inputs, OpRequest(device=self._device.type))
        capture, self.graph_refusal = choose_capture(capture, network, config)
        state = SamplingState(
            config.max_num_seqs + (capture is not None),  # the last row is padding
            vocab_size,
            self._device,
            logits_processors=logits_processors,
            always=always_processors,
            config=sampling_config,
        )
        self._grammars = RowGrammars(grammars, vocab_size, self._device)
        self._rows = Rows(config, plan.groups, state, self._grammars, self._device)
        chosen = [op_table().choose(op, OpRequest(device=self._device.type)) for op in SAMPLING_OPS]
        self._sampler = Sampler(state, *(None if each.name == "reference" else each.function for each in chosen))
        self._decode = network.bind_decode(self._rows.for_decode(self._group_of_layer, self._kv_caches))
        proposes: RowDrafter | None = None if drafter is None else TextDrafting(drafter, self._rows)
        if draft_network is not None:
            target = cast(QuireNetwork, network)
            proposes = network_drafting(draft_network, target, self._rows, plan, config, self._step_inputs)
        self._drafting: PacedDrafting | None = None
        if proposes is not None:
            self._drafting = PacedDrafting(proposes, draft_controller, self._rows, config, vocab_size)
        self._graphs = None if capture is None else self._make_graphs(network, capture)
        self._on_logits = on_logits
        self._transfers = None if make_transfer_worker is None else make_transfer_worker(BlockBytes(plan, caches))

    @classmethod
    def for_model(
        cls,
        model: QuireNetwork,
        plan: KVCachePlan,
        config: RunnerConfig,
        *,
        drafter: Drafter | RequestDrafter | None = None,
        draft_network: QuireNetwork | None = None,
        draft_controller: DraftController | None = None,
        logits_processors: Mapping[str, LogitsProcessor] | None = None,
        always_processors: Sequence[str] = (),
        sampling_config: SamplingConfig | None = None,
        grammars: GrammarSource | None = None,
        on_logits: LogitsTap | None = None,
        make_transfer_worker: MakeTransferWorker | None = None,
        adapters: StepAdapters | None = None,
        capture: CaptureStep | None = None,
    ) -> ModelRunner:
        """A runner for a network of `quire_models`, which says itself what the constructor asks about networks."""
        return cls(
            model,
            plan,
            config,
            vocab_size=model.config.vocab_size,
            cache_shape=model.attention_backend.kv_cache_shape,
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
            adapters=adapters,
            capture=capture,
        )

    @property
    def rows(self) -> Rows:
        """The persistent rows; for tools and tests, read only."""
        return self._rows

    @property
    def cores(self) -> tuple[int, ...]:
        """Cores that the threads of a step are bound to, one each; none where they are not."""
        return self._cores

    @property
    def graphs(self) -> DecodeGraphs | None:
        """Graphs of decode steps; None where none are captured, and `graph_refusal` says why."""
        return self._graphs

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run steps of many sizes on padding, where decode steps are captured: what they need to have compiled is there
        when the first request comes. Before the first step."""
        if self._graphs is None:
            return
        self._graphs.warm_up()
        most = min(self._config.max_num_batched_tokens, self._config.max_model_len)
        for query_lens in (*REHEARSED_PROMPTS, [most]):
            if sum(query_lens) <= most:
                for num_computed in {0, self._config.max_model_len - max(query_lens)}:
                    self._padded.rehearse_prompt(self._step_inputs, query_lens, num_computed)

    def learn_draft_costs(self) -> None:
        """Let the controller of drafts know what they cost, by steps for nobody that take a moment. Before the first
        step, in the thread that runs steps."""
        if self._drafting is None:
            return
        on_logits, self._on_logits = self._on_logits, None
        try:
            self._drafting.learn_costs(self._plan, self.launch)
        except Exception:
            _logger.exception("the cost of drafts could not be measured; it is learned from requests")
        finally:
            self._on_logits = on_logits

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
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
            if self._drafting is not None:
                self._drafting.drafter.begin(output)
            dropped = {row: rows.failed[row] for row in output.rows if row in rows.failed} if rows.failed else {}
            step = without_entries(output, dropped) if dropped else output
            if step.rows and self._adapters is not None:
                rows.hide_slot(self._adapters.merge_for_step(rows.adapter_slots[step.rows]))
            if not step.rows:
                read: PendingResult = ReadyResult(ModelRunnerOutput(step_id=output.step_id, sampled_token_ids=[]))
            elif self._drafting is None:
                read = self._compute(step)
            else:
                read = self._drafting.run(step, self._compute)
        return lambda: self._completed(read(), output, step, dropped)

    def _completed(
        self, result: ModelRunnerOutput, output: SchedulerOutput, step: SchedulerOutput, dropped: Failures
    ) -> ModelRunnerOutput:
        """The result with the entries that were left out, and with news of transfers."""
        if dropped:
            by_row = dict(zip(step.rows, result.sampled_token_ids, strict=True))
            result.sampled_token_ids = [by_row.get(row, []) for row in output.rows]
            result.failed_rows |= dropped
        if self._transfers is not None:
            result.kv_transfer = self._transfers.poll(output.kv_transfer is not None and output.kv_transfer.waits)
        return result

    def release_kv_cache(self) -> int:
        """Give the cache's memory back between steps (`give_back_pages`); later steps must not read what it held."""
        return give_back_pages(self._kv_caches)

    def close(self) -> None:
        """Give the KV cache and the network back. Idempotent; `execute` must not follow."""
        if self._transfers is not None:
            self._transfers.close()
        if self._graphs is not None:
            self._graphs.close()
        self._kv_caches = ()
        self._states = ()
        self._network = self._decode = self._graphs = None

    def _make_graphs(self, network: Network, capture: CaptureStep) -> DecodeGraphs:
        decode_inputs = bind(ops.decode_inputs, OpRequest(device=self._device.type))
        layers = Layers(self._group_of_layer, self._kv_caches, self._states)
        longest = self._config.max_model_len
        sizes = self._config.graph_sizes
        target = cast(QuireNetwork, network)
        read, features = tuple[int, ...](), None
        if self._drafting is not None and self._wants_features:
            read = self._drafting.drafter.feature_layers
            shape = (max(sizes), max(1, len(read)) * target.config.hidden_size)
            features = torch.zeros(shape, dtype=target.dtype, device=self._device)
        self._padded = PaddedDecode(target, self._rows, decode_inputs, self._sampler, layers, longest, max(sizes), read)
        return DecodeGraphs(
            self._padded,
            sizes,
            self._padded.modes,
            padding_row=self._config.max_num_seqs,
            device=self._device,
            capture=capture,
            features=features,
            # What adapters change in the network belongs to the thread that runs steps; a CPU has no time beside them.
            in_background=self._adapters is None and self._device.type == "cuda",
        )

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

    def _compute(self, output: SchedulerOutput) -> PendingResult:
        network = self._network
        if network is None:
            raise RuntimeError("the runner is closed")
        drafts = self._present_drafter is not None
        decode = None if drafts and self._wants_features else self._decode  # what decodes in one call gives none
        is_single = (decode is not None or self._graphs is not None) and self._is_single(output)
        is_plain = is_single and self._is_plain(output)
        plan = None if is_plain and not drafts else plan_step(output, self._rows)
        if decode is not None and is_plain:
            whole = fused_decode(decode, output, self._grammars, drafts_follow=drafts)
            if whole is not None:
                left = self._left_grammars(*whole)
                return left if plan is None else ReadyResult(self._with_drafts(output, plan, None, whole[0]))
        plan = plan or plan_step(output, self._rows)
        if self._graphs is not None and (is_single or self._is_verifying(output)):
            replayed = self._replay(self._graphs, output, plan, drafts_follow=drafts)
            if replayed is not None:
                features = self._graphs.features
                return ReadyResult(self._with_drafts(output, plan, features, replayed())) if drafts else replayed
        if decode is not None and is_single and not is_plain:
            logits = decode.logits(output.rows, output.num_computed_tokens)
            if logits is not None:
                result = _empty_result(output, drafts_follow=drafts)
                read = self._take(output, plan, *self._sample_logits(output, plan, output.rows, logits), result)
                return ReadyResult(self._with_drafts(output, plan, None, read())) if drafts else read
        if plan.num_drafts is not None:
            write_drafts(output, plan, self._rows)
        batch = forward_batch(
            plan, self._rows, self._step_inputs, self._group_of_layer, self._kv_caches, self._states, output.new_rows
        )
        if self._adapters is not None:
            batch.lora = self._adapters.tokens_of(np.repeat(self._rows.lora_slots[plan.rows], plan.query_lens))
        if batch.encoder is not None:
            if self._adapters is not None:
                slots = encoder_slots(output.new_rows, self._rows, batch.encoder.lens)
                batch.encoder.lora = self._adapters.tokens_of(slots)
            cast(QuireNetwork, network).encode(batch)
        hidden, features = self._forward(network, batch)
        result = _empty_result(output, drafts_follow=drafts)
        if self._rows.prompt_logprobs:
            chunk = self._config.logits_chunk_tokens
            result.prompt_logprobs = step_prompt_logprobs(plan, self._rows, hidden, self._logits_of, chunk)
        wants_logits = len(plan.logits.rows) > 0
        read = self._sample(network, output, plan, hidden, result) if wants_logits else ReadyResult(result)
        return ReadyResult(self._with_drafts(output, plan, features, read())) if drafts else read

    def _replay(
        self, graphs: DecodeGraphs, output: SchedulerOutput, plan: HostPlan, *, drafts_follow: bool
    ) -> PendingResult | None:
        """The step by a graph; None where there is none for it. Every token has an entry of its own there: keys and
        values of all are stored before any attends, and a draft sees as far as its position."""
        wanted = plan.logits
        mode, size = self._mode(output.rows), graphs.size_for(len(wanted.rows))
        if mode is SampleMode.HOST or size is None:
            return None
        slots, lora = self._rows.lora_slots[wanted.rows], None
        if self._adapters is not None and (slots >= 0).any():
            lora = self._adapters.captured_tokens_of(slots, size)
            if lora is None:
                return None
        graph = graphs.find(len(wanted.rows), mode, lora)
        if graph is None:
            return None
        self._rows.check(plan.rows, plan.ends)
        masks, grammar_failures = self._grammars.masks(output, wanted.entry_ends)
        mask_of = None
        if masks is not None:
            mask_of = masks.mask_of(len(wanted.rows)).numpy()
            self._padded.bitmask[: len(masks.indices)].copy_(masks.bitmask)
        if plan.num_drafts is not None:
            write_drafts(output, plan, self._rows)
        sampled = self._sampler.output(graph.run(wanted.rows, wanted.positions, mask_of), wanted.rows.tolist())
        result = _empty_result(output, drafts_follow=drafts_follow)
        return self._reading(output, plan, sampled, grammar_failures, result)

    def _mode(self, rows: list[int]) -> SampleMode:
        """The sample mode of a step with these rows; HOST where somebody looks at the logits."""
        if self._on_logits is not None:
            return SampleMode.HOST
        mode = self._sampler.state.mode_of(rows)
        return max(mode, SampleMode.EDITED) if self._grammars.has_any(rows) else mode

    def _forward(self, network: Network, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        """Hidden states, and the features that the drafter wants."""
        drafter = self._present_drafter
        if drafter is not None and drafter.feature_layers:
            return cast(QuireNetwork, network).forward_with_features(batch, drafter.feature_layers)
        hidden = network.forward(batch)
        return hidden, hidden if drafter is not None and drafter.wants_hidden else None

    @property
    def _wants_features(self) -> bool:
        """Whether the drafter, if it is asked, reads features."""
        return self._drafting is not None and self._drafting.drafter.wants_features

    @property
    def _present_drafter(self) -> RowDrafter | None:
        """The drafter, if it is asked behind the present step."""
        return None if self._drafting is None else self._drafting.present

    def _with_drafts(
        self, output: SchedulerOutput, plan: HostPlan, features: Tensor | None, result: ModelRunnerOutput
    ) -> ModelRunnerOutput:
        """The result, with proposals for the next step."""
        assert self._drafting is not None
        return self._drafting.follow(output, plan, features, result)

    def _logits_of(self, row: int, hidden: Tensor) -> Tensor:
        """[N, vocab_size] of hidden states [N, hidden_size] of one row."""
        assert self._network is not None
        rows = np.full(len(hidden), row)
        return self._network.compute_logits(hidden, self._logit_adapters(rows))

    def _logit_adapters(self, rows: NDArray[np.int64]) -> LoraTokens | None:
        """Which of the hidden states of rows [N] have adapters that change their logits; None for none."""
        return None if self._adapters is None else self._adapters.logit_tokens_of(self._rows.lora_slots[rows])

    def _is_single(self, output: SchedulerOutput) -> bool:
        """Whether every entry computes one token, and nothing of it is wanted but its logits."""
        return sum(output.num_scheduled_tokens) == len(output.rows) and self._wants_logits_only(output)

    def _is_verifying(self, output: SchedulerOutput) -> bool:
        """Whether every entry computes its last known token and a chain of drafts behind it, the logits of all of them
        are needed, and nothing else is wanted. What layers keep besides keys and values would be stored for drafts that
        turn out wrong."""
        drafts = output.draft_token_ids
        return (
            bool(drafts)
            and sum(output.num_scheduled_tokens)
            == len(output.rows) + sum(len(drafts.get(row, ())) for row in output.rows)
            and not output.draft_parents
            and not output.forced_rows
            and not self._states
            and self._wants_logits_only(output)
        )

    def _wants_logits_only(self, output: SchedulerOutput) -> bool:
        """Whether logits behind every entry are all that is wanted of the step."""
        return (
            all(output.samples)
            and not self._rows.prompt_logprobs
            and not (
                self._adapters is not None and self._adapters.changes_vocabulary(self._rows.lora_slots[output.rows])
            )
        )

    def _is_plain(self, output: SchedulerOutput) -> bool:
        """Whether nothing of the logits is wanted but the token that they say."""
        return self._on_logits is None and self._sampler.state.mode_of(output.rows) <= SampleMode.SAMPLED

    def _logits_are_free(self) -> bool:
        """Whether nobody but the sampler wants to see or change logits."""
        return self._on_logits is None and not self._grammars.is_used

    def _sample(
        self, network: Network, output: SchedulerOutput, plan: HostPlan, hidden: Tensor, result: ModelRunnerOutput
    ) -> PendingResult:
        """Compute logits, sample, and write tokens to their rows."""
        wanted = plan.logits
        if len(wanted.rows) < hidden.shape[0]:
            hidden = hidden.index_select(0, to_device(wanted.token_index, hidden.device))
        rows = wanted.rows.tolist()
        grammar_failures: Failures = {}
        lora = self._logit_adapters(wanted.rows)
        if self._logits_are_free() and self._sampler.state.mode_of(rows) is SampleMode.ARGMAX:
            token_ids, max_logits = network.argmax(hidden, lora)
            sampled = SamplerOutput(token_ids, rows, max_logits)
        else:
            sampled, grammar_failures = self._sample_logits(output, plan, rows, network.compute_logits(hidden, lora))
        return self._take(output, plan, sampled, grammar_failures, result)

    def _take(
        self,
        output: SchedulerOutput,
        plan: HostPlan,
        sampled: SamplerOutput,
        grammar_failures: Failures,
        result: ModelRunnerOutput,
    ) -> PendingResult:
        """Write what was sampled to its rows."""
        self._rows.write_next(plan.logits.rows, plan.logits.positions, sampled.token_ids)
        return self._reading(output, plan, sampled, grammar_failures, result)

    def _reading(
        self,
        output: SchedulerOutput,
        plan: HostPlan,
        sampled: SamplerOutput,
        grammar_failures: Failures,
        result: ModelRunnerOutput,
    ) -> PendingResult:
        """What reads the tokens that are in their rows; where the next step depends on them, they are read now."""
        wanted = plan.logits
        if plan.num_drafts is None:
            # However the step ends, these rows have one token more: the next step can be planned.
            self._rows.num_tokens[wanted.rows] = wanted.positions + 2
        fills, copied = self._rows.fills(output.rows), sampled.begin_read()

        def read() -> ModelRunnerOutput:
            if plan.num_drafts is None:
                plain_output(output, self._rows, fills, copied(), result, grammar_failures)
            else:
                verified_output(output, plan, self._rows, copied(), result, grammar_failures)
                if plan.held is not None:
                    plan.held.store(self._rows.num_tokens - 1)
                if plan.kept:
                    compact_accepted_kv(plan, self._rows, Layers(self._group_of_layer, self._kv_caches))
            return result

        if plan.num_drafts is None and not self._grammars.has_any(output.rows):
            return read
        return self._left_grammars(result, self._grammars.accept(output, read()))

    def _left_grammars(self, result: ModelRunnerOutput, left: Failures) -> PendingResult:
        """The result, with the rows that left their grammars."""
        self._rows.failed |= left
        result.failed_rows |= left
        return ReadyResult(result)

    def _sample_logits(
        self, output: SchedulerOutput, plan: HostPlan, rows: list[int], logits: Tensor
    ) -> tuple[SamplerOutput, Failures]:
        """What was sampled, and per row whose grammar gave no mask, why."""
        if self._on_logits is not None:
            self._on_logits(rows, plan.logits.positions.tolist(), logits)
        masks, grammar_failures = self._grammars.masks(output, plan.logits.entry_ends)
        positions = to_device(plan.logits.positions, logits.device)
        return self._sampler.sample(logits, rows, positions, self._rows.token_ids, masks), grammar_failures


def _empty_result(output: SchedulerOutput, *, drafts_follow: bool) -> ModelRunnerOutput:
    return ModelRunnerOutput(
        step_id=output.step_id, sampled_token_ids=[[] for _ in output.rows], drafts_follow=drafts_follow
    )


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
