"""Ollama's API: chat and generate as lines and whole, options, thinking, calls, formats, models, refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

USER = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def lines(server: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with server.client.stream("POST", path, json=body) as response:
        text = response.read().decode()
        assert response.status_code == 200, text
        assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in text.splitlines()]


def says(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"¤{text}¥"}]


def test_chat_is_lines_unless_it_is_asked_for_whole(live: Any) -> None:
    body = {"model": "tiny", "messages": USER, "options": {"num_predict": 5.0, "seed": 3, "temperature": 0.5}}
    *parts, last = lines(live, "/api/chat", body)
    whole = live.post("/api/chat", {**body, "stream": False}).json()
    assert parts
    assert all(part["done"] is False and part["message"]["role"] == "assistant" for part in parts)
    assert "".join(part["message"]["content"] for part in parts) == whole["message"]["content"]
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "length", "")
    chat = live.post("/v1/chat/completions", {"messages": USER, "max_tokens": 5, "seed": 3, "temperature": 0.5}).json()
    assert chat["choices"][0]["message"]["content"] == whole["message"]["content"]
    for answer in (last, whole):
        assert answer["prompt_eval_count"] == chat["usage"]["prompt_tokens"]
        assert answer["eval_count"] == 5
        assert 0 < answer["prompt_eval_duration"] + answer["eval_duration"] <= answer["total_duration"] < 60e9
        assert answer["load_duration"] == 0


def test_generate_goes_through_the_template_or_takes_the_prompt_as_it_is(live: Any) -> None:
    options = {"num_predict": 3, "seed": 1}
    asked = {"model": "tiny:latest", "prompt": "Hello", "stream": False, "options": options}
    answer = live.post("/api/generate", asked).json()
    chat = live.post("/api/chat", {"messages": USER, "stream": False, "options": options}).json()
    assert (answer["model"], answer["response"]) == ("tiny:latest", chat["message"]["content"])
    raw = live.post("/api/generate", {**asked, "raw": True}).json()
    plain = live.post("/v1/completions", {"prompt": "Hello", "max_tokens": 3, "seed": 1}).json()
    assert raw["response"] == plain["choices"][0]["text"]
    assert raw["prompt_eval_count"] == plain["usage"]["prompt_tokens"] < answer["prompt_eval_count"]
    assert "context" not in raw
    *parts, last = lines(live, "/api/generate", {**asked, "stream": True})
    assert "".join(part["response"] for part in parts) == answer["response"]
    assert last["context"] == answer["context"]
    assert len(answer["context"]) == answer["prompt_eval_count"] + 3


def test_context_is_what_was_said_before(live: Any) -> None:
    options = {"num_predict": 2, "seed": 1}
    first = live.post("/api/generate", {"prompt": "Hello", "stream": False, "options": options}).json()
    second = {"prompt": "More", "stream": False, "options": options}
    alone = live.post("/api/generate", second).json()
    behind = live.post("/api/generate", {**second, "context": first["context"]}).json()
    assert behind["context"][: len(first["context"])] == first["context"]
    assert behind["prompt_eval_count"] - alone["prompt_eval_count"] in (
        len(first["context"]),
        len(first["context"]) - 1,  # the token that begins a text is there once
    )
    wrong = live.post("/api/generate", {**second, "context": [10**6]})
    assert (wrong.status_code, "context[0]" in wrong.json()["error"]) == (400, True)


def test_num_predict_may_reach_past_the_context(live: Any) -> None:
    for body in ({"prompt": "x", "raw": True}, {"prompt": "x"}):
        answer = live.post("/api/generate", {**body, "stream": False, "options": {"num_predict": 10**6}}).json()
        assert (answer["done_reason"], answer["prompt_eval_count"] + answer["eval_count"]) == ("length", 512)


def test_thinking_and_calls_are_told_apart(scripted: Any) -> None:
    text = "<think>I wonder.</think>It rains."
    body = {"messages": says(text), "stream": False, "think": True, "options": {"num_predict": 200}}
    message = scripted.post("/api/chat", body).json()["message"]
    assert (message["thinking"].strip(), message["content"].strip()) == ("I wonder.", "It rains.")
    generated = scripted.post("/api/generate", {**body, "prompt": says(text)[0]["content"]}).json()
    assert (generated["thinking"].strip(), generated["response"].strip()) == ("I wonder.", "It rains.")
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    asked = {"messages": says(f"x</think>{call}"), "tools": [WEATHER], "options": {"num_predict": 200}}
    whole = scripted.post("/api/chat", {**asked, "stream": False}).json()
    told = [part["message"] for part in lines(scripted, "/api/chat", asked)]
    (streamed,) = [each for message in told for each in message.get("tool_calls", [])]
    (called,) = whole["message"]["tool_calls"]
    assert called["function"] == streamed["function"]
    assert called["function"] == {"index": 0, "name": "weather", "arguments": {"city": "Oslo"}}
    assert whole["done_reason"] == "stop"


def test_a_call_that_is_cut_short_is_not_told(scripted: Any) -> None:
    call = 'x</think><tool_call>{"name": "weather", "arguments": {"city": "Oslo and all of Norway"}}</tool_call>'
    asked = {"messages": says(call), "tools": [WEATHER]}
    begun = scripted.post("/v1/chat/completions", {**asked, "max_tokens": 60}).json()["choices"][0]
    assert (begun["finish_reason"], begun["message"]["tool_calls"][0]["function"]["name"]) == ("length", "weather")
    answer = scripted.post("/api/chat", {**asked, "stream": False, "options": {"num_predict": 60}}).json()
    assert answer["done_reason"] == "length"
    assert "tool_calls" not in answer["message"]


def test_results_of_tools_belong_to_their_calls() -> None:
    from quire_server.ollama.conversation import chat_messages

    calls = [{"function": {"name": name, "arguments": {"x": 1}}} for name in ("a", "b")]
    messages = chat_messages(
        [
            {"role": "assistant", "content": "", "tool_calls": calls, "thinking": "hm"},
            {"role": "tool", "tool_name": "b", "content": "2"},
            {"role": "tool", "content": "1"},
        ]
    )
    first, second = messages[0]["tool_calls"]
    assert messages[0]["reasoning_content"] == "hm"
    assert json.loads(first["function"]["arguments"]) == {"x": 1}
    assert [each["tool_call_id"] for each in messages[1:]] == [second["id"], first["id"]]


def test_images_become_parts() -> None:
    from quire_server.ollama.conversation import chat_messages

    png = "iVBORw0KGgoAAAANSUhEUg=="
    (message,) = chat_messages([{"role": "user", "content": "What is it?", "images": [png, "/9j/4AAQ"]}])
    urls = [part["image_url"]["url"] for part in message["content"][:2]]
    assert urls == [f"data:image/png;base64,{png}", "data:image/jpeg;base64,/9j/4AAQ"]
    assert message["content"][2] == {"type": "text", "text": "What is it?"}


def test_format_is_json_or_a_schema() -> None:
    from quire_server.ollama.protocol import OllamaChatRequest

    def form(value: Any) -> Any:
        return OllamaChatRequest.model_validate({"format": value}).response_format()

    assert form("json") == {"type": "json_object"}
    assert form("") is form(None) is None
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}}
    assert form(schema)["json_schema"]["schema"] == schema


def test_options_are_those_of_the_openai_routes() -> None:
    from quire_server.ollama.protocol import OllamaOptions

    def fields(**options: Any) -> Any:
        return OllamaOptions.model_validate(options).sampling_fields()

    assert fields(repeat_penalty=1.2, mirostat=2, top_k=40, num_ctx=4096, num_gpu=9) == {
        "repetition_penalty": 1.2,
        "mirostat_mode": 2,
        "top_k": 40,
    }
    assert fields(num_predict=-1) == fields(num_predict=-2) == {"max_tokens": None}
    assert fields(repeat_last_n=0, repeat_penalty=1.2, presence_penalty=1) == {}


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("5m", 300), ("1h30m", 5400), ("250ms", 0.25), (10, 10), ("30", 30), (0, 0), (None, None), (-1, float("inf"))],
)
def test_keep_alive_is_seconds_or_a_duration(value: Any, seconds: float) -> None:
    from quire_server.ollama.protocol import keep_alive_s

    assert keep_alive_s(value) == seconds


def test_log_probabilities_come_with_their_tokens(live: Any) -> None:
    body = {"messages": USER, "options": {"num_predict": 2, "seed": 1}, "logprobs": True, "top_logprobs": 2}
    for answer in (live.post("/api/chat", {**body, "stream": False}).json(), lines(live, "/api/chat", body)[0]):
        assert [len(each["top_logprobs"]) for each in answer["logprobs"]][:1] == [2]
    raw = {"prompt": "x", "raw": True, "stream": False, "logprobs": True, "options": {"num_predict": 2}}
    assert len(live.post("/api/generate", raw).json()["logprobs"]) == 2


def test_a_request_without_a_prompt_asks_for_the_model(live: Any) -> None:
    chat = live.post("/api/chat", {"model": "tiny"}).json()
    assert (chat["done"], chat["done_reason"], chat["message"]["content"]) == (True, "load", "")
    generated = live.post("/api/generate", {"model": "tiny", "keep_alive": "5m"}).json()
    assert (generated["done"], generated["done_reason"], generated["response"]) == (True, "load", "")


def test_bodies_need_no_content_type(live: Any) -> None:
    data = json.dumps({"messages": USER, "stream": False, "options": {"num_predict": 1}})
    headers = {"content-type": "application/x-www-form-urlencoded"}
    assert live.client.post("/api/chat", content=data, headers=headers).json()["done"] is True


def test_models_are_listed_and_shown(live: Any) -> None:
    (model,) = live.client.get("/api/tags").json()["models"]
    assert (model["name"], model["model"], model["details"]["family"]) == ("tiny", "tiny", "llama")
    assert len(model["digest"]) == 64
    assert model["size"] > 1000
    (loaded,) = live.client.get("/api/ps").json()["models"]
    assert (loaded["digest"], loaded["context_length"]) == (model["digest"], 512)
    shown = live.post("/api/show", {"model": "tiny:latest"}).json()
    assert "completion" in shown["capabilities"]
    assert shown["model_info"]["llama.context_length"] == 512
    assert shown["model_info"]["general.parameter_count"] > 1000
    assert tuple(map(int, live.client.get("/api/version").json()["version"].split("."))) >= (0, 6, 4)
    assert live.client.head("/").status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/api/chat", {"model": "other", "messages": USER}, 404, "'other'"),
        ("/api/chat", {"messages": USER, "think": True}, 400, "does not support thinking"),
        ("/api/chat", {"messages": USER, "tools": [WEATHER]}, 400, "does not support tools"),
        ("/api/chat", {"messages": USER, "options": {"temperature": -1}}, 400, "options.temperature"),
        ("/api/chat", {"messages": USER, "options": {"top_k": "many"}}, 400, "options.top_k"),
        ("/api/chat", {"messages": USER, "keep_alive": "soon"}, 400, "keep_alive"),
        ("/api/chat", {"messages": USER, "format": "xml"}, 400, "format"),
        ("/api/chat", {"messages": [{"role": "user", "images": ["?!"]}]}, 400, "messages[0].images[0]"),
        ("/api/generate", {"prompt": "x", "template": "{{ .Prompt }}"}, 400, "--chat-template"),
        ("/api/generate", {"prompt": "x", "raw": True, "system": "y"}, 400, "raw"),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
        ("/api/embed", {"input": "x"}, 404, "--runner pooling"),
        ("/api/show", {}, 400, "model is required"),
        ("/api/create", {"model": "x", "from": "tiny"}, 400, "Modelfile"),
        ("/api/copy", {"source": "tiny", "destination": "x"}, 400, "--served-model-name"),
        ("/api/copy", {"source": "other", "destination": "x"}, 404, "other"),
        ("/api/push", {"model": "tiny"}, 400, "uploads"),
        ("/api/pull", {"model": "owner/name"}, 403, "--allow-pull"),
        ("/api/none", {}, 404, "no route"),
    ],
)
def test_errors_are_texts(live: Any, path: str, body: Any, status: int, text: str) -> None:
    response = live.post(path, body)
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    assert text in response.json()["error"]


def test_models_are_neither_deleted_nor_kept_as_blobs(live: Any) -> None:
    assert live.client.request("DELETE", "/api/delete", json={"model": "tiny"}).status_code == 400
    assert live.client.request("DELETE", "/api/delete", json={"model": "other"}).status_code == 404
    assert live.client.head("/api/blobs/sha256:00").status_code == 404
    assert live.client.post("/api/blobs/sha256:00", content=b"x").status_code == 400


def test_pulling_what_is_served_is_done_at_once(live: Any) -> None:
    assert live.post("/api/pull", {"model": "tiny", "stream": False}).json() == {"status": "success"}
    assert lines(live, "/api/pull", {"model": "tiny"})[-1] == {"status": "success"}


def test_only_names_of_the_hub_are_pulled(make_live: Any) -> None:
    server = make_live(allow_pull=True)
    for name in ("llama3.2", "../../etc/passwd", "/tmp/x", "a/b/c"):
        refused = server.post("/api/pull", {"model": name})
        assert (refused.status_code, "hub" in refused.json()["error"]) == (400, True)
    missing = server.post("/api/pull", {"model": "hf.co/nobody/nothing", "stream": False})
    assert (missing.status_code, "nobody/nothing" in missing.json()["error"]) == (404, True)


def test_texts_become_vectors(make_live: Any) -> None:
    server = make_live(engine={"pooling_tasks": ["embed"], "runner": "pooling"})
    answer = server.post("/api/embed", {"model": "tiny", "input": ["a b", "c"]}).json()
    expected = server.post("/v1/embeddings", {"input": ["a b", "c"]}).json()
    assert answer["embeddings"] == [each["embedding"] for each in expected["data"]]
    assert answer["prompt_eval_count"] == expected["usage"]["prompt_tokens"]
    assert answer["total_duration"] > 0
    assert server.post("/api/embed", {"input": []}).json()["embeddings"] == []
    old = server.post("/api/embeddings", {"model": "tiny", "prompt": "c"}).json()
    assert len(old["embedding"]) == len(answer["embeddings"][1])
    assert server.post("/api/chat", {"messages": USER}).status_code == 404


def test_doors_want_the_same_keys_and_tell_the_same_ids(make_live: Any) -> None:
    server = make_live(api_key=("secret",))
    for path, is_text in (("/api/chat", True), ("/completion", False), ("/generate", False)):
        refused = server.post(path, {"messages": USER, "prompt": "x", "text": "x"})
        assert refused.status_code == 401
        assert isinstance(refused.json()["error"], str) is is_text
    headers = {"authorization": "Bearer secret", "x-request-id": "mine"}
    body = {"messages": USER, "stream": False, "options": {"num_predict": 1}}
    answer = server.post("/api/chat", body, headers=headers)
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, "mine")
    assert "quire:request_success_total" in server.client.get("/metrics", headers=headers).text


def test_a_client_that_leaves_ends_its_request(live: Any) -> None:
    body = {"prompt": "x", "raw": True, "options": {"num_predict": -1}}
    with live.client.stream("POST", "/api/generate", json=body) as response:
        assert json.loads(next(response.iter_lines()))["done"] is False
    live.wait_idle()
