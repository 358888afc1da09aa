"""Rendering: what each of the text routes would give to the engine, and where tokens stand in its text."""

from __future__ import annotations

from typing import Any

import pytest

WEATHER = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
MESSAGES = {
    "system": "Be brief.",
    "messages": [{"role": "user", "content": "¤Hello there.¥"}],
    "max_tokens": 40,
    "temperature": 0,
    "stop_sequences": ["zzz"],
}
RESPONSES = {
    "instructions": "Be brief.",
    "input": [{"role": "user", "content": "¤Hello there.¥"}],
    "max_output_tokens": 40,
    "temperature": 0,
}


def ok(response: Any) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def generated_text(server: Any, rendered: dict[str, Any]) -> str:
    text: str = ok(server.post("/inference/v1/generate", {**rendered, "output_mode": "text"}))["choices"][0]["text"]
    return text


def test_messages_are_rendered(scripted: Any) -> None:
    body = {**MESSAGES, "tools": [{"name": "get_weather", "input_schema": WEATHER["parameters"]}]}
    whole = ok(scripted.post("/v1/messages", body))
    rendered = ok(scripted.post("/v1/messages/render", body, headers={"X-Request-Id": "mine"}))
    assert (rendered["request_id"], rendered["model"], rendered["stream"]) == ("msg_mine", "tiny", False)
    assert len(rendered["token_ids"]) == ok(scripted.post("/v1/messages/count_tokens", body))["input_tokens"]
    params = rendered["sampling_params"]
    assert (params["max_tokens"], params["temperature"], params["stop"]) == (40, 0, ["zzz"])
    assert generated_text(scripted, rendered) == whole["content"][0]["text"] == "Hello there."
    far = ok(scripted.post("/v1/messages/render", {**body, "max_tokens": 100_000}))
    assert far["sampling_params"]["max_tokens"] is None  # this API's answers end with the context
    wrong = scripted.post("/v1/messages/render", {**body, "messages": [{"role": "user", "content": 5}]})
    assert (wrong.status_code, wrong.json()["type"]) == (400, "error")
    assert "messages[0].content" in wrong.json()["error"]["message"]


def test_responses_are_rendered(scripted: Any) -> None:
    body = {**RESPONSES, "tools": [{"type": "function", **WEATHER}]}
    whole = ok(scripted.post("/v1/responses", body))
    rendered = ok(scripted.post("/v1/responses/render", {**body, "request_id": "mine"}))
    assert (rendered["request_id"], rendered["sampling_params"]["max_tokens"]) == ("resp_mine", 40)
    assert len(rendered["token_ids"]) == whole["usage"]["input_tokens"]
    assert generated_text(scripted, rendered) == whole["output"][0]["content"][0]["text"] == "Hello there."


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"input": None}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": "word " * 3000}, "input"),
        ({"max_output_tokens": 2048}, "max_output_tokens"),
    ],
)
def test_responses_that_cannot_be_rendered(scripted: Any, changes: dict[str, Any], param: str) -> None:
    response = scripted.post("/v1/responses/render", {**RESPONSES, **changes})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_offsets_say_where_tokens_stand_in_the_rendered_text(live: Any) -> None:
    text = "the quire — 東京"
    (rendered,) = ok(live.post("/v1/completions/render", {"prompt": text, "return_token_offsets": True}))
    spans = rendered["token_offsets"]
    assert len(spans) == len(rendered["token_ids"])
    assert (spans[0][0], max(end for _, end in spans)) == (0, len(text))
    token_ids = iter(rendered["token_ids"])
    for (begin, end), token_id in zip(spans, token_ids, strict=True):
        shown = ok(live.post("/detokenize", {"tokens": [token_id]}))["prompt"]
        assert shown == text[begin:end] or "\ufffd" in shown
    chat = {"messages": [{"role": "user", "content": text}], "return_token_offsets": True}
    rendered = ok(live.post("/v1/chat/completions/render", chat))
    whole = ok(live.post("/detokenize", {"tokens": rendered["token_ids"]}))["prompt"]
    assert len(rendered["token_offsets"]) == len(rendered["token_ids"])
    assert rendered["token_offsets"][-1][1] == len(whole)


def test_offsets_are_null_where_nobody_can_tell_or_asks(live: Any) -> None:
    for body in ({"prompt": [5, 6]}, {"prompt": "the fox", "truncate_prompt_tokens": 1}):
        (rendered,) = ok(live.post("/v1/completions/render", {**body, "return_token_offsets": True}))
        assert rendered["token_offsets"] is None
    assert ok(live.post("/v1/completions/render", {"prompt": "the fox"}))[0]["token_offsets"] is None


def test_the_tokenizer_is_shown_where_that_is_switched_on(live: Any, make_live: Any) -> None:
    assert live.client.get("/tokenizer_info").status_code == 404
    info = ok(make_live(enable_tokenizer_info_endpoint=True).client.get("/tokenizer_info"))
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "messages" in info["chat_template"]
    assert isinstance(info["eos_token"], str)
    assert not {"vocab_file", "merges_file", "name_or_path"} & set(info)


def test_templates_of_requests_are_tokenized_where_they_are_trusted(live: Any, make_live: Any) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ messages[0].content }} and more"}
    response = live.post("/tokenize", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template")
    trusting = make_live(trust_request_chat_template=True)
    tokens = ok(trusting.post("/tokenize", body))["tokens"]
    assert ok(trusting.post("/detokenize", {"tokens": tokens}))["prompt"] == "x and more"
