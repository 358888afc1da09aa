"""Cohere's chat: answers whole and as events, thinking, calls, histories, documents, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire_server.cohere_chat.protocol import CohereChatRequest
from quire_testkit.checkpoints import make_checkpoint

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def says(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": f"¤{text}¥"}], **fields}


def events(server: Any, body: dict[str, Any], path: str = "/v2/chat") -> list[dict[str, Any]]:
    with server.client.stream("POST", path, json={**body, "stream": True}) as response:
        text = response.read().decode()
        assert response.status_code == 200, text
    *parts, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    told = []
    for part in parts:
        name, data = part.split("\n")
        told.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {told[-1]['type']}"
    return told


def put_together(told: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    """Content and calls of a message, as a client makes them of its events."""
    content: list[Any] = []
    calls: list[Any] = []
    for event in told:
        match event:
            case {"type": "content-start", "index": index, "delta": {"message": {"content": part}}}:
                assert index == len(content)
                content.append(dict(part))
            case {"type": "content-delta", "index": index, "delta": {"message": {"content": piece}}}:
                ((kind, text),) = piece.items()
                content[index][kind] += text
            case {"type": "tool-call-start", "index": index, "delta": {"message": {"tool_calls": call}}}:
                assert index == len(calls)
                calls.append(json.loads(json.dumps(call)))
            case {"type": "tool-call-delta", "index": index, "delta": {"message": {"tool_calls": piece}}}:
                calls[index]["function"]["arguments"] += piece["function"]["arguments"]
    return content, calls


@pytest.mark.parametrize("path", ["/v2/chat", "/cohere/v2/chat"])
def test_an_answer_is_the_same_whole_and_streamed(live: Any, path: str) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "seed": 3}
    whole = live.post(path, {**body, "logprobs": True}).json()
    first, *told, last = events(live, {**body, "logprobs": True}, path)
    assert (first["type"], last["type"]) == ("message-start", "message-end")
    content, calls = put_together(told)
    assert (content, calls) == (whole["message"]["content"], [])
    assert (whole["message"]["role"], whole["finish_reason"]) == ("assistant", "MAX_TOKENS")
    assert last["delta"]["finish_reason"] == "MAX_TOKENS"
    assert whole["usage"]["tokens"] == {**last["delta"]["usage"]["tokens"], "output_tokens": 5}
    chat = live.post(
        "/v1/chat/completions", {"messages": body["messages"], "max_tokens": 5, "seed": 3, "logprobs": True}
    ).json()
    assert content == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert whole["usage"]["tokens"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    logprobs = [each["logprob"] for each in chat["choices"][0]["logprobs"]["content"]]
    assert [each["logprobs"] for each in whole["logprobs"]] == [[each] for each in logprobs]
    streamed = [each for event in told if "logprobs" in event for each in event["logprobs"]["logprobs"]]
    assert streamed == logprobs


def test_thinking_and_calls_are_told_apart(scripted: Any) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    body = says(f"<think>hm</think>Let me see. {call}", tools=[WEATHER])
    whole = scripted.post("/v2/chat", body).json()
    assert whole["finish_reason"] == "TOOL_CALL"
    assert whole["message"]["content"] == [
        {"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Let me see."},
    ]  # fmt: skip
    (told_call,) = whole["message"]["tool_calls"]
    assert told_call["function"]["name"] == "weather"
    assert json.loads(told_call["function"]["arguments"]) == {"city": "Rome"}
    told = events(scripted, body)
    content, calls = put_together(told)
    assert content == whole["message"]["content"]
    assert [each["function"] for each in calls] == [told_call["function"]]
    kinds = list(dict.fromkeys(event["type"] for event in told))
    assert kinds == ["message-start", "content-start", "content-delta", "content-end", "tool-call-start",
                     "tool-call-delta", "tool-call-end", "message-end"]  # fmt: skip
    assert told[-1]["delta"]["finish_reason"] == "TOOL_CALL"
    stopped = scripted.post("/v2/chat", says("One. Two. Three.", stop_sequences=["Two"])).json()
    assert (stopped["finish_reason"], stopped["message"]["content"][0]["text"]) == ("STOP_SEQUENCE", "One. ")
    plain = scripted.post("/v2/chat", says("Done.", tools=[WEATHER], tool_choice="NONE")).json()
    assert (plain["finish_reason"], plain["message"]["content"][0]["text"]) == ("COMPLETE", "Done.")


def test_a_body_becomes_that_of_a_chat_completion() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]
    document = {"type": "document", "document": {"data": {"sky": "blü"}}}
    body = CohereChatRequest(
        model="m",
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "tool_plan": "I look.", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "1", "content": [document, {"type": "text", "text": "calm"}]},
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "so"}, {"type": "text", "text": "Blue."}],
            },
        ],
        tools=[WEATHER],
        strict_tools=True,
        tool_choice="REQUIRED",
        documents=["one", {"id": "b", "data": {"title": "T"}}, {"data": "three"}],
        response_format={"type": "json_object", "json_schema": {"type": "object"}},
        safety_mode="STRICT",
        thinking={"type": "enabled", "token_budget": 9},
        stop_sequences=["x"],
        k=5,
        p=0.5,
    )
    fields = body.chat_fields()
    assert fields["messages"][1]["content"] == [{"type": "text", "text": "Hi"}]
    assert fields["messages"][2:] == [
        {"role": "assistant", "content": None, "reasoning": "I look.", "reasoning_content": "I look.",
         "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": '{"sky": "blü"}\ncalm'},
        {"role": "assistant", "content": "Blue.", "reasoning": "so", "reasoning_content": "so"},
    ]  # fmt: skip
    assert fields["tools"][0]["function"]["strict"] is True
    assert fields["documents"] == [{"id": "0", "text": "one"}, {"id": "b", "title": "T"}, {"id": "2", "text": "three"}]
    assert fields["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert fields["chat_template_kwargs"] == {"safety_mode": "STRICT", "enable_thinking": True, "thinking": True}
    others = {name: fields[name] for name in ("tool_choice", "thinking_token_budget", "stop", "top_k", "top_p")}
    assert others == {"tool_choice": "required", "thinking_token_budget": 9, "stop": ["x"], "top_k": 5, "top_p": 0.5}


def test_documents_go_to_a_template_that_reads_them(make_live: Any, tmp_path: Path) -> None:
    template = "{% for d in documents or [] %}{{ d.id }}:{{ d.text }};{% endfor %}{{ messages[0].content }}"
    folder = make_checkpoint(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(template)
    server = make_live(folder=folder)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    without = server.post("/v2/chat", body).json()["usage"]["tokens"]["input_tokens"]
    response = server.post("/v2/chat", {**body, "documents": ["sky", "sea"]})
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["tokens"]["input_tokens"] > without


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": "other"}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "assistant", "content": [{"type": "image"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "tool_call_id": "1", "content": [7]}]}, "messages[0].content"),
        ({"documents": ["text"]}, "documents"),
        ({"documents": [{"data": 3}]}, "documents"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"k": -3}, "k"),
        ({"p": 7}, "p"),
        ({"tool_choice": "REQUIRED"}, "tool_choice"),
        ({"tool_choice": "MAYBE"}, "tool_choice"),
        ({"thinking": {"type": "enabled", "token_budget": 0}}, "thinking.token_budget"),
        ({"messages": [{"role": "user", "content": "x " * 4000}]}, "messages"),
    ],
)
def test_what_is_wrong_is_named_as_cohere_does(live: Any, fields: dict[str, Any], param: str) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, **fields}
    response = live.post("/v2/chat", body)
    assert response.status_code == (404 if param == "model" else 400), response.text
    assert response.json()["error"]["param"] == param
