"""More than 2,000 wrong bodies: each is answered by a 4xx that names the field, and the engine still serves.

Three sources: a list of known nasty values for every field, random mutations of good bodies, and raw bytes that are no
JSON. What the schema of the API itself breeds is in test_server_abuse_schema.py.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any

import httpx
import pytest

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
    TEXT: {"model": "tiny", "prompt": "hello", "max_tokens": 2},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [5, 6]},
}

DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]

HUGE = (2**31 + 1, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400)
NOT_INT = ("1", 1.5, [], {}, [1], "x" * 1000, True, DEEP)
NOT_FLOAT = ("0.5", [], {}, "NaN", True, DEEP)
NOT_BOOL = ("true", "yes", 2, 0.5, [], {}, DEEP)
NOT_TEXT = (5, 0.5, True, [], {}, DEEP)
NOT_LIST = (5, 0.5, True, {}, {"0": 1})
NOT_DICT = (5, 0.5, True, [], "x", [["a", 1]])
BAD_IDS = ([-1], ["5"], [1.5], [[5]], [True], [None], [2**31], [10**30], [5, {}], [DEEP])

WRONG_SAMPLING: dict[str, tuple[Any, ...]] = {
    "n": (0, -1, 129, *HUGE, *NOT_INT),
    "best_of": (0, 129, -1, *HUGE, *NOT_INT),
    "temperature": (-0.1, 101, 1e300, *HUGE, *NOT_FLOAT),
    "top_p": (0, -0.5, 1.01, 1e300, *HUGE, *NOT_FLOAT),
    "top_k": (-2, *HUGE, *NOT_INT),
    "min_p": (-0.1, 1.1, *HUGE, *NOT_FLOAT),
    "repetition_penalty": (0, -1, *NOT_FLOAT),
    "presence_penalty": (-2.1, 2.1, *HUGE, *NOT_FLOAT),
    "frequency_penalty": (-2.1, 2.1, *HUGE, *NOT_FLOAT),
    "logit_bias": (
        *NOT_DICT, {"x": 1}, {"-1": 1}, {"5": "1"}, {"5": 101}, {"5": -101}, {"99999": 1}, {"5": None}, {"": 1},
        {"5": [1]}, {"1e3": 1}, {"٣": 1}, {"9" * 5000: 1}, {"5": 10**30},
    ),
    "allowed_token_ids": (*NOT_LIST, [], [1024], *BAD_IDS),
    "stop_token_ids": (*NOT_LIST, [1024], *BAD_IDS),
    "bad_words": (*NOT_LIST, [5], [""], ["  "], [["a"]], [None]),
    "min_tokens": (-1, 3, *HUGE, *NOT_INT),
    "stop": (5, True, {}, [""], "", [5], [None], [["a"]], ["a", ""]),
    "include_stop_str_in_output": NOT_BOOL,
    "ignore_eos": NOT_BOOL,
    "seed": (2**63, -(2**63) - 1, 2**64, 10**30, *NOT_INT),
    "prompt_logprobs": (-1, 21, *HUGE, *NOT_INT),
    "skip_special_tokens": NOT_BOOL,
    "stream": NOT_BOOL,
    "stream_options": (*NOT_DICT, {"include_usage": True}, {"include_usage": "x"}),
    "priority": (1, -1, *HUGE, *NOT_INT),
    "cache_salt": ("", "x" * 1025, *NOT_TEXT),
    "return_token_ids": NOT_BOOL,
    "add_special_tokens": NOT_BOOL,
    "request_id": ("", "x" * 257, *NOT_TEXT),
    "user": NOT_TEXT,
    "response_format": (
        *NOT_DICT, {"type": "json_object"}, {"type": 5}, {"type": DEEP}, {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {}}, {"type": "json_schema", "json_schema": {"schema": "x"}},
        {"type": "json_schema", "json_schema": DEEP}, {"type": "structural_tag"},
    ),
    "structured_outputs": (
        *NOT_DICT, {"regexp": "a"}, {"regex": 5}, {"regex": ""}, {"json": 5}, {"json": ""}, {"choice": []},
        {"choice": "x"}, {"choice": [5]}, {"choice": [DEEP]}, {"grammar": {}}, {"json_object": "x"},
        {"regex": "a", "choice": ["b"]}, {"whitespace_pattern": "x"}, {"structural_tag": 7}, {"json": {}, "regex": "a"},
        {"json": {}, "disable_any_whitespace": 3}, {"reasoning": {}},
    ),
    "guided_json": (5, True, [], "", DEEP),
    "guided_regex": ("", *NOT_TEXT),
    "guided_choice": (*NOT_LIST, [], [5], [""]),
    "guided_grammar": ("", *NOT_TEXT),
    "guided_json_object": (2, "yes", [], {}, DEEP),
    "guided_whitespace_pattern": ("x", *NOT_TEXT),
    "model": ("other", "", *NOT_TEXT),
    "max_tokens": (0, -1, 513, *HUGE, *NOT_INT),
}  # fmt: skip

WRONG: dict[str, dict[str, tuple[Any, ...]]] = {
    CHAT: {
        **WRONG_SAMPLING,
        "messages": (
            None, "hello", 5, [], {}, [5], ["hello"], [None], [[]], [{}], [{"role": "user"}], [{"content": "x"}],
            [{"role": 5, "content": "x"}], [{"role": "", "content": "x"}], [{"role": "user", "content": 5}],
            [{"role": "user", "content": {"text": "x"}}], [{"role": "user", "content": [5]}],
            [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [{"text": "x"}]}],
            [{"role": "user", "content": [{"type": "text", "text": 5}]}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
            [{"role": "user", "content": "x"}, {"role": None, "content": "x"}], DEEP,
            [{"role": "user", "content": DEEP}], [{"role": "user", "content": "word " * 2000}],
        ),
        "max_completion_tokens": (0, -1, 513, *HUGE, *NOT_INT),
        "logprobs": NOT_BOOL,
        "top_logprobs": (1, -1, 21, *HUGE, *NOT_INT),
        "tools": (*NOT_LIST, [5], ["f"], [None], [[]]),
        "tool_choice": ("required", "f", {"type": "function", "function": {"name": "f"}}, 5, []),
        "parallel_tool_calls": NOT_BOOL,
        "add_generation_prompt": NOT_BOOL,
        "continue_final_message": NOT_BOOL,
        "chat_template": ("{{ 1 }}", "{% broken", *NOT_TEXT),
        "chat_template_kwargs": (
            *NOT_DICT, {"messages": []}, {"tools": 5}, {"add_generation_prompt": False},
        ),
        "echo": NOT_BOOL,
    },
    TEXT: {
        **WRONG_SAMPLING,
        "prompt": (
            None, 5, 0.5, True, {}, [], [[]], [["a"]], [None], [{}], ["a", 5], [5, "a"], [[5], "a"], [[5], 6], [-1],
            [1024], [2**31], [10**30], [1.5], [[5], []], [[5], [1024]], [[-1]], ["a"] * 1025, [5] * 513, "word " * 2000,
            DEEP, [True],
        ),
        "logprobs": (-1, 21, *HUGE, *NOT_INT),
        "echo": NOT_BOOL,
        "suffix": ("x", *NOT_TEXT),
    },
    "/tokenize": {
        "prompt": (None, 5, [5], {}, True),
        "messages": ([{"role": "user", "content": "x"}], 5, "x"),
        "add_special_tokens": NOT_BOOL,
        "return_token_strs": NOT_BOOL,
        "model": ("other", *NOT_TEXT),
    },
    "/detokenize": {"tokens": (None, *NOT_LIST, [1024], *BAD_IDS), "model": ("other", *NOT_TEXT)},
}  # fmt: skip

NOT_JSON = [
    b"", b" ", b"{", b"}", b"[", b"nul", b"{'prompt': 'x'}", b'{"prompt": "x"', b'{"prompt": "x",}', b'{"prompt" "x"}',
    b'{"prompt": NaN}', b'{"temperature": NaN, "prompt": "x"}', b'{"temperature": Infinity, "prompt": "x"}',
    b'{"temperature": -Infinity, "prompt": "x"}', b'{"temperature": 1e999, "prompt": "x"}', b'{"n": 01, "prompt": "x"}',
    b'{"prompt": "\xff\xfe"}', b'{"prompt": "\xc3"}', b'{"prompt": "\xed\xa0\x80"}', b"\xff\xfe{\x00}\x00",
    b"\xef\xbb\xbf{}", b'{"prompt": "\\ud800"}', b'{"prompt": "\\x"}', b'{"prompt": "\n"}', b'{"prompt": "\x00"}',
    b"[" * 100_000, b'{"prompt": ' + b"[" * 100_000, b'{"a":' * 50_000, b"null", b"true", b"5", b'"x"', b"[]", b"[{}]",
    b'[{"prompt": "x"}]', b'{"prompt": "x"}{"prompt": "x"}', b'{"prompt": "x"} trailing', b"prompt=x&n=1",
    b"<prompt>x</prompt>", b'{"prompt": ' + b"9" * 20_000 + b"}", b'{"prompt": "\\udfff"}',
    b"\x00" * 1000, b'{"prompt": "x' * 50, b"-", b"1.", b'{"prompt"}', b'{:1}', b'{"prompt": "x", "prompt": 5}',
]  # fmt: skip


def hand_written() -> list[tuple[str, bytes, str | None]]:
    """(path, body, field that must be named)."""
    cases: list[tuple[str, bytes, str | None]] = []
    for path, fields in WRONG.items():
        for field, values in fields.items():
            for value in values:
                body = {**GOOD[path], field: value}
                cases.append((path, json.dumps(body).encode(), field))
        cases += [(path, raw, None) for raw in NOT_JSON]
        required = "messages" if path == CHAT else "tokens" if path == "/detokenize" else "prompt"
        cases.append((path, b"{}", required))
    return cases


def mutated(count: int, seed: int) -> list[tuple[str, bytes, str | None]]:
    """Good bodies with two fields made wrong, each streaming or not, and texts with bytes flipped until no JSON."""
    chooser = random.Random(seed)
    cases: list[tuple[str, bytes, str | None]] = []
    while len(cases) < count:
        path = chooser.choice((CHAT, TEXT))
        body = {**GOOD[path]}
        for field in chooser.sample(sorted(WRONG[path]), 2):
            body[field] = chooser.choice(WRONG[path][field])
        body.setdefault("stream", chooser.random() < 0.5)
        text = json.dumps(body).encode()
        if chooser.random() < 0.2:
            place = chooser.randrange(len(text))
            text = text[:place] + bytes([chooser.choice((0, 0x22, 0x7B, 0xFF, 0x80))]) + text[place:]
            try:
                json.loads(text)
                continue  # a byte inside of a text may do no harm
            except ValueError:
                cases.append((path, text, None))
                continue
        if body["stream"] is True and "stream_options" in body:
            continue  # which is right
        cases.append((path, text, ""))
    return cases


async def send_all(url: str, cases: list[tuple[str, bytes, str | None]]) -> list[httpx.Response]:
    """All of them, 16 at a time, none slower than 20 s."""
    limits = httpx.Limits(max_connections=16)
    async with httpx.AsyncClient(base_url=url, timeout=20, limits=limits) as client:
        gate = asyncio.Semaphore(16)

        async def one(path: str, body: bytes) -> httpx.Response:
            async with gate:
                return await client.post(path, content=body, headers={"content-type": "application/json"})

        return await asyncio.gather(*(one(path, body) for path, body, _ in cases))


def complaint(case: tuple[str, bytes, str | None], response: httpx.Response) -> str | None:
    """What is wrong with an answer, None when it is right."""
    path, body, field = case
    shown = f"{path} {body[:200]!r}: {response.status_code} {response.text[:300]}"
    if not 400 <= response.status_code < 500 or response.status_code == 422:
        return shown
    error = response.json()["error"]
    if not error["message"] or not error["param"] or len(response.content) > 4000:
        return shown
    if field and error["param"].split("[")[0].split(".")[0] != field:
        return f"{shown} (does not name {field})"
    return None


def check(live, cases: list[tuple[str, bytes, str | None]]) -> None:
    responses = asyncio.run(send_all(live.url, cases))
    complaints = [text for case, response in zip(cases, responses, strict=True) if (text := complaint(case, response))]
    assert not complaints, f"{len(complaints)} of {len(cases)}:\n" + "\n".join(complaints[:40])
    assert live.post(TEXT, {"prompt": "still there", "max_tokens": 3, "ignore_eos": True}).status_code == 200


def test_hand_written_bodies(live):
    cases = hand_written()
    assert len(cases) >= 1000
    check(live, cases)


def test_mutated_bodies(live):
    check(live, mutated(1000, seed=1))


@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize"])
def test_ten_megabytes_of_prompt(live, path):
    text = "the quire gathers twelve blocks of paper " * 250_000
    content = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    start_s = time.process_time()  # the API serves in this process; others may have the processor meanwhile
    response = live.post(path, content)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == ("messages" if path == CHAT else "prompt")
    assert time.process_time() - start_s < 15


def test_loop_stays_alive_while_a_long_prompt_is_refused(live):
    async def both() -> tuple[float, float]:
        async with httpx.AsyncClient(base_url=live.url, timeout=60) as client:
            begin = time.monotonic()
            long = asyncio.ensure_future(client.post(TEXT, json={"prompt": "some words here " * 60_000}))
            slowest = 0.0
            while not long.done():
                start = time.monotonic()
                assert (await client.get("/health")).status_code == 200
                slowest = max(slowest, time.monotonic() - start)
                await asyncio.sleep(0.01)
            assert (await long).status_code == 400
            return slowest, time.monotonic() - begin

    slowest_s, whole_s = asyncio.run(both())
    assert slowest_s < max(2.0, whole_s / 2)  # on a busy machine both are slower
