"""What is asked: lengths are exact, files are read as they say, the same seed asks the same."""

from __future__ import annotations

import json
import random
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from quire_bench import Workload, random_requests
from quire_bench.arrivals import Arrivals, RampUp
from quire_bench.datasets import (
    TextRequest,
    custom_requests,
    image_file_requests,
    multi_turn_requests,
    prefix_repetition_requests,
    random_image_requests,
    random_png,
    sharegpt_requests,
    sonnet_requests,
    texts_of_ids,
)
from quire_interfaces import ConfigError
from quire_renderers import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return load_tokenizer(tiny_model)


def written(path: Path, value: object) -> str:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return str(path)


def test_texts_have_exactly_the_tokens_of_ids(tokenizer: Any) -> None:
    ids = random_requests(Workload(num_requests=6, input_len=50, prefix_len=20, length_spread=0.4), low=10, high=250)
    texts = texts_of_ids(ids, tokenizer, seed=1)
    tokens = [tokenizer.encode(each.prompt, add_special_tokens=False) for each in texts]
    assert [len(each) for each in tokens] == [len(each.prompt_token_ids) for each in ids]
    assert all(each[:20] == tokens[0][:20] for each in tokens)
    assert len({tuple(each[:21]) for each in tokens}) > 1
    assert [each.output_len for each in texts] == [each.output_len for each in ids]
    assert texts == texts_of_ids(ids, tokenizer, seed=1)
    assert texts != texts_of_ids(ids, tokenizer, seed=2)


class GreedyTokenizer:
    """Takes the longest piece, so that an a at the end of a head and a b behind it become one token."""

    pieces = ("a", "b", "ab", "c")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = []
        while text:
            token_id = max((i for i, piece in enumerate(self.pieces) if text.startswith(piece)), key=self._length)
            ids.append(token_id)
            text = text[self._length(token_id) :]
        return ids

    def _length(self, token_id: int) -> int:
        return len(self.pieces[token_id])

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self.pieces[each] for each in token_ids if each < len(self.pieces))


def test_heads_are_shared_though_tokens_join_at_their_ends() -> None:
    tokenizer = GreedyTokenizer()
    ids = random_requests(Workload(num_requests=6, input_len=12, prefix_len=5), low=10, high=250)
    for seed in range(20):
        tokens = [tokenizer.encode(each.prompt) for each in texts_of_ids(ids, tokenizer, seed=seed)]
        assert {len(each) for each in tokens} == {12}
        assert len({tuple(each[:5]) for each in tokens}) == 1


def test_prefixes_are_repeated_equally_often() -> None:
    lengths: dict[str, Any] = {"prefix_len": 30, "suffix_len": 7, "output_len": 3, "token_range": (10, 250)}
    requests = prefix_repetition_requests(num_requests=12, num_prefixes=4, seed=0, **lengths)
    heads = [tuple(each.prompt_token_ids[:30]) for each in requests]
    assert sorted(heads.count(head) for head in set(heads)) == [3, 3, 3, 3]
    assert {(len(each.prompt_token_ids), each.output_len) for each in requests} == {(37, 3)}
    assert len({tuple(each.prompt_token_ids) for each in requests}) == 12
    assert heads != sorted(heads), "in random order"
    with pytest.raises(ConfigError, match="less than the 4 prefixes"):
        prefix_repetition_requests(num_requests=3, num_prefixes=4, seed=0, **lengths)


def talk(*texts: str) -> dict[str, Any]:
    roles = ("human", "gpt")
    return {"conversations": [{"from": roles[number % 2], "value": text} for number, text in enumerate(texts)]}


def test_sharegpt(tmp_path: Path, tokenizer: Any) -> None:
    long = "word " * 1500
    path = written(tmp_path / "a.json", [
        talk("What is a quire of paper?", "Some gathered sheets of paper."), talk("alone and never answered"),
        talk("x", "too short a question"), talk(long, "An answer of several words."),
    ])  # fmt: skip
    (first, again) = sharegpt_requests(path, count=2, seed=0, output_len=None, tokenizer=tokenizer)
    assert first == again, "one conversation fits, and is asked twice"
    assert first.prompt == "What is a quire of paper?"
    answer = tokenizer.encode("Some gathered sheets of paper.", add_special_tokens=False)
    assert first.output_len == len(answer)
    assert first.num_input_tokens == len(tokenizer.encode(first.prompt, add_special_tokens=False))
    uncounted = sharegpt_requests(path, count=3, seed=0, output_len=9, tokenizer=None)
    assert {each.output_len for each in uncounted} == {9}
    assert {each.num_input_tokens for each in uncounted} == {None}
    with pytest.raises(ConfigError, match="give --tokenizer, or --sharegpt-output-len"):
        sharegpt_requests(path, count=1, seed=0, output_len=None, tokenizer=None)


