"""Draft trees: which candidates are taken, and that verification keeps the distribution of every text."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter

import pytest

from quire_spec_decode import Level, accept_drafts, accept_tree, best_tree, depths, paths

VOCABULARY = 4


def grown(chooser: random.Random, topk: int, depth: int) -> tuple[list[Level], dict[tuple[int, ...], float]]:
    """Levels as a drafter grows them, and the score of each candidate by its path."""
    levels: list[Level] = []
    scores: dict[tuple[int, ...], float] = {}
    above: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    expanded = [-1]
    for _ in range(depth):
        level = Level(expanded, [], [])
        found: list[tuple[tuple[int, ...], float]] = []
        for path, score in above:
            tokens = chooser.sample(range(100), topk)
            of_node = [score - chooser.choice([0.0, 0.5, 1.0, 2.0]) for _ in tokens]
            level.token_ids.append(tokens)  # type: ignore[attr-defined]
            level.scores.append(of_node)  # type: ignore[attr-defined]
            found += [((*path, token), value) for token, value in zip(tokens, of_node, strict=True)]
        levels.append(level)
        scores |= dict(found)
        expanded = sorted(range(len(found)), key=lambda i: -found[i][1])[:topk]
        above = [found[i] for i in expanded]
    return levels, scores


@pytest.mark.parametrize("seed", range(20))
def test_the_likeliest_nodes_parents_first(seed: int) -> None:
    chooser = random.Random(seed)
    levels, scores = grown(chooser, chooser.randint(1, 4), chooser.randint(1, 4))
    num_nodes = chooser.randint(1, 20)
    draft = best_tree(levels, num_nodes)
    assert draft.parents is not None
    found = [tuple(draft.token_ids[i] for i in path) for path in paths(draft.parents)]
    assert len(set(found)) == len(found) == min(num_nodes, len(scores))
    assert sorted(scores[path] for path in found) == sorted(scores.values(), reverse=True)[: len(found)][::-1]
    least = min(scores[path] for path in found)
    for path in set(scores) - set(found):  # of equals, the shallower ones
        assert scores[path] < least or len(path) >= max(len(each) for each in found if scores[each] == least)
    assert depths(draft.parents) == [len(path) for path in found]
    best = max((path for path in found if len(path) == 1), key=scores.__getitem__)
    assert scores[found[0]] == scores[best]
    assert draft.first(1).token_ids == draft.token_ids[:1]
    assert draft.first(1).parents == [-1]


def test_a_chain_is_a_tree() -> None:
    chooser = random.Random(1)
    for _ in range(300):
        size = chooser.randint(0, 5)
        sampled, drafts = chooser.choices(range(2), k=size + 1), chooser.choices(range(2), k=size)
        right = accept_tree(sampled, drafts, list(range(-1, size - 1)))
        assert [sampled[0], *(sampled[1 + i] for i in right)] == accept_drafts(sampled, drafts)


def test_lengths_of_a_tree_must_fit() -> None:
    for sampled, drafts, parents in (([1], [1], [-1]), ([1, 2], [1], []), ([1, 2], [1], [-1, 0])):
        with pytest.raises(ValueError, match="as many parents"):
            accept_tree(sampled, drafts, parents)


@functools.cache
def distribution(text: tuple[int, ...]) -> list[float]:
    """A language model."""
    weights = random.Random(repr(text)).choices(range(1, 9), k=VOCABULARY)
    return [weight / sum(weights) for weight in weights]


def test_texts_are_distributed_as_without_drafts() -> None:
    """Chi-square of three tokens at a time: 100,000 texts, each with a random tree. Of a node's children one is
    kept with the probability of them all, as in rejection sampling without replacement."""
    chooser, counts, num_texts = random.Random(9), Counter[tuple[int, ...]](), 100_000
    accepted = expected = variance = 0.0
    for _ in range(num_texts):
        drafts = [*chooser.sample(range(VOCABULARY), 2), *chooser.sample(range(VOCABULARY), 2), chooser.randrange(4)]
        parents = [-1, -1, 0, 0, 3]
        known = [(), *(tuple(drafts[i] for i in path) for path in paths(parents))]
        sampled = [chooser.choices(range(VOCABULARY), distribution(text))[0] for text in known]
        right = accept_tree(sampled, drafts, parents)
        text = (sampled[0], *(sampled[1 + i] for i in right))
        while len(text) < 3:
            text += (chooser.choices(range(VOCABULARY), distribution(text))[0],)
        counts[text[:3]] += 1
        share = sum(distribution(())[token] for token in drafts[:2])
        accepted += bool(right)
        expected += share
        variance += share * (1 - share)
    assert abs(accepted - expected) < 4 * variance**0.5
    statistic = 0.0
    for text in itertools.product(range(VOCABULARY), repeat=3):
        share = 1.0
        for i, token in enumerate(text):
            share *= distribution(text[:i])[token]
        statistic += (counts[text] - num_texts * share) ** 2 / (num_texts * share)
    assert statistic < 113  # 63 degrees of freedom: exceeded once in 10,000
