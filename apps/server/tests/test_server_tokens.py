"""Tokens in, tokens out: render, generate and derender give what the chat and completion routes answer at once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

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
        for call in (choice.get("message") or {}).get("tool_calls", []):
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
    expected = [choice.pop("token_ids") for choice in whole["choices"]]
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


def test_a_budget_is_left_out_where_nothing_thinks(live: Any, scripted: Any) -> None:
    body = chat_body("x", {"thinking_token_budget": 3})
    assert "thinking" not in ok(live.post("/v1/chat/completions/render", body))
    forced = {**body, "tools": [WEATHER], "tool_choice": "required"}
    assert "thinking" not in ok(scripted.post("/v1/chat/completions/render", forced))


@pytest.mark.parametrize(
    ("thinking", "param"),
    [
        ({"budget": -1}, "thinking.budget"),
        ({}, "thinking.budget"),
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
