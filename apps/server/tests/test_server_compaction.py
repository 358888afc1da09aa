"""Conversations that are summarized by the server: asked for by an item, or past a threshold."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from quire_server.sealing import open_summary

TRIGGER = {"type": "compaction_trigger"}


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


def answer(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": text}


def respond(server: Any, *, stream: bool = False, **body: Any) -> dict[str, Any]:
    """A response; of a stream, that of its last event, whose items are those that were told before."""
    # OpenAI's type of an event does not know that a response may hold warnings or a full context as its error.
    url, request = f"{server.url}/v1/responses", {"model": "tiny", **body}
    if not stream:
        response = httpx.post(url, json=request, timeout=60)
        assert response.status_code == 200, response.text
        return response.json()
    lines = httpx.post(url, json={**request, "stream": True}, timeout=60).text.split("\n\n")
    events = [json.loads(line.partition("data: ")[2]) for line in lines if line]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    response = events[-1]["response"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == response["output"]
    return response


def summary(response: dict[str, Any], place: int = 0) -> Any:
    item = response["output"][place]
    assert item["type"] == "compaction"
    return open_summary(item["encrypted_content"])


both = pytest.mark.parametrize("stream", [False, True])


@both
def test_a_trigger_gives_one_item_that_a_conversation_goes_on_from(scripted: Any, stream: bool) -> None:
    tools = [{"type": "function", "name": "f", "parameters": {}}, {"type": "web_search"}]
    said = [user("Remember 7. ¤Seven.¥"), answer("Yes."), TRIGGER]
    response = respond(scripted, stream=stream, input=said, tools=tools)
    assert (response["status"], len(response["output"])) == ("completed", 1)
    assert summary(response) == ("Seven.", False)
    assert response["usage"]["output_tokens"] > 0
    assert [warning["param"] for warning in response["warnings"]] == ["tools[1]"]
    after = respond(scripted, stream=stream, input=[*response["output"], user("And? ¤Go.¥")])
    assert after["output"][0]["content"][0]["text"] == "Go."


@both
def test_a_trigger_in_a_chain_replaces_what_came_before(scripted: Any, stream: bool) -> None:
    first = respond(scripted, input="¤One. ¥")
    asked = respond(scripted, stream=stream, input=[TRIGGER], previous_response_id=first["id"])
    assert summary(asked) == ("One.", True)
    count = {"model": "tiny", "input": "¤x¥", "previous_response_id": asked["id"]}
    many = scripted.post("/v1/responses/input_tokens", count).json()["input_tokens"]
    all_of_it = scripted.post("/v1/responses/input_tokens", {**count, "previous_response_id": first["id"]}).json()
    assert many > 0
    assert all_of_it["input_tokens"] > 0
    assert respond(scripted, input="¤Two.¥", previous_response_id=asked["id"])["status"] == "completed"


@both
def test_past_the_threshold_the_conversation_is_summarized_first(scripted: Any, stream: bool) -> None:
    long = [user("Remember 7. ¤Seven.¥"), answer("word " * 400)]
    management = [{"type": "compaction", "compact_threshold": 200}]
    body = {"context_management": management, "instructions": "Be kind."}
    response = respond(scripted, stream=stream, input=[*long, user("¤Now.¥")], **body)
    assert [item["type"] for item in response["output"]] == ["compaction", "message"]
    assert summary(response) == ("Seven.", True)
    assert response["output"][1]["content"][0]["text"] == "Now."
    again = respond(scripted, stream=stream, input="¤Next.¥", previous_response_id=response["id"], **body)
    assert [item["type"] for item in again["output"]] == ["message"], "it was summarized already"
    history = [*long, user("¤Now.¥"), *response["output"], user("¤Next.¥")]
    assert [item["type"] for item in respond(scripted, input=history, **body)["output"]] == ["message"]
    small = respond(scripted, stream=stream, input=[user("a"), answer("b"), user("¤Now.¥")], **body)
    assert [item["type"] for item in small["output"]] == ["message"]
    alone = respond(scripted, stream=stream, input=[user("word " * 400 + "¤Now.¥")], **body)
    assert [item["type"] for item in alone["output"]] == ["message"], "there is nothing to summarize"


def test_a_conversation_that_does_not_fit_is_summarized_without_its_oldest_parts(scripted: Any) -> None:
    long = [each for _ in range(30) for each in (user("word " * 100), answer("word " * 100))]
    said = [*long, user("¤Before.¥"), answer("x"), user("¤End.¥")]
    plain = scripted.post("/v1/responses", {"model": "tiny", "input": said}).json()["error"]
    assert plain["code"] == "context_length_exceeded"
    assert plain["message"].startswith("Your input exceeds the context window of this model.")
    assert plain["type"] == "invalid_request_error"
    assert summary(respond(scripted, input=[*said, TRIGGER])) == ("End.", False)
    managed = respond(scripted, input=said, context_management=[{"type": "compaction", "compact_threshold": 1000}])
    assert [item["type"] for item in managed["output"]] == ["compaction", "message"]
    assert summary(managed) == ("Before.", True)
    compacted = scripted.post("/v1/responses/compact", {"model": "tiny", "input": said}).json()
    assert open_summary(compacted["output"][0]["encrypted_content"]) == ("End.", False)
    one = respond(scripted, input=[user("word " * 5000 + "¤One.¥"), TRIGGER])
    assert summary(one) == ("One.", False)


@pytest.mark.parametrize(
    ("management", "param"),
    [
        ("auto", "context_management"),
        ([{"type": "clearing"}], "context_management[0].type"),
        ([{"type": "compaction", "compact_threshold": 0}], "context_management[0].compact_threshold"),
        ([{"type": "compaction", "compact_threshold": "9"}], "context_management[0].compact_threshold"),
    ],
)
def test_wrong_management_is_named(scripted: Any, management: Any, param: str) -> None:
    body = {"model": "tiny", "input": "x", "context_management": management}
    assert scripted.post("/v1/responses", body).json()["error"]["param"] == param


def test_a_full_context_is_told_in_the_words_of_each_api(scripted: Any) -> None:
    long = "word " * 5000
    chat = scripted.post("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}).json()["error"]
    assert chat["message"].startswith("This model's maximum context length is 2048 tokens. However, your messages")
    assert (chat["code"], chat["type"], chat["param"]) == (
        "context_length_exceeded", "invalid_request_error", "messages",
    )  # fmt: skip
    asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5000}
    message = scripted.post("/v1/chat/completions", asked).json()["error"]["message"]
    assert "However, you requested 50" in message
    assert "5000 in the completion" in message
    prompt = scripted.post("/v1/completions", {"prompt": long}).json()["error"]["message"]
    assert prompt.startswith("This model's maximum context length is 2048 tokens. However, you requested")


def test_thoughts_are_sealed_where_they_are_wanted(scripted: Any) -> None:
    body = {"input": "¤<think>Hm \U0001f600.</think>Yes.¥", "include": ["reasoning.encrypted_content"], "store": False}
    whole, streamed = respond(scripted, **body), respond(scripted, stream=True, **body)
    for response in (whole, streamed):
        thought = response["output"][0]
        assert thought["type"] == "reasoning"
        del thought["content"]
        history = [user("x"), thought, answer("Yes."), user("¤Next.¥")]
        with_it = scripted.post("/v1/responses/input_tokens", {"model": "tiny", "input": history}).json()
        assert with_it["input_tokens"] > 0
        assert respond(scripted, input=history)["output"][0]["content"][0]["text"] == "Next."
    assert "encrypted_content" not in respond(scripted, input=body["input"])["output"][0]
