"""The loop around the core: what is sent when, and how it ends. Driven by a written-down list of messages."""

from __future__ import annotations

import pytest

from quire_engine import CoreLoop, EngineConfig, EngineCore
from quire_engine.messages import (
    AbortRequests,
    ClientMessage,
    CoreMessage,
    EngineFailed,
    EngineStopped,
    Outputs,
    Shutdown,
    UtilityCall,
    UtilityReply,
)
from quire_interfaces import EngineDeadError, FinishReason, PauseState, RequestFailure, SchedulerStats
from quire_testkit.conformance.engine_client import make_message
from quire_testkit.fake_engine import FakeEngineConfig, build_fake_engine
from quire_testkit.fake_runner import expected_output


class Script:
    """An inbox that gives one list of messages per call, then the shutdown."""

    def __init__(self, *turns: list[ClientMessage]) -> None:
        self._turns = list(turns)
        self.waits_s: list[float] = []

    def receive(self, timeout_s: float) -> list[ClientMessage]:
        self.waits_s.append(timeout_s)
        return self._turns.pop(0) if self._turns else [Shutdown(drain_s=30.0)]


def run(*turns: list[ClientMessage], engine: FakeEngineConfig | None = None, **settings: float) -> list[CoreMessage]:
    sent: list[CoreMessage] = []
    core = EngineCore(build_fake_engine(engine), EngineConfig(**settings))
    CoreLoop(core, Script(*turns), sent.append).run()
    return sent


def pieces(sent: list[CoreMessage], request_id: str = "r") -> list[list[int]]:
    return [
        output.new_token_ids
        for message in sent
        if isinstance(message, Outputs)
        for output in message.outputs
        if output.request_id == request_id
    ]


@pytest.mark.parametrize(
    ("interval", "sizes"), [(1, [1] * 12), (3, [1, 3, 3, 3, 2]), (5, [1, 5, 5, 1]), (100, [1, 11])]
)
def test_stream_interval(interval: int, sizes: list[int]) -> None:
    sent = run([make_message("r", [1, 2], 12)], stream_interval=interval)
    got = pieces(sent)
    assert [len(piece) for piece in got] == sizes
    assert [token for piece in got for token in piece] == expected_output([1, 2], 12, request_seed=0)


def test_steps_that_give_nobody_anything_send_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_engine.core_loop.STATS_INTERVAL_S", 3600.0)
    counts = {}
    for interval in (1, 100):
        outputs = run([make_message("r", [1, 2], 40)], stream_interval=interval)
        told = [each.step_tokens for each in outputs if isinstance(each, Outputs)]
        assert sum(map(sum, told)) == 2 + 39, "every step is told"
        counts[interval] = len(told)
    assert counts[100] <= 5 < 40 <= counts[1]


def test_aborted_requests_send_nothing_more_even_with_an_interval() -> None:
    turns: list[list[ClientMessage]] = [[make_message("r", [1], 50)], [], [], [AbortRequests(request_ids=["r", "x"])]]
    sent = run(*turns, stream_interval=10)
    assert pieces(sent) == [expected_output([1], 1, request_seed=0)]


def test_an_idle_loop_waits_and_a_busy_one_does_not() -> None:
    script = Script([], [make_message("r", [1], 5)])
    CoreLoop(EngineCore(build_fake_engine(), EngineConfig(async_scheduling=False)), script, lambda _: None).run()
    assert script.waits_s[:2] == [1.0, 1.0]
    assert script.waits_s[2] == 0.0


@pytest.mark.parametrize(("messages_s", "starts"), [(0.0, [["a"], ["b"], ["c"]]), (3600.0, [["a", "b", "c"]])])
def test_steps_come_between_messages_that_take_long(
    monkeypatch: pytest.MonkeyPatch, messages_s: float, starts: list[list[str]]
) -> None:
    monkeypatch.setattr("quire_engine.core_loop.MESSAGES_S", messages_s)
    sent = run([make_message(name, [1], 9) for name in "abc"], async_scheduling=False)
    assert [each.started for each in sent if isinstance(each, Outputs) and each.started] == starts
    assert [len(pieces(sent, name)) for name in "abc"] == [9, 9, 9]


