"""What is rendered, generated and derendered is what the chat and completions routes answer, whole and streamed."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
GENERATE = "/inference/v1/generate"
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SAYS: list[tuple[str, dict[str, Any]]] = [
    ("Hello there.", {}),
    ("Hello there.", {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}),
    ("Hello there.", {"logprobs": True, "return_tokens_as_token_ids": True, "n": 2}),
    ("東京 🎈 is one", {"logprobs": True, "prompt_logprobs": 1}),
    (f"<think>Where?</think>I look.\n{CALL}", {"tools": [WEATHER], "logprobs": True}),
    (f"<think>Where?</think>{CALL}\n{CALL}", {"tools": [WEATHER], "include_reasoning": False}),
    (f"Both.\n{CALL}\n{CALL}", {"tools": [WEATHER], "n": 2, "parallel_tool_calls": False}),
    ("one two three", {"stop": ["two"], "max_tokens": 40, "logprobs": True}),
    ("one two three", {"stop": "two", "include_stop_str_in_output": True, "n": 2}),
    ("one two three", {"max_tokens": 4}),
    ("one two three", {"stop_token_ids": [1023], "ignore_eos": True}),
    (CALL, {"tools": [WEATHER], "tool_choice": "required"}),
    (CALL, {"functions": [WEATHER["function"]]}),
    ("<think>one two three four five six</think>Done.", {"thinking_token_budget": 3, "n": 2, "logprobs": True}),
    ("<think>one two three four five six</think>Done.", {"thinking_token_budget": 0}),
    (f"<think>one two three four five</think>{CALL}", {"thinking_token_budget": 3, "tools": [WEATHER]}),
]


def chat_body(text: str, changes: dict[str, Any]) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": f"¤{text}¥"}], "seed": 4, **changes}


def ok(response: Any) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def said(value: Any) -> Any:
    """Without what is new each time (ids, times, what was cached), and without nulls."""
    if isinstance(value, dict):
        fresh = ("id", "created", "prompt_tokens_details", "kv_transfer_params")
        return {key: said(each) for key, each in value.items() if key not in fresh and each is not None}
    return [said(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize(("text", "changes"), SAYS, ids=range(len(SAYS)))
def test_render_generate_derender_is_a_chat(scripted: Any, text: str, changes: dict[str, Any]) -> None:
    body = chat_body(text, changes)
    whole = ok(scripted.post(CHAT, body))
    rendered = ok(scripted.post(f"{CHAT}/render", body))
    generated = ok(scripted.post(GENERATE, rendered))
    parts = {"model": "tiny", "generate_response": generated, "chat_request": body}
    answer = ok(scripted.post(f"{CHAT}/derender", parts))
    ChatCompletion.model_validate(answer, strict=True)
    assert said(answer) == said(whole)
    assert answer["id"] == rendered["request_id"]
    cached = generated["usage"]["prompt_tokens_details"]
    assert answer["usage"]["prompt_tokens_details"] == cached
    assert cached["cached_tokens"] > 0 or rendered["sampling_params"].get("prompt_logprobs") is not None


def test_an_output_without_its_request_is_text(scripted: Any) -> None:
    body = chat_body(f"<think>Hm.</think>{CALL}", {"tools": [WEATHER]})
    rendered = ok(scripted.post(f"{CHAT}/render", body))
    generated = ok(scripted.post(GENERATE, rendered))
    answer = ok(scripted.post(f"{CHAT}/derender", {"generate_response": generated}))
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == f"<think>Hm.</think>{CALL}"
    assert answer["usage"]["prompt_tokens"] == len(rendered["token_ids"])
    counted = ok(scripted.post(f"{CHAT}/derender", {"generate_response": generated, "prompt_tokens": 9}))
    assert counted["usage"]["prompt_tokens"] == 9
    named = {"choices": [{"token_ids": generated["choices"][0]["token_ids"]}]}
    response = scripted.post(f"{CHAT}/derender", {"generate_response": named}, headers={"X-Request-Id": "mine"})
    assert ok(response)["id"] == "chatcmpl-mine"


COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": [[9, 8], [5, 6, 7]], "n": 2, "max_tokens": 5},
    {"prompt": "the fox", "max_tokens": 5, "logprobs": 2, "return_token_ids": True},
    {"prompt": ["the fox", "a dog"], "max_tokens": 5, "echo": True, "logprobs": 1},
    {"prompt": "the fox", "max_tokens": 0, "echo": True},
    {"prompt": "the fox", "max_tokens": 5, "prompt_logprobs": 0, "return_tokens_as_token_ids": True, "logprobs": 0},
    {"prompt": "the fox", "max_tokens": 20, "stop": ["a", "e"], "n": 2, "logprobs": 0},
    {"prompt": [*range(5, 60)], "max_tokens": 3},
    {"prompt": "the fox", "max_tokens": 20, "truncate_prompt_tokens": 1, "echo": True},
]


@pytest.mark.parametrize("changes", COMPLETIONS, ids=range(len(COMPLETIONS)))
def test_render_generate_derender_are_completions(live: Any, changes: dict[str, Any]) -> None:
    body = {"model": "tiny", "seed": 3, "ignore_eos": True, **changes}
    whole = ok(live.post(TEXT, body))
    rendered = ok(live.post(f"{TEXT}/render", body))
    generated = [ok(live.post(GENERATE, each)) for each in rendered]
    answer = ok(live.post(f"{TEXT}/derender", {"generate_responses": generated, "completion_request": body}))
    if not body.get("echo"):  # OpenAI's type has no nulls for the first token of a prompt
        Completion.model_validate(answer, strict=True)
    assert said(answer) == said(whole)
    assert answer["id"] == rendered[0]["request_id"]
    counts = [len(each["token_ids"]) + 1 for each in rendered]
    alone = {"generate_responses": generated, "prompt_tokens": counts}
    assert ok(live.post(f"{TEXT}/derender", alone))["usage"]["prompt_tokens"] == sum(counts)


def test_transfer_parameters_pass_through(live: Any) -> None:
    params = {"do_remote_decode": True}
    body = {"messages": [{"role": "user", "content": "x"}], "kv_transfer_params": params, "max_tokens": 2}
    rendered = ok(live.post(f"{CHAT}/render", body))
    assert rendered["kv_transfer_params"] == params
    (text,) = ok(live.post(f"{TEXT}/render", {"prompt": "x", "kv_transfer_params": params}))
    assert text["kv_transfer_params"] == params
    generated = {"choices": [{"token_ids": [5]}], "kv_transfer_params": {"remote_block_ids": [1]}}
    parts = {"generate_response": generated, "chat_request": body}
    assert ok(live.post(f"{CHAT}/derender", parts))["kv_transfer_params"] == {"remote_block_ids": [1]}
    answer = ok(live.post(f"{TEXT}/derender", {"generate_responses": [generated]}))
    assert answer["kv_transfer_params"] == {"remote_block_ids": [1]}


def test_fields_that_clients_read_are_null_not_absent(live: Any) -> None:
    generated = {"choices": [{"token_ids": [5, 6], "finish_reason": "length"}]}
    chat = ok(live.post(f"{CHAT}/derender", {"generate_response": generated}))
    text = ok(live.post(f"{TEXT}/derender", {"generate_responses": [generated]}))
    step = {"stream": True, "generate_chunk": generated}
    chunk = ok(live.post(f"{CHAT}/derender", step))["chunk"]
    assert [chat[name] for name in ("prompt_logprobs", "prompt_token_ids", "kv_transfer_params")] == [None] * 3
    assert chat["choices"][0]["message"]["reasoning"] is None
    assert text["kv_transfer_params"] is None
    for answer in (chat, text, chunk, ok(live.post(f"{TEXT}/derender", step))["chunk"]):
        (choice,) = answer["choices"]
        assert [choice[name] for name in ("logprobs", "stop_reason", "token_ids")] == [None] * 3


def folded(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The choices of a stream, put together as clients do."""
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event["choices"]:
            delta = choice.get("delta", {"content": choice.get("text")})
            empty = {"text": "", "reasoning": "", "calls": {}, "logprobs": [], "ids": [], "ends": [], "role": 0}
            whole = found.setdefault(choice["index"], empty)
            whole["role"] += delta.get("role") == "assistant"
            whole["text"] += delta.get("content") or ""
            whole["reasoning"] += delta.get("reasoning") or ""
            whole["ids"] += choice.get("token_ids") or []
            if choice["finish_reason"]:
                whole["ends"].append((choice["finish_reason"], choice.get("stop_reason")))
            logprobs = choice["logprobs"] or {}
            if "tokens" in logprobs:
                whole["logprobs"] += zip(*(logprobs[name] for name in sorted(logprobs)), strict=True)
            whole["logprobs"] += logprobs.get("content") or []
            older = delta.get("function_call")
            for call in [*(delta.get("tool_calls") or []), *([{"index": 0, "function": older}] if older else [])]:
                parts = whole["calls"].setdefault(call["index"], ["", "", []])
                parts[0] += call["function"].get("name") or ""
                parts[1] += call["function"].get("arguments") or ""
                parts[2] += [call["id"]] if call.get("id") else []
    return found


