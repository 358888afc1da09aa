"""The suffix drafter: longest match in own text or finished outputs, votes, exact forgetting, bounded memory."""

from __future__ import annotations

import time
from array import array
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_interfaces import ConfigError
from quire_spec_decode import SuffixDrafter
from quire_spec_decode import suffix as suffix_module


def reference(texts: list[list[int]], own: list[int], k: int, depth: int, factor: float, least: float) -> list[int]:
    """The definition with all occurrences: own text first where equally long, votes, the most recent of equals."""

    def find(text: list[int], is_own: bool) -> tuple[int, list[int]]:
        best, ends = 1, []
        for end in range(len(text) - is_own, 0, -1):
            n = 0
            while n < min(depth, end, len(own)) and text[end - 1 - n] == own[-1 - n]:
                n += 1
            if n > best:
                best, ends = n, [end]
            elif n == best and n > 1:
                ends.append(end)
        return (best, ends) if ends else (0, [])

    joined = [token for text in texts for token in (*text, -1)]
    length, ends = find(own, True)
    other_length, other_ends = find(joined, False)
    is_own = other_length <= length
    text = list(own) if is_own else joined
    length, ends = (length, ends) if is_own else (other_length, other_ends)
    drafts: list[int] = []
    share = 1.0
    while ends and len(drafts) < min(k, int(length * factor)):
        following = [text[end] if end < len(text) else -1 for end in ends]
        counts = Counter(following)
        best = max(counts.values())
        token = next(t for t in following if counts[t] == best)
        share *= best / len(ends)
        if token == -1 or share < least:
            break
        drafts.append(token)
        ends = [end + 1 for end, t in zip(ends, following, strict=True) if t == token]
        if is_own:
            text.append(token)
    return drafts


tokens = st.lists(st.integers(0, 2), max_size=14)


@settings(max_examples=150)
@given(
    prompts=st.lists(st.tuples(tokens, tokens), max_size=5),
    own=tokens,
    pieces=st.lists(tokens, max_size=4),
    k=st.integers(0, 8),
    depth=st.integers(2, 6),
    factor=st.sampled_from([0.5, 1.0, 4.0]),
    least=st.sampled_from([0.0, 0.3, 0.6]),
    kept=st.integers(0, 3),
)
def test_equals_the_definition(prompts, own, pieces, k, depth, factor, least, kept) -> None:  # type: ignore[no-untyped-def]
    before, suffix_module.NUM_PLACES = suffix_module.NUM_PLACES, 1000  # the definition knows no bound of places
    try:
        drafter = SuffixDrafter(
            max_tree_depth=depth, max_spec_factor=factor, min_token_prob=least, max_cached_requests=kept
        )
        finished: list[list[int]] = []
        for key, (prompt, output) in enumerate(prompts):
            drafter.begin(key, prompt + output, len(prompt))
            drafter.end(key)
            if len(output) > 2:
                finished.append(output)
        finished = finished[len(finished) - min(kept, len(finished)) :]
        drafter.begin(9, own, len(own))
        for piece in pieces:
            own = own + piece
            got = drafter.propose(9, array("i", own), k)
            expected = reference(finished, own, k, depth, factor, least) if len(own) > 2 else []
            assert got == expected
    finally:
        suffix_module.NUM_PLACES = before


def test_outputs_help_requests_with_the_same_salt_only() -> None:
    drafter = SuffixDrafter()
    drafter.begin(0, [1, 2, 3, 4, 5, 6], 0, "blue")
    drafter.end(0)
    proposals = []
    for key, salt in enumerate(["blue", "red", None]):
        drafter.begin(key, [9, 9, 2, 3, 4], 5, salt)
        proposals.append(drafter.propose(key, [9, 9, 2, 3, 4], 2))
    assert proposals == [[5, 6], [], []]


def test_prompts_are_not_shared() -> None:
    drafter = SuffixDrafter()
    drafter.begin(0, [1, 2, 3, 4, 5, 6, 7], 6)
    drafter.end(0)
    drafter.begin(1, [1, 2, 3], 3)
    assert drafter.propose(1, [1, 2, 3], 4) == []


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_module, "MAX_CACHED_TOKENS", 500)
    drafter = SuffixDrafter(max_cached_requests=20)
    for i in range(300):
        drafter.begin(i % 7, [i + j for j in range(10 + i % 50)], 2, str(i % 3))
        assert drafter.num_cached_tokens <= 500
    drafter.begin(0, range(3000), 0)
    drafter.end(0)
    assert 0 < drafter.num_cached_tokens <= 500
    kept = sum(len(each.text.tokens) for each in drafter._finished.values())
    assert kept == drafter.num_cached_tokens
    places = [place for each in drafter._finished.values() for at in each.text._places.values() for place in at]
    assert len(places) <= 500


@pytest.mark.parametrize(
    "values",
    [{"max_tree_depth": 1}, {"max_cached_requests": -1}, {"max_spec_factor": 0}, {"min_token_prob": 1.5}],
)
def test_values_that_make_no_sense(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="suffix drafting needs"):
        SuffixDrafter(**values)  # type: ignore[arg-type]


def test_a_proposal_takes_no_longer_after_a_longer_text() -> None:
    def seconds(length: int) -> float:
        text = array("i", [token % 997 for i in range(length // 2) for token in (i, 7 * i)])
        drafter = SuffixDrafter()
        drafter.begin(0, text, length)
        times = []
        for i in range(100):
            text.append(i % 997)
            start = time.perf_counter()
            drafter.propose(0, text, 5)
            times.append(time.perf_counter() - start)
        return min(times)  # other work on the machine makes some of them slower, none faster

    assert seconds(40_000) < 5 * max(seconds(2_000), 1e-5)
