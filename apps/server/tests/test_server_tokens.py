"""Tokens in, tokens out: render and generate do what the chat and completion routes do with what they are given."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'

FEATURES = {"mm_hashes": {"image": ["0" * 64]}, "mm_placeholders": {"image": [{"offset": 0, "length": 1}]}}


def chat_body(text: str, changes: dict[str, Any]) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": f"¤{text}¥"}], "seed": 4, **changes}


def ok(response: Any) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


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


def test_a_generated_output_is_as_long_as_the_context_lets_it_be(live: Any) -> None:
    for params in ({}, {"max_tokens": None}):
        body = {"token_ids": [5, 6], "sampling_params": {"ignore_eos": True, **params}}
        answer = ok(live.post("/inference/v1/generate", body))
        assert (len(answer["choices"][0]["token_ids"]), answer["choices"][0]["finish_reason"]) == (510, "length")
    most = ok(live.post("/inference/v1/generate", asking(max_tokens=511, ignore_eos=True)))
    assert most["usage"]["total_tokens"] == 512


def test_generated_log_probabilities_name_tokens_by_their_ids(live: Any) -> None:
    body = {
        "token_ids": [5, 6, 7],
        "sampling_params": {"max_tokens": 4, "seed": 3, "logprobs": 2, "prompt_logprobs": 1},
    }
    (tokens,) = ok(live.post("/inference/v1/generate", body))["choices"]
    text = ok(live.post("/inference/v1/generate", {**body, "output_mode": "text"}))
    assert [each["token_id"] for each in tokens["logprobs"]["content"]] == tokens["token_ids"]
    for ours, named in zip(tokens["logprobs"]["content"], text["choices"][0]["logprobs"]["content"], strict=True):
        assert set(ours) == {"token_id", "token", "logprob", "rank", "bytes", "top_logprobs"}
        assert (ours["token"], ours["bytes"]) == (f"token_id:{ours['token_id']}", None)
        assert ours["logprob"] == named["logprob"]
        assert [each["rank"] for each in ours["top_logprobs"]] == [1, 2]
        ids = [ours["token_id"], *(each["token_id"] for each in ours["top_logprobs"])]
        texts = [ok(live.post("/detokenize", {"tokens": [each]}))["prompt"] for each in ids]
        assert texts == [named["token"], *(each["token"] for each in named["top_logprobs"])]
    first, *others = text["prompt_logprobs"]
    assert (first, [next(iter(each)) for each in others]) == (None, ["6", "7"])


@pytest.mark.parametrize("logprobs", [0, 1, 5])
def test_a_place_has_at_least_its_own_token(live: Any, logprobs: int) -> None:
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4, "seed": 3, "logprobs": logprobs}}
    (choice,) = ok(live.post("/inference/v1/generate", body))["choices"]
    for place in choice["logprobs"]["content"]:
        assert len(place["top_logprobs"]) == max(1, logprobs)
        if not logprobs:
            assert place["top_logprobs"][0]["token_id"] == place["token_id"]


def test_words_and_forms_stand_in_the_sampling_parameters(scripted: Any) -> None:
    ids = ok(scripted.post("/tokenize", {"prompt": "¤one two three¥"}))["tokens"]
    params = {"stop": "two", "bad_words": ["zebra"], "n": 2, "include_stop_str_in_output": False}
    answer = ok(scripted.post("/inference/v1/generate", {"token_ids": ids, "sampling_params": params}))
    for choice in answer["choices"]:
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "two")
    wrong = scripted.post("/inference/v1/generate", {"token_ids": ids, "sampling_params": {"bad_words": [" "]}})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "sampling_params.bad_words"), wrong.text


def test_log_probabilities_of_named_tokens(live: Any) -> None:
    named = list(range(100, 140))  # more than --max-logprobs lets a count be
    asked = {"max_tokens": 2, "seed": 3, "ignore_eos": True, "logprob_token_ids": named}
    chat = ok(live.post("/v1/chat/completions", {**HELLO, **asked, "logprobs": True}))["choices"][0]
    text_body = {"prompt": [5], **asked, "logprobs": 1, "echo": True, "return_tokens_as_token_ids": True}
    text = ok(live.post("/v1/completions", text_body))["choices"][0]
    body = {"token_ids": [5], "sampling_params": asked}
    tokens = ok(live.post("/inference/v1/generate", body))["choices"][0]
    for place in range(2):
        assert len(chat["logprobs"]["content"][place]["top_logprobs"]) == 40
        entry = tokens["logprobs"]["content"][place]
        assert [each["token_id"] for each in entry["top_logprobs"]] == named
        assert {each["rank"] for each in entry["top_logprobs"]} == {None}
        assert {f"token_id:{each}" for each in named} <= set(text["logprobs"]["top_logprobs"][place + 1])
    rendered = ok(live.post("/v1/chat/completions/render", {**HELLO, **asked, "logprobs": True}))
    assert rendered["sampling_params"]["logprob_token_ids"] == named
    generated = ok(live.post("/inference/v1/generate", rendered))
    parts = {"generate_response": generated, "chat_request": {**HELLO, **asked, "logprobs": True}}
    assert ok(live.post("/v1/chat/completions/derender", parts))["choices"][0]["logprobs"] == chat["logprobs"]


@pytest.mark.parametrize("ids", [[5, 5], [-1], [5000], "5", list(range(129))])
@pytest.mark.parametrize("logprobs", [True, None])
def test_wrong_named_tokens(live: Any, ids: Any, logprobs: Any) -> None:
    chat = live.post("/v1/chat/completions", {**HELLO, "logprobs": logprobs, "logprob_token_ids": ids})
    assert (chat.status_code, chat.json()["error"]["param"].split("[")[0]) == (400, "logprob_token_ids"), chat.text
    tokens = live.post("/inference/v1/generate", asking(logprob_token_ids=ids))
    param = tokens.json()["error"]["param"].split("[")[0]
    assert (tokens.status_code, param) == (400, "sampling_params.logprob_token_ids"), tokens.text


def test_fields_that_clients_read_are_null_not_absent(live: Any) -> None:
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3, "ignore_eos": True}}
    whole = ok(live.post("/inference/v1/generate", body))
    chunks = live.events("/inference/v1/generate", body)
    for answer in (whole, *chunks):
        assert answer["model"] == "tiny"
        assert answer["created"] > 0
        names = ("prompt_logprobs", "prompt_token_ids", "kv_transfer_params", "ec_transfer_params")
        assert [answer[name] for name in names] == [None] * 4
        (choice,) = answer["choices"]
        assert [choice[name] for name in ("logprobs", "stop_reason", "routed_experts")] == [None] * 3
    assert all(chunk["usage"] is None for chunk in chunks)
    rendered = ok(live.post("/v1/chat/completions/render", HELLO))
    names = ("token_offsets", "features", "kv_transfer_params", "stream_options", "cache_salt")
    assert [rendered[name] for name in names] == [None] * 5
    assert rendered["sampling_params"]["max_tokens"] is None


def test_usage_and_prompt_are_streamed_when_asked_for(live: Any) -> None:
    body = {
        "token_ids": [5, 6],
        "sampling_params": {"max_tokens": 3, "ignore_eos": True},
        "return_token_ids": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    *chunks, last = live.events("/inference/v1/generate", body)
    assert [chunk["prompt_token_ids"] for chunk in chunks] == [[5, 6], *[None] * (len(chunks) - 1)]
    assert chunks[-1]["usage"]["completion_tokens"] == last["usage"]["completion_tokens"] == 3
    assert (last["choices"], last["usage"]["prompt_tokens"]) == ([], 2)
    assert ok(live.post("/inference/v1/generate", body | {"stream_options": None}))["prompt_token_ids"] == [5, 6]


def test_a_request_has_the_name_that_its_client_gave_it(live: Any) -> None:
    body = {"token_ids": [5], "sampling_params": {"max_tokens": 1}}
    named, header = {**body, "request_id": "in-the-body"}, {"X-Request-Id": "in-the-header"}
    assert ok(live.post("/inference/v1/generate", named))["request_id"] == "in-the-body"
    response = live.post("/inference/v1/generate", named, headers=header)
    assert ok(response)["request_id"] == response.headers["x-request-id"] == "in-the-header"
    assert ok(live.post("/v1/chat/completions/render", HELLO, headers=header))["request_id"] == "chatcmpl-in-the-header"
    rendered = ok(live.post("/v1/completions/render", {"prompt": ["x", "y"], "request_id": "mine"}))
    assert [each["request_id"] for each in rendered] == ["cmpl-mine"] * 2
    one, other = (ok(live.post("/inference/v1/generate", body))["request_id"] for _ in range(2))
    assert len({one, other, ""}) == 3


@pytest.mark.parametrize("thinking", [None, {"budget": 100_000}])
def test_requests_are_aborted_by_their_ids(make_scripted: Any, thinking: Any) -> None:
    server = make_scripted(engine={"step_time_s": 0.01, "max_model_len": 2048})
    ids = ok(server.post("/tokenize", {"prompt": "¤" + "<think>" + "word " * 400 + "¥"}))["tokens"]
    body = {"token_ids": ids, "sampling_params": {"n": 2}, "request_id": "mine", "stream": True, "thinking": thinking}
    with server.client.stream("POST", "/inference/v1/generate", json=body) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        assert ok_empty(server.post("/inference/v1/abort_requests", {"request_ids": ["other"]}))
        assert ok_empty(server.post("/inference/v1/abort_requests", {"request_ids": ["mine", "other"]}))
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    ends = {each["index"]: each["finish_reason"] for event in events for each in event["choices"]}
    assert ends == {0: "abort", 1: "abort"}
    server.wait_idle()
    assert server.context.generating == {}


def ok_empty(response: Any) -> bool:
    return (response.status_code, response.content) == (200, b"")


def test_generated_tokens_are_counted(make_live: Any) -> None:
    server = make_live()

    def counted() -> tuple[float, float]:
        text = server.client.get("/metrics").text
        found = dict(re.findall(r"^quire:(\w+_tokens_total)(?:{[^}]*})? (\S+)", text, re.MULTILINE))
        return float(found["prompt_tokens_total"]), float(found["generation_tokens_total"])

    before = counted()
    ok(
        server.post(
            "/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3, "ignore_eos": True}}
        )
    )
    after = counted()
    assert (after[0] - before[0], after[1] - before[1]) == (2, 3)


def test_every_token_route_wants_the_key(make_live: Any) -> None:
    server = make_live(api_key=("secret",), enable_tokenizer_info_endpoint=True)
    paths = [path for path in server.client.get("/openapi.json", headers=KEY).json()["paths"] if is_token_route(path)]
    assert len(paths) == 11
    for path in paths:
        method = "GET" if path == "/tokenizer_info" else "POST"
        assert server.client.request(method, path, json={}).status_code == 401, path
        assert server.client.request(method, path, json={}, headers=KEY).status_code != 401, path


KEY = {"authorization": "Bearer secret"}


def is_token_route(path: str) -> bool:
    return path.endswith(("/render", "/derender")) or path.startswith(("/inference/", "/tokenize", "/detokenize"))


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


HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def asking(**params: Any) -> dict[str, Any]:
    return {"token_ids": [5], "sampling_params": params}


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
        ("/inference/v1/generate", {"token_ids": [5, "6"]}, "token_ids[1]"),
        ("/inference/v1/generate", asking(max_tokens=512), "sampling_params.max_tokens"),
        ("/inference/v1/generate", asking(min_tokens=512), "sampling_params.min_tokens"),
        ("/inference/v1/generate", asking(stop_token_ids=[5000]), "sampling_params.stop_token_ids"),
        ("/inference/v1/generate", asking(logprobs=10**6), "sampling_params.logprobs"),
        ("/inference/v1/generate", asking(structured_outputs={"json": 5}), "sampling_params.structured_outputs.json"),
        ("/inference/v1/generate", asking(structured_outputs={}), "sampling_params.structured_outputs"),
        ("/inference/v1/generate", {"token_ids": [5], "kv_transfer_params": {"do_remote": 1}}, "kv_transfer_params"),
        ("/inference/v1/generate", {"token_ids": [5], "features": FEATURES}, "features"),
        ("/inference/v1/generate", {"token_ids": [5], "content_parts": [{"type": "image_url"}]}, "content_parts"),
        ("/inference/v1/generate", {"token_ids": [5], "ec_transfer_params": {"x": 1}}, "ec_transfer_params"),
        ("/inference/v1/generate", {"token_ids": [5], "request_id": ""}, "request_id"),
        ("/inference/v1/generate", {"token_ids": [5], "thinking": {"budget": 3}}, "thinking"),
        ("/v1/chat/completions/render", {"messages": []}, "messages"),
        (
            "/v1/chat/completions/render",
            {"messages": [{"role": "user", "content": "x"}], "use_beam_search": True},
            "use_beam_search",
        ),
        ("/v1/chat/completions/render", {"messages": [{"role": "user", "content": "word " * 600}]}, "messages"),
        ("/v1/chat/completions/render", {**HELLO, "max_tokens": 510}, "max_tokens"),
        ("/v1/chat/completions/render", {**HELLO, "max_completion_tokens": 510}, "max_completion_tokens"),
        ("/v1/chat/completions/render", {**HELLO, "stop_token_ids": [5000]}, "stop_token_ids"),
        ("/v1/completions/render", {"prompt": "x", "temperature": -1}, "temperature"),
        ("/v1/completions/render", {"prompt": "x", "use_beam_search": True}, "use_beam_search"),
        ("/v1/completions/render", {"prompt": [5] * 512}, "prompt"),
        ("/v1/completions/render", {"prompt": ["x", "y"], "max_tokens": 512}, "max_tokens"),
        ("/v1/completions/render", {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ("/inference/v1/abort_requests", {}, "request_ids"),
        ("/inference/v1/abort_requests", {"request_ids": 5}, "request_ids"),
        ("/inference/v1/abort_requests", {"request_ids": ["x", 5]}, "request_ids[1]"),
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