def without_call_ids(found: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    for whole in found.values():
        whole["calls"] = {index: (*parts[:2], len(parts[2])) for index, parts in whole["calls"].items()}
    return found


def event_bytes(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def derendered(server: Any, pieces: list[bytes], path: str = CHAT) -> Any:
    headers = {"content-type": "text/event-stream"}
    return server.client.post(f"{path}/derender", content=iter(pieces), headers=headers)


def events_of(response: Any) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    *events, done = [event.removeprefix("data: ") for event in response.text.split("\n\n") if event]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def in_steps(server: Any, path: str, chunks: list[dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    """What comes of a request per chunk, as vLLM's clients send them: each choice has a state of its own."""
    states: dict[int, Any] = {}
    answers = []
    for chunk in chunks:
        for choices in [[each] for each in chunk["choices"]] or [[]]:
            index = choices[0]["index"] if choices else 0
            part = {**chunk, "choices": choices}
            body = {"stream": True, "generate_chunk": part, "stream_state": states.get(index), **fields}
            told = ok(server.post(f"{path}/derender", body))
            states[index] = told["stream_state"]
            answers.append(told["chunk"])
    return answers


def same_usage(one: dict[str, Any], other: dict[str, Any]) -> bool:
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    return [one["usage"][name] for name in names] == [other["usage"][name] for name in names]


@pytest.mark.parametrize(("text", "changes"), SAYS, ids=range(len(SAYS)))
def test_a_stream_of_tokens_is_the_chats_stream(scripted: Any, text: str, changes: dict[str, Any]) -> None:
    body = chat_body(text, {**changes, "stream_options": {"include_usage": True}, "stream": True})
    chat = scripted.events(CHAT, body)
    rendered = ok(scripted.post(f"{CHAT}/render", body))
    chunks = scripted.events(GENERATE, rendered)
    data = b"".join(map(event_bytes, [{"model": "tiny", "chat_request": body}, *chunks])) + b"data: [DONE]\n\n"
    events = events_of(derendered(scripted, [data[start : start + 97] for start in range(0, len(data), 97)]))
    steps = in_steps(scripted, CHAT, chunks, model="tiny", chat_request=body)
    expected = without_call_ids(folded(chat))
    assert all(whole["role"] == 1 for whole in expected.values())
    for told in (events, steps):
        for event in told:
            ChatCompletionChunk.model_validate(event, strict=True)
        assert without_call_ids(folded(told)) == expected
        assert told[-1]["choices"] == []
        assert same_usage(told[-1], chat[-1])
        cached = chunks[-1]["usage"]["prompt_tokens_details"]
        assert told[-1]["usage"]["prompt_tokens_details"] == cached
        assert {event["id"] for event in told} == {rendered["request_id"]}
        scored = [event["prompt_logprobs"] for event in told if event.get("prompt_logprobs") is not None]
        assert scored == [event["prompt_logprobs"] for event in chat if event.get("prompt_logprobs") is not None]
    assert said(events[-1]["usage"]) == said(chat[-1]["usage"])
    if body.get("return_token_ids"):
        assert events[0]["prompt_token_ids"] == steps[0]["prompt_token_ids"] == rendered["token_ids"]


@pytest.mark.parametrize(
    "changes",
    [each for each in COMPLETIONS if not isinstance(each["prompt"][0], (list, str)) or isinstance(each["prompt"], str)],
)
def test_a_stream_of_tokens_is_the_completions_stream(live: Any, changes: dict[str, Any]) -> None:
    body = {"model": "tiny", "seed": 3, "ignore_eos": True, **changes}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    texts = live.events(TEXT, body)
    (rendered,) = ok(live.post(f"{TEXT}/render", body))
    chunks = live.events(GENERATE, rendered)
    pieces = list(map(event_bytes, [{"completion_request": body}, *chunks]))
    events = events_of(derendered(live, pieces, TEXT))
    for told in (events, in_steps(live, TEXT, chunks, completion_request=body)):
        assert folded(told) == folded(texts)
        assert same_usage(told[-1], texts[-1])
        assert told[-1]["usage"]["prompt_tokens_details"] == chunks[-1]["usage"]["prompt_tokens_details"]
        assert {event["id"] for event in told} == {rendered["request_id"]}


def test_a_call_keeps_its_id_from_chunk_to_chunk(scripted: Any) -> None:
    body = chat_body(f"{CALL}\n{CALL}", {"tools": [WEATHER]})
    rendered = ok(scripted.post(f"{CHAT}/render", body))
    (choice,) = ok(scripted.post(GENERATE, rendered))["choices"]
    ids = choice["token_ids"]
    chunks = [{"choices": [{"index": 0, "token_ids": [token]}]} for token in ids[:-1]]
    chunks.append({"choices": [{"index": 0, "token_ids": ids[-1:], "finish_reason": "stop"}]})
    (whole,) = folded(in_steps(scripted, CHAT, chunks, chat_request=body)).values()
    assert [parts[:2] for parts in whole["calls"].values()] == [["get_weather", '{"city": "Paris"}']] * 2
    assert [len(parts[2]) for parts in whole["calls"].values()] == [1, 1]
    assert len({parts[2][0] for parts in whole["calls"].values()}) == 2
    assert whole["ends"] == [("tool_calls", None)]


def test_an_end_token_that_ends_nothing_has_its_place_in_the_text(live: Any) -> None:
    end = live.llm.engine.eos_token_ids[0]
    shown = ok(live.post("/detokenize", {"tokens": [end]}))["prompt"]
    asked = {"prompt": "x", "logprobs": 0, "skip_special_tokens": False}

    def chunk(ids: list[int], **fields: Any) -> dict[str, Any]:
        logprobs = {"content": [{"token_id": each, "logprob": -1} for each in ids]}
        return {"choices": [{"token_ids": ids, "logprobs": logprobs, "index": 0, **fields}]}

    letter, other = ok(live.post("/tokenize", {"prompt": "ab", "add_special_tokens": False}))["tokens"]
    chunks = [chunk([letter, end]), chunk([other, end], finish_reason="stop")]
    steps = in_steps(live, TEXT, chunks, completion_request=asked)
    assert [step["choices"][0]["text"] for step in steps] == ["a", f"{shown}b"]
    offsets = [step["choices"][0]["logprobs"]["text_offset"] for step in steps]
    assert offsets == [[0, 1], [1 + len(shown), 2 + len(shown)]]


def test_a_long_output_is_read_again_for_its_last_chunk(scripted: Any) -> None:
    text = "<think>" + "word " * 300 + "</think>" + "東京 🎈 " * 100
    body = chat_body(text, {})
    rendered = ok(scripted.post(f"{CHAT}/render", body | {"messages": [{"role": "user", "content": "x"}]}))
    ids = ok(scripted.post("/tokenize", {"prompt": text, "add_special_tokens": False}))["tokens"]
    assert len(ids) > 1100
    body = {"stream": True, "prompt_token_ids": rendered["token_ids"], "chat_request": body | {"logprobs": True}}
    state, pieces = None, {"content": "", "reasoning": ""}
    for start in range(0, len(ids), 97):
        logprobs = {"content": [{"token_id": each, "logprob": -1} for each in ids[start : start + 97]]}
        choice = {"index": 3, "token_ids": ids[start : start + 97], "logprobs": logprobs}
        if start + 97 >= len(ids):
            choice["finish_reason"] = "length"
        step = {**body, "generate_chunk": {"choices": [choice]}, "stream_state": state}
        told = ok(scripted.post(f"{CHAT}/derender", step))
        state, (answer,) = told["stream_state"], told["chunk"]["choices"]
        assert (answer["index"], len(answer["logprobs"]["content"])) == (3, len(choice["token_ids"]))
        for name in pieces:
            pieces[name] += answer["delta"].get(name) or ""
    assert pieces == {"content": "東京 🎈 " * 100, "reasoning": ("word " * 300).rstrip()}
    assert answer["finish_reason"] == "length"


def test_text_is_told_before_the_last_chunk_has_come(scripted: Any) -> None:
    url = urlsplit(scripted.url)
    ids = ok(scripted.post("/tokenize", {"prompt": "Hello there.", "add_special_tokens": False}))["tokens"]
    connection = http.client.HTTPConnection(str(url.hostname), url.port, timeout=60)
    connection.putrequest("POST", f"{CHAT}/derender")
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


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("events", "param"),
    [
        ([], "body"),
        ([{}], "choices"),
        ([{"prompt_tokens": -1}, {"choices": []}], "prompt_tokens"),
        ([{"prompt_token_ids": [5000]}, {"choices": []}], "prompt_token_ids[0]"),
        ([{}, {"choices": [{"index": 1, "token_ids": [5]}]}], "choices[0].index"),
        ([{}, {"choices": [{"index": 0, "token_ids": [5, 5000]}]}], "choices[0].token_ids[1]"),
        ([{}, {"choices": [{"index": 0}, {"index": 0}]}], "choices[1].index"),
        ([{}, {"choices": [], "output_mode": "text"}], "output_mode"),
        ([{}, {"error": {"message": "lost"}}], "error"),
        ([{}, {"error": "lost"}], "error"),
    ],
    ids=range(10),
)
def test_wrong_streams_are_named(scripted: Any, path: str, events: list[Any], param: str) -> None:
    response = derendered(scripted, [event_bytes(event) for event in events], path)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_wrong_requests_at_the_head_of_a_stream_are_named(scripted: Any) -> None:
    for path, head, param in (
        (CHAT, {"chat_request": {"messages": []}}, "chat_request.messages"),
        (CHAT, {"chat_request": {"messages": [{"role": "user"}], "top_p": 2}}, "chat_request.top_p"),
        (TEXT, {"completion_request": {"prompt": ["x", "y"]}}, "completion_request.prompt"),
    ):
        response = derendered(scripted, [event_bytes(head), event_bytes({"choices": [{"token_ids": [5]}]})], path)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_stream_that_breaks_off_ends_with_an_error(scripted: Any, path: str) -> None:
    chunks = [event_bytes({}), event_bytes({"choices": [{"index": 0, "token_ids": [70, 71]}]})]
    assert "before every choice had its finish_reason" in derendered(scripted, chunks, path).text


ONE = {"choices": [{"token_ids": [5]}]}
ASKED = {"messages": [{"role": "user", "content": "x"}]}


def whole(**fields: Any) -> dict[str, Any]:
    """A body with a response without choices, which has these fields."""
    return {"generate_response": {"choices": [], **fields}}


def chunk(**fields: Any) -> dict[str, Any]:
    """A body with a chunk that has these fields."""
    return {"stream": True, "generate_chunk": fields}


def one(**fields: Any) -> dict[str, Any]:
    """A body with a response of one choice, which has these fields."""
    return {"generate_response": {"choices": [{"token_ids": [5, 6], **fields}]}}


def content(*entries: Any) -> dict[str, Any]:
    return one(logprobs={"content": list(entries)})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "generate_response"),
        ({"generate_response": 5}, "generate_response"),
        ({"generate_response": {}}, "generate_response.choices"),
        ({"generate_response": {"choices": [5]}}, "generate_response.choices[0]"),
        (whole(output_mode="text"), "generate_response.output_mode"),
        (whole(usage={"prompt_tokens": -1}), "generate_response.usage.prompt_tokens"),
        (whole(prompt_logprobs=[{"x": {"logprob": 0}}]), "generate_response.prompt_logprobs"),
        (whole(prompt_logprobs=[5]), "generate_response.prompt_logprobs[0]"),
        ({"generate_response": {"choices": [{"index": 1}, {"index": 1}]}}, "generate_response.choices[1].index"),
        (one(index=10**6), "generate_response.choices[0].index"),
        (one(index=-1), "generate_response.choices[0].index"),
        (one(token_ids=[5000]), "generate_response.choices[0].token_ids[0]"),
        (one(token_ids=[5, "6"]), "generate_response.choices[0].token_ids[1]"),
        (one(token_ids=[5] * 513), "generate_response.choices[0].token_ids"),
        (one(token_ids=[5] * 400_000), "generate_response.choices[0].token_ids"),
        (one(finish_reason="error"), "generate_response.choices[0].finish_reason"),
        (one(finish_reason=5), "generate_response.choices[0].finish_reason"),
        (one(stop_reason=[]), "generate_response.choices[0].stop_reason"),
        (one(logprobs=[]), "generate_response.choices[0].logprobs"),
        (content({}), "generate_response.choices[0].logprobs.content[0].token_id"),
        (content({"token_id": 5}), "generate_response.choices[0].logprobs.content[0].logprob"),
        (content({"token_id": 5, "logprob": "x"}), "generate_response.choices[0].logprobs.content[0].logprob"),
        (content({"token_id": 5000, "logprob": 0}), "generate_response.choices[0].logprobs.content[0][0]"),
        (content(*[{"token_id": 5, "logprob": 0}] * 3), "generate_response.choices[0].logprobs.content"),
        ({"generate_response": ONE, "prompt_tokens": -1}, "prompt_tokens"),
        ({"generate_response": ONE, "prompt_token_ids": [5000]}, "prompt_token_ids[0]"),
        ({"generate_response": ONE, "chat_request": {"messages": []}}, "chat_request.messages"),
        ({"generate_response": ONE, "chat_request": {}}, "chat_request.messages"),
        ({"generate_response": ONE, "chat_request": {**ASKED, "temperature": -1}}, "chat_request.temperature"),
        ({"generate_response": ONE, "chat_request": {**ASKED, "tool_choice": "required"}}, "chat_request.tool_choice"),
        ({"generate_response": ONE, "stream": "x"}, "stream"),
        ({"generate_response": ONE, "stream": True}, "generate_chunk"),
        (chunk(choices=[{}, {"index": 1}]), "generate_chunk.choices"),
        (chunk(error={}), "generate_chunk.error"),
        (chunk(choices=[{"token_ids": [5000]}]), "generate_chunk.choices[0].token_ids[0]"),
        ({"stream": True, "generate_chunk": ONE, "stream_state": []}, "stream_state"),
    ],
)  # fmt: skip
def test_wrong_bodies_are_named(live: Any, body: dict[str, Any], param: str) -> None:
    response = live.post(f"{CHAT}/derender", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text[:1000]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "generate_responses"),
        ({"generate_responses": []}, "generate_responses"),
        ({"generate_responses": [ONE, {"choices": [{}, {}]}]}, "generate_responses[1].choices[1].index"),
        ({"generate_responses": [ONE], "prompt_tokens": [1, 2]}, "prompt_tokens"),
        ({"generate_responses": [ONE], "prompt_tokens": [-1]}, "prompt_tokens[0]"),
        ({"generate_responses": [ONE], "prompt_token_ids": [[5], [6]]}, "prompt_token_ids"),
        ({"generate_responses": [ONE], "prompt_token_ids": [[5000]]}, "prompt_token_ids[0][0]"),
        ({"generate_responses": [ONE], "completion_request": {}}, "completion_request.prompt"),
        ({"generate_responses": [ONE], "completion_request": {"prompt": ["x", "y"]}}, "completion_request.prompt"),
        ({"generate_responses": [ONE], "completion_request": {"prompt": "x", "top_p": 2}}, "completion_request.top_p"),
        ({**chunk(**ONE), "completion_request": {"prompt": ["x", "y"]}}, "completion_request.prompt"),
    ],
)  # fmt: skip
def test_wrong_bodies_of_completions_are_named(live: Any, body: dict[str, Any], param: str) -> None:
    response = live.post(f"{TEXT}/derender", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text[:1000]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("state", "param"),
    [
        ({"output_token_ids": "5"}, "stream_state.output_token_ids"),
        ({"output_token_ids": [5, -1]}, "stream_state.output_token_ids[1]"),
        ({"output_token_ids": [5000], "output_chunk_lens": [1]}, "stream_state.output_token_ids[0]"),
        ({"output_token_ids": [5, 6], "output_chunk_lens": [1]}, "stream_state.output_chunk_lens"),
        ({"output_token_ids": [5], "output_chunk_lens": [2, -1]}, "stream_state.output_chunk_lens[1]"),
        ({"output_token_ids": [5] * 512, "output_chunk_lens": [512]}, "stream_state.output_token_ids"),
        ({"output_token_ids": [5] * 400_000, "output_chunk_lens": [400_000]}, "stream_state.output_token_ids"),
        ({"role_sent": "yes"}, "stream_state.role_sent"),
    ],
    ids=range(8),
)
def test_forged_states_are_named(live: Any, path: str, state: dict[str, Any], param: str) -> None:
    response = live.post(f"{path}/derender", {"stream": True, "generate_chunk": ONE, "stream_state": state})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text[:1000]


