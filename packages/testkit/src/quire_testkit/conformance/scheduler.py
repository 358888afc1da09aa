"""What every `Scheduler`, `SchedulingPolicy` and `AdmissionRule` must do, as tests to inherit.

    class TestMyScheduler(SchedulerSuite):
        def make_scheduler(self, allocator, **options): return MyScheduler(...)

The suite drives a scheduler against a `FakeRunner`, which checks each step plan, and compares outputs with those of
requests run alone. It sees a scheduler only through the Protocol.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from quire_interfaces import (
    AdmissionRule,
    BlockAllocator,
    FinishReason,
    ModelRunnerOutput,
    OverloadedError,
    PauseState,
    Request,
    RequestError,
    RequestOptions,
    SamplingParams,
    Scheduler,
    SchedulerOutput,
    SchedulingPolicy,
    TokenLogprobs,
)
from quire_testkit.fake_runner import FakeRunner, expected_output
from quire_testkit.plain_blocks import PlainBlocks

__all__ = [
    "AdmissionRuleSuite",
    "Driver",
    "SchedulerSuite",
    "SchedulingPolicySuite",
    "expected_of",
    "make_request",
]

BLOCK = 4
"""Tokens in a block, in all tests."""


def make_request(
    request_id: str,
    prompt_token_ids: Sequence[int],
    *,
    max_tokens: int = 8,
    priority: int = 0,
    arrival_time_s: float = 0.0,
    stop_token_ids: Sequence[int] = (),
    min_tokens: int = 0,
    prompt_logprobs: int | None = None,
    logprobs: int | None = None,
    seed: int = 0,
    tenant: str | None = None,
) -> Request:
    """A request as an engine would resolve it."""
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt_token_ids),
        sampling_params=SamplingParams(
            max_tokens=max_tokens, min_tokens=min_tokens, prompt_logprobs=prompt_logprobs, logprobs=logprobs
        ),
        seed=seed,
        stop_token_ids=frozenset(stop_token_ids),
        max_tokens=max_tokens,
        arrival_time_s=arrival_time_s,
        options=RequestOptions(priority=priority, tenant=tenant),
        reads_prefix_cache=prompt_logprobs is None,
    )


def expected_of(request: Request, *, num_token_ids: int = 1000) -> list[int]:
    """What the request must have put out when it ended by itself."""
    return expected_output(
        request.prompt_token_ids,
        request.max_tokens,
        request_seed=request.seed,
        stop_token_ids=request.stop_token_ids,
        min_tokens=request.sampling_params.min_tokens,
        num_token_ids=num_token_ids,
    )


@dataclass
class Transcript:
    """What a client received of a request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    num_cached_tokens: int = 0


