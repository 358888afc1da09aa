"""One entry of log probabilities per token, at the place of its text: whatever ends, holds back or hides the text."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import numpy as np
import pytest

from quire_engine import CompletionOutput, Logprob
from quire_server.logprobs import EchoedTokens, completion_logprobs

PROMPT = "the quire é 🚀 gathers"


class AroundTokenizer:
    """A tokenizer that puts a token of its own on both sides of a text, and spells some characters in two tokens."""

    pieces = None
    _texts = ("<s>", "ab", "\ufffd", "é", " c", "</s>")

    def token_text(self, token_id: int) -> str:
        return self._texts[token_id]

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
        ids = list(token_ids)
        made = "".join(self._texts[each] for each in ids)
        return made.replace("\ufffdé", "é") if ids[-1:] != [2] else made


def choices(server: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of an answer, which must be those of its stream."""
    whole = server.post(path, body)
    assert whole.status_code == 200, whole.text
    usage = whole.json()["usage"]
    streamed: dict[int, dict[str, Any]] = {}
    events = server.events(path, {**body, "stream_options": {"include_usage": True}})
    for choice in [choice for event in events for choice in event["choices"]]:
        made = streamed.setdefault(choice["index"], {"token_ids": [], "logprobs": None, "text": ""})
        made["token_ids"] += choice.get("token_ids") or []
        made["text"] += choice.get("text") or ""
        if choice["logprobs"] is None:
            continue
        made["logprobs"] = made["logprobs"] or {name: [] for name in choice["logprobs"] if name != "refusal"}
        for name, values in made["logprobs"].items():
            values += choice["logprobs"][name]
    found = whole.json()["choices"]
    for choice in found:
        again = streamed[choice["index"]]
        told = {name: value for name, value in choice["logprobs"].items() if name != "refusal"}
        assert again["logprobs"] == told
        assert again["token_ids"] == choice["token_ids"]
        assert again["text"] == choice.get("text", "")
    assert sum(len(choice["token_ids"]) for choice in found) == usage["completion_tokens"]
    assert events[-1]["usage"]["completion_tokens"] == usage["completion_tokens"]
    return found


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "stop string": {"stop": ["three", "e f"]},
    "kept stop string": {"stop": ["three"], "include_stop_str_in_output": True},
    "held back": {"stop": ["five six nine"]},
    "one token": {"max_tokens": 1},
    "two": {"n": 2, "seed": 1},
    "hidden end": {"skip_special_tokens": False},
    "ids": {"return_tokens_as_token_ids": True, "stop": ["four"]},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "text", ["one two three four five six", "<think>one two</think>three four five", "a 🚀 é three"], ids=range(3)
)
def test_chat_has_an_entry_per_token(scripted: Any, case: str, text: str) -> None:
    body = {"messages": [{"role": "user", "content": f"¤{text}¥"}], "logprobs": True, "return_token_ids": True}
    for choice in choices(scripted, "/v1/chat/completions", {**body, **CASES[case]}):
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) > 0


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_completions_have_an_entry_per_token_at_its_place(scripted: Any, case: str, echo: bool) -> None:
    body = {"prompt": "¤one 🚀 two three four é five¥", "logprobs": 1, "return_token_ids": True, "echo": echo}
    asked = {**body, "max_tokens": 40, **CASES[case]}
    named = choices(scripted, "/v1/completions", asked)
    by_id = choices(scripted, "/v1/completions", {**asked, "return_tokens_as_token_ids": True})
    for choice, other in zip(named, by_id, strict=True):
        logprobs = choice["logprobs"]
        num_prompt = len(choice["prompt_token_ids"]) if echo else 0
        assert len(logprobs["tokens"]) == num_prompt + len(choice["token_ids"])
        assert {len(values) for values in logprobs.values()} == {len(logprobs["tokens"])}
        assert other["logprobs"]["text_offset"] == logprobs["text_offset"]
        assert [int(name.removeprefix("token_id:")) for name in other["logprobs"]["tokens"]][num_prompt:] == choice[
            "token_ids"
        ]
        assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
        for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
            is_shown = "�" not in token and "token_id" not in token and offset + len(token) <= len(choice["text"])
            assert not is_shown or choice["text"][offset : offset + len(token)] == token or "|im_end|" in token