def test_a_stale_state_is_only_an_earlier_place(scripted: Any) -> None:
    body = chat_body("one two", {})
    chunk = {"choices": [{"index": 0, "token_ids": [70]}]}
    first = ok(scripted.post(f"{CHAT}/derender", {"stream": True, "generate_chunk": chunk, "chat_request": body}))
    again = {"stream": True, "generate_chunk": chunk, "chat_request": body, "stream_state": first["stream_state"]}
    answers = [ok(scripted.post(f"{CHAT}/derender", again)) for _ in range(2)]
    assert said(answers[0]) == said(answers[1])


@pytest.mark.parametrize("top", [[], [("token_id:9", 9)]])
def test_ids_may_be_written_as_names_of_tokens(live: Any, top: list[tuple[str, int]]) -> None:
    """Other engines give the ids of log probabilities in `token` alone."""
    entries = [{"token": name, "logprob": -2.0, "bytes": None} for name, _ in top]
    place = {"token": "token_id:8", "logprob": -1.0, "bytes": None, "top_logprobs": entries}
    choice = {"index": 0, "token_ids": [8], "finish_reason": "stop", "logprobs": {"content": [place]}}
    body = {"model": "tiny", "generate_response": {"request_id": "r", "choices": [choice]}}
    answer = live.post("/v1/chat/completions/derender", body)
    assert answer.status_code == 200, answer.text
    (told,) = answer.json()["choices"][0]["logprobs"]["content"]
    texts = [
        live.post("/detokenize", {"tokens": [each]}).json()["prompt"] for each in (8, *(number for _, number in top))
    ]
    assert [told["token"], *(each["token"] for each in told["top_logprobs"])] == texts
    place["token"] = "token_id:no"
    refused = live.post("/v1/chat/completions/derender", body)
    assert refused.status_code == 400
    assert "token_id" in refused.json()["error"]["param"]


@pytest.mark.parametrize("token_ids", [[], None])
def test_an_answer_without_tokens_is_none(live: Any, token_ids: list[int] | None) -> None:
    choice = {"index": 0, "token_ids": token_ids, "finish_reason": "stop"}
    body = {"model": "tiny", "generate_response": {"request_id": "r", "choices": [choice]}}
    answer = live.post("/v1/chat/completions/derender", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "generate_response.choices[0].token_ids"
