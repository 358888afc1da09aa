"""Rich bodies of the chat protocols with every part replaced or taken away: never a failure of the server's own."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
RICH: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "tiny",
        "max_tokens": 2,
        "messages": [
            {"role": "developer", "content": "x"},
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "y"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "include_reasoning": True,
        "thinking_token_budget": 1,
    },
    "/v1/messages": {
        "model": "tiny",
        "max_tokens": 2,
        "system": [{"type": "text", "text": "x"}],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "document", "title": "t", "source": {"type": "text", "data": "x"}},
                    {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "x"}]}},
                    {"type": "search_result", "source": "s", "content": [{"type": "text", "text": "x"}]},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "x"},
                    {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": "b"}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "y"}]}],
            },
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1, "display": "omitted"},
        "output_config": {"effort": "low"},
        "stop_sequences": ["x"],
        "metadata": {"user_id": "me"},
    },
    "/v1/responses": {
        "model": "tiny",
        "max_output_tokens": 2,
        "instructions": "x",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "y"}]},
            {"type": "compaction", "id": "k", "encrypted_content": "aGk="},
        ],
        "tools": [{"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": False}],
        "tool_choice": {"type": "function", "name": "f"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "text"}},
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 1,
        "metadata": {"a": "b"},
        "truncation": "auto",
    },
}
CHAT = RICH["/v1/chat/completions"]
SAID = [{"role": "user", "content": "x"}]
CHOICE = {"index": 0, "token_ids": [5, 6], "finish_reason": "stop", "logprobs": None}
# Two scripts, so that the model has a summary to give whichever of them an odd part takes away.
SCRIPTED = [
    {"role": "user", "content": [{"type": "input_text", "text": "¤Said.¥"}]},
    *RICH["/v1/responses"]["input"][1:],
]
OTHER: dict[str, dict[str, Any]] = {
    "/v1/chat/completions/batch": {"model": "tiny", "max_tokens": 2, "messages": [SAID, SAID], "temperature": 0.5},
    "/v1/chat/completions/render": {**CHAT, "tool_choice": "auto"},
    "/v1/chat/completions/derender": {
        "chat_request": {"messages": SAID, "max_tokens": 2, "tools": CHAT["tools"]},
        "prompt_tokens": 3,
        "generate_response": {"request_id": "r", "choices": [CHOICE], "usage": {"prompt_tokens": 1}},
    },
    "/v1/completions/derender": {
        "completion_request": {"prompt": "x", "max_tokens": 2},
        "generate_responses": [{"request_id": "r", "choices": [CHOICE]}],
    },
    "/inference/v1/generate": {
        "token_ids": [5, 6, 7],
        "sampling_params": {"max_tokens": 2, "temperature": 0.5, "stop": ["x"], "logprobs": 1},
        "output_mode": "text",
        "thinking": {"budget": 1},
    },
    "/v1/responses/compact": {"input": SCRIPTED, "instructions": "¤Told.¥"},
    "/v1/conversations": {"metadata": {"a": "b"}, "items": RICH["/v1/responses"]["input"][:3]},
}
DEEP: Any = []
for _ in range(150):
    DEEP = [DEEP]
ODD: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, 2**70, "", "x", "\ud800", "\x00", [], {}, [None], [5], ["x"], {"x": None}, {"type": "x"},
    [{}], [[]], DEEP,
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where anything stands in a body."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, each in value.items():
            yield from places(each, (*path, key))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from places(each, (*path, index))


def changed(body: dict[str, Any], path: tuple[Any, ...], odd: Any, *, gone: bool = False) -> dict[str, Any]:
    body = copy.deepcopy(body)
    holder: Any = body
    for step in path[:-1]:
        holder = holder[step]
    if gone:
        del holder[path[-1]]
    else:
        holder[path[-1]] = odd
    return body


async def send_all(url: str, path: str, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    slots = asyncio.Semaphore(16)
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:

        async def send(body: dict[str, Any]) -> httpx.Response:
            async with slots:
                content = json.dumps(body)
                return await client.post(path, content=content, headers={"content-type": "application/json"})

        return await asyncio.gather(*(send(body) for body in bodies))


ALLOWED = {
    "/v1/chat/completions": {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
    },
    "/v1/messages": {"type": "any"},
    "/v1/responses": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
}


@pytest.mark.parametrize("path", RICH)
def test_odd_choices_of_tools_are_answered_or_refused(scripted, path):
    body = {**RICH[path], "tool_choice": ALLOWED[path]}
    assert scripted.post(path, body).status_code == 200
    places_ = [place for place in places(body) if place[0] == "tool_choice"]
    cases = [changed(body, place, odd) for place in places_ for odd in ODD]
    for case, response in zip(cases, asyncio.run(send_all(scripted.url, path, cases)), strict=True):
        assert response.status_code == 200 or 400 <= response.status_code < 500, (case, response.text)


@pytest.mark.parametrize("path", RICH)
@pytest.mark.parametrize("stream", [False, True])
def test_odd_parts_are_answered_or_refused(scripted, path, stream):
    body = {**RICH[path], "stream": stream}
    assert scripted.post(path, body).status_code == 200
    every = list(places(RICH[path]))
    # Each place meets half of the odd values, in one of the two forms of answers each.
    cases = [
        changed(body, place, odd)
        for number, place in enumerate(every)
        for index, odd in enumerate(ODD)
        if (number + index) % 4 == stream
    ]
    cases += [changed(body, place, None, gone=True) for place in every]
    responses = asyncio.run(send_all(scripted.url, path, cases))
    for case, response in zip(cases, responses, strict=True):
        assert response.status_code == 200 or 400 <= response.status_code < 500, (case, response.text)
        assert "internal error" not in response.text, (case, response.text)
        if response.status_code != 200:
            error = response.json()["error"]
            assert error["message"]
            assert len(error["message"]) < 2000
    assert scripted.post(path, RICH[path]).status_code == 200
    scripted.wait_idle()


@pytest.mark.parametrize("path", OTHER)
def test_odd_parts_of_other_routes_are_answered_or_refused(scripted, path):
    body = OTHER[path]
    assert scripted.post(path, body).status_code == 200
    # Each place meets a few of the odd values, all of them meet some place.
    cases = [
        changed(body, place, ODD[(3 * number + step) % len(ODD)])
        for number, place in enumerate(places(body))
        for step in range(3)
    ]
    cases += [changed(body, place, None, gone=True) for place in places(body)]
    for case, response in zip(cases, asyncio.run(send_all(scripted.url, path, cases)), strict=True):
        assert response.status_code == 200 or 400 <= response.status_code < 500, (case, response.text)
        if response.status_code != 200:
            assert 0 < len(response.json()["error"]["message"]) < 2000
    scripted.wait_idle()
