"""Sample-and-compare keeps exactly the tokens that would have been sampled one by one."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_spec_decode import NgramDrafter, accept_drafts


@pytest.mark.parametrize(
    ("sampled", "drafts", "accepted"),
    [
        ([7], [], [7]),
        ([7, 8], [7], [7, 8]),
        ([7, 8], [9], [7]),
        ([7, 8, 9], [7, 8], [7, 8, 9]),
        ([7, 8, 9], [7, 1], [7, 8]),
        ([7, 8, 9], [1, 8], [7]),  # a later agreement is worth nothing: its condition was wrong
    ],
)
def test_examples(sampled: list[int], drafts: list[int], accepted: list[int]) -> None:
    assert accept_drafts(sampled, drafts) == accepted


@given(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.data())
def test_a_prefix_that_ends_at_the_first_disagreement(sampled: list[int], data: st.DataObject) -> None:
    size = len(sampled) - 1
    drafts = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    accepted = accept_drafts(sampled, drafts)
    assert accepted == sampled[: len(accepted)]
    assert accepted[:-1] == drafts[: len(accepted) - 1]
    assert len(accepted) == len(sampled) or accepted[-1] != drafts[len(accepted) - 1]


@pytest.mark.parametrize(("num_sampled", "num_drafts"), [(0, 0), (1, 1), (3, 1)])
def test_lengths_must_fit(num_sampled: int, num_drafts: int) -> None:
    with pytest.raises(ValueError, match="samples to verify"):
        accept_drafts([1] * num_sampled, [1] * num_drafts)


def next_token(history: list[int], seed: int) -> int:
    """A random language model over 3 tokens, whose draw is a function of history, seed and position."""
    weights = random.Random(repr(history[-2:])).choices(range(1, 9), k=3)
    return random.Random(f"{seed} {len(history)}").choices(range(3), weights)[0]


def generate(prompt: list[int], seed: int, num_tokens: int, drafter: NgramDrafter | None) -> tuple[list[int], int]:
    tokens, num_steps = list(prompt), 0
    while len(tokens) < len(prompt) + num_tokens:
        drafts = drafter.propose(tokens, 3) if drafter else []
        sampled = [next_token(tokens + drafts[:i], seed) for i in range(len(drafts) + 1)]
        tokens += accept_drafts(sampled, drafts)
        num_steps += 1
    return tokens[len(prompt) :][:num_tokens], num_steps


def test_the_same_tokens_with_and_without_drafts_in_fewer_steps() -> None:
    steps = Counter[str]()
    for seed in range(60):
        plain, plain_steps = generate([0, 1, 2], seed, 40, None)
        drafted, drafted_steps = generate([0, 1, 2], seed, 40, NgramDrafter(1, 3))
        assert drafted == plain
        steps["plain"] += plain_steps
        steps["drafted"] += drafted_steps
    assert steps["drafted"] < 0.85 * steps["plain"]
