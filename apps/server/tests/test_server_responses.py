"""OpenAI's Responses API, as the official client reads, accumulates and strictly checks it."""

from __future__ import annotations

import json
import time
from typing import Any

import openai
import pytest
from openai.types.responses import CompactedResponse, Response, ResponseStreamEvent
from pydantic import TypeAdapter

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
CLOCK: dict[str, Any] = {"type": "function", "name": "now", "parameters": {"type": "object"}, "strict": False}
PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def client(scripted):
    with scripted.openai() as client:
        yield client


def ask(client, text, **arguments):
    return client.responses.create(**{"model": "tiny", "input": f"¤{text}¥", "tools": [WEATHER, CLOCK], **arguments})


def streamed(client, text, **arguments):
    """What the client's own accumulator makes of a stream."""
    arguments = {"model": "tiny", "input": f"¤{text}¥", "tools": [WEATHER, CLOCK], **arguments}
    with client.responses.stream(**arguments) as stream:
        for _ in stream:
            pass
        return stream.get_final_response()


def plain(response):
    """What must not depend on streaming."""
    items = []
    for item in response.output:
        if item.type == "message":
            items.append(("message", item.content[0].text, item.status))
        elif item.type == "reasoning":
            items.append(("reasoning", item.content[0].text, item.status))
        else:
            items.append((item.type, item.name, json.loads(item.arguments), item.status))
    return items, response.status, response.usage.output_tokens


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("Hello.", [("message", "Hello.", "completed")]),
        (PARIS, [("function_call", "get_weather", {"city": "Paris"}, "completed")]),
        (
            f"<think>\nBoth.\n</think>\n\nI look.\n{PARIS}\n{NOW}",
            [
                ("reasoning", "Both.", "completed"),
                ("message", "I look.", "completed"),
                ("function_call", "get_weather", {"city": "Paris"}, "completed"),
                ("function_call", "now", {}, "completed"),
            ],
        ),
        ("", []),
    ],
)
def test_answers_whole_and_streamed(client, text, items):
    whole = ask(client, text)
    assert plain(whole)[:2] == (items, "completed")
    assert plain(streamed(client, text)) == plain(whole)
    assert len({item.id for item in whole.output}) == len(items)
    assert whole.output_text == next((item[1] for item in items if item[0] == "message"), "")


@pytest.mark.parametrize("text", ["Hello.", f"<think>\nBoth.\n</think>\n\nI look.\n{PARIS}\n{NOW}", ""])
@pytest.mark.parametrize(
    "extra", [{}, {"include": ["message.output_text.logprobs"], "top_logprobs": 2}, {"max_output_tokens": 4}]
)
def test_every_event_and_answer_is_what_the_client_s_types_say(scripted, text, extra):
    body = {"model": "tiny", "input": f"¤{text}¥", "tools": [WEATHER, CLOCK], **extra}
    Response.model_validate_json(scripted.post("/v1/responses", body).text, strict=True, extra="forbid")
    with scripted.client.stream("POST", "/v1/responses", json={**body, "stream": True}) as response:
        pieces = response.read().decode().split("\n\n")
    assert pieces.pop() == ""
    events = []
    for piece in pieces:
        first, second = piece.split("\n")
        data = json.loads(second.removeprefix("data: "))
        assert first == f"event: {data['type']}"
        EVENT.validate_json(second.removeprefix("data: "), strict=True, extra="forbid")
        events.append(data)
    kinds = [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == ("response.incomplete" if extra.get("max_output_tokens") and text else "response.completed")
    for what in ("output_item", "content_part"):
        assert kinds.count(f"response.{what}.added") == kinds.count(f"response.{what}.done")
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]


def test_a_cut_answer_is_incomplete(client):
    text = PARIS.replace("Paris", "Paris and many more places than fit")
    *_, last = ask(client, text, max_output_tokens=30, stream=True)
    for response in (ask(client, text, max_output_tokens=30), last.response):
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        for item in response.output:
            assert item.status == "incomplete"
            if item.type == "function_call":
                assert isinstance(json.loads(item.arguments), dict)


def test_tool_choice(client):
    rest = '{"city": "Rome"}}\n</tool_call>'
    for make in (ask, streamed):
        named = make(client, rest, tool_choice={"type": "function", "name": "get_weather"})
        assert plain(named)[0] == [("function_call", "get_weather", {"city": "Rome"}, "completed")]
        required = make(client, f'get_weather", "arguments": {rest}', tool_choice="required")
        assert plain(required)[0] == plain(named)[0]
        assert plain(make(client, NOW, tool_choice="none"))[0] == [("message", NOW, "completed")]
        one = make(client, PARIS + NOW, parallel_tool_calls=False)
        assert [item[1] for item in plain(one)[0]] == ["get_weather"]