class Driver:
    """An engine's loop in miniature: schedules, executes in order, and updates up to `depth` steps late.

    Args:
        scheduler: Under test.
        runner: Executes the steps.
        depth: Steps that may be in flight when the next one is scheduled.
    """

    def __init__(self, scheduler: Scheduler, runner: FakeRunner, depth: int = 0) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.depth = depth
        self.transcripts: dict[str, Transcript] = {}
        self.steps: list[SchedulerOutput] = []
        self._flying: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()

    def add(self, *requests: Request) -> None:
        """Add requests and begin to listen for their output."""
        for request in requests:
            self.scheduler.add_request(request)
            self.transcripts[request.request_id] = Transcript()

    def step(self) -> bool:
        """Schedule once and take in what is due. False when nothing happened and nothing is in flight."""
        output = self.scheduler.schedule() if self.scheduler.has_work() else None
        if output is not None:
            self.steps.append(output)
            self._flying.append((output, self.runner.execute(output)))
        elif not self._flying:
            return False
        if output is None or len(self._flying) > self.depth:
            self.land()
        return True

    def land(self) -> None:
        """Take in the oldest step in flight."""
        for output in self.scheduler.update(*self._flying.popleft()):
            transcript = self.transcripts[output.request_id]
            assert transcript.finish_reason is None, f"{output.request_id} has an output after its end"
            transcript.token_ids += output.new_token_ids
            transcript.logprobs += output.logprobs or []
            transcript.prompt_logprobs += output.prompt_logprobs or []
            transcript.finish_reason = output.finish_reason
            transcript.stop_token_id = output.stop_token_id
            transcript.error = output.failure and output.failure.message
            transcript.num_cached_tokens = output.num_cached_tokens

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left to do."""
        for _ in range(max_steps):
            if not self.step():
                return
        raise AssertionError(f"not done after {max_steps} steps")


class SchedulerSuite:
    """Tests of the `Scheduler` contract. Implement `make_scheduler`; override nothing else."""

    def make_scheduler(
        self,
        allocator: BlockAllocator,
        *,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_queued_requests: int = 64,
        num_speculative_tokens: int = 0,
    ) -> Scheduler:
        """A fresh scheduler, first come first served.

        Args:
            allocator: The KV cache.
            max_num_seqs: Rows.
            max_num_batched_tokens: Token budget of a step.
            max_queued_requests: Bound of the waiting queue.
            num_speculative_tokens: Most drafts verified per request and step.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement make_scheduler")

    def _driver(
        self, *, num_blocks: int = 64, depth: int = 0, num_drafts: int = 0, num_forced: int = 0, **options: int
    ) -> Driver:
        allocator = PlainBlocks(num_blocks, BLOCK)
        scheduler = self.make_scheduler(allocator, num_speculative_tokens=num_drafts, **options)
        runner = FakeRunner(
            num_rows=options.get("max_num_seqs", 8),
            block_sizes=(BLOCK,),
            num_blocks=num_blocks + 1,
            num_draft_tokens=num_drafts,
            num_forced_tokens=num_forced,
        )
        return Driver(scheduler, runner, depth)

    @pytest.mark.parametrize("depth", [0, 1, 2])
    @pytest.mark.parametrize("num_drafts", [0, 3])
    @pytest.mark.parametrize("num_forced", [0, 5])
    @pytest.mark.parametrize("num_blocks", [7, 64])
    def test_outputs_do_not_depend_on_the_batch(
        self, depth: int, num_drafts: int, num_forced: int, num_blocks: int
    ) -> None:
        driver = self._driver(
            num_blocks=num_blocks,
            depth=depth,
            num_drafts=num_drafts,
            num_forced=num_forced,
            max_num_seqs=4,
            max_num_batched_tokens=7,
        )
        requests = [make_request(f"r{i}", range(i, 2 * i + 3), max_tokens=1 + 2 * i, seed=i) for i in range(7)]
        driver.add(*requests)
        driver.run()
        for request in requests:
            transcript = driver.transcripts[request.request_id]
            assert transcript.token_ids == expected_of(request), request.request_id
            assert transcript.finish_reason == FinishReason.LENGTH
        assert driver.runner.num_filled_rows == 0
        assert not driver.scheduler.has_requests()
        assert not driver.scheduler.has_work()
        assert driver.scheduler.stats().kv_cache_usage == 0

    @pytest.mark.parametrize("depth", [0, 1])
    def test_a_stop_token_ends_the_output(self, depth: int) -> None:
        free_running = make_request("free", [1, 2, 3], max_tokens=10)
        stop = expected_of(free_running)[4]
        request = make_request("r", [1, 2, 3], max_tokens=10, stop_token_ids=[stop])
        driver = self._driver(depth=depth)
        driver.add(request)
        driver.run()
        transcript = driver.transcripts["r"]
        assert transcript.token_ids == expected_of(request)
        assert (transcript.finish_reason, transcript.stop_token_id) == (FinishReason.STOP, stop)
        assert driver.runner.num_filled_rows == 0

    def test_the_budget_and_the_rows_bound_a_step(self) -> None:
        driver = self._driver(max_num_seqs=3, max_num_batched_tokens=5)
        driver.add(*[make_request(f"r{i}", range(9), seed=i) for i in range(6)])
        driver.run()
        assert max(len(step.rows) for step in driver.steps) <= 3
        assert max(step.total_num_scheduled_tokens for step in driver.steps) == 5

    @pytest.mark.parametrize("depth", [0, 1])
    def test_abort_frees_at_once(self, depth: int) -> None:
        driver = self._driver(depth=depth, max_num_seqs=2)
        driver.add(*[make_request(f"r{i}", range(5), max_tokens=50) for i in range(3)])
        for _ in range(4):
            driver.step()
        assert driver.scheduler.abort_requests(["r0", "nobody", "r2"]) == ["r0", "r2"]
        assert driver.scheduler.abort_requests(["r0"]) == []
        assert driver.scheduler.num_requests() == (1, 0)
        num_told = len(driver.transcripts["r0"].token_ids)
        driver.run()
        assert len(driver.transcripts["r0"].token_ids) == num_told
        assert driver.transcripts["r1"].finish_reason == FinishReason.LENGTH
        assert driver.transcripts["r2"].token_ids == []
        assert driver.runner.num_filled_rows == 0

    def test_a_full_queue_refuses(self) -> None:
        driver = self._driver(max_num_seqs=1, max_queued_requests=2)
        driver.add(make_request("a", [1]), make_request("b", [1]))
        with pytest.raises(OverloadedError, match="2") as caught:
            driver.scheduler.add_request(make_request("c", [1]))
        assert caught.value.retry_after_s > 0
        driver.run()
        driver.add(make_request("c", [1]))
        driver.run()

    def test_what_can_never_run_is_refused(self) -> None:
        driver = self._driver(num_blocks=4)
        with pytest.raises(RequestError, match="16"):
            driver.scheduler.add_request(make_request("big", range(17), max_tokens=1))
        driver.add(make_request("a", range(16), max_tokens=1))
        with pytest.raises(RequestError, match="'a'"):
            driver.scheduler.add_request(make_request("a", [1]))
        driver.run()
        assert driver.transcripts["a"].finish_reason == FinishReason.LENGTH

    def test_pausing_holds_requests_where_they_are(self) -> None:
        driver = self._driver()
        driver.add(make_request("a", [1, 2]))
        driver.step()
        driver.scheduler.pause(PauseState.ALL_HELD)
        assert not driver.scheduler.has_work()
        assert driver.scheduler.schedule() is None
        driver.scheduler.pause(PauseState.NEW_HELD)
        driver.add(make_request("b", [1, 2]))
        driver.run()
        assert driver.transcripts["a"].finish_reason == FinishReason.LENGTH
        assert driver.transcripts["b"].token_ids == []
        assert driver.scheduler.num_requests() == (0, 1)
        driver.scheduler.pause(PauseState.RUNNING)
        driver.run()
        assert driver.transcripts["b"].finish_reason == FinishReason.LENGTH

    @pytest.mark.parametrize("depth", [0, 1])
    def test_a_failed_row_fails_alone(self, depth: int) -> None:
        driver = self._driver(depth=depth)
        good, bad = make_request("good", [1, 2]), make_request("bad", [3, 4])
        driver.add(bad, good)
        driver.step()
        driver.runner.fail_on["bad"] = "its processor raised"
        driver.run()
        transcript = driver.transcripts["bad"]
        assert (transcript.finish_reason, transcript.error) == (FinishReason.ERROR, "its processor raised")
        assert driver.transcripts["good"].token_ids == expected_of(good)
        assert driver.runner.num_filled_rows == 0

    def test_a_discarded_step_can_be_scheduled_again(self) -> None:
        driver = self._driver()
        requests = [make_request(f"r{i}", range(i, i + 6), seed=i) for i in range(4)]
        driver.add(*requests[:2])
        driver.step()
        driver.add(*requests[2:])
        driver.runner.raise_on.add("r3")
        output = driver.scheduler.schedule()
        assert output is not None
        with pytest.raises(RuntimeError, match="r3"):
            driver.runner.execute(output)
        driver.scheduler.discard_step(output)
        half = driver.scheduler.schedule(frozenset({"r0", "r2"}))
        assert half is not None
        assert sorted(half.request_ids) == ["r0", "r2"]
        for change in driver.scheduler.update(half, driver.runner.execute(half)):
            driver.transcripts[change.request_id].token_ids += change.new_token_ids
        driver.scheduler.abort_requests(["r3"], FinishReason.ERROR)
        driver.run()
        for request in requests[:3]:
            assert driver.transcripts[request.request_id].token_ids == expected_of(request)
        assert driver.runner.num_filled_rows == 0

    def test_reset_prefix_cache(self) -> None:
        driver = self._driver()
        request = make_request("a", [1, 2, 3])
        driver.add(request)
        driver.step()
        assert not driver.scheduler.reset_prefix_cache()
        assert driver.scheduler.reset_prefix_cache(preempt_running=True)
        driver.run()
        assert driver.transcripts["a"].token_ids == expected_of(request)
        assert driver.scheduler.stats().num_preemptions_total == 1

    def test_nothing_to_do(self) -> None:
        driver = self._driver()
        assert driver.scheduler.schedule() is None
        assert not driver.scheduler.has_work()
        assert driver.scheduler.num_requests() == (0, 0)


