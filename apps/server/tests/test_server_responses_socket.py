"""The Responses API over a websocket, through the official client and by hand."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def open_socket(server, **arguments):
    return connect(server.url.replace("http", "ws") + "/v1/responses", open_timeout=20, **arguments)


def send(socket, **body):
    socket.send(json.dumps({"type": "response.create", "model": "tiny", **body}))


def read_response(socket):
    """All events up to the end of a response, or the error."""
    events = []
    while not events or events[-1]["type"] not in ("response.completed", "response.incomplete", "error"):
        events.append(json.loads(socket.recv(timeout=20)))
    return events


@pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")  # its own use
def test_the_official_client_goes_on_over_one_connection(scripted):
    with scripted.openai() as client, client.responses.connect() as connection:
        previous = None
        for turn in range(3):
            more = {"previous_response_id": previous} if previous else {}
            connection.response.create(model="tiny", input=f"¤Turn {turn}.¥", **more)
            text = ""
            for event in connection:
                if event.type == "response.output_text.delta":
                    text += event.delta
                if event.type == "response.completed":
                    break
            assert (text, event.response.output_text) == (f"Turn {turn}.", f"Turn {turn}.")
            assert event.response.previous_response_id == previous
            previous = event.response.id
        assert client.responses.retrieve(previous).output_text == "Turn 2."


def test_a_response_that_is_not_stored_is_gone_on_from_over_its_connection_alone(scripted):
    def prompt_tokens(events):
        return events[-1]["response"]["usage"]["input_tokens"]

    with open_socket(scripted) as socket, open_socket(scripted) as other:
        send(socket, input="¤The first of three.¥", store=False)
        first = read_response(socket)
        send(socket, input="¤The second.¥", store=False, previous_response_id=first[-1]["response"]["id"])
        second = read_response(socket)
        assert prompt_tokens(second) > prompt_tokens(first)
        send(socket, input="¤The third.¥", store=False, previous_response_id=second[-1]["response"]["id"])
        third = read_response(socket)
        assert prompt_tokens(third) > prompt_tokens(second)
        for asking, previous in ((other, third), (socket, first)):  # another connection's, and one that was replaced
            send(asking, input="¤x¥", store=False, previous_response_id=previous[-1]["response"]["id"])
            (error,) = read_response(asking)
            assert (error["error"]["param"], error["error"]["code"]) == (
                "previous_response_id",
                "previous_response_not_found",
            )
        name = third[-1]["response"]["id"]
        assert scripted.client.get(f"/v1/responses/{name}").status_code == 404
        send(socket, input="¤The fourth.¥", store=False, previous_response_id=name)
        assert prompt_tokens(read_response(socket)) > prompt_tokens(third)


def test_events_are_those_of_a_stream(scripted):
    body = {"input": "¤<think>hm</think>Hello.¥"}
    with open_socket(scripted) as socket:
        send(socket, **body)
        events = read_response(socket)
    for event in events:
        EVENT.validate_json(json.dumps(event), strict=True, extra="forbid")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    with scripted.client.stream("POST", "/v1/responses", json={"model": "tiny", **body, "stream": True}) as response:
        kinds = [line.removeprefix("event: ") for line in response.iter_lines() if line.startswith("event: ")]
    assert {event["type"] for event in events} == set(kinds)


def test_messages_wait_for_their_turn(scripted):
    with open_socket(scripted) as socket:
        for number in range(5):
            send(socket, input=f"¤{number}¥", store=False)
        texts = [read_response(socket)[-1]["response"]["output"][0]["content"][0]["text"] for _ in range(5)]
    assert texts == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("no json", "body"),
        ("[]", "type"),
        ('{"type": "response.cancel"}', "type"),
        ('{"type": "response.create"}', "input"),
        ('{"type": "response.create", "input": "x", "temperature": "hot"}', "temperature"),
        ('{"type": "response.create", "input": "x", "background": true}', "background"),
        ('{"type": "response.create", "input": "x", "model": "other"}', "model"),
    ],
)
def test_a_wrong_message_is_its_own_error(scripted, message, param):
    with open_socket(scripted) as socket:
        socket.send(message)
        (error,) = read_response(socket)
        assert (error["type"], error["error"]["param"]) == ("error", param)
        assert error["status"] in (400, 404)
        send(socket, input="¤fine¥")
        assert read_response(socket)[-1]["type"] == "response.completed"


def last_before_the_end(socket):
    last = ""
    with contextlib.suppress(ConnectionClosed):
        while True:
            last = socket.recv(timeout=20)
    return last


def test_too_many_messages_end_the_connection(make_scripted):
    slow = make_scripted(engine={"step_time_s": 0.05})
    with open_socket(slow) as socket:
        for _ in range(40):
            send(socket, input="¤long long long long long long¥")
        last = last_before_the_end(socket)
    assert json.loads(last)["error"]["code"] == "too_many_messages"
    slow.wait_idle()


def test_large_messages_that_wait_end_the_connection_before_there_are_many(make_scripted):
    slow = make_scripted(engine={"step_time_s": 0.05}, max_body_bytes=1 << 16)
    with open_socket(slow) as socket:
        for _ in range(4):
            send(socket, input="¤long long long long long long¥", instructions="x" * 30_000)
        last = last_before_the_end(socket)
    assert "messages of more than 65536 bytes" in json.loads(last)["error"]["message"]
    slow.wait_idle()


def test_a_client_that_leaves_frees_the_engine(make_scripted):
    slow = make_scripted(engine={"step_time_s": 0.01})
    with open_socket(slow) as socket:
        send(socket, input=f"¤{'long ' * 300}¥", store=False)
        socket.recv(timeout=20)
    slow.wait_idle(5)


def test_a_key_is_wanted(make_scripted):
    server = make_scripted(api_key=("sesame",))
    with pytest.raises(InvalidStatus), open_socket(server):
        pass
    with open_socket(server, additional_headers={"Authorization": "Bearer sesame"}) as socket:
        send(socket, input="¤Hi¥")
        assert read_response(socket)[-1]["type"] == "response.completed"


def test_there_is_no_websocket_elsewhere(scripted):
    with pytest.raises(InvalidStatus), connect(scripted.url.replace("http", "ws") + "/v1/models"):
        pass
