"""Scripted runs of the scheduler, told as digests: what `golden_schedules.json` was recorded with.

    python packages/scheduler/tests/scheduler_traces.py > packages/scheduler/tests/golden_schedules.json

A scenario is settings and a seed; everything that happens in it follows from the seed. Record anew only when schedules
are meant to change, and say why in the changelog.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import random
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from quire_interfaces import (
    CrossAttentionSpec,
    EngineCoreOutput,
    FinishReason,
    FullAttentionSpec,
    KVCacheGroup,
    KVCachePlan,
    KVTransferPlan,
    MambaSpec,
    ModelRunnerOutput,
    PauseState,
    QuireError,
    SchedulerOutput,
    SlidingWindowSpec,
    StateTensor,
)
from quire_kv_cache import KVCacheConfig, KVCacheManager
from quire_scheduler import (
    AdapterGate,
    EncoderRule,
    KVTransfers,
    MaxRunningPerTenantRule,
    Scheduler,
    SchedulerConfig,
    SharedPromptRule,
)
from quire_testkit.conformance.scheduler import make_request
from quire_testkit.memory_tier import MemoryConnector, MemoryTier, TieredFakeRunner

NUM_TOKEN_IDS = 40
EVENTS_PER_DIGEST = 40


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Settings of one run."""

    name: str
    num_requests: int = 40
    num_events: int = 600
    depth: int = 1
    """Most steps in flight."""
    block_size: int = 4
    num_blocks: int = 60
    groups: tuple[str, ...] = ("full",)
    prefix_caching: bool = True
    max_prompt: int = 30
    max_tokens: int = 30
    max_encoder_tokens: int = 0
    tenants: tuple[str | None, ...] = (None,)
    tenant_share: int = 0
    has_tier: bool = False
    num_adapters: int = 0
    num_adapter_slots: int = 0
    draft_accuracy: float = 0.6
    num_forced_tokens: int = 0
    rests_in: tuple[int, int] = (0, 0)
    wants_logprobs: float = 0.05
    """Share of requests that ask for log probabilities, which keep their steps off the short path."""
    mishaps: float = 0.05
    """Share of events that are an abort, a pause, a failed step, a reset or a broken request."""
    config: dict[str, Any] = field(default_factory=dict)


SCENARIOS = (
    Scenario(name="plain", mishaps=0, wants_logprobs=0, num_blocks=400, config={"max_num_seqs": 16}),
    Scenario(name="plain sync", depth=0, mishaps=0, wants_logprobs=0, num_blocks=400, config={"max_num_seqs": 16}),
    Scenario(name="plain deep", depth=3, mishaps=0.02, num_blocks=400, config={"max_num_seqs": 12}),
    Scenario(name="long decodes", mishaps=0.01, wants_logprobs=0.02, num_blocks=900, max_tokens=150, num_events=900),
    Scenario(name="crowded", num_blocks=25, config={"max_num_seqs": 8}),
    Scenario(name="crowded deep", depth=3, num_blocks=22, config={"max_num_seqs": 8}),
    Scenario(name="crowded sync", depth=0, num_blocks=22, mishaps=0.1),
    Scenario(name="priority", num_blocks=30, config={"policy": "priority"}),
    Scenario(name="small budget", config={"max_num_batched_tokens": 6}),
    Scenario(name="budget below rows", num_blocks=300, config={"max_num_batched_tokens": 5, "max_num_seqs": 12}),
    Scenario(name="threshold", config={"long_prefill_token_threshold": 4}),
    Scenario(
        name="whole prompts",
        config={"enable_chunked_prefill": False, "max_model_len": 40, "max_num_batched_tokens": 64},
    ),
    Scenario(name="no cache", prefix_caching=False, num_blocks=40),
    Scenario(name="tenants", tenants=(None, "a", "a", "a", "b"), num_blocks=30),
    Scenario(name="tenant share", tenants=("a", "a", "b"), tenant_share=2, config={"max_running_per_tenant": 3}),
    Scenario(name="queue bound", tenants=("a", "b"), config={"max_queued_requests": 6}, num_requests=80),
    Scenario(name="drafts", config={"num_speculative_tokens": 3, "num_lookahead_tokens": 3}),
    Scenario(name="drafts crowded", num_blocks=24, depth=2, config={"num_speculative_tokens": 4}),
    Scenario(name="drafts rest", num_blocks=60, rests_in=(20, 120), config={"num_speculative_tokens": 3}),
    Scenario(name="forced", num_forced_tokens=5, num_blocks=40),
    Scenario(name="forced and drafts", num_forced_tokens=4, depth=2, config={"num_speculative_tokens": 2}),
    Scenario(name="windows", groups=("full", "window"), num_blocks=60),
    Scenario(name="window alone", groups=("window",), num_blocks=24, max_tokens=60),
    Scenario(name="states", groups=("full", "state"), num_blocks=60),
    Scenario(name="states and drafts", groups=("full", "state"), config={"num_speculative_tokens": 2}),
    Scenario(name="tier", has_tier=True, num_blocks=30, num_events=900),
    Scenario(name="tier deep", has_tier=True, depth=3, num_blocks=24, num_events=900),
    Scenario(name="tier and drafts", has_tier=True, num_blocks=24, config={"num_speculative_tokens": 2}),
    Scenario(name="encoder", groups=("full", "cross"), max_encoder_tokens=16, num_blocks=80),
    Scenario(name="encoder crowded", groups=("full", "cross"), max_encoder_tokens=16, num_blocks=34, depth=2),
    Scenario(name="adapters", num_adapters=5, num_adapter_slots=2, num_blocks=60),
    Scenario(name="adapters crowded", num_adapters=4, num_adapter_slots=2, num_blocks=24, tenants=("a", "b")),
)


