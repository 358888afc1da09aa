"""The core alone: depth changes nothing, aborts at any time, failing requests are found and fail alone."""

from __future__ import annotations

import random
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_engine import EngineConfig, EngineCore, EngineParts
from quire_interfaces import (
    EngineDeadError,
    FinishReason,
    ModelRunnerOutput,
    PauseState,
    RankDeadError,
    Request,
    RequestError,
    SamplingParams,
    SchedulerOutput,
)
from quire_testkit.fake_engine import FakeEngineConfig, build_fake_engine
from quire_testkit.fake_runner import expected_output

SMALL = FakeEngineConfig(num_blocks=40, block_size=4, max_num_seqs=6, max_num_batched_tokens=16, max_model_len=128)


def make_core(engine: FakeEngineConfig = SMALL, depth: int = 0, **options: float) -> EngineCore:
    return EngineCore(build_fake_engine(engine), EngineConfig(async_scheduling=bool(depth), **options))


def make_request(request_id: str, prompt: list[int], max_tokens: int = 8, seed: int = 0) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=max_tokens),
        seed=seed,
        max_tokens=max_tokens,
    )


class Record:
    """Collects what steps bring."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.errors: dict[str, str | None] = {}

    def step(self, core: EngineCore) -> None:
        for output in core.step().outputs:
            assert output.request_id not in self.reasons, "an output after the end"
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.reasons[output.request_id] = output.finish_reason
                self.errors[output.request_id] = output.failure and output.failure.message

    def run(self, core: EngineCore, limit: int = 5000) -> None:
        for _ in range(limit):
            if not core.has_work():
                break
            self.step(core)
        assert not core.has_requests()
        assert core.stats().kv_cache_usage == 0.0
        assert core.parts.check_integrity is not None
        core.parts.check_integrity()


@given(data=st.data(), depth=st.integers(0, 1), num_drafts=st.sampled_from([0, 0, 3]))
@settings(max_examples=60, deadline=None)
def test_random_requests_aborts_and_faults(data: st.DataObject, depth: int, num_drafts: int) -> None:
    """Whatever happens to others, a request's tokens are those of the request run alone."""
    seed = data.draw(st.integers(0, 10**6))
    rng = random.Random(seed)
    engine = FakeEngineConfig(
        num_blocks=rng.choice([24, 40]),
        block_size=rng.choice([1, 4]) if num_drafts == 0 else 4,
        max_num_seqs=rng.choice([1, 3, 6]),
        max_num_batched_tokens=rng.choice([4, 16, 64]),
        num_draft_tokens=num_drafts,
        max_model_len=64,
    )
    core = make_core(engine, depth)
    record = Record()
    requests: dict[str, Request] = {}
    for i in range(rng.randrange(1, 14)):
        kind = rng.choice(["r", "r", "r", "raise", "fail"])
        prompt = [rng.randrange(30) for _ in range(rng.randrange(1, 9))]
        request = make_request(f"{kind}{i}", prompt, rng.randrange(1, 12), seed=i)
        core.add_request(request)
        requests[request.request_id] = request
        for _ in range(rng.randrange(3)):
            record.step(core)
        if rng.random() < 0.2:
            core.abort_requests([rng.choice(sorted(requests)), "unknown"])
    record.run(core)
    core.close()
    for request_id, request in requests.items():
        tokens = record.tokens.get(request_id, [])
        expected = expected_output(request.prompt_token_ids, request.max_tokens, request_seed=request.seed)
        assert tokens == expected[: len(tokens)]
        reason = record.reasons.get(request_id)
        if request_id.startswith("r") and not request_id.startswith("raise") and reason is not None:
            assert (tokens, reason) == (expected, FinishReason.LENGTH)
        elif reason is not None:
            assert reason == FinishReason.ERROR
            assert record.errors[request_id]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("culprits", [[0], [15], [3, 4], [0, 5, 10, 15], list(range(16))])
def test_culprits_are_found_and_the_rest_go_on(depth: int, culprits: list[int]) -> None:
    engine = FakeEngineConfig(max_num_seqs=16, num_blocks=200, block_size=4)
    core = make_core(engine, depth)
    record = Record()
    for i in range(16):
        core.add_request(make_request(f"raise{i}" if i in culprits else f"r{i}", [i, i + 1], 12, seed=i))
    record.run(core)
    for i in range(16):
        if i in culprits:
            assert record.reasons[f"raise{i}"] == FinishReason.ERROR
            assert "broke the step" in (record.errors[f"raise{i}"] or "")
        else:
            assert record.tokens[f"r{i}"] == expected_output([i, i + 1], 12, request_seed=i)


