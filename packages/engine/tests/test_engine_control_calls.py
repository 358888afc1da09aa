"""Control calls: each gets its own answer, in time or not at all."""

from __future__ import annotations

import asyncio

import pytest

from quire_engine.control_calls import ControlCalls
from quire_engine.messages import UtilityCall, UtilityReply
from quire_interfaces import EngineDeadError, RequestError


async def test_answers_find_their_calls_in_any_order() -> None:
    sent: list[UtilityCall] = []
    calls = ControlCalls(sent.append, 60.0)
    waiting = [asyncio.ensure_future(calls.call("stats", number=number)) for number in range(3)]
    await asyncio.sleep(0)
    assert [(each.method, each.arguments) for each in sent] == [("stats", {"number": number}) for number in range(3)]
    for message in reversed(sent):
        calls.on_reply(UtilityReply(call_id=message.call_id, result=message.arguments["number"] * 10))
        calls.on_reply(UtilityReply(call_id=message.call_id, result="a second answer"))
    assert await asyncio.gather(*waiting) == [0, 10, 20]


async def test_a_refusal_raises_and_silence_ends() -> None:
    sent: list[UtilityCall] = []
    calls = ControlCalls(sent.append, 0.05)
    refused = asyncio.ensure_future(calls.call("sleep"))
    await asyncio.sleep(0)
    calls.on_reply(UtilityReply.from_error(sent[0].call_id, RequestError("no such level", param="level")))
    with pytest.raises(RequestError, match="no such level"):
        await refused
    with pytest.raises(EngineDeadError, match=r"did not answer 'ping' within call_timeout_s=0\.05"):
        await calls.call("ping")
    calls.on_reply(UtilityReply(call_id=sent[1].call_id))  # too late, for nobody


async def test_calls_that_nobody_waits_for() -> None:
    sent: list[UtilityCall] = []
    results: list[object] = []
    calls = ControlCalls(sent.append, 60.0)
    calls.send("ping")
    calls.send_then(results.append, "restore_adapters", loads={})
    calls.send_then(results.append, "restore_adapters", loads={"a": "b"})
    calls.on_reply(UtilityReply(call_id=sent[0].call_id, result="pong"))
    calls.on_reply(UtilityReply(call_id=sent[1].call_id, result="restored"))
    calls.on_reply(UtilityReply(call_id=sent[2].call_id, error="gone"))
    await asyncio.sleep(0)
    assert results == ["restored"]


async def test_all_calls_end_when_the_engine_is_gone() -> None:
    calls = ControlCalls(lambda message: None, 60.0)
    waiting = [asyncio.ensure_future(calls.call("stats")) for _ in range(2)]
    await asyncio.sleep(0)
    calls.fail_all(lambda: EngineDeadError("gone"))
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(each) for each in results] == [EngineDeadError] * 2
    assert results[0] is not results[1], "each has its own traceback"
