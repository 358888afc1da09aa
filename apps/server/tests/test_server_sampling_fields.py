"""Fields of samplers that local servers are known for, under the names that their clients send."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire_interfaces import SamplingParams
from quire_server.body import parse_body
from quire_server.protocol import ChatCompletionRequest, CompletionRequest


def params_of(fields: dict[str, Any], *, chat: bool) -> SamplingParams:
    if chat:
        body = json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode()
        return parse_body(body, ChatCompletionRequest).to_sampling_params({"temperature": 0.3})
    body = json.dumps({"prompt": "x", **fields}).encode()
    return parse_body(body, CompletionRequest).to_sampling_params({"temperature": 0.3})


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(
    ("fields", "meant"),
    [
        ({}, {"temperature": 0.3}),
        (
            {"dry_multiplier": 0.8, "dry_base": 2, "dry_allowed_length": 3, "dry_range": 64},
            {"dry_multiplier": 0.8, "dry_base": 2, "dry_allowed_length": 3, "dry_range": 64},
        ),
        ({"dry_multiplier": 1, "dry_penalty_last_n": -1}, {"dry_multiplier": 1, "dry_range": 0}),
        ({"dry_sequence_breakers": ["\n", "x"]}, {"dry_sequence_breakers": ("\n", "x")}),
        ({"dry_sequence_breakers": '"\\n", ":"'}, {"dry_sequence_breakers": ("\n", ":")}),
        ({"dry_sequence_breakers": '["*"]'}, {"dry_sequence_breakers": ("*",)}),
        ({"xtc_probability": 0.5, "xtc_threshold": 0.2}, {"xtc_probability": 0.5, "xtc_threshold": 0.2}),
        ({"top_n_sigma": -1}, {"top_n_sigma": -1}),
        (
            {"mirostat": 2, "mirostat_tau": 4, "mirostat_eta": 0.2},
            {"mirostat_mode": 2, "mirostat_tau": 4, "mirostat_eta": 0.2},
        ),
        ({"mirostat_mode": 1}, {"mirostat_mode": 1}),
        (
            {"temperature": 1.0, "dynatemp_range": 0.5, "dynatemp_exponent": 2},
            {"temperature": 1.0, "dynatemp_range": 0.5, "dynatemp_exponent": 2},
        ),
        ({"dynatemp_low": 0.5, "dynatemp_high": 1.5}, {"temperature": 1.0, "dynatemp_range": 0.5}),
    ],
)  # fmt: skip
def test_each_name_is_understood(fields: dict[str, Any], meant: dict[str, Any], chat: bool) -> None:
    params = params_of(fields, chat=chat)
    assert params == SamplingParams(**{"temperature": 0.3, **meant}, max_tokens=None if chat else 16)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"dry_multiplier": -1}, "dry_multiplier"),
        ({"dry_multiplier": 1, "dry_sequence_breakers": [""]}, "dry_sequence_breakers"),
        ({"dry_sequence_breakers": '"a'}, "dry_sequence_breakers"),
        ({"dry_sequence_breakers": "[1]"}, "dry_sequence_breakers"),
        ({"xtc_threshold": 2}, "xtc_threshold"),
        ({"mirostat": 3}, "mirostat_mode"),
        ({"mirostat_tau": 0}, "mirostat_tau"),
        ({"dynatemp_low": 1.0}, "dynatemp_high"),
        ({"dynatemp_high": 1.0}, "dynatemp_low"),
        ({"dynatemp_low": 1.0, "dynatemp_high": 0.5}, "dynatemp_high"),
        ({"dynatemp_low": 0.5, "dynatemp_high": 1.0, "dynatemp_range": 1.0}, "dynatemp_high"),
    ],
)
def test_wrong_values_are_named(live: Any, fields: dict[str, Any], param: str) -> None:
    response = live.post("/v1/completions", {"prompt": "x", **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_requests_with_them_run(live: Any) -> None:
    fields = {"dry_multiplier": 1.0, "xtc_probability": 0.5, "mirostat": 2, "top_n_sigma": 1, "dynatemp_range": 0.2}
    response = live.post("/v1/completions", {"prompt": "x", "temperature": 1.0, "max_tokens": 4, **fields})
    assert response.status_code == 200, response.text


def test_defaults_of_the_checkpoint_stand_where_a_request_says_nothing() -> None:
    defaults = {"top_k": 5, "bad_words_token_ids": ((1,), (2, 3)), "stop": ("END",)}

    def params(**fields: Any) -> SamplingParams:
        body = json.dumps({"prompt": "x", **fields}).encode()
        return parse_body(body, CompletionRequest).to_sampling_params(defaults)

    plain = params()
    assert (plain.top_k, plain.bad_words_token_ids, plain.stop) == (5, ((1,), (2, 3)), ("END",))
    asked = params(stop="x", bad_words=["y"], top_k=1)
    assert (asked.top_k, asked.stop, asked.bad_words) == (1, ("x",), ("y",))
    assert asked.bad_words_token_ids == ((1,), (2, 3))
    search = params(use_beam_search=True)  # which is refused with either of them, where a client asks for it
    assert (search.bad_words_token_ids, search.stop) == ((), ())
