"""Drafting with Medusa heads, which need nothing but the hidden state behind the last token that was computed."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from quire_interfaces.step import SchedulerOutput
from quire_models.draft_heads.medusa import MedusaHeads
from quire_models.draft_heads.medusa_config import MedusaConfig
from quire_ops import to_device
from quire_spec_decode.row_drafter import DraftLimits, DraftRows, DraftStep, RowDrafter
from quire_spec_decode.trees import Draft, Level, best_tree

__all__ = ["MedusaDrafting", "last_states"]


def last_states(step: DraftStep, rows: DraftRows) -> tuple[list[int], Tensor]:
    """Rows that get drafts, N of them, and the features [N, H] of the last token of each that was computed: the one
    before its last known token, which the step has sampled."""
    plan, found, places = step.plan, list[int](), list[int]()
    for i, row in enumerate(plan.rows.tolist()):
        if row in step.limits:
            kept = plan.kept[row][-1] if row in plan.kept else int(rows.num_tokens[row] - 2 - plan.start[i])
            found.append(row)
            places.append(int(plan.query_start_loc[i]) + kept)
    assert step.features is not None
    return found, step.features[to_device(np.array(places, dtype=np.int64), step.features.device)]


class MedusaDrafting(RowDrafter):
    """Chains of what each head finds most likely, or trees: the heads know nothing of each other, so that every node of
    a depth has the same candidates, and the product of their probabilities ranks them, as it does EAGLE's."""

    feature_layers: tuple[int, ...] = ()
    wants_hidden = True

    def __init__(self, heads: MedusaHeads, rows: DraftRows, limits: DraftLimits) -> None:
        assert isinstance(heads.config, MedusaConfig)
        self._heads = heads
        self._rows = rows
        self._topk, self._depth, self._num_nodes = limits.topk, limits.depth, limits.num_nodes
        self._num_heads = heads.config.medusa_heads

    def begin(self, output: SchedulerOutput) -> None:
        """Nothing: the heads keep nothing of rows."""

    def propose(self, step: DraftStep) -> dict[int, Draft]:
        """Row -> what the heads guess to follow, at most as deep as its limit and as there are heads."""
        rows, hidden = last_states(step, self._rows)
        if not rows:
            return {}
        depth = min(max(step.limits.values()), self._num_heads)
        found = [self._heads.top(hidden, head, self._topk) for head in range(depth)]
        tops = [(scores.tolist(), ids.tolist()) for scores, ids in found]
        drafts: dict[int, Draft] = {}
        for i, row in enumerate(rows):
            of_row = [(scores[i], ids[i]) for scores, ids in tops[: step.limits[row]]]
            if self._topk == 1 or row in step.chains:
                drafts[row] = Draft([ids[0] for _, ids in of_row])
            else:
                levels = _grown(of_row, self._topk)
                drafts[row] = best_tree(levels, -(-self._num_nodes * len(levels) // self._depth))
        return drafts


def _grown(tops: list[tuple[list[float], list[int]]], topk: int) -> list[Level]:
    """Levels of a tree from (log probabilities, tokens) of each depth."""
    levels: list[Level] = []
    expanded, known = [-1], [0.0]
    for scores, ids in tops:
        level = Level(expanded, [ids] * len(known), [[value + score for score in scores] for value in known])
        levels.append(level)
        values = [value for of_node in level.scores for value in of_node]
        expanded = sorted(range(len(values)), key=lambda i: -values[i])[:topk]
        known = [values[i] for i in expanded]
    return levels
