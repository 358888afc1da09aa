"""Arguments leave every API as the model wrote them: numbers that no double holds, halves of surrogate pairs."""

from __future__ import annotations

import json
from typing import Any

import pytest

WRITTEN = (
    '{"half": "\\ud83d", "\\ude00": [1e999, 123456789012345678901234567890, 0.1000000000000000055511], '
    '"pair": "\\ud83d\\ude00", "twice": 1, "twice": 2}'
)
HERMES = f'<tool_call>\n{{"name": "log", "arguments": {WRITTEN}}}\n</tool_call>'
TAGGED = f"<tool_call>\n<function=log>\n<parameter=data>\n{WRITTEN}\n</parameter>\n</function>\n</tool_call>"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"data": {"type": "object"}}}


@pytest.fixture(scope="module", params=["hermes", "qwen3_coder"])
def said(request, scripted, make_scripted):
    """(server, what its model says, the arguments that it means)."""
    if request.param == "hermes":
        return scripted, HERMES, WRITTEN
    return make_scripted(config={"tool_call_parser": "qwen3_coder"}), TAGGED, f'{{"data": {WRITTEN}}}'


def chat_request(text):
    function = {"name": "log", "parameters": SCHEMA}
    return "/v1/chat/completions", {
        "messages": [{"role": "user", "content": f"¤{text}¥"}],
        "tools": [{"type": "function", "function": function}],
    }


def responses_request(text):
    return "/v1/responses", {
        "input": f"¤{text}¥",
        "tools": [{"type": "function", "name": "log", "parameters": SCHEMA, "strict": False}],
    }


def messages_request(text):
    return "/v1/messages", {
        "max_tokens": 500,
        "messages": [{"role": "user", "content": f"¤{text}¥"}],
        "tools": [{"name": "log", "input_schema": SCHEMA}],
    }


def streamed(server, path, body):
    """The data of a stream's events, each of which must be JSON in UTF-8."""
    with server.client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        lines = response.read().decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ") and line != "data: [DONE]"]


def test_chat_completions(said):
    server, text, arguments = said
    path, body = chat_request(text)
    (choice,) = server.post(path, body).json()["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == arguments
    assert choice["finish_reason"] == "tool_calls"
    deltas = [chunk["choices"][0]["delta"] for chunk in streamed(server, path, body) if chunk["choices"]]
    pieces = [call["function"].get("arguments") or "" for delta in deltas for call in delta.get("tool_calls") or ()]
    assert "".join(pieces) == arguments


def test_responses(said):
    server, text, arguments = said
    path, body = responses_request(text)
    (item,) = server.post(path, body).json()["output"]
    assert (item["type"], item["arguments"]) == ("function_call", arguments)
    last = streamed(server, path, body)[-1]["response"]
    assert last["output"][0]["arguments"] == arguments


def test_messages(said):
    """The input is a part of the answer's JSON there: the same numbers, and nothing that strict readers refuse."""
    server, text, arguments = said
    arguments = arguments.replace('"\\ud83d"', '"\ufffd"').replace('"\\ude00"', '"\ufffd"')
    path, body = messages_request(text)
    response = server.post(path, body)
    assert response.status_code == 200
    assert f'"input":{arguments}' in response.content.decode().replace('"input": ', '"input":')
    assert response.json()["stop_reason"] == "tool_use"
    events = streamed(server, path, body)
    pieces = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(pieces) == arguments


def test_the_conversation_goes_on(said):
    server, text, _ = said
    path, body = chat_request(text)
    (choice,) = server.post(path, body).json()["choices"]
    body["messages"] += [choice["message"], {"role": "tool", "content": "ok", "tool_call_id": "1"}]
    body["messages"] += [{"role": "user", "content": "¤Done.¥"}]
    answer = server.post(path, body)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"] == "Done."