def test_a_conversation_is_the_same_prompt_whether_kept_or_sent(client):
    """What previous_response_id stands for, and the same items sent back, give the same number of tokens."""
    first = ask(client, f"<think>\nhm\n</think>\n\nI look.\n{PARIS}")
    call = next(item for item in first.output if item.type == "function_call")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    question = {"role": "user", "content": [{"type": "input_text", "text": "¤It is sunny.¥"}]}
    kept = ask(client, "", previous_response_id=first.id, input=[result, question])
    sent = [
        {"role": "user", "content": f"¤<think>\nhm\n</think>\n\nI look.\n{PARIS}¥"},
        *(item.to_dict() for item in first.output),
        result,
        question,
    ]
    again = ask(client, "", input=sent)
    assert kept.output_text == again.output_text == "It is sunny."
    assert kept.usage.input_tokens == again.usage.input_tokens
    assert kept.previous_response_id == first.id


def test_input_tokens_are_those_of_the_prompt(client):
    first = ask(client, "Hi", instructions="Be short.")
    arguments = {"model": "tiny", "input": "¤Ho¥", "previous_response_id": first.id, "tools": [WEATHER]}
    counted = client.responses.input_tokens.count(**arguments)
    assert counted.input_tokens == client.responses.create(**arguments).usage.input_tokens


def test_instructions_are_of_their_own_response_only(client):
    first = ask(client, "Hi", instructions="Be short. " * 5)
    second = ask(client, "Ho", previous_response_id=first.id)
    third = ask(client, "Ho", previous_response_id=first.id, instructions="Be short. " * 5)
    assert third.usage.input_tokens - second.usage.input_tokens > 10


def test_responses_are_kept_listed_and_deleted(client):
    first = ask(client, "Hi", metadata={"who": "me"})
    second = ask(client, "Ho", previous_response_id=first.id)
    read = client.responses.retrieve(second.id)
    assert read.to_dict() == second.to_dict()
    assert client.responses.retrieve(first.id).metadata == {"who": "me"}
    listed = client.responses.input_items.list(second.id, order="asc").data
    assert [item.role for item in listed] == ["user", "assistant", "user"]
    assert [item.content[0].text for item in listed] == ["¤Hi¥", "Hi", "¤Ho¥"]
    pages = list(client.responses.input_items.list(second.id, limit=1))
    assert [item.id for item in pages] == [item.id for item in reversed(listed)]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "Ho", previous_response_id=second.id)
    assert caught.value.code == "previous_response_not_found"