def test_held_requests_do_not_spin() -> None:
    script = Script(
        [UtilityCall(call_id=1, method="pause", arguments={"state": int(PauseState.ALL_HELD)})],
        [make_message("r", [1], 5)],
        [],
        [],
    )
    CoreLoop(EngineCore(build_fake_engine(), EngineConfig()), script, lambda _: None).run()
    assert script.waits_s[2] > 0
    assert script.waits_s[3] > 0


def test_the_last_statistics_say_that_nothing_runs() -> None:
    sent = run([make_message("r", [1], 30), make_message("s", [1], 3)], [], [], [AbortRequests(request_ids=["r"])])
    stats = [message.stats for message in sent if isinstance(message, Outputs) and message.stats is not None]
    assert (stats[-1].num_running, stats[-1].num_waiting, stats[-1].kv_cache_usage) == (0, 0, 0.0)
    assert stats[-1].num_generation_tokens_total >= 3
    assert isinstance(sent[-1], EngineStopped)


def test_utilities_answer_and_wrong_calls_harm_nobody() -> None:
    sent = run(
        [UtilityCall(call_id=1, method="stats"), UtilityCall(call_id=2, method="__init__")],
        [UtilityCall(call_id=3, method="pause", arguments={"state": 99})],
        [UtilityCall(call_id=4, method="ping", arguments={"x": 1}), make_message("r", [1], 2)],
    )
    replies = {message.call_id: message for message in sent if isinstance(message, UtilityReply)}
    assert isinstance(replies[1].result, SchedulerStats)
    assert "no utility '__init__'" in (replies[2].error or "")
    assert "99" in (replies[3].error or "")
    assert "TypeError" in (replies[4].error or "")
    assert len(pieces(sent)) == 2


def test_malformed_requests_are_their_own_error() -> None:
    broken = make_message("broken", [1], 5)
    broken.prompt = b"abc"  # not a multiple of four bytes
    sent = run([broken, make_message("r", [1], 2)])
    rejected = [each for message in sent if isinstance(message, Outputs) for each in message.rejected]
    assert [each.request_id for each in rejected] == ["broken"]
    assert len(pieces(sent)) == 2


def test_a_loop_that_drains_finishes_what_it_has_and_takes_nothing_new() -> None:
    """The late request comes while the first one still runs, so that only the drain can refuse it."""
    sent = run([make_message("r", [1], 40)], [], [Shutdown(drain_s=30.0)], [make_message("late", [1], 5)])
    rejected = [each for message in sent if isinstance(message, Outputs) for each in message.rejected]
    assert [(each.request_id, each.kind) for each in rejected] == [("late", "overloaded")]
    assert pieces(sent, "late") == []
    assert sum(map(len, pieces(sent))) == 40
    assert sent[-1] == EngineStopped(num_aborted=0)


def test_a_core_that_fails_says_so_before_it_ends() -> None:
    sent: list[CoreMessage] = []
    core = EngineCore(build_fake_engine(), EngineConfig(max_failed_steps=2))
    requests: list[ClientMessage] = [make_message(f"raise{i}", [i], 5) for i in range(6)]
    with pytest.raises(EngineDeadError):
        CoreLoop(core, Script(requests, [], [], [], [], []), sent.append).run()
    assert isinstance(sent[-1], EngineFailed)
    assert "broke the step" in sent[-1].cause


def test_failed_requests_end_with_the_reason() -> None:
    sent = run([make_message("fail", [1], 5)])
    (output,) = [output for message in sent if isinstance(message, Outputs) for output in message.outputs]
    assert (output.finish_reason, output.failure) == (FinishReason.ERROR, RequestFailure("asked to fail"))
