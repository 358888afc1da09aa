"""Draft trees: several guesses for a position, of which verification takes the one that comes true.

A tree is a list of tokens, parents before children, and the place of each one's parent in the list, -1 for those that
follow the last known token. Knows numbers; does not know who drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Draft", "Level", "best_tree", "depths", "paths"]


class Draft(NamedTuple):
    """What is proposed for a request."""

    token_ids: list[int]
    parents: list[int] | None = None
    """Of each token, the place in `token_ids` of the one that it follows, or -1; None for a chain."""

    def first(self, count: int) -> Draft:
        """Without the tokens from number `count` on."""
        return Draft(self.token_ids[:count], None if self.parents is None else self.parents[:count])


class Level(NamedTuple):
    """The candidates of one depth: each expanded node of the depth before has as many as the others."""

    expanded: Sequence[int]
    """Which candidates of the level before were expanded; [-1], the last known token, at the first level."""
    token_ids: Sequence[Sequence[int]]
    """Per expanded node: its candidates."""
    scores: Sequence[Sequence[float]]
    """Per expanded node: log probability of each candidate and all that it follows; at most that of the node."""


def best_tree(levels: Sequence[Level], num_nodes: int) -> Draft:
    """The `num_nodes` candidates of the highest scores, the shallower ones among equals (the reranking of EAGLE-2, Li
    et al. 2024, arXiv:2406.16858, section 4.2). What a node follows has at least its score, so it is there, too.

    Returns:
        The tree, the best child of each node directly behind it.
    """
    tokens: list[int] = []
    scores: list[float] = []
    parents: list[int] = []
    before = 0  # where the candidates of the level before begin
    for level in levels:
        here = len(tokens)
        for node, ids, values in zip(level.expanded, level.token_ids, level.scores, strict=True):
            parents += [before + node if node >= 0 else -1] * len(ids)
            tokens += ids
            scores += values
        before = here
    chosen = sorted(range(len(tokens)), key=lambda i: -scores[i])[:num_nodes]  # a stable order: by depth among equals
    children: dict[int, list[int]] = {}
    for i in chosen:
        children.setdefault(parents[i], []).append(i)
    draft = Draft([], [])
    assert draft.parents is not None
    left = [(i, -1) for i in reversed(children.get(-1, []))]
    while left:
        i, parent = left.pop()
        place = len(draft.token_ids)
        draft.token_ids.append(tokens[i])
        draft.parents.append(parent)
        left += [(child, place) for child in reversed(children.get(i, []))]
    return draft


def depths(parents: Sequence[int]) -> list[int]:
    """Of each node, how many tokens it is behind the last known one, from 1 on."""
    node_depths: list[int] = []
    for parent in parents:
        node_depths.append(1 if parent < 0 else node_depths[parent] + 1)
    return node_depths


def paths(parents: Sequence[int]) -> list[list[int]]:
    """Of each node, the nodes that it follows and itself, from the first one down."""
    node_paths: list[list[int]] = []
    for i, parent in enumerate(parents):
        node_paths.append([i] if parent < 0 else [*node_paths[parent], i])
    return node_paths