def test_what_is_not_to_be_kept_is_not(client):
    response = ask(client, "Hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def wait_for(client, response_id, statuses):
    end = time.monotonic() + 30
    while (response := client.responses.retrieve(response_id)).status not in statuses:
        assert time.monotonic() < end, response.status
        time.sleep(0.02)
    return response


def test_a_client_cannot_choose_the_id_under_which_an_answer_is_kept(client):
    first = ask(client, "Hi")
    second = ask(client, "Ho", extra_body={"request_id": first.id.removeprefix("resp_")})
    assert second.id != first.id
    assert client.responses.retrieve(first.id).output_text == "Hi"


def test_background_responses_finish_by_themselves(client):
    started = ask(client, f"I look.\n{PARIS}", background=True)
    assert (started.status, started.background, started.output) == ("queued", True, [])
    done = wait_for(client, started.id, {"completed"})
    assert [item.type for item in done.output] == ["message", "function_call"]
    assert client.responses.cancel(started.id).status == "completed"
    replayed = list(client.responses.retrieve(started.id, stream=True))
    assert replayed[-1].response.to_dict() == done.to_dict()
    later = list(client.responses.retrieve(started.id, stream=True, starting_after=3))
    assert [event.to_dict() for event in later] == [event.to_dict() for event in replayed[4:]]
    assert ask(client, "Ho", previous_response_id=started.id).output_text == "Ho"


def test_a_background_stream_can_be_left_and_read_again(make_scripted, tmp_path):
    server = make_scripted(engine={"step_time_s": 0.02}, response_store=str(tmp_path / "kept.sqlite"))
    with server.openai() as client:
        stream = ask(client, "one two three four five six", background=True, stream=True)
        first = next(iter(stream))
        stream.close()
        assert client.responses.retrieve(first.response.id).status in ("queued", "in_progress")
        events = list(client.responses.retrieve(first.response.id, stream=True))
        assert events[-1].response.output_text == "one two three four five six"
        assert (
            "".join(event.delta for event in events if event.type == "response.output_text.delta")
            == events[-1].response.output_text
        )
        running = ask(client, "long " * 200, background=True)
        with pytest.raises(openai.BadRequestError, match="still running"):
            ask(client, "Ho", previous_response_id=running.id)
        assert client.responses.cancel(running.id).status == "cancelled"
        assert client.responses.retrieve(running.id).status == "cancelled"
        server.wait_idle()


def test_forty_turns_with_tools_survive_a_restart(make_scripted, tmp_path):
    path = str(tmp_path / "kept.sqlite")
    previous: Any = openai.omit
    pending: list[Any] = []
    for half in range(2):
        server = make_scripted(
            engine={"max_model_len": 16384, "num_blocks": 2048, "check_kv": False}, response_store=path
        )
        with server.openai() as client:
            for turn in range(20):
                says = f"<think>t{turn}</think>Turn {half} {turn}.\n{PARIS if turn % 2 else NOW}"
                items = [*pending, {"role": "user", "content": f"¤{says}¥"}]
                make = streamed if turn % 3 == 0 else ask
                response = make(client, "", input=items, previous_response_id=previous)
                call = response.output[-1]
                assert (call.type, call.name) == ("function_call", "get_weather" if turn % 2 else "now")
                assert response.output_text == f"Turn {half} {turn}."
                pending = [{"type": "function_call_output", "call_id": call.call_id, "output": f"result {turn}"}]
                previous = response.id
        assert response.usage.input_tokens_details.cached_tokens > response.usage.input_tokens * 0.8
    with server.openai() as client:
        items = list(client.responses.input_items.list(previous, order="asc", limit=100))
    assert len([item for item in items if item.type == "function_call_output"]) == 39


def test_what_ran_when_the_server_stopped_is_failed(make_scripted, tmp_path):
    path = str(tmp_path / "kept.sqlite")
    one, two = (make_scripted(engine={"step_time_s": 0.05}, response_store=path) for _ in range(2))
    with one.openai() as first, two.openai() as second:
        running = ask(first, "long " * 100, background=True)
        seen = second.responses.retrieve(running.id)
        assert (seen.status, seen.error.code) == ("failed", "server_error")
        first.responses.cancel(running.id)


def test_compaction_is_where_a_conversation_can_begin_again(client, scripted):
    first = ask(client, "Hi")
    body = {"model": "tiny", "previous_response_id": first.id, "max_output_tokens": 20}
    answer = scripted.post("/v1/responses/compact", {**body, "input": "¤We said hi.¥"})
    compacted = CompactedResponse.model_validate_json(answer.text, strict=True, extra="forbid")
    assert client.responses.compact(model="tiny", previous_response_id=first.id).object == "response.compaction"
    items = [item.to_dict() for item in compacted.output]
    response = ask(client, "", input=[*items, {"role": "user", "content": "¤ok¥"}])
    assert response.output_text == "ok"
    listed = client.responses.input_items.list(response.id, order="asc").data
    assert [item.type for item in listed] == ["compaction", "message"]


def test_a_server_that_keeps_nothing(make_scripted):
    server = make_scripted(response_store="none")
    with server.openai() as client:
        response = ask(client, "Hi")
        assert response.output_text == "Hi"
        for arguments in ({"store": True}, {"background": True}):
            with pytest.raises(openai.BadRequestError, match="--response-store"):
                ask(client, "Hi", **arguments)
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            ask(client, "Hi", previous_response_id=response.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response.id)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input": None}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "message", "role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "msg_missing"}]}, "input[0].id"),
        ({"input": [{"id": "msg_missing"}]}, "input[0].id"),
        ({"input": [{"type": 5}]}, "input[0].type"),
        ({"input": [{"text": "x"}]}, "input[0].type"),
        ({"tools": [{"name": "x"}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [{"type": "mcp", "server_label": "x"}], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tool_choice": {"type": ["function"]}}, "tool_choice.type"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [5]}}, "tool_choice.tools[0]"),
        ({"tools": [{"type": "mcp"}]}, "tools[0].server_label"),
        ({"tools": [{"type": "custom", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "custom", "name": "a", "format": {"type": "yaml"}}]}, "tools[0].format"),
        (
            {"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar", "syntax": "bnf"}}]},
            "tools[0].format.syntax",
        ),
        (
            {"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar", "syntax": "lark"}}]},
            "tools[0].format.definition",
        ),
        ({"tools": [{"type": "namespace", "name": "a", "tools": 5}]}, "tools[0].tools"),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "missing"}}, "tool_choice.name"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        (
            {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
        ),
        ({"reasoning": {"effort": 5}}, "reasoning.effort"),
        ({"conversation": {"name": "x"}}, "conversation"),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True, "store": False}, "background"),
        ({"truncation": "middle"}, "truncation"),
        ({"previous_response_id": "resp_missing"}, "previous_response_id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"n": 2}, "n"),
    ],
)
def test_wrong_requests_are_named(scripted, changes, param):
    body = {"model": "tiny", "input": "x", "tools": [CLOCK], **changes}
    response = scripted.post("/v1/responses", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


@pytest.mark.parametrize("path", ["", "/input_items", "/cancel"])
def test_unknown_responses_are_not_found(scripted, path):
    ask = scripted.client.post if path == "/cancel" else scripted.client.get
    response = ask(f"/v1/responses/resp_missing{path}")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "response_not_found")