class BreaksLate:
    """An executor that raises when a certain request reaches a certain position, or for a certain pair together."""

    def __init__(self, parts: EngineParts, request_id: str = "", position: int = 0, pair: tuple[str, ...] = ()) -> None:
        self._inner = parts.executor
        self._request_id = request_id
        self._position = position
        self._pair = set(pair)
        self.num_failures = 0

    def execute(self, output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        ends = {
            request_id: start + count
            for request_id, start, count in zip(
                output.request_ids, output.num_computed_tokens, output.num_scheduled_tokens, strict=True
            )
        }
        late = ends.get(self._request_id, 0) >= self._position > 0
        together = bool(self._pair) and self._pair <= set(output.request_ids)
        if late or together:
            self.num_failures += 1
            # A step that raises leaves no trace; the fake runner is told by making it raise.
            runner = self._inner.runner  # type: ignore[attr-defined]
            runner.raise_on = set(output.request_ids)
            future = self._inner.execute(output)
            runner.raise_on = set()
            return future
        return self._inner.execute(output)

    def close(self) -> None:
        self._inner.close()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_that_breaks_the_step_only_later(depth: int) -> None:
    """It gets through its prompt, is recomputed in quarantine, and is still found; its early tokens were streamed."""
    parts = build_fake_engine(SMALL)
    parts.executor = executor = BreaksLate(parts, "r2", 15)
    core = EngineCore(parts, EngineConfig(async_scheduling=bool(depth)))
    record = Record()
    for i in range(5):
        core.add_request(make_request(f"r{i}", [i] * 5, 20, seed=i))
    record.run(core)
    assert executor.num_failures >= 2
    for i in range(5):
        expected = expected_output([i] * 5, 20, request_seed=i)
        if i == 2:
            assert record.reasons["r2"] == FinishReason.ERROR
            assert record.tokens["r2"] == expected[: len(record.tokens["r2"])]
            assert 8 <= len(record.tokens["r2"]) < 12
        else:
            assert record.tokens[f"r{i}"] == expected


@pytest.mark.parametrize("depth", [0, 1])
def test_two_that_only_fail_together_both_finish(depth: int) -> None:
    parts = build_fake_engine(SMALL)
    parts.executor = executor = BreaksLate(parts, pair=("r1", "r3"))
    core = EngineCore(parts, EngineConfig(async_scheduling=bool(depth)))
    record = Record()
    for i in range(5):
        core.add_request(make_request(f"r{i}", [i] * 3, 6, seed=i))
    record.run(core)
    assert executor.num_failures > 1
    for i in range(5):
        assert record.tokens[f"r{i}"] == expected_output([i] * 3, 6, request_seed=i)


class LosesARank:
    """An executor whose steps fail because a rank is gone."""

    def execute(self, output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        future: Future[ModelRunnerOutput] = Future()
        future.set_exception(RankDeadError(1, "its process was ended by SIGKILL"))
        return future

    def close(self) -> None:
        pass


def test_a_rank_that_is_gone_ends_the_engine_at_once() -> None:
    parts = build_fake_engine(SMALL)
    parts.executor = LosesARank()
    core = EngineCore(parts, EngineConfig())
    core.add_request(make_request("r0", [1, 2], 4, seed=0))
    with pytest.raises(RankDeadError, match="rank 1 is gone: its process was ended by SIGKILL"):
        core.step()


def test_others_are_served_while_suspects_are_tried() -> None:
    core = make_core(FakeEngineConfig(max_num_seqs=16), depth=1)
    record = Record()
    for i in range(8):
        core.add_request(make_request("raise" if i == 6 else f"r{i}", [i], 30, seed=i))
    record.step(core)
    core.add_request(make_request("newcomer", [50], 3, seed=50))
    for _ in range(12):
        record.step(core)
    assert record.tokens["newcomer"] == expected_output([50], 3, request_seed=50)
    record.run(core)


@pytest.mark.parametrize("depth", [0, 1])
def test_suspects_and_others_take_turns(depth: int) -> None:
    """Neither waits for the other to be done: both advance while the culprit is still sought."""
    core = make_core(FakeEngineConfig(max_num_seqs=32), depth=depth)
    record = Record()
    for i in range(16):
        core.add_request(make_request("raise" if i == 11 else f"r{i}", [i], 30, seed=i))
    while not core._quarantine:
        record.step(core)
    core.add_request(make_request("newcomer", [50], 200, seed=50))
    steps_of_newcomer = []
    for step in range(24):
        before = len(record.tokens.get("newcomer", ()))
        record.step(core)
        if len(record.tokens.get("newcomer", ())) > before:
            steps_of_newcomer.append(step)
        if "raise" in record.reasons:
            break
    assert "raise" in record.reasons, "the others kept the suspects from being tried"
    assert len(steps_of_newcomer) >= 2, "the suspects kept the others waiting"
    assert len(record.tokens["newcomer"]) < 200
    record.run(core)


def test_aborting_a_suspect() -> None:
    core = make_core(FakeEngineConfig(max_num_seqs=16))
    record = Record()
    for i in range(4):
        core.add_request(make_request(f"raise{i}", [i], 30))
    record.step(core)
    assert core.abort_requests([f"raise{i}" for i in range(4)]) == [f"raise{i}" for i in range(4)]
    record.run(core)
    assert not record.reasons


def test_suspects_that_are_held_do_not_stop_the_loop() -> None:
    core = make_core(FakeEngineConfig(max_num_seqs=16))
    record = Record()
    for i in range(4):
        core.add_request(make_request("raise" if i == 1 else f"r{i}", [i], 5, seed=i))
    record.step(core)
    core.pause(PauseState.ALL_HELD)
    for _ in range(10):
        record.step(core)
    assert not record.reasons
    core.pause(PauseState.RUNNING)
    record.run(core)
    assert record.reasons["raise"] == FinishReason.ERROR
    assert record.tokens["r0"] == expected_output([0], 5, request_seed=0)


def test_an_executor_that_raises_at_once_is_like_a_step_that_raised() -> None:
    parts = build_fake_engine(SMALL)
    inner = parts.executor

    class RefusesAtOnce:
        def execute(self, output: SchedulerOutput) -> Future[ModelRunnerOutput]:
            if "r1" in output.request_ids:
                raise MemoryError("no memory for r1")
            return inner.execute(output)

        def close(self) -> None:
            inner.close()

    parts.executor = RefusesAtOnce()
    core = EngineCore(parts, EngineConfig(async_scheduling=False))
    record = Record()
    core.add_request(make_request("r1", [1], 5))
    record.step(core)
    assert record.errors["r1"] == "the model could not compute this request: MemoryError: no memory for r1"


def test_a_broken_device_ends_the_core() -> None:
    core = make_core(max_failed_steps=5)
    for i in range(10):
        core.add_request(make_request(f"raise{i}", [i]))
    with pytest.raises(EngineDeadError, match="5 steps failed one after another"):
        Record().run(core)
    core.close()
    core.close()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_hanging_device_ends_the_core(depth: int) -> None:
    core = make_core(depth=depth, step_timeout_s=0.1)
    core.add_request(make_request("hang", [1]))
    with pytest.raises(EngineDeadError, match=r"step_timeout_s=0\.1"):
        core.step()


def test_started_requests_and_counts_are_told() -> None:
    core = make_core()
    core.add_request(make_request("a", [1, 2, 3]))
    result = core.step()
    assert result.started == ["a"]
    assert result.started_time_s > 0
    assert result.step_tokens == [3]
    assert core.step().started == []


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("changes", [{}, {"num_draft_tokens": 3}, {"num_blocks": 14}])
def test_each_step_tells_the_tokens_that_it_computed(depth: int, changes: dict[str, Any]) -> None:
    core = make_core(replace(SMALL, max_num_batched_tokens=8, **changes), depth)
    computed: list[int] = []
    execute = core.parts.executor.execute

    def counted(output: SchedulerOutput) -> Any:
        computed.extend([sum(output.num_scheduled_tokens)] if output.rows else [])
        return execute(output)

    core.parts.executor.execute = counted  # type: ignore[method-assign]
    for index, length in enumerate([20, 3, 11]):
        core.add_request(make_request(f"r{index}", [7 + index] * length, max_tokens=30))
    told: list[int] = []
    for number in range(200):
        # What is taken in at once is several steps, too.
        result = core.collect_all() if number % 7 == 6 else core.step()
        told += result.step_tokens
        if not core.has_requests():
            break
    told += core.collect_all().step_tokens
    assert not core.has_requests()
    assert told == computed
    assert max(told) <= 8
    once = 20 + 3 + 11 + 3 * 29
    # Without drafts and preemptions each token but the last of a request is computed once; ahead of an end, one more.
    assert once <= sum(told) <= (once + 3 * depth if not changes else 10 * once)
    assert (core.stats().num_preemptions_total > 0) == ("num_blocks" in changes)


def test_refused_requests_leave_no_trace() -> None:
    core = make_core()
    with pytest.raises(RequestError):
        core.add_request(make_request("long", [1] * 500))
    assert not core.has_requests()
    assert core.abort_all() == []
    core.add_request(make_request("long", [1] * 5))
    assert core.abort_all() == ["long"]