def test_tokens_around_a_prompt_have_no_place_in_it() -> None:
    echoed = EchoedTokens.of(AroundTokenizer(), [0, 1, 2, 3, 4, 5], "abé c", [None] * 6, as_ids=True)  # type: ignore[arg-type]
    assert echoed.offsets == [0, 0, 2, 2, 3, 5]
    assert echoed.names[0] == "token_id:0"


def test_an_echo_of_several_completions_scores_the_prompt_in_each(scripted: Any) -> None:
    body = {"prompt": ["¤one two¥", "¤three¥"], "logprobs": 0, "echo": True, "n": 3, "max_tokens": 5, "seed": 1}
    found = choices(scripted, "/v1/completions", {**body, "return_token_ids": True, "prompt_logprobs": 1})
    assert [choice["index"] for choice in found] == list(range(6))
    for choice in found:
        assert len(choice["prompt_logprobs"]) == len(choice["prompt_token_ids"])
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert None not in choice["logprobs"]["token_logprobs"][1:]


def unpacked(packed: dict[str, Any]) -> list[dict[str, float]]:
    """Name -> log probability of each place, the likeliest first."""
    assert (packed["token_ids_dtype"], packed["logprobs_dtype"]) == ("<i4", "<f4")
    num_tokens, width = packed["shape"]
    ids = np.frombuffer(base64.b64decode(packed["token_ids_b64"]), "<i4").reshape(num_tokens, width)
    values = np.frombuffer(base64.b64decode(packed["logprobs_b64"]), "<f4").reshape(num_tokens, width)
    return [
        {f"token_id:{token_id}": float(value) for token_id, value in zip(*row, strict=True)}
        for row in zip(ids, values, strict=True)
    ]


def test_packed_candidates_are_the_named_ones(live: Any) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 6, "temperature": 1.5, "seed": 3, "logprobs": 2, "ignore_eos": True}
    body["return_tokens_as_token_ids"] = True
    (named,) = live.post("/v1/completions", body).json()["choices"]
    (packed,) = live.post("/v1/completions", {**body, "packed_top_logprobs": True}).json()["choices"]
    assert packed["logprobs"]["token_logprobs"] == named["logprobs"]["token_logprobs"]
    assert packed["logprobs"]["top_logprobs"] == []
    found = unpacked(packed["logprobs"]["packed_top_logprobs"])
    for place, row in enumerate(found):
        names = named["logprobs"]["top_logprobs"][place]
        likeliest = sorted(names, key=lambda name: -names[name])[:2]
        assert list(row) == likeliest
        assert list(row.values()) == pytest.approx([names[name] for name in likeliest], abs=1e-6)
    streamed = []
    for event in live.events("/v1/completions", {**body, "packed_top_logprobs": True}):
        for choice in event["choices"]:
            if choice["logprobs"] is not None:
                streamed += unpacked(choice["logprobs"]["packed_top_logprobs"])
    assert streamed == found


def test_a_chosen_token_is_packed_by_its_rank_alone() -> None:
    def position(chosen: int, rank: int) -> list[Logprob]:
        likely = {2: -0.5, 3: -1.5}
        first = Logprob(chosen, likely.get(chosen, -4.0), rank)
        return [first, *(Logprob(token_id, value, place) for place, (token_id, value) in enumerate(likely.items(), 1))]

    output = CompletionOutput(index=0, text="", logprobs=[position(9, 3), position(2, 1)], text_offsets=[0, 1])
    result = completion_logprobs(output, as_ids=True, num_packed=2)
    assert result is not None
    assert result.token_logprobs == [-4.0, -0.5]
    packed = msgspec.to_builtins(result.packed_top_logprobs)
    assert unpacked(packed) == [{"token_id:2": -0.5, "token_id:3": -1.5}] * 2
    assert list(unpacked(packed)[1]) == ["token_id:2", "token_id:3"]


@pytest.mark.parametrize(
    "other", [{"echo": True}, {"use_beam_search": True}, {"logprobs": 0}, {"logprob_token_ids": [1]},
              {"return_tokens_as_token_ids": False}]
)  # fmt: skip
def test_what_cannot_be_packed_is_refused(live: Any, other: dict[str, Any]) -> None:
    body = {"prompt": [5], "logprobs": 2, "packed_top_logprobs": True, "return_tokens_as_token_ids": True, **other}
    response = live.post("/v1/completions", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "packed_top_logprobs")
