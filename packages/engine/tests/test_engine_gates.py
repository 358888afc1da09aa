"""What requests need besides a place in a step: prepared beside the loop, waited for alone, refused with the reason."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from quire_engine import CoreLoop, EngineCore, EngineInfo, EngineParts, InputProcessor, LLMEngine
from quire_engine.messages import AbortRequests, ClientMessage, CoreMessage, Outputs, Shutdown
from quire_interfaces import (
    AdmissionRule,
    FinishReason,
    QuireError,
    RenderedPrompt,
    Request,
    RequestError,
    SamplingParams,
    SchedulerStats,
    StructuredOutputsParams,
)
from quire_scheduler import Scheduler
from quire_testkit.conformance.engine_client import make_message
from quire_testkit.fake_engine import FakeEngineConfig, build_fake_engine


class Kitchen(AdmissionRule):
    """Prepares for requests whose prompt begins with 9; tokens behind say after how many questions, and how it ends."""

    name = "kitchen"
    holds_queue = False

    def __init__(self) -> None:
        self.cooking: dict[str, list[int]] = {}
        self.forgotten: list[str] = []
        self.closed = False

    @property
    def is_preparing(self) -> bool:
        return bool(self.cooking)

    def prepare(self, request: Request) -> None:
        if request.prompt_token_ids[0] == 8:
            raise RequestError("we are out of that", param="dish")
        if request.prompt_token_ids[0] == 9:
            self.cooking[request.request_id] = list(request.prompt_token_ids[1:3])

    def wait(self, request: Request) -> None:
        rest = self.cooking.pop(request.request_id, None)
        if rest is not None and rest[1]:
            raise RequestError("it burnt", param="dish")

    def take_failed(self) -> list[tuple[str, QuireError]]:
        failed: list[tuple[str, QuireError]] = []
        for request_id, rest in list(self.cooking.items()):
            rest[0] -= 1
            if rest[0] <= 0:
                del self.cooking[request_id]
                if rest[1]:
                    failed.append((request_id, RequestError("it burnt", param="dish")))
        return failed

    def forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.cooking.pop(request_id, None)
            self.forgotten.append(request_id)

    def add_stats(self, stats: SchedulerStats) -> None:
        stats.num_grammar_queries_total = 77

    def close(self) -> None:
        self.closed = True

    def admits(self, request: Request) -> bool:
        return request.request_id not in self.cooking

    def admitted(self, request: Request) -> None: ...

    def released(self, request: Request) -> None: ...


def parts_with(kitchen: Kitchen) -> EngineParts:
    parts = build_fake_engine(FakeEngineConfig())
    scheduler = parts.scheduler
    assert isinstance(scheduler, Scheduler)
    parts.scheduler = Scheduler(scheduler.config, scheduler._allocator, rules=(kitchen,))
    parts.gates = (kitchen,)
    return parts


class Script:
    def __init__(self, *turns: list[ClientMessage]) -> None:
        self._turns = list(turns)
        self.waits_s: list[float] = []

    def receive(self, timeout_s: float) -> list[ClientMessage]:
        self.waits_s.append(timeout_s)
        return self._turns.pop(0) if self._turns else []


def run(kitchen: Kitchen, *turns: list[ClientMessage]) -> tuple[list[CoreMessage], Script]:
    sent: list[CoreMessage] = []
    script = Script(*turns, *[[] for _ in range(40)], [Shutdown(drain_s=5.0)])
    CoreLoop(EngineCore(parts_with(kitchen)), script, sent.append).run()
    return sent, script


def outputs(sent: list[CoreMessage]) -> list[Outputs]:
    return [each for each in sent if isinstance(each, Outputs)]


def finished(sent: list[CoreMessage]) -> list[str]:
    return [output.request_id for each in outputs(sent) for output in each.outputs if output.finish_reason is not None]


def test_others_go_on_while_one_waits() -> None:
    kitchen = Kitchen()
    sent, script = run(kitchen, [make_message("slow", [9, 10, 0], 3), make_message("quick", [5], 3)])
    assert finished(sent) == ["quick", "slow"]
    assert 0 < min(wait for wait in script.waits_s if wait) < 0.01, "the loop looks again soon"
    assert kitchen.closed


def test_a_failure_refuses_the_request_with_its_reason() -> None:
    sent, _ = run(Kitchen(), [make_message("bad", [9, 3, 1], 3), make_message("good", [9, 3, 0], 3)])
    [rejected] = [each for message in outputs(sent) for each in message.rejected]
    assert rejected.request_id == "bad"
    assert (rejected.message, rejected.param) == ("it burnt", "dish")
    assert finished(sent) == ["good"]


def test_what_is_known_at_once_is_refused_at_once() -> None:
    kitchen = Kitchen()
    sent, _ = run(kitchen, [make_message("bad", [8], 3)])
    [rejected] = [each for message in outputs(sent) for each in message.rejected]
    assert rejected.message == "we are out of that"
    assert kitchen.forgotten == ["bad"]


def test_a_request_that_leaves_is_forgotten() -> None:
    kitchen = Kitchen()
    sent, _ = run(kitchen, [make_message("gone", [9, 30, 1], 3)], [AbortRequests(request_ids=["gone"])])
    assert kitchen.cooking == {}
    assert not [each for message in outputs(sent) for each in message.rejected]
    assert finished(sent) == []


def test_gates_count_into_the_statistics() -> None:
    core = EngineCore(parts_with(Kitchen()))
    assert core.stats().num_grammar_queries_total == 77
    core.close()


def test_the_synchronous_front_waits_and_raises() -> None:
    kitchen = Kitchen()
    engine = LLMEngine(parts_with(kitchen))
    with pytest.raises(RequestError, match="it burnt"):
        engine.add_request([9, 50, 1], SamplingParams(max_tokens=2))
    assert not engine.has_unfinished_requests()
    assert engine.stats().num_waiting == 0
    engine.add_request([9, 50, 0], SamplingParams(max_tokens=2))
    results = []
    while engine.has_unfinished_requests():
        results += engine.step()
    assert results[0].outputs[0].finish_reason == FinishReason.LENGTH
    engine.close()


INFO: dict[str, Any] = {"max_model_len": 100, "vocab_size": 50}


def constraint_of(params: SamplingParams, **info: Any) -> Any:
    processor = InputProcessor(EngineInfo(**{**INFO, "structured_output_backend": "x", **info}), eos_token_ids=[2, 3])
    return processor.process("r", RenderedPrompt(token_ids=[5]), params)


def test_constraints_are_checked_before_they_are_sent() -> None:
    regex = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a" * 20))
    with pytest.raises(RequestError, match="takes no structured outputs"):
        constraint_of(regex, structured_output_backend="")
    with pytest.raises(RequestError, match="20 characters, at most 19") as error:
        constraint_of(regex, max_grammar_bytes=19)
    assert error.value.param == "structured_outputs.regex"
    with pytest.raises(RequestError, match="not JSON"):
        constraint_of(SamplingParams(structured_outputs=StructuredOutputsParams(json="{")))
    schema = StructuredOutputsParams(json={"type": "integer"})
    [message] = constraint_of(SamplingParams(structured_outputs=schema, ignore_eos=True))
    assert message.sampling_params.structured_outputs.json == '{"type":"integer"}'
    assert message.stop_token_ids == {2, 3}, "the constraint ends with the end tokens, whatever ignore_eos says"