class _ReadStore:
    """An `AdapterStore` that has read everything."""

    def resolve(self, name: str) -> str:
        return f"{name}-1"

    def fetch(self, version: str) -> Future[None]:
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def hold(self, version: str) -> None: ...

    def drop(self, version: str) -> None: ...


class _Runner(TieredFakeRunner):
    """Answers as a `FakeRunner` does and keeps no KV, so that groups of every kind will do."""

    def _write(self, row: Any, where: str, position: int, digest: int) -> None:
        """Nothing is written."""


def _make_plan(scenario: Scenario) -> KVCachePlan:
    shape: dict[str, Any] = {"block_size": scenario.block_size, "num_kv_heads": 1, "head_dim": 1, "dtype": "bfloat16"}
    specs = {
        "full": lambda: FullAttentionSpec(**shape),
        "window": lambda: SlidingWindowSpec(**shape, sliding_window=6),
        "state": lambda: MambaSpec(
            block_size=scenario.block_size, states=(StateTensor(name="s", shape=(4,), dtype="float32"),)
        ),
        "cross": lambda: CrossAttentionSpec(**shape, max_encoder_tokens=scenario.max_encoder_tokens),
    }
    groups = tuple(
        KVCacheGroup(spec=specs[kind](), layer_names=(f"layer{index}",)) for index, kind in enumerate(scenario.groups)
    )
    return KVCachePlan(groups=groups, num_blocks=scenario.num_blocks + 1, tensor_block_bytes=(1,))


