"""Verification against sums in float64: every text has its probability, and every tree the nodes it should have."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_spec_decode import Draft, Level, accept_drafts, accept_tree, best_tree, depths, paths

VOCABULARY = 3


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 6) -> tuple[list[int], list[int]]:
    """(tokens, parents) of a tree in which no two children of a node are alike."""
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(draw(st.integers(0, max_nodes))):
        parent, token = draw(st.integers(-1, len(tokens) - 1)), draw(st.integers(0, VOCABULARY - 1))
        if (parent, token) not in zip(parents, tokens, strict=True):
            parents.append(parent)
            tokens.append(token)
    return tokens, parents


def next_probabilities(text: tuple[int, ...], seed: int) -> list[float]:
    """A language model."""
    weights = random.Random(f"{seed} {text}").choices(range(1, 9), k=VOCABULARY)
    return [weight / sum(weights) for weight in weights]


def samples(contexts: Sequence[tuple[int, ...]], seed: int) -> Iterator[tuple[float, list[int]]]:
    """All outcomes of one sample behind each context, with their probabilities."""
    models = [next_probabilities(context, seed) for context in contexts]
    for outcome in itertools.product(range(VOCABULARY), repeat=len(contexts)):
        yield math.prod(model[token] for model, token in zip(models, outcome, strict=True)), list(outcome)


def check_shares(shares: dict[tuple[int, ...], float], seed: int) -> None:
    """Each text that may come out, of whatever length, has come with the probability that decoding token by token
    gives it, where texts that go on count for what they begin with."""
    assert math.isclose(sum(shares.values()), 1.0, rel_tol=1e-12)
    for length in (1, 2, 3):
        for text in itertools.product(range(VOCABULARY), repeat=length):
            expected = math.prod(next_probabilities(text[:i], seed)[token] for i, token in enumerate(text))
            reached = sum(share for other, share in shares.items() if other[:length] == text)
            for other, share in shares.items():
                if len(other) < length and text[: len(other)] == other:
                    rest = range(len(other), length)
                    reached += share * math.prod(next_probabilities(text[:i], seed)[text[i]] for i in rest)
            assert math.isclose(reached, expected, rel_tol=1e-12)


@settings(max_examples=40, deadline=None)
@given(drafts=st.lists(st.integers(0, VOCABULARY - 1), max_size=4), seed=st.integers(0, 99))
def test_chains_leave_every_probability_as_it_is(drafts: list[int], seed: int) -> None:
    shares: dict[tuple[int, ...], float] = {}
    contexts = [tuple(drafts[:i]) for i in range(len(drafts) + 1)]
    for share, sampled in samples(contexts, seed):
        text = tuple(accept_drafts(sampled, drafts))
        shares[text] = shares.get(text, 0.0) + share
    check_shares(shares, seed)
    num_accepted = sum(share * (len(text) - 1) for text, share in shares.items())
    chain = [next_probabilities(tuple(drafts[:i]), seed)[token] for i, token in enumerate(drafts)]
    assert math.isclose(num_accepted, sum(itertools.accumulate(chain, float.__mul__)), rel_tol=1e-12, abs_tol=1e-12)


@settings(max_examples=40, deadline=None)
@given(tree=trees(), seed=st.integers(0, 99))
def test_trees_leave_every_probability_as_it_is(tree: tuple[list[int], list[int]], seed: int) -> None:
    tokens, parents = tree
    contexts = [(), *(tuple(tokens[i] for i in path) for path in paths(parents))]
    shares: dict[tuple[int, ...], float] = {}
    num_accepted = 0.0
    for share, sampled in samples(contexts, seed):
        nodes = accept_tree(sampled, tokens, parents)
        text = (sampled[0], *(sampled[1 + i] for i in nodes))
        shares[text] = shares.get(text, 0.0) + share
        num_accepted += share * len(nodes)
    check_shares(shares, seed)
    # Each node comes true with the probability of its text: that is what a tree is worth.
    expected = sum(
        math.prod(next_probabilities(text[:i], seed)[token] for i, token in enumerate(text)) for text in contexts[1:]
    )
    assert math.isclose(num_accepted, expected, rel_tol=1e-12, abs_tol=1e-12)


@given(tree=trees(12), data=st.data())
def test_the_nodes_that_come_true_are_the_longest_path_that_was_sampled(
    tree: tuple[list[int], list[int]], data: st.DataObject
) -> None:
    tokens, parents = tree
    size = len(tokens) + 1
    sampled = data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=size, max_size=size))

    def comes_true(path: list[int]) -> bool:
        return all(sampled[1 + before] == tokens[node] for before, node in zip([-1, *path], path, strict=False))

    right = [path for path in [[], *paths(parents)] if comes_true(path)]
    longest = max(right, key=len)
    assert [path for path in right if len(path) == len(longest)] == [longest]
    assert accept_tree(sampled, tokens, parents) == longest


@given(tree=trees(12))
def test_paths_and_depths_agree_with_the_parents(tree: tuple[list[int], list[int]]) -> None:
    tokens, parents = tree
    assert [len(path) for path in paths(parents)] == depths(parents)
    for node, path in enumerate(paths(parents)):
        assert path[-1] == node
        assert [parents[each] for each in path] == [-1, *path[:-1]]
    for count in range(len(tokens) + 1):
        part = Draft(tokens, parents).first(count)
        assert part.parents is not None
        assert paths(part.parents) == paths(parents)[:count]


@pytest.mark.parametrize("seed", range(8))
def test_the_best_tree_covers_the_most_probability(seed: int) -> None:
    """No tree of as many nodes out of all candidates is more likely to have them come true: compared with all."""
    chooser = random.Random(seed)
    first = [math.log(chooser.uniform(0.05, 0.4)) for _ in range(2)]
    second = [[score + math.log(chooser.uniform(0.1, 0.5)) for _ in range(2)] for score in first]
    levels = [Level([-1], [[0, 1]], [first]), Level([0, 1], [[2, 3], [4, 5]], second)]
    scores = [*first, *second[0], *second[1]]
    parents = [-1, -1, 0, 0, 1, 1]
    for num_nodes in range(1, 7):
        wholes = [
            nodes
            for nodes in itertools.combinations(range(6), num_nodes)
            if all(parents[node] < 0 or parents[node] in nodes for node in nodes)
        ]
        most = max(sum(math.exp(scores[node]) for node in nodes) for nodes in wholes)
        draft = best_tree(levels, num_nodes)
        assert math.isclose(sum(math.exp(scores[token]) for token in draft.token_ids), most, rel_tol=1e-12)
