"""Tokens to text as they come: whole characters at once, and in the end exactly what decode() says."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire_interfaces import TextDelta
from quire_renderers import IncrementalDetokenizer, load_tokenizer
from quire_renderers.fast_tokenizer import FastTokenizer

thorough = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
seeds = st.integers(0, 2**32)


@pytest.fixture(scope="module")
def tokenizer(any_folder):
    return load_tokenizer(any_folder)


@pytest.fixture(scope="module")
def byte_level(tokenizer_folder) -> FastTokenizer:
    return load_tokenizer(tokenizer_folder("byte_level"))


def chunks(chooser: random.Random, token_ids: list[int]) -> list[list[int]]:
    """The ids in random handfuls, empty ones among them."""
    cut, handfuls = 0, []
    while cut < len(token_ids):
        size = chooser.randrange(6)
        handfuls.append(token_ids[cut : cut + size])
        cut += size
    return handfuls


def random_ids(chooser: random.Random, vocab_size: int) -> list[int]:
    """Ids of any kind, some of them outside the vocabulary."""
    outside = [-1, vocab_size, 2**33]
    count = chooser.randrange(41)
    return [chooser.choice(outside) if chooser.random() < 0.1 else chooser.randrange(vocab_size) for _ in range(count)]


def byte_token(tokenizer: FastTokenizer, byte: int) -> int:
    return next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == bytes([byte]))


@thorough
@given(seed=seeds, skip=st.booleans())
def test_random_tokens_give_what_decode_gives(tokenizer, seed, skip):
    chooser = random.Random(seed)
    token_ids = random_ids(chooser, tokenizer.vocab_size)
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    parts = [detokenizer.add(chunk).text for chunk in chunks(chooser, token_ids)]
    parts.append(detokenizer.finish().text)
    assert "".join(parts) == tokenizer.decode(token_ids, skip_special_tokens=skip)


@thorough
@given(text=st.text(max_size=30))
def test_no_half_characters_and_none_withheld(tokenizer, text):
    """After each token the text so far is the decodable part of the bytes so far, no more and no less."""
    if tokenizer.token_bytes(0) == b"[UNK]":
        return  # WordPiece turns what it does not know into [UNK]; its tokens have no bytes to compare with
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer, [0], skip_special_tokens=False)
    given_out, taken_in = "", b""
    for token_id in token_ids:
        given_out += detokenizer.add([token_id]).text
        taken_in += tokenizer.token_bytes(token_id)
        whole = taken_in.decode("utf-8", "replace")
        unfinished = 0
        for size in (1, 2, 3):  # a character takes up to 4 bytes: at most 3 of them can be waiting
            tail = taken_in[-size:]
            if len(tail) == size and _is_beginning_of_character(tail):
                unfinished = 1
        assert given_out == (whole[:-1] if unfinished else whole)


def _is_beginning_of_character(tail: bytes) -> bool:
    try:
        tail.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data" and error.start == 0
    return False


@thorough
@given(seed=seeds, stop=st.sampled_from([(), ("never said",)]))
def test_offsets_say_where_each_token_begins(byte_level, seed, stop):
    chooser = random.Random(seed)
    token_ids = random_ids(chooser, byte_level.vocab_size)
    detokenizer = IncrementalDetokenizer(byte_level, stop=stop)
    deltas = [detokenizer.add(chunk) for chunk in chunks(chooser, token_ids)]
    offsets = [offset for delta in deltas for offset in delta.text_offsets]
    text = "".join(delta.text for delta in deltas) + detokenizer.finish().text
    assert len(offsets) == len(token_ids)
    assert offsets == sorted(offsets)
    for index, token_id in enumerate(token_ids):
        piece = byte_level.token_bytes(token_id)
        if piece.isascii() and piece and token_id not in byte_level.pieces.special_token_ids:
            # A character left unfinished by the tokens before turns into one U+FFFD first.
            start = text[offsets[index] :].removeprefix("\ufffd")
            assert start.startswith(piece.decode()), (index, offsets, text)


def test_a_character_over_three_tokens(byte_level):
    detokenizer = IncrementalDetokenizer(byte_level)
    said = [detokenizer.add([byte_token(byte_level, byte)]).text for byte in "世".encode()]
    assert said == ["", "", "世"]


def test_an_unfinished_character_becomes_a_replacement_at_the_end(byte_level):
    detokenizer = IncrementalDetokenizer(byte_level)
    assert detokenizer.add([byte_token(byte_level, 0xE4)]).text == ""
    assert detokenizer.finish() == TextDelta("\ufffd")
    assert detokenizer.finish() == TextDelta()


def test_an_impossible_byte_is_not_withheld(byte_level):
    detokenizer = IncrementalDetokenizer(byte_level)
    assert detokenizer.add([byte_token(byte_level, 0xFF)]).text == "\ufffd"


def test_after_a_prompt_the_first_space_stays(tokenizer_folder):
    for kind in ("byte_fallback_prepend", "unigram", "sentencepiece_bpe"):
        tokenizer = load_tokenizer(tokenizer_folder(kind))
        token_ids = tokenizer.encode("the fox", add_special_tokens=False)
        for prompt, expected in (([], "the fox"), ([1], " the fox")):
            detokenizer = IncrementalDetokenizer(tokenizer, prompt)
            assert detokenizer.add(token_ids).text + detokenizer.finish().text == expected


def test_long_wordpiece_output_keeps_a_short_window(tokenizer_folder):
    tokenizer = load_tokenizer(tokenizer_folder("wordpiece"))
    detokenizer = IncrementalDetokenizer(tokenizer)
    token_ids = tokenizer.encode("quick brown fox") * 500
    text = "".join(detokenizer.add([token_id]).text for token_id in token_ids)
    assert text + detokenizer.finish().text == tokenizer.decode(token_ids)
    assert len(detokenizer._stream._token_ids) <= 8
