"""Work over large requests is done by worker threads, and only once the request is known to be within its bounds."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from pydantic import model_validator

from quire_interfaces import RequestError
from quire_server.body import SMALL_BYTES, parse_checked
from quire_server.large_bodies import BodyInspector
from quire_server.protocol import Body, ChatCompletionRequest, CompletionRequest
from quire_server.token_protocol import DerenderChatRequest
from quire_server.value_count import ValueBounds

BOUNDS = ValueBounds(500, 100)


class Seen(Body):
    """A body that says in which threads it was read."""

    text: str

    @model_validator(mode="before")
    @classmethod
    def _note(cls, value: Any) -> Any:
        THREADS.append(threading.get_ident())
        return value


THREADS: list[int] = []


class Bounded:
    """The part of a `ServerContext` that reading a body needs."""

    def __init__(self, bounds: ValueBounds) -> None:
        self.inspector = BodyInspector(1 << 30, bounds)


def read(body: Any, model: type[Any] = Seen, bounds: ValueBounds = BOUNDS) -> Any:
    THREADS.clear()
    context = Bounded(bounds)
    try:
        return asyncio.run(parse_checked(context, json.dumps(body).encode(), model))  # type: ignore[arg-type]
    finally:
        if (process := context.inspector._process) is not None:
            process.communicate()


@pytest.mark.parametrize(("num_chars", "is_large"), [(10, False), (SMALL_BYTES, True), (1 << 20, True)])
def test_the_event_loop_reads_small_bodies_only(num_chars, is_large):
    assert read({"text": "x" * num_chars}).is_large == is_large
    assert (THREADS[0] != threading.get_ident()) == is_large


def test_a_body_beyond_the_bounds_is_not_read_at_all():
    with pytest.raises(RequestError, match=r"^zzz holds 601 values; .*, 500 values are allowed") as error:
        read({"text": "x", "zzz": ["y"] * 600})
    assert (error.value.param, THREADS) == ("zzz", [])


def test_bodies_inside_large_ones_are_large():
    chat = {"messages": [{"role": "user", "content": "x" * SMALL_BYTES}]}
    body = read({"chat_request": chat, "generate_response": {"choices": []}}, DerenderChatRequest)
    assert body.chat_request.is_large


WRONG: list[tuple[Any, dict[str, Any], str, str]] = [
    (CompletionRequest, {"prompt": ["a"] * 16_385}, "prompt", "holds 16385 elements, at most 16384"),
    (CompletionRequest, {"prompt": [[1]] * 16_385}, "prompt", "holds 16385 elements, at most 16384"),
    (CompletionRequest, {"prompt": [{}] * 16_000}, "prompt", "must be text, a list of token ids"),
    (CompletionRequest, {"logit_bias": dict.fromkeys(map(str, range(32_769)), "x")}, "logit_bias", "at most 32768"),
    (CompletionRequest, {"stop_token_ids": ["x"] * 90_000}, "stop_token_ids[0]", "valid integer"),
    (ChatCompletionRequest, {"messages": [{}] * 20_001}, "messages", "holds 20001 elements, at most 20000"),
    (ChatCompletionRequest, {"tools": [{}] * 2049}, "tools", "holds 2049 elements, at most 2048"),
    (ChatCompletionRequest, {"metadata": dict.fromkeys(map(str, range(90_000)), 1)}, "metadata", "at most 16"),
    (ChatCompletionRequest, {"messages": [1] * 19_000}, "messages[0]", "valid dictionary"),
]


@pytest.mark.parametrize(("model", "body", "param", "told"), WRONG, ids=range(len(WRONG)))
def test_long_lists_are_refused_with_one_error(model, body, param, told):
    base = {"prompt": "x"} if model is CompletionRequest else {"messages": [{"role": "user", "content": "x"}]}
    with pytest.raises(RequestError, match=told) as error:
        read({**base, **body}, model, ValueBounds(500_000, 100_000))
    assert error.value.param == param
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("body", "is_large"),
    [
        ({"prompt": ["x"] * 32}, False),
        ({"prompt": ["x"] * 33}, True),
        ({"prompt": "x" * 9000}, False),
        ({"prompt": "x", "bad_words": ["w"] * 33}, True),
        ({"prompt": "x", "dry_sequence_breakers": ["w"] * 33}, True),
    ],
)
def test_a_short_body_that_asks_for_much_is_large(body, is_large):
    assert read(body, CompletionRequest).is_large == is_large


def test_all_prompts_together_may_ask_for_so_many_completions(live):
    body = {"prompt": ["x"] * 1000, "n": 17}
    error = live.post("/v1/completions", body).json()["error"]
    assert error["param"] == "n"
    assert "17 completions of each of 1000 prompts" in error["message"]


@pytest.mark.parametrize(
    ("path", "field", "value", "told"),
    [
        ("/v1/completions", "bad_words", ["w"] * 1025, "at most 1024"),
        ("/v1/chat/completions", "logit_bias", dict.fromkeys(map(str, range(32_769)), 1), "at most 32768"),
        ("/v1/messages", "stop_sequences", ["s"] * 257, "at most 256"),
        ("/v1/responses", "input", [{"role": "user", "content": "c"}] * 20_001, "at most 20000"),
        ("/tokenize", "zzz", [[]] * 100_001, "100000 lists and objects"),
        ("/v1/conversations", "items", [1] * 500_000, "500000 values"),
    ],
)
def test_every_route_names_the_field_and_the_bound(live, path, field, value, told):
    body = (
        {"prompt": "x"}
        if path in ("/v1/completions", "/tokenize")
        else {"messages": [{"role": "user", "content": "x"}]}
    )
    response = live.post(path, {**body, "max_tokens": 1, field: value})
    error = response.json()["error"]
    assert response.status_code == 400
    assert error.get("param", field) == field
    assert field in error["message"]
    assert told in error["message"]
