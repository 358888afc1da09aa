"""Tokens in, tokens out: render, generate and derender give what the chat and completion routes answer at once."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SAYS = [
    ("Hello there.", {}),
    (f"<think>Where?</think>I look.\n{CALL}", {"tools": [WEATHER]}),
    (f"Both.\n{CALL}", {"tools": [WEATHER], "n": 2}),
    ("one two three", {"stop": ["two"], "max_tokens": 40}),
    (CALL, {"tools": [WEATHER], "tool_choice": "required"}),
]


def chat_body(text: str, changes: dict[str, Any]) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": f"¤{text}¥"}], "seed": 4, **changes}


def ok(response: Any) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def comparable(answer: dict[str, Any]) -> dict[str, Any]:
    """Without what is new each time."""
    for choice in answer["choices"]:
        choice.pop("stop_reason", None)
        for call in (choice.get("message") or {}).get("tool_calls") or []:
            del call["id"]
    usage = {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return {"choices": answer["choices"], "usage": usage, "deterministic": answer["deterministic"]}


@pytest.mark.parametrize(("text", "changes"), SAYS, ids=range(len(SAYS)))
def test_render_generate_derender_is_a_chat(scripted: Any, text: str, changes: dict[str, Any]) -> None:
    body = chat_body(text, changes)
    whole = ok(scripted.post("/v1/chat/completions", body))
    rendered = ok(scripted.post("/v1/chat/completions/render", body))
    generated = ok(scripted.post("/inference/v1/generate", rendered))
    assert generated["output_mode"] == "tokens"
    assert all("text" not in choice for choice in generated["choices"])
    parts = {"model": "tiny", "generate_response": generated, "chat_request": body}
    answer = ok(scripted.post("/v1/chat/completions/derender", parts))
    ChatCompletion.model_validate(answer, strict=True)
    assert comparable(answer) == comparable(whole)
    plain = ok(scripted.post("/v1/chat/completions/derender", {"generate_response": generated, "prompt_tokens": 9}))
    assert plain["usage"]["prompt_tokens"] == 9
    assert (plain["choices"][0]["message"]["content"] or "").split() != []
    counts = ok(scripted.post("/tokenize", {"messages": body["messages"], "tools": body.get("tools")}))
    assert rendered["token_ids"][: counts["count"]] == counts["tokens"]


@pytest.mark.parametrize(
    ("budget", "changes"), [(0, {}), (5, {"n": 2}), (12, {"tools": [WEATHER]}), (5, {"max_tokens": 20}), (1000, {})]
)
def test_a_rendered_request_keeps_the_thinking_budget(scripted: Any, budget: int, changes: dict[str, Any]) -> None:
    text = "<think>one two three four five six seven eight</think>Done."
    body = chat_body(text, {"thinking_token_budget": budget, **changes})
    whole = ok(scripted.post("/v1/chat/completions", {**body, "return_token_ids": True}))
    expected = [choice["token_ids"] for choice in whole["choices"]]
    for choice in whole["choices"]:
        choice["token_ids"] = None
    rendered = ok(scripted.post("/v1/chat/completions/render", body))
    assert rendered["thinking"]["budget"] == budget
    generated = ok(scripted.post("/inference/v1/generate", rendered))
    assert [choice["token_ids"] for choice in generated["choices"]] == expected
    assert generated["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == sum(map(len, expected))
    streamed: dict[int, list[int]] = {}
    for event in scripted.events("/inference/v1/generate", rendered):
        for choice in event["choices"]:
            streamed.setdefault(choice["index"], []).extend(choice["token_ids"])
    assert [ids for _, ids in sorted(streamed.items())] == expected
    parts = {"model": "tiny", "generate_response": generated, "chat_request": body}
    assert comparable(ok(scripted.post("/v1/chat/completions/derender", parts))) == comparable(whole)


def folded(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The message and finish reason of each choice of a stream, put together as clients do."""
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event["choices"]:
            whole = found.setdefault(choice["index"], {"content": "", "reasoning": "", "calls": {}, "end": None})
            whole["end"] = choice["finish_reason"] or whole["end"]
            for name in ("content", "reasoning"):
                whole[name] += choice["delta"].get(name) or ""
            for call in choice["delta"].get("tool_calls", []):
                pair = whole["calls"].setdefault(call["index"], ["", ""])
                pair[0] += call["function"].get("name", "")
                pair[1] += call["function"]["arguments"]
    return found


