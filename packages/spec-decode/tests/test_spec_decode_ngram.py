"""The n-gram drafter proposes what followed the most recent occurrence of the longest matching suffix."""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_interfaces import ConfigError
from quire_spec_decode import NgramDrafter
from quire_testkit.conformance.drafter import DrafterSuite


class TestNgramDrafter(DrafterSuite):
    def make_drafter(self) -> NgramDrafter:
        return NgramDrafter(1, 3)


def reference(token_ids: Sequence[int], max_tokens: int, min_n: int, max_n: int) -> list[int]:
    """The definition, by looking at every place for every length."""
    token_ids = list(token_ids)
    for n in range(max_n, min_n - 1, -1):
        for start in range(len(token_ids) - n - 1, -1, -1):
            if token_ids[start : start + n] == token_ids[len(token_ids) - n :]:
                text = list(token_ids)
                for i in range(max_tokens):
                    text.append(text[start + n + i])
                return text[len(token_ids) :]
    return []


@given(
    token_ids=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    max_tokens=st.integers(0, 12),
    lengths=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
    scale=st.sampled_from([1, 256, 65_536, 256**3 // 3]),  # ids whose bytes look alike across token borders
    kind=st.sampled_from([list, tuple, lambda ids: array("i", ids), lambda ids: array("q", ids)]),
)
def test_equals_the_definition(token_ids, max_tokens, lengths, scale, kind) -> None:  # type: ignore[no-untyped-def]
    token_ids = [token_id * scale for token_id in token_ids]
    min_n, max_n = lengths
    drafter = NgramDrafter(min_n, max_n)
    assert drafter.propose(kind(token_ids), max_tokens) == reference(token_ids, max_tokens, min_n, max_n)


def test_equals_the_definition_on_every_short_sequence() -> None:
    for min_n, max_n in ((1, 1), (1, 3), (2, 4)):
        drafter = NgramDrafter(min_n, max_n)
        for length in range(1, 9):
            for token_ids in itertools.product((0, 1), repeat=length):
                assert drafter.propose(token_ids, 4) == reference(token_ids, 4, min_n, max_n)


def test_prefers_the_longest_match_over_the_most_recent() -> None:
    text = [1, 2, 3, 50, 60, 9, 2, 3, 70, 80, 1, 2, 3]
    assert NgramDrafter(2, 3).propose(text, 2) == [50, 60]
    assert NgramDrafter(2, 2).propose(text, 2) == [70, 80]


def test_a_repeating_pattern_is_drafted_in_full_length() -> None:
    assert NgramDrafter(2, 4).propose([7, 8, 9] * 3, 8) == [7, 8, 9, 7, 8, 9, 7, 8]
    assert NgramDrafter(1, 4).propose([5, 5], 3) == [5, 5, 5]


def test_nothing_to_say() -> None:
    drafter = NgramDrafter(2, 4)
    for token_ids in ([], [1], [1, 2], [1, 2, 3, 4, 5], [1, 2, 9, 2, 1]):
        assert drafter.propose(token_ids, 4) == []


@pytest.mark.parametrize(("min_n", "max_n"), [(0, 3), (4, 3), (-1, -1)])
def test_lengths_that_make_no_sense(min_n: int, max_n: int) -> None:
    with pytest.raises(ConfigError, match="1 <= min_n <= max_n"):
        NgramDrafter(min_n, max_n)


def test_cost_grows_with_the_text_only_linearly() -> None:
    """The worst text for a search: it almost matches everywhere."""
    drafter = NgramDrafter(2, 64)

    def seconds(length: int) -> float:
        token_ids = array("i", [0] * length + [1] + [0] * 60)
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            drafter.propose(token_ids, 4)
            best = min(best, time.perf_counter() - start)
        return best

    assert seconds(64_000) < 40 * max(seconds(8_000), 2e-4)