class Trace:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._random = random.Random(scenario.name)
        self.tier = MemoryTier(finishes_alone=False)
        connector = MemoryConnector(self.tier) if scenario.has_tier else None
        cache_config = KVCacheConfig(block_size=scenario.block_size, enable_prefix_caching=scenario.prefix_caching)
        on_computed = None if connector is None else connector.offer
        self.cache = KVCacheManager(_make_plan(scenario), cache_config, on_computed=on_computed)
        config = SchedulerConfig(**{"max_num_seqs": 6, "max_num_batched_tokens": 32, **scenario.config})
        self.adapters = AdapterGate(_ReadStore(), scenario.num_adapter_slots) if scenario.num_adapters else None
        self.scheduler = self._make_scheduler(config, connector)
        self.runner = _Runner(
            self.tier,
            num_rows=config.max_num_seqs,
            block_sizes=[scenario.block_size] * len(scenario.groups),
            num_token_ids=NUM_TOKEN_IDS,
            num_draft_tokens=config.num_speculative_tokens,
            draft_accuracy=scenario.draft_accuracy,
            num_forced_tokens=scenario.num_forced_tokens,
            check_kv=False,
        )
        self.runner.rests_in = range(*scenario.rests_in)
        self._flying: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._alive: list[str] = []
        self._num_added = 0
        self._num_events = 0
        self._digest = hashlib.sha256()
        self.digests: list[str] = []

    def _make_scheduler(self, config: SchedulerConfig, connector: MemoryConnector | None) -> Scheduler:
        scenario = self._scenario
        rules: list[Any] = [] if self.adapters is None else [self.adapters]
        if scenario.prefix_caching:
            rules.append(SharedPromptRule())
        if scenario.tenant_share:
            rules.append(MaxRunningPerTenantRule(scenario.tenant_share))
        if connector is not None:
            rules.append(KVTransfers(self.cache, connector))
        rules.append(EncoderRule(scenario.max_encoder_tokens, config.max_num_batched_tokens))
        return Scheduler(config, self.cache, rules=rules)

    def run(self) -> list[str]:
        """Live through the scenario, then let everything end. Returns the digests, in order."""
        scenario, rng = self._scenario, self._random
        for _ in range(scenario.num_events):
            choice = rng.random()
            if choice < scenario.mishaps:
                self._mishap()
            elif choice < 0.2:
                self._add()
            elif choice < 0.25:
                self._end_loads()
            elif choice < 0.65 and len(self._flying) <= scenario.depth:
                self._schedule()
            elif self._flying:
                self._land()
            self.cache.check_integrity()
        self.scheduler.pause(PauseState.RUNNING)
        self.tier.finishes_alone = True
        for _ in range(4000):
            if len(self._flying) <= scenario.depth:
                self._schedule()
            if not self._flying:
                break
            self._land()
        assert not self.scheduler.has_requests(), (scenario.name, self.scheduler.waiting_reasons())
        counted = {name: value for name, value in dataclasses.asdict(self.scheduler.stats()).items() if value}
        self._note("end", counted, self.cache.prefix_cache_stats)
        self.digests.append(self._digest.hexdigest()[:12])
        return self.digests

    def _note(self, *what: object) -> None:
        self._digest.update(repr(what).encode())
        self._num_events += 1
        if self._num_events % EVENTS_PER_DIGEST == 0:
            self.digests.append(self._digest.hexdigest()[:12])

    def _add(self) -> None:
        scenario, rng = self._scenario, self._random
        if self._num_added >= scenario.num_requests:
            return
        number = self._num_added
        self._num_added += 1
        prompt = [rng.choice((0, 1))] * rng.randint(0, 12)
        prompt += [rng.randrange(3) for _ in range(rng.randint(1, max(1, scenario.max_prompt - len(prompt))))]
        request = make_request(
            f"r{number}",
            prompt,
            max_tokens=rng.randint(1, scenario.max_tokens),
            priority=rng.randint(-1, 1),
            arrival_time_s=number / 4,
            stop_token_ids=rng.sample(range(NUM_TOKEN_IDS), rng.choice((0, 0, 1, 2))),
            min_tokens=rng.choice((0, 0, 1)),
            prompt_logprobs=0 if rng.random() < 0.08 else None,
            logprobs=1 if rng.random() < scenario.wants_logprobs else None,
            seed=rng.randrange(3),
            tenant=rng.choice(scenario.tenants),
        )
        if rng.random() < 0.2:
            request.prompt_group = f"group {number // 5}"
        if rng.random() < 0.1:
            request.options = dataclasses.replace(request.options, cache_salt="salt")
        if scenario.max_encoder_tokens:
            request.encoder_token_ids = [rng.randrange(2) for _ in range(rng.randint(1, scenario.max_encoder_tokens))]
        if scenario.num_adapters and rng.random() < 0.8:
            adapter = f"adapter{rng.randrange(scenario.num_adapters)}"
            request.options = dataclasses.replace(request.options, adapter=adapter)
        try:
            if self.adapters is not None:
                self.adapters.prepare(request)
            self.scheduler.add_request(request)
        except QuireError as error:
            self._forget([request.request_id])
            self._note("refused", number, str(error))
            return
        self._alive.append(request.request_id)
        self._note("added", number)

    def _forget(self, request_ids: list[str]) -> None:
        if self.adapters is not None:
            self.adapters.forget(request_ids)
        self._alive = [each for each in self._alive if each not in request_ids]

    def _mishap(self) -> None:
        rng = self._random
        kind = rng.choice(("abort", "abort", "pause", "resume", "resume", "fail", "raise", "raise", "reset", "only"))
        if kind == "pause":
            self.scheduler.pause(rng.choice((PauseState.NEW_HELD, PauseState.ALL_HELD)))
        elif kind == "resume":
            self.scheduler.pause(PauseState.RUNNING)
        elif kind == "reset":
            self._note("reset", self.scheduler.reset_prefix_cache(preempt_running=rng.random() < 0.3))
        elif not self._alive:
            return
        elif kind == "abort":
            ended = self.scheduler.abort_requests([rng.choice(self._alive)], FinishReason.ABORT)
            self._note("abort", ended)
            self._forget(ended)
        elif kind == "fail":
            self.runner.fail_on[rng.choice(self._alive)] = "broken"
        else:
            only = frozenset(rng.sample(self._alive, rng.randint(1, len(self._alive))))
            self._schedule(only, is_raised=kind == "raise")

    def _schedule(self, only: frozenset[str] | None = None, *, is_raised: bool = False) -> None:
        scheduler = self.scheduler
        self._note("work", scheduler.has_work(), scheduler.num_requests(), sorted(scheduler.waiting_reasons().items()))
        output = scheduler.schedule(only)
        self._note("step", None if output is None else _told_of_step(output))
        if output is None:
            return
        if not is_raised or not output.request_ids:
            self._flying.append((output, self.runner.execute(output)))
            return
        self.runner.raise_on.add(output.request_ids[0])
        with contextlib.suppress(RuntimeError):
            self.runner.execute(output)
        self.runner.raise_on.clear()
        scheduler.discard_step(output)

    def _land(self) -> None:
        outputs = self.scheduler.update(*self._flying.popleft())
        self._note("landed", [_told_of_output(each) for each in outputs])
        self._forget([each.request_id for each in outputs if each.finish_reason is not None])

    def _end_loads(self) -> None:
        if not self.tier.unfinished:
            return
        keys = [block.key for block in self.tier.unfinished[0].blocks]
        kind = self._random.random()
        if kind < 0.2:
            self.tier.late.append(self.tier.unfinished[0].job_id)
        else:
            lost = frozenset(self._random.sample(keys, 1)) if kind < 0.4 else frozenset()
            self.tier.finish_loads(1, lost=lost)