def event_bytes(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def derendered(server: Any, pieces: list[bytes]) -> Any:
    headers = {"content-type": "text/event-stream"}
    return server.client.post("/v1/chat/completions/derender", content=iter(pieces), headers=headers)


@pytest.mark.parametrize(("text", "changes"), SAYS, ids=range(len(SAYS)))
def test_a_stream_of_tokens_is_derendered_as_it_comes(scripted: Any, text: str, changes: dict[str, Any]) -> None:
    body = chat_body(text, {**changes, "stream_options": {"include_usage": True}, "stream": True})
    chat = scripted.events("/v1/chat/completions", body)
    rendered = ok(scripted.post("/v1/chat/completions/render", body))
    chunks = scripted.events("/inference/v1/generate", rendered)
    data = b"".join(map(event_bytes, [{"model": "tiny", "chat_request": body}, *chunks])) + b"data: [DONE]\n\n"
    response = derendered(scripted, [data[start : start + 97] for start in range(0, len(data), 97)])
    assert response.status_code == 200, response.text
    *events, done = [event.removeprefix("data: ") for event in response.text.split("\n\n") if event]
    assert done == "[DONE]"
    events = [json.loads(event) for event in events]
    for event in events:
        ChatCompletionChunk.model_validate(event, strict=True)
    assert folded(events) == folded(chat)
    lists: dict[int, list[int]] = {}
    for choice in [choice for chunk in chunks for choice in chunk["choices"]]:
        lists.setdefault(choice["index"], []).extend(choice["token_ids"])
    choices = [{"index": index, "token_ids": ids} for index, ids in lists.items()]
    parts = {"chat_request": body, "generate_response": {"choices": choices}}
    for choice in ok(scripted.post("/v1/chat/completions/derender", parts))["choices"]:
        found = folded(events)[choice["index"]]
        assert found["content"] == (choice["message"]["content"] or "")
        assert found["reasoning"] == (choice["message"]["reasoning"] or "")
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert events[-1]["usage"][name] == chat[-1]["usage"][name]


def test_text_is_told_before_the_last_chunk_has_come(scripted: Any) -> None:
    url = urlsplit(scripted.url)
    ids = ok(scripted.post("/tokenize", {"prompt": "Hello there.", "add_special_tokens": False}))["tokens"]
    connection = http.client.HTTPConnection(str(url.hostname), url.port, timeout=60)
    connection.putrequest("POST", "/v1/chat/completions/derender")
    connection.putheader("content-type", "text/event-stream")
    connection.putheader("transfer-encoding", "chunked")
    connection.endheaders()

    def send(data: bytes) -> None:
        connection.send(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    send(event_bytes({"prompt_tokens": 3}) + event_bytes({"choices": [{"index": 0, "token_ids": ids}]}))
    with connection.getresponse() as response:
        lines = [response.readline() for _ in range(3)]
        assert b"Hello" in lines[2]
        send(event_bytes({"choices": [{"index": 0, "token_ids": [], "finish_reason": "length"}]}))
        send(b"")
        assert b'"finish_reason":"length"' in response.read()
    connection.close()


@pytest.mark.parametrize(
    ("events", "status", "param"),
    [
        ([], 400, "body"),
        ([{}], 400, "choices"),
        ([{"chat_request": {"messages": []}}, {"choices": []}], 400, "chat_request.messages"),
        ([{}, {"choices": [{"index": 1, "token_ids": [5]}]}], 400, "choices"),
        ([{}, {"choices": [{"index": 0, "token_ids": [5000]}]}], 400, "generate_response"),
        ([{}, {"error": {"message": "lost"}}], 500, None),
    ],
    ids=range(6),
)
def test_wrong_streams_are_named(scripted: Any, events: list[Any], status: int, param: str | None) -> None:
    response = derendered(scripted, [event_bytes(event) for event in events])
    assert (response.status_code, response.json()["error"]["param"]) == (status, param), response.text


def test_a_stream_that_breaks_off_ends_with_an_error(scripted: Any) -> None:
    response = derendered(scripted, [event_bytes({}), event_bytes({"choices": [{"index": 0, "token_ids": [70, 71]}]})])
    assert "before every choice had its finish_reason" in response.text


def test_a_prompt_that_thinks_already_is_bounded_too(scripted: Any) -> None:
    messages = [
        {"role": "user", "content": "¤one two three</think>Done.¥"},
        {"role": "assistant", "content": "<think>"},
    ]
    body = {"messages": messages, "continue_final_message": True, "return_token_ids": True}
    lengths = []
    for budget in (0, 4):
        bounded = {**body, "thinking_token_budget": budget}
        (choice,) = ok(scripted.post("/v1/chat/completions", bounded))["choices"]
        rendered = ok(scripted.post("/v1/chat/completions/render", bounded))
        assert rendered["thinking"]["is_open"]
        assert ok(scripted.post("/inference/v1/generate", rendered))["choices"][0]["token_ids"] == choice["token_ids"]
        lengths.append(len(choice["token_ids"]))
    assert lengths[1] == lengths[0] + 4


def test_a_budget_is_left_out_where_nothing_thinks(live: Any) -> None:
    body = chat_body("x", {"thinking_token_budget": 3})
    assert "thinking" not in ok(live.post("/v1/chat/completions/render", body))


def test_a_rendered_request_says_which_call_is_begun(scripted: Any) -> None:
    body = chat_body("x", {"tools": [WEATHER], "tool_choice": "required"})
    begun = ok(scripted.post("/v1/chat/completions/render", body))["thinking"]
    assert (begun["budget"], begun["forced"], begun["thinks"]) == (None, '<tool_call>\n{"name": "', False)


@pytest.mark.parametrize(
    ("thinking", "param"),
    [
        ({"budget": -1}, "thinking.budget"),
        ({"budget": 1, "tools": [{}]}, "thinking.tools[0].function"),
    ],
)
def test_wrong_thinking_is_named(scripted: Any, thinking: dict[str, Any], param: str) -> None:
    response = scripted.post("/inference/v1/generate", {"token_ids": [5], "thinking": thinking})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_render_generate_derender_are_completions(live: Any) -> None:
    body = {"model": "tiny", "prompt": [[9, 8], [5, 6, 7]], "n": 2, "max_tokens": 5, "seed": 3, "ignore_eos": True}
    whole = ok(live.post("/v1/completions", body))
    rendered = ok(live.post("/v1/completions/render", body))
    assert rendered[1]["token_ids"] == [5, 6, 7]
    generated = [ok(live.post("/inference/v1/generate", each)) for each in rendered]
    counts = [len(each["token_ids"]) for each in rendered]
    parts = {"generate_responses": generated, "prompt_tokens": counts, "completion_request": body}
    answer = ok(live.post("/v1/completions/derender", parts))
    Completion.model_validate(answer, strict=True)
    assert comparable(answer) == comparable(whole)


def test_generate_streams_and_tells_text_and_logprobs_when_asked(live: Any) -> None:
    params = {"max_tokens": 6, "seed": 3, "logprobs": 2, "ignore_eos": True, "n": 2, "logit_bias": {"7": 1.5}}
    body = {"token_ids": [5, 6, 7], "sampling_params": params, "output_mode": "text", "request_id": "mine"}
    whole = ok(live.post("/inference/v1/generate", body))
    assert (whole["request_id"], whole["output_mode"], len(whole["choices"])) == ("mine", "text", 2)
    assert whole["usage"]["completion_tokens"] == 12
    events = live.events("/inference/v1/generate", {**body, "stream_options": {"include_usage": True}})
    assert events[-1]["usage"]["completion_tokens"] == 12
    for choice in whole["choices"]:
        parts = [each for event in events for each in event["choices"] if each["index"] == choice["index"]]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [each["logprob"] for part in parts for each in part["logprobs"]["content"]] == [
            each["logprob"] for each in choice["logprobs"]["content"]
        ]
        assert parts[-1]["finish_reason"] == choice["finish_reason"] == "length"
    assert len(ok(live.post("/inference/v1/generate", {"token_ids": [5]}))["choices"][0]["token_ids"]) <= 16


def test_several_conversations_at_once(scripted: Any) -> None:
    texts = ["First.", "<think>Hm.</think>Second.", "Third"]
    body = {"model": "tiny", "messages": [chat_body(text, {})["messages"] for text in texts]}
    answer = ok(scripted.post("/v1/chat/completions/batch", body))
    ChatCompletion.model_validate(answer, strict=True)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["First.", "Second.", "Third"]
    assert answer["choices"][1]["message"]["reasoning"] == "Hm."
    alone = [ok(scripted.post("/v1/chat/completions", chat_body(text, {})))["usage"] for text in texts]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][name] == sum(usage[name] for usage in alone)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/inference/v1/generate", {}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": []}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": [5000]}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": [5], "output_mode": "song"}, "output_mode"),
        ("/inference/v1/generate", {"token_ids": [5], "priority": 3}, "priority"),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"top_p": 2}}, "sampling_params.top_p"),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"top_p": "x"}}, "sampling_params.top_p"),
        ("/inference/v1/generate", {"token_ids": [5] * 600}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": [5], "thinking": {"budget": 3}}, "thinking"),
        ("/v1/chat/completions/render", {"messages": []}, "messages"),
        (
            "/v1/chat/completions/render",
            {"messages": [{"role": "user", "content": "x"}], "use_beam_search": True},
            "use_beam_search",
        ),
        ("/v1/completions/render", {"prompt": "x", "temperature": -1}, "temperature"),
        ("/v1/chat/completions/derender", {}, "generate_response"),
        (
            "/v1/chat/completions/derender",
            {"generate_response": {"choices": [{"token_ids": [5000]}]}},
            "generate_response",
        ),
        ("/v1/chat/completions/derender", {"generate_response": {"choices": [{"index": 10**6}]}}, "n"),
        ("/v1/chat/completions/derender", {"generate_response": {"choices": []}, "stream": True}, "stream"),
        ("/v1/completions/derender", {"generate_responses": []}, "generate_responses"),
        ("/v1/chat/completions/batch", {"messages": []}, "messages"),
        ("/v1/chat/completions/batch", {"messages": [[]]}, "messages"),
        ("/v1/chat/completions/batch", {"messages": [[{"role": "user", "content": "x"}]], "stream": True}, "stream"),
        ("/v1/chat/completions/batch", {"messages": [[{"role": "user", "content": "x"}]], "n": 2}, "n"),
        ("/v1/chat/completions/batch", {"messages": [[{"role": "user", "content": "x"}]] * 1025}, "messages"),
    ],
)  # fmt: skip
def test_wrong_requests_are_named(live: Any, path: str, body: dict[str, Any], param: str) -> None:
    response = live.client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
