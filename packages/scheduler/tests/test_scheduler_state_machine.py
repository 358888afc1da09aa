"""Anything may happen at any time, and still every request gets the tokens it would get alone, and ends.

Half of the machines have a tier behind the KV cache, whose loads end late, lose blocks, or hang.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire_interfaces import (
    AdmissionRule,
    FinishReason,
    FullAttentionSpec,
    KVCacheGroup,
    KVCachePlan,
    ModelRunnerOutput,
    PauseState,
    Request,
    RequestError,
    SchedulerOutput,
    SlidingWindowSpec,
)
from quire_kv_cache import KVCacheConfig, KVCacheManager
from quire_scheduler import KVTransfers, MaxRunningPerTenantRule, Scheduler, SchedulerConfig
from quire_testkit.conformance.scheduler import Transcript, expected_of, make_request
from quire_testkit.memory_tier import MemoryConnector, MemoryTier, TieredFakeRunner

NUM_TOKEN_IDS = 6  # few, so that stop tokens and equal prefixes are frequent
KNOWN_PROMPTS = ([0, 1] * 7, [0] * 14)
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14) | st.builds(
    lambda prompt, length: prompt[:length], st.sampled_from(KNOWN_PROMPTS), st.integers(1, 14)
)


def make_cache(
    num_blocks: int, block_size: int, windows: tuple[int | None, ...], connector: MemoryConnector | None
) -> KVCacheManager:
    groups = []
    for index, window in enumerate(windows):
        shape = {"block_size": block_size, "num_kv_heads": 1, "head_dim": 1, "dtype": "bfloat16"}
        spec = FullAttentionSpec(**shape) if window is None else SlidingWindowSpec(**shape, sliding_window=window)
        groups.append(KVCacheGroup(spec=spec, layer_names=(f"layer{index}",)))
    plan = KVCachePlan(groups=tuple(groups), num_blocks=num_blocks + 1, tensor_block_bytes=(1,))
    on_computed = None if connector is None else connector.offer
    return KVCacheManager(plan, KVCacheConfig(block_size=block_size), on_computed=on_computed)


def fill_tier(tier: MemoryTier, block_size: int, windows: tuple[int | None, ...]) -> None:
    """What an engine that ran before left in the tier."""
    connector = MemoryConnector(tier)
    cache = make_cache(200, block_size, windows, connector)
    scheduler = Scheduler(SchedulerConfig(), cache, rules=[KVTransfers(cache, connector)])
    runner = TieredFakeRunner(
        tier, num_rows=8, block_sizes=[block_size] * len(windows), sliding_windows=windows, num_token_ids=NUM_TOKEN_IDS
    )
    for number, prompt in enumerate(KNOWN_PROMPTS):
        scheduler.add_request(make_request(f"before{number}", prompt, max_tokens=4))
    while (output := scheduler.schedule()) is not None:
        scheduler.update(output, runner.execute(output))


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_rows=st.integers(1, 4),
        budget=st.integers(1, 12),
        threshold=st.integers(0, 5),
        num_drafts=st.sampled_from([0, 0, 1, 3]),
        num_forced=st.sampled_from([0, 0, 1, 4]),
        policy=st.sampled_from(["fcfs", "priority"]),
        chunked=st.booleans(),
        block_size=st.sampled_from([1, 2, 4]),
        num_blocks=st.integers(3, 24),
        windows=st.sampled_from([(None,), (None,), (None, 3), (2,)]),
        tenant_share=st.integers(0, 2),
        max_stores=st.sampled_from([0, 1, 100]),
    )
    def start(self, num_rows: int, budget: int, block_size: int, num_blocks: int, **options: Any) -> None:
        windows: tuple[int | None, ...] = options["windows"]
        chunked = options["chunked"]
        max_model_len = 24
        self.config = SchedulerConfig(
            max_num_seqs=num_rows,
            max_num_batched_tokens=budget if chunked else max_model_len,
            long_prefill_token_threshold=options["threshold"] if chunked else 0,
            enable_chunked_prefill=chunked,
            max_model_len=max_model_len,
            num_speculative_tokens=options["num_drafts"],
            policy=options["policy"],
        )
        # Without stores there is no tier at all; with one, loads end when the machine says so.
        has_tier = options["max_stores"] > 0
        self.tier = MemoryTier(finishes_alone=False, max_stores=options["max_stores"])
        connector = MemoryConnector(self.tier) if has_tier else None
        if has_tier:
            fill_tier(self.tier, block_size, windows)
        self.cache = make_cache(num_blocks, block_size, windows, connector)
        share = options["tenant_share"]
        rules: list[AdmissionRule] = [MaxRunningPerTenantRule(share)] if share else []
        if connector is not None:
            rules.append(KVTransfers(self.cache, connector))
        self.scheduler = Scheduler(self.config, self.cache, rules=rules)
        self.runner = TieredFakeRunner(
            self.tier,
            num_rows=num_rows,
            block_sizes=[block_size] * len(windows),
            sliding_windows=windows,
            num_blocks=num_blocks + 1,
            num_token_ids=NUM_TOKEN_IDS,
            max_model_len=max_model_len,
            num_draft_tokens=options["num_drafts"],
            draft_accuracy=0.7,
            num_forced_tokens=options["num_forced"],
        )
        self.requests: dict[str, Request] = {}
        self.transcripts: dict[str, Transcript] = {}
        self.aborted: set[str] = set()
        self.flying: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 9),
        stop=st.lists(st.integers(0, NUM_TOKEN_IDS - 1), max_size=2),
        min_tokens=st.integers(0, 3),
        priority=st.integers(-1, 1),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        logprobs=st.sampled_from([None, None, 1]),
        tenant=st.sampled_from([None, "a", "b"]),
    )
    def add(self, prompt: list[int], max_tokens: int, stop: list[int], min_tokens: int, **options: Any) -> None:
        number = len(self.requests)
        request = make_request(
            f"r{number}",
            prompt,
            max_tokens=max_tokens,
            stop_token_ids=stop,
            min_tokens=min(min_tokens, max_tokens),
            arrival_time_s=number / 2,
            seed=number % 2,
            **options,
        )
        needed = len(prompt) + max_tokens - 1
        try:
            self.scheduler.add_request(request)
        except RequestError:
            assert needed > self.cache.max_request_tokens(self.config.max_num_batched_tokens)
            return
        self.requests[request.request_id] = request
        self.transcripts[request.request_id] = Transcript()

    @rule()
    @precondition(lambda self: len(self.flying) < 3)
    def schedule(self) -> None:
        could = self.scheduler.has_work()
        output = self.scheduler.schedule()
        assert could or output is None
        if output is not None:
            assert output.total_num_scheduled_tokens <= self.config.max_num_batched_tokens
            self.flying.append((output, self.runner.execute(output)))

    @rule()
    @precondition(lambda self: self.flying)
    def land(self) -> None:
        for output in self.scheduler.update(*self.flying.popleft()):
            transcript = self.transcripts[output.request_id]
            assert transcript.finish_reason is None
            assert output.request_id not in self.aborted
            transcript.token_ids += output.new_token_ids
            transcript.logprobs += output.logprobs or []
            transcript.prompt_logprobs += output.prompt_logprobs or []
            transcript.finish_reason = output.finish_reason
            transcript.stop_token_id = output.stop_token_id
            transcript.error = output.failure and output.failure.message

    @rule(data=st.data(), reason=st.sampled_from([FinishReason.ABORT, FinishReason.STOP]))
    @precondition(lambda self: self.requests)
    def abort(self, data: st.DataObject, reason: FinishReason) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        alive = not self.requests[request_id].is_finished
        assert self.scheduler.abort_requests([request_id], reason) == ([request_id] if alive else [])
        if alive:
            self.aborted.add(request_id)

    @rule(data=st.data())
    @precondition(lambda self: self.requests)
    def break_a_request(self, data: st.DataObject) -> None:
        self.runner.fail_on[data.draw(st.sampled_from(sorted(self.requests)))] = "broken"

    @rule(data=st.data())
    def a_step_raises(self, data: st.DataObject) -> None:
        if not self.requests:
            return
        only = data.draw(st.none() | st.frozensets(st.sampled_from(sorted(self.requests))))
        output = self.scheduler.schedule(only)
        if output is None:
            return
        assert only is None or only.issuperset(output.request_ids)
        if not output.request_ids:
            self.flying.append((output, self.runner.execute(output)))
            return
        self.runner.raise_on.add(data.draw(st.sampled_from(output.request_ids)))
        failed = [output]
        self.expect_raise(output)
        self.runner.raise_on.clear()
        # Another step may have been planned on top of it; it fails with it, or is undone all the same.
        if data.draw(st.booleans()) and (later := self.scheduler.schedule()) is not None:
            failed.append(later)
            with contextlib.suppress(RuntimeError):
                self.runner.execute(later)
        for step in data.draw(st.permutations(failed)):
            self.scheduler.discard_step(step)

    def expect_raise(self, output: SchedulerOutput) -> None:
        try:
            self.runner.execute(output)
        except RuntimeError:
            return
        raise AssertionError("the step did not raise")

    @rule(data=st.data(), all_arrive=st.booleans())
    @precondition(lambda self: self.tier.unfinished)
    def finish_a_load(self, data: st.DataObject, all_arrive: bool) -> None:
        keys = [block.key for block in self.tier.unfinished[0].blocks]
        lost = [] if all_arrive else data.draw(st.lists(st.sampled_from(keys)))
        self.tier.finish_loads(1, lost=frozenset(lost))

    @rule()
    @precondition(lambda self: self.tier.unfinished)
    def a_load_is_late(self) -> None:
        self.tier.late.append(self.tier.unfinished[0].job_id)

    @rule(data=st.data())
    @precondition(lambda self: self.tier.blocks)
    def the_tier_forgets(self, data: st.DataObject) -> None:
        del self.tier.blocks[data.draw(st.sampled_from(sorted(self.tier.blocks)))]

    @rule(really=st.integers(0, 9))
    @precondition(lambda self: self.tier.blocks)
    def the_tier_breaks(self, really: int) -> None:
        self.tier.is_stopped = self.tier.is_stopped or really == 0

    @rule(state=st.sampled_from(PauseState))
    def pause(self, state: PauseState) -> None:
        self.scheduler.pause(state)

    @rule(preempt=st.booleans())
    def reset_prefix_cache(self, preempt: bool) -> None:
        running, _ = self.scheduler.num_requests()
        assert self.scheduler.reset_prefix_cache(preempt_running=preempt) or (running and not preempt)

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        running, waiting = self.scheduler.num_requests()
        external = self.scheduler.stats().external_prefix_cache_hit_tokens_total
        assert 0 <= external <= self.scheduler.stats().external_prefix_cache_query_tokens_total
        assert running <= self.config.max_num_seqs
        assert sum(self.scheduler.waiting_reasons().values()) == waiting
        assert self.scheduler.has_requests() == bool(running + waiting)
        for request in self.requests.values():
            # A finished request keeps its count, but what is still on the device is of no more interest.
            assert (
                request.is_finished
                or 0 <= request.num_computed_tokens <= request.num_tokens + request.num_in_flight_tokens
            )

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.pause(PauseState.RUNNING)
        self.tier.finishes_alone = True
        for _ in range(3000):
            self.schedule()
            if not self.flying:
                break
            self.land()
        assert not self.scheduler.has_requests(), self.scheduler.waiting_reasons()
        assert self.runner.num_filled_rows == 0
        assert self.cache.usage().num_free_blocks == self.cache.usage().num_total_blocks
        for request_id, request in self.requests.items():
            self.check_transcript(request, self.transcripts[request_id])

    def check_transcript(self, request: Request, transcript: Transcript) -> None:
        expected = expected_of(request, num_token_ids=NUM_TOKEN_IDS)
        expected = expected[: self.config.max_model_len - request.num_prompt_tokens]
        assert transcript.token_ids == expected[: len(transcript.token_ids)]
        if request.request_id in self.aborted:
            return
        if transcript.finish_reason == FinishReason.ERROR:
            assert self.runner.fail_on[request.request_id] == transcript.error
            return
        assert transcript.token_ids == expected
        assert transcript.finish_reason == (
            FinishReason.STOP if transcript.stop_token_id is not None else FinishReason.LENGTH
        )
        if request.sampling_params.logprobs is not None:
            assert [entry.token_ids[0] for entry in transcript.logprobs] == expected
        if request.sampling_params.prompt_logprobs is not None:
            assert [entry.token_ids[0] for entry in transcript.prompt_logprobs] == request.prompt_token_ids[1:]


SchedulerMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestSchedulerMachine = SchedulerMachine.TestCase