class SchedulingPolicySuite:
    """Tests of the `SchedulingPolicy` contract. Implement `make_policy`."""

    def make_policy(self) -> SchedulingPolicy:
        """A fresh policy."""
        raise NotImplementedError(f"{type(self).__name__} does not implement make_policy")

    def test_keys_compare_and_stay(self) -> None:
        policy = self.make_policy()
        requests = [
            make_request(f"r{i}", [1], priority=(7 * i) % 5 - 2, arrival_time_s=(3 * i) % 7 / 2) for i in range(20)
        ]
        keys = [policy.sort_key(request) for request in requests]
        assert all(a < b or b < a or a == b for a in keys for b in keys)
        for request in requests:
            request.output_token_ids.append(1)
            request.num_computed_tokens = 1
            request.num_preemptions += 1
        assert [policy.sort_key(request) for request in requests] == keys


class AdmissionRuleSuite:
    """Tests of the `AdmissionRule` contract. Implement `make_rule`."""

    def make_rule(self, capacity: int) -> AdmissionRule:
        """A fresh rule that lets `capacity` requests of one tenant run at the same time."""
        raise NotImplementedError(f"{type(self).__name__} does not implement make_rule")

    def test_takes_and_gives_back(self) -> None:
        rule = self.make_rule(2)
        assert rule.name
        assert rule.holds_queue in (True, False)
        requests = [make_request(f"r{i}", [1], tenant="t") for i in range(3)]
        for request in requests[:2]:
            assert rule.admits(request)
            assert rule.admits(request), "asking must not take"
            rule.admitted(request)
        assert not rule.admits(requests[2])
        rule.released(requests[0])
        assert rule.admits(requests[2])
        rule.admitted(requests[2])
        assert not rule.admits(requests[0])