def test_sonnet(tmp_path: Path, tokenizer: Any) -> None:
    lines = [f"The {number} th line of a poem about {number * 7} sheets" for number in range(40)]
    path = written(tmp_path / "poem.txt", "\n".join(lines) + "\n\n")
    lengths = {"input_len": 300, "output_len": 20, "prefix_len": 120}
    requests = sonnet_requests(path, count=5, seed=3, **lengths, tokenizer=tokenizer)
    longest = max(len(tokenizer.encode(f"{line}\n", add_special_tokens=False)) for line in lines)
    for each in requests:
        count = len(tokenizer.encode(each.prompt, add_special_tokens=False))
        assert each.num_input_tokens == count
        assert 300 - longest - 2 <= count <= 300 + 2, "as many whole lines as there is room for"
    heads = {each.prompt[: len(requests[0].prompt) // 4] for each in requests}
    assert len(heads) == 1
    assert len({each.prompt for each in requests}) == 5
    with pytest.raises(ConfigError, match="has room for no line"):
        sonnet_requests(path, count=1, seed=0, input_len=3, output_len=1, prefix_len=0, tokenizer=tokenizer)


def test_custom(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    text = json.dumps({"prompt": "One", "output_tokens": 4}) + "\n\n" + json.dumps({"messages": messages}) + "\n"
    path = written(tmp_path / "a.jsonl", text)
    by_prompt = {each.prompt: each for each in custom_requests(path, count=2, seed=0, output_len=None, tokenizer=None)}
    assert by_prompt["One"].output_len == 4
    assert by_prompt["Why?"].output_len is None
    assert by_prompt["Why?"].messages() == messages
    assert {each.output_len for each in custom_requests(path, count=2, seed=0, output_len=8, tokenizer=None)} == {8}
    for text, words in (
        ('{"prompt": 5}', "neither prompt"),
        ("{", "line 1: no JSON"),
        ("5", "line 1: not a JSON object"),
        ("", "holds no request"),
        ('{"prompt": "x", "output_tokens": 0}', "output_tokens must be"),
    ):
        with pytest.raises(ConfigError, match=words):
            custom_requests(written(tmp_path / "b.jsonl", text), count=1, seed=0, output_len=None, tokenizer=None)
    with pytest.raises(ConfigError, match="No such file"):
        custom_requests(str(tmp_path / "none"), count=1, seed=0, output_len=None, tokenizer=None)
    with pytest.raises(ConfigError, match="give --dataset-path"):
        custom_requests(None, count=1, seed=0, output_len=None, tokenizer=None)


def test_turns_of_a_conversation(tmp_path: Path) -> None:
    path = written(tmp_path / "a.json", [talk("One?", "1", "Two?", "2", "Three?"), {"messages": [
        {"role": "user", "content": "Alone?"}]}])  # fmt: skip
    conversations = multi_turn_requests(path, count=2, seed=0, output_len=5, max_turns=2)
    assert {tuple(turn.prompt for turn in each.turns) for each in conversations} == {("One?", "Two?"), ("Alone?",)}
    assert {turn.output_len for each in conversations for turn in each.turns} == {5}


def test_pictures(tmp_path: Path) -> None:
    data = random_png(7, 5, random.Random(1))
    assert data != random_png(7, 5, random.Random(2))
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height) == (7, 5)
    length = struct.unpack(">I", data[33:37])[0]
    assert len(zlib.decompress(data[41 : 41 + length])) == 5 * (1 + 3 * 7)
    sizes: dict[str, Any] = {"images": 2, "size": (8, 6), "spread": 0.5, "output_len": 3}
    (request,) = random_image_requests(count=1, seed=0, **sizes, prompt_of=lambda _: "What?")
    assert [part["type"] for part in request.messages()[0]["content"]] == ["image_url", "image_url", "text"]
    (tmp_path / "a.png").write_bytes(data)
    (tmp_path / "notes.txt").write_text("no image")
    (read,) = image_file_requests(str(tmp_path), count=1, seed=0, output_len=3, prompt="What?")
    assert read.parts[0]["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
    path = written(tmp_path / "a.jsonl", json.dumps({"image": "a.png", "prompt": "Where?"}))
    assert image_file_requests(path, count=1, seed=0, output_len=3, prompt="") == [
        TextRequest(prompt="Where?", output_len=3, parts=read.parts)
    ]


def test_bursts() -> None:
    """Mean and deviation of gaps of a gamma distribution: 1 / rate, and 1 / (rate * sqrt(burstiness))."""
    for burstiness in (0.25, 1.0, 4.0):
        gaps = list(Arrivals(rate=10, burstiness=burstiness, seed=1).gaps(20_000))
        mean = sum(gaps) / len(gaps)
        deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
        assert mean == pytest.approx(0.1, rel=0.05)
        assert deviation == pytest.approx(0.1 / burstiness**0.5, rel=0.05)
    ramp = RampUp(strategy="exponential", start_rps=1, end_rps=100)
    assert [ramp.rate(share) for share in (0, 0.5, 1)] == pytest.approx([1, 10, 100])
    gaps = list(Arrivals(rate=100, burstiness=1e6, ramp_up=RampUp(strategy="linear", start_rps=10, end_rps=30)).gaps(3))
    assert gaps == pytest.approx([1 / 10, 1 / 20, 1 / 30], rel=0.02)
    with pytest.raises(ConfigError, match="a ramp goes from"):
        RampUp(strategy="linear", start_rps=5, end_rps=1)
