"""Stop strings: wherever token borders fall, the same text comes out."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_interfaces import RequestError
from quire_renderers import IncrementalDetokenizer, load_tokenizer
from quire_renderers.stop_strings import StopMatcher

relaxed = settings(max_examples=200, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32)
letters = st.text(alphabet="ab", max_size=30)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    return load_tokenizer(tokenizer_folder("byte_level"))


def first_completed(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The plain way: the smallest end, then the longest stop string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


def handfuls(seed: int, items):
    chooser, cut = random.Random(seed), 0
    while cut < len(items):
        size = chooser.randrange(1, 5)
        yield items[cut : cut + size]
        cut += size


@pytest.mark.parametrize("length", range(1, 9))
def test_a_stop_string_behind_each_of_its_own_beginnings_is_found(length):
    """A border that is too short loses a match that begins within the failed one, in patterns like aabaaac."""
    for pattern in map("".join, product("abc" if length < 8 else "ab", repeat=length)):
        for begun in range(length):
            text = pattern[:begun] + pattern
            matcher = StopMatcher([pattern])
            match = matcher.feed(text)
            assert match is not None, (pattern, text)
            assert match.end == text.index(pattern) + length, (pattern, text)


@relaxed
@given(seed=seeds, text=letters, stops=stop_lists)
def test_matcher_finds_the_first_completed(seed, text, stops):
    matcher, seen, expected = StopMatcher(stops), 0, first_completed(text, stops)
    for part in handfuls(seed, text):
        match = matcher.feed(part)
        if match is not None:
            assert (seen + match.end, match.stop) == expected
            return
        seen += len(part)
        so_far = text[:seen]
        needed = max(k for stop in stops for k in range(len(stop)) if so_far.endswith(stop[:k]))
        assert matcher.num_withheld == needed
    assert expected is None


@relaxed
@given(seed=seeds, text=letters, stops=stop_lists, include=st.booleans(), min_tokens=st.integers(0, 8))
def test_text_does_not_depend_on_the_handfuls(tokenizer, seed, text, stops, include, min_tokens):
    token_ids = [tokenizer.encode(char, add_special_tokens=False)[0] for char in text]
    detokenizer = IncrementalDetokenizer(
        tokenizer, stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens
    )
    said, num_tokens, stop = "", 0, None
    for part in handfuls(seed, token_ids):
        delta = detokenizer.add(part)
        said, stop = said + delta.text, delta.stop_string
        if stop is not None:
            num_tokens += delta.num_stop_tokens
            break
        num_tokens += len(part)
    said += detokenizer.finish().text
    ends = [end for end in range(max(min_tokens, 1), len(text) + 1) if any(text[:end].endswith(s) for s in stops)]
    if not ends:
        assert (stop, said, num_tokens) == (None, text, len(text))
        return
    expected = max((s for s in stops if text[: ends[0]].endswith(s)), key=len)
    assert (stop, num_tokens) == (expected, ends[0])
    assert said == text[: ends[0]].removesuffix("" if include else expected)


def test_stop_string_inside_and_across_tokens(tokenizer):
    token_ids = tokenizer.encode("the quick brown fox jumps over")
    for stop in ("brown", "k br", "x j", " ", "t", "over", "quick brown fox ju"):
        detokenizer = IncrementalDetokenizer(tokenizer, stop=[stop])
        said = "".join(detokenizer.add([token_id]).text for token_id in token_ids) + detokenizer.finish().text
        assert said == "the quick brown fox jumps over".split(stop)[0]


def test_only_what_may_become_a_stop_string_is_withheld(tokenizer):
    detokenizer = IncrementalDetokenizer(tokenizer, stop=["###"])
    hash_id = tokenizer.encode("#", add_special_tokens=False)[0]
    a_id = tokenizer.encode("a", add_special_tokens=False)[0]
    assert [detokenizer.add([i]).text for i in (a_id, hash_id, hash_id, a_id)] == ["a", "", "", "##a"]
    assert detokenizer.add([hash_id]).text == ""
    assert detokenizer.finish().text == "#"


def test_nothing_comes_after_a_stop_string(tokenizer):
    detokenizer = IncrementalDetokenizer(tokenizer, stop=["fox"])
    delta = detokenizer.add(tokenizer.encode("the fox jumps"))
    assert (delta.text, delta.stop_string) == ("the ", "fox")
    later = detokenizer.add(tokenizer.encode("more"))
    assert (later.text, later.stop_string, later.num_stop_tokens) == ("", None, 0)
    assert detokenizer.finish().text == ""


def test_stop_string_of_multibyte_characters(tokenizer):
    detokenizer = IncrementalDetokenizer(tokenizer, stop=["界!"])
    said = "".join(detokenizer.add([i]).text for i in tokenizer.encode("你好 世界! x"))
    assert said == "你好 世"


def test_special_token_text_can_stop_when_shown(tokenizer):
    token_ids = tokenizer.encode("the<|im_end|>fox")
    shown = IncrementalDetokenizer(tokenizer, stop=["<|im_end|>"], skip_special_tokens=False)
    hidden = IncrementalDetokenizer(tokenizer, stop=["<|im_end|>"])
    assert shown.add(token_ids).text == "the"
    assert hidden.add(token_ids).text + hidden.finish().text == "thefox"


@pytest.mark.parametrize("stop", ["", None, 3])
def test_bad_stop_strings_are_refused(tokenizer, stop):
    with pytest.raises(RequestError, match="stop"):
        IncrementalDetokenizer(tokenizer, stop=[stop])
