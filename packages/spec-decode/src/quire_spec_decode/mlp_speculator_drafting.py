"""Drafting with an MLP speculator: from the hidden state behind the last token that was computed, head after head."""

from __future__ import annotations

import numpy as np

from quire_interfaces.step import SchedulerOutput
from quire_models.draft_heads.mlp_speculator import MLPSpeculator
from quire_models.draft_heads.mlp_speculator_config import MLPSpeculatorConfig
from quire_ops import to_device
from quire_spec_decode.medusa_drafting import last_states
from quire_spec_decode.row_drafter import DraftRows, DraftStep, RowDrafter
from quire_spec_decode.trees import Draft

__all__ = ["MLPSpeculatorDrafting"]


class MLPSpeculatorDrafting(RowDrafter):
    """Chains of what each head finds most likely behind what the head before it said."""

    feature_layers: tuple[int, ...] = ()
    wants_hidden = True

    def __init__(self, heads: MLPSpeculator, rows: DraftRows) -> None:
        assert isinstance(heads.config, MLPSpeculatorConfig)
        self._heads = heads
        self._rows = rows
        self._num_heads = heads.config.num_heads_ahead

    def begin(self, output: SchedulerOutput) -> None:
        """Nothing: the heads keep nothing of rows."""

    def propose(self, step: DraftStep) -> dict[int, Draft]:
        """Row -> what the heads guess to follow, at most as deep as its limit and as there are heads."""
        rows, hidden = last_states(step, self._rows)
        if not rows:
            return {}
        last = to_device(self._rows.num_tokens[np.array(rows)] - 1, self._rows.token_ids.device)
        token_ids = self._rows.token_ids[to_device(np.array(rows), last.device), last].long()
        depth = min(max(step.limits.values()), self._num_heads)
        drafts = self._heads.draft(hidden, token_ids, depth).tolist()
        return {row: Draft(tokens[: step.limits[row]]) for row, tokens in zip(rows, drafts, strict=True)}