def _told_of_step(output: SchedulerOutput) -> tuple[object, ...]:
    return (
        output.step_id,
        list(output.rows),
        list(output.request_ids),
        list(output.num_computed_tokens),
        list(output.num_scheduled_tokens),
        list(output.samples),
        output.total_num_scheduled_tokens,
        [
            (new.row, new.token_ids, new.num_computed_tokens, new.block_ids, new.encoder_token_ids, new.adapter_slot)
            for new in output.new_rows
        ],
        list(output.new_block_ids.items()),
        list(output.draft_token_ids.items()),
        sorted(output.forced_rows),
        list(output.freed_rows),
        None if (plan := output.kv_transfer) is None else _told_of_plan(plan),
    )


def _told_of_plan(plan: KVTransferPlan) -> tuple[object, ...]:
    told = dataclasses.asdict(plan)
    assert (plan.holds, plan.connector_metadata) == ([], None), "there is no connector"
    return tuple(told[name] for name in ("loads", "stores", "acknowledged", "waits"))


def _told_of_output(output: EngineCoreOutput) -> tuple[object, ...]:
    return (
        output.request_id,
        list(output.new_token_ids),
        output.finish_reason and output.finish_reason.value,
        output.stop_token_id,
        output.logprobs and [each.token_ids for each in output.logprobs],
        output.prompt_logprobs and [each.token_ids for each in output.prompt_logprobs],
        output.num_cached_tokens,
        output.failure and output.failure.message,
    )


if __name__ == "__main__":
    print(json.dumps({scenario.name: Trace(scenario).run() for scenario in SCENARIOS}, indent=0))
