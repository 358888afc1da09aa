"""Made tokenizers: each id has a text, and each text is tokenized back to its id, in any size and for any seed."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from quire_interfaces import ConfigError
from quire_testkit.tokenizers import MAX_VOCAB_SIZE, MIN_VOCAB_SIZE, SPECIAL_TOKENS, sample_text, write_tokenizer


def make_tokenizer(vocab_size: int, seed: int = 0) -> Tokenizer:
    with tempfile.TemporaryDirectory() as scratch:
        write_tokenizer(Path(scratch), vocab_size=vocab_size, seed=seed)
        return Tokenizer.from_file(str(Path(scratch) / "tokenizer.json"))


TOKENIZER = make_tokenizer(2000)


def check_every_id(tokenizer: Tokenizer, vocab_size: int) -> None:
    assert tokenizer.get_vocab_size(with_added_tokens=True) == vocab_size
    texts = tokenizer.decode_batch([[token_id] for token_id in range(vocab_size)], skip_special_tokens=False)
    names = [tokenizer.id_to_token(token_id) for token_id in range(vocab_size)]
    assert len(set(names)) == vocab_size
    assert all(texts)
    assert [tokenizer.token_to_id(name) for name in names] == list(range(vocab_size))
    characters = [token_id for token_id in range(vocab_size) if texts[token_id] != "\N{REPLACEMENT CHARACTER}"]
    # Only bytes that are no character of their own have no text: the upper half of the bytes.
    assert len(characters) == vocab_size - 128
    encoded = tokenizer.encode_batch([texts[token_id] for token_id in characters], add_special_tokens=False)
    assert [encoding.ids for encoding in encoded] == [[token_id] for token_id in characters]


@settings(max_examples=20, deadline=None)
@given(st.integers(MIN_VOCAB_SIZE, 3000), st.integers(0, 2**31))
def test_each_id_round_trips(vocab_size: int, seed: int) -> None:
    check_every_id(make_tokenizer(vocab_size, seed), vocab_size)


def test_a_large_vocabulary_takes_time_in_proportion() -> None:
    times = []
    for size in (15_194, 151_936):
        start = time.process_time()
        tokenizer = make_tokenizer(size)
        times.append(time.process_time() - start)
    assert times[1] < 40 * times[0], "ten times as many; 100 times the time if each met all others"
    check_every_id(tokenizer, 151_936)


@settings(max_examples=50, deadline=None)
@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_text_like_the_training_text_is_compressed() -> None:
    text = sample_text(500, seed=99)
    assert len(TOKENIZER.encode(text).ids) < len(text) / 3


def test_special_tokens_are_last_and_whole() -> None:
    assert [TOKENIZER.token_to_id(text) for text in SPECIAL_TOKENS] == [1997, 1998, 1999]
    assert TOKENIZER.encode("<|im_start|>a<|im_end|>").tokens == ["<|im_start|>", "a", "<|im_end|>"]
    assert TOKENIZER.decode([1998, 1999]) == ""


def test_the_seed_decides(tmp_path: Path) -> None:
    texts = []
    for number, seed in enumerate((3, 3, 4)):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_tokenizer(folder, vocab_size=1000, seed=seed)
        texts.append((folder / "tokenizer.json").read_bytes())
    assert texts[0] == texts[1] != texts[2]


def test_the_settings_name_the_template_and_the_end(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, vocab_size=300)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "<|im_end|>"
    assert "add_generation_prompt" in settings["chat_template"]


@pytest.mark.parametrize("vocab_size", [-1, 0, MIN_VOCAB_SIZE - 1, MAX_VOCAB_SIZE + 1])
def test_impossible_sizes(tmp_path: Path, vocab_size: int) -> None:
    with pytest.raises(ConfigError, match=f"from 259 .* to 457911 .* got {vocab_size}") as caught:
        write_tokenizer(tmp_path, vocab_size=vocab_size)
    assert caught.value.field == "vocab_size"
    assert not list(tmp_path.iterdir())


def test_sample_text_is_reproducible() -> None:
    assert sample_text(50, seed=1) == sample_text(50, seed=1) != sample_text(50, seed=2)
    assert sample_text(0) == ""
