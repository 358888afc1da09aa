"""`ModelRunner`: one step on the device, from the scheduler's plan to sampled tokens.

Knows rows, inputs, network and sampler, and the order in which they act. Knows no request beyond its row, no text, no
queue, and nothing of how blocks are given out. The code is the same for every device; nothing waits for the device
before the sampled tokens are read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from quire_attention.batch import ForwardBatch
from quire_interfaces.device import Drafter, LogitsProcessor
from quire_interfaces.errors import ConfigError
from quire_interfaces.grammar import GrammarSource
from quire_interfaces.kv_cache import KVCachePlan, MambaSpec
from quire_interfaces.kv_transfer import BlockMemory, KVTransferWorker
from quire_interfaces.step import ModelRunnerOutput, SchedulerOutput
from quire_models import Network as QuireNetwork
from quire_ops import DecodeRows, OpRequest, RunDecode, bind
from quire_runner.affinity import bind_team, choose_cores
from quire_runner.block_bytes import BlockBytes
from quire_runner.config import RunnerConfig
from quire_runner.grammars import RowGrammars
from quire_runner.inputs import HostPlan, forward_batch, plan_step, to_device, write_drafts
from quire_runner.kv_cache import CacheShape, allocate_kv_caches, layer_states
from quire_runner.output import build_output, without_entries
from quire_runner.prompt_logprobs import step_prompt_logprobs
from quire_runner.rows import Rows
from quire_sampling import Sampler, SamplerOutput, SamplingConfig, SamplingState

__all__ = ["LogitsTap", "ModelRunner", "Network"]

_logger = logging.getLogger(__name__)

LogitsTap = Callable[[list[int], list[int], Tensor], None]
"""(rows, positions, logits [N, vocab_size] float32): called once per step that samples, before the sampler changes the
logits; a tap that keeps them must copy. Logits n say what follows the token at `positions[n]` of `rows[n]`."""


MakeTransferWorker = Callable[[BlockMemory], KVTransferWorker]


class Network(Protocol):
    """What the runner asks of a network; every network of `quire_models` is one."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [T, hidden_size] of the step's tokens; writes their keys and values into the KV caches."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] -> [N, vocab_size] float32."""

    def bind_decode(self, rows: DecodeRows) -> RunDecode | None:
        """The network joined with the rows, for steps in which every row takes its most likely token; None where
        nothing runs these in one call."""

    def most_likely(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[N, hidden_size] -> per row the largest logit's token [N] int64, the lowest id among equals, and that logit
        [N] float32, NaN where the row has NaN."""


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
        logits_processors: Name -> processor that requests may ask for.
        always_processors: Names of those that run for every request.
        sampling_config: Limits of the sampler.
        grammars: Makes the matchers of requests whose output has a form; None takes no such requests.
        on_logits: Sees the logits of every step, for tests and tools.
        make_transfer_worker: Makes what moves blocks between this KV cache and a tier; None without a tier.

    Raises:
        ConfigError: the plan does not fit the network, drafts are to be proposed for a network whose states
            cannot be taken back, or a tier cannot reach the cache.
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
        drafter: Drafter | None = None,
        logits_processors: Mapping[str, LogitsProcessor] | None = None,
        always_processors: Sequence[str] = (),
        sampling_config: SamplingConfig | None = None,
        grammars: GrammarSource | None = None,
        on_logits: LogitsTap | None = None,
        make_transfer_worker: MakeTransferWorker | None = None,
    ) -> None:
        self._config = config
        self._device = torch.device(config.device)
        self._cores = choose_cores(config.cpu_affinity, config.num_threads) if self._device.type == "cpu" else ()
        self._bind_first = bool(self._cores)
        num_threads = len(self._cores) or config.num_threads
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        if drafter is not None and any(isinstance(group.spec, MambaSpec) for group in plan.groups):
            raise ConfigError(
                "this model keeps recurrent states, which cannot be taken back when a draft is rejected; "
                "switch speculation off",
                field="speculative_method",
            )
        names = _layer_names(plan, layer_names)
        group_of = {name: i for i, group in enumerate(plan.groups) for name in group.layer_names}
        caches = allocate_kv_caches(plan, device=self._device, cache_shape=cache_shape)
        self._group_of_layer = tuple(group_of[name] for name in names)
        self._kv_caches = tuple(caches[name] for name in names)
        states = layer_states(plan, caches)
        self._states = tuple(states.get(name, ()) for name in names) if states else ()
        self._network: Network | None = network
        self._step_inputs = bind("step_inputs", OpRequest(device=self._device.type))
        state = SamplingState(
            config.max_num_seqs,
            vocab_size,
            self._device,
            logits_processors=logits_processors,
            always=always_processors,
            config=sampling_config,
        )
        self._grammars = RowGrammars(grammars, vocab_size, self._device)
        self._rows = Rows(config, plan.groups, state, self._grammars, self._device)
        self._sampler = Sampler(state)
        self._decode = network.bind_decode(self._rows.for_decode(self._group_of_layer, self._kv_caches))
        self._drafter = drafter
        self._on_logits = on_logits
        self._transfers = None if make_transfer_worker is None else make_transfer_worker(BlockBytes(plan, caches))

    @classmethod
    def for_model(
        cls,
        model: QuireNetwork,
        plan: KVCachePlan,
        config: RunnerConfig,
        *,
        drafter: Drafter | None = None,
        logits_processors: Mapping[str, LogitsProcessor] | None = None,
        always_processors: Sequence[str] = (),
        sampling_config: SamplingConfig | None = None,
        grammars: GrammarSource | None = None,
        on_logits: LogitsTap | None = None,
        make_transfer_worker: MakeTransferWorker | None = None,
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
            logits_processors=logits_processors,
            always_processors=always_processors,
            sampling_config=sampling_config,
            grammars=grammars,
            on_logits=on_logits,
            make_transfer_worker=make_transfer_worker,
        )

    @property
    def rows(self) -> Rows:
        """The persistent rows; for tools and tests, read only."""
        return self._rows

    @property
    def cores(self) -> tuple[int, ...]:
        """Cores that the threads of a step are bound to, one each; none where they are not."""
        return self._cores

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step.

        Rows are freed, filled and extended first, and stay so even if the step then fails; token history changes only
        after everything that can fail has been done.

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
            rows.apply(output)
            dropped = {row: rows.failed[row] for row in output.rows if row in rows.failed} if rows.failed else {}
            step = without_entries(output, dropped) if dropped else output
            result = self._run(step) if step.rows else ModelRunnerOutput(step_id=output.step_id, sampled_token_ids=[])
        if dropped:
            by_row = dict(zip(step.rows, result.sampled_token_ids, strict=True))
            result.sampled_token_ids = [by_row.get(row, []) for row in output.rows]
            result.failed_rows |= dropped
        if self._transfers is not None:
            result.kv_transfer = self._transfers.poll(output.kv_transfer is not None and output.kv_transfer.waits)
        return result

    def close(self) -> None:
        """Give the KV cache and the network back. Idempotent; `execute` must not follow."""
        if self._transfers is not None:
            self._transfers.close()
        self._kv_caches = ()
        self._states = ()
        self._network = self._decode = None

    def _run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        network = self._network
        if network is None:
            raise RuntimeError("the runner is closed")
        if self._decode is not None and self._is_plain(output):
            token_ids = self._decode(output.rows, output.num_computed_tokens)
            if token_ids is not None:
                return ModelRunnerOutput(step_id=output.step_id, sampled_token_ids=[[each] for each in token_ids])
        plan = plan_step(output, self._rows)
        if plan.num_drafts is not None:
            write_drafts(output, plan, self._rows)
        batch = forward_batch(plan, self._rows, self._step_inputs, self._group_of_layer, self._kv_caches, self._states)
        hidden = network.forward(batch)
        result = ModelRunnerOutput(step_id=output.step_id, sampled_token_ids=[[] for _ in output.rows])
        if self._rows.prompt_logprobs:
            chunk = self._config.logits_chunk_tokens
            result.prompt_logprobs = step_prompt_logprobs(plan, self._rows, hidden, network.compute_logits, chunk)
        if len(plan.logits.rows):
            self._sample(network, output, plan, hidden, result)
        return result

    def _is_plain(self, output: SchedulerOutput) -> bool:
        """Whether every entry computes one token, and nothing is wanted but the most likely one behind it."""
        return (
            sum(output.num_scheduled_tokens) == len(output.rows)
            and all(output.samples)
            and self._takes_most_likely(output.rows)
            and self._drafter is None
            and not self._rows.prompt_logprobs
        )

    def _takes_most_likely(self, rows: list[int]) -> bool:
        """Whether nothing of these rows' logits is wanted but the most likely token."""
        return self._on_logits is None and not self._grammars.is_used and self._sampler.takes_most_likely(rows)

    def _sample(
        self, network: Network, output: SchedulerOutput, plan: HostPlan, hidden: Tensor, result: ModelRunnerOutput
    ) -> None:
        wanted = plan.logits
        if len(wanted.rows) < hidden.shape[0]:
            hidden = hidden.index_select(0, to_device(wanted.token_index, hidden.device))
        rows = wanted.rows.tolist()
        grammar_failures: dict[int, str] = {}
        if self._takes_most_likely(rows):
            token_ids, peaks = network.most_likely(hidden)
            sampled = SamplerOutput(token_ids, rows, peaks)
        else:
            sampled, grammar_failures = self._sample_logits(output, plan, rows, network.compute_logits(hidden))
        self._rows.write_next(wanted.rows, wanted.positions, sampled.token_ids)
        build_output(output, plan, self._rows, sampled, result, grammar_failures)
        left = self._grammars.accept(output, result)
        self._rows.failed |= left
        result.failed_rows |= left
        if self._drafter is not None:
            result.draft_token_ids = self._propose(output, result)

    def _sample_logits(
        self, output: SchedulerOutput, plan: HostPlan, rows: list[int], logits: Tensor
    ) -> tuple[SamplerOutput, dict[int, str]]:
        """What was sampled, and per row whose grammar gave no mask, why."""
        if self._on_logits is not None:
            self._on_logits(rows, plan.logits.positions.tolist(), logits)
        masks, grammar_failures = self._grammars.masks(output, plan)
        positions = to_device(plan.logits.positions, logits.device)
        return self._sampler.sample(logits, rows, positions, self._rows.token_ids, masks), grammar_failures

    def _propose(self, output: SchedulerOutput, result: ModelRunnerOutput) -> dict[int, list[int]]:
        assert self._drafter is not None
        proposals: dict[int, list[int]] = {}
        for row, tokens in zip(output.rows, result.sampled_token_ids, strict=True):
            # An error of a custom processor at a rejected draft could not be told from a real one, so requests that
            # have any get no drafts.
            if not tokens or row in self._rows.sampling.processors or row in result.forced_token_ids:
                continue
            num_tokens = int(self._rows.num_tokens[row])
            # A draft at the last position of the context would leave no place for the token after it.
            room = min(self._config.num_speculative_tokens, self._config.max_model_len - num_tokens - 1)
            if room < 1:
                continue
            try:
                drafts = self._drafter.propose(self._rows.history(row), room)
            except Exception:
                # A guess that fails costs speed, never an answer.
                _logger.exception("the drafter failed; row %d goes on without drafts", row)
                continue
            drafts = self._grammars.follow(row, drafts[:room])
            if drafts:
                proposals[row] = drafts
        return proposals


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
