"""`RowDrafter`: the seam between a runner and whatever drafts for the rows of a step at once, and the drafters behind
it that look at token ids only.

Knows rows as `DraftRows`; does not know networks (`network_drafting.py`), nor how drafts are verified.

Shape legend: R rows, L token slots of a row, S sequences of a step, T tokens of a step.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire_interfaces import Drafter, RequestDrafter, SchedulerOutput
from quire_ops import RowTable
from quire_spec_decode.trees import Draft

__all__ = ["DraftLimits", "DraftRows", "DraftStep", "RowDrafter", "StepLayout", "TextDrafting"]

_logger = logging.getLogger(__name__)


class RowBlocks(Protocol):
    """The block table of one KV cache group."""

    table: Tensor
    """[R, W] int32 block ids in token order."""
    num_blocks: NDArray[np.int64]
    """[R] blocks of each row."""


class DraftRows(Protocol):
    """A runner's rows as drafters see them; `quire_runner.Rows` is one."""

    token_ids: Tensor
    """[R, L] int32."""
    num_tokens: NDArray[np.int64]
    """[R] certain tokens of each row."""

    @property
    def block_tables(self) -> Sequence[RowBlocks]:
        """Per KV cache group of the target."""

    @property
    def row_tables(self) -> tuple[RowTable, ...]:
        """Per KV cache group of the target, as op `step_inputs` takes it."""

    @property
    def failed(self) -> Collection[int]:
        """Rows whose request cannot go on."""

    def history(self, row: int) -> array[int]:
        """The certain tokens of a row, as C integers."""

    def write_next(self, rows: NDArray[np.int64], positions: NDArray[np.int64], token_ids: Tensor) -> None:
        """Put token ids [N] behind positions [N] of rows [N]."""


class StepLayout(Protocol):
    """The tokens of a step in host numbers; `quire_runner.inputs.HostPlan` is one."""

    rows: NDArray[np.int64]
    """[S]."""
    start: NDArray[np.int64]
    """[S] position of the first token."""
    ends: NDArray[np.int64]
    """[S] position after the last token."""
    query_start_loc: NDArray[np.int64]
    """[S + 1] place of each sequence's first token among the step's, then T."""
    kept: dict[int, list[int]]
    """Row with a tree -> which of its tokens of the step are right, the first one (0) among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLimits:
    """How large a drafting network's proposals may be."""

    depth: int
    """Most tokens that a draft goes ahead."""
    num_nodes: int
    """Most tokens of a draft, trees included."""
    topk: int
    """Nodes of each depth that a tree goes on from; 1 for chains."""
    max_num_batched_tokens: int
    """Most tokens of one pass."""


@dataclass(slots=True, kw_only=True)
class DraftStep:
    """A step that has run, as drafters see it; `num_tokens` of the rows count what it sampled."""

    plan: StepLayout
    limits: dict[int, int]
    """Row -> most tokens that a draft for its next step goes ahead; rows without an entry get none."""
    chains: frozenset[int] = frozenset()
    """Rows whose drafts must be chains."""
    features: Tensor | None = None
    """[T, width] what the target computed at the step's tokens, if the drafter asks for it."""


class RowDrafter(Protocol):
    """Proposes drafts for all rows of a step at once. Its failures cost speed, never an answer."""

    feature_layers: tuple[int, ...]
    """Layers of the target whose input is wanted as features, side by side; none for most."""
    wants_hidden: bool
    """The target's hidden states behind its final norm are wanted as features instead."""

    @property
    def wants_features(self) -> bool:
        """Whether it needs either; otherwise a step may be computed in whatever way gives its tokens."""
        return self.wants_hidden or bool(self.feature_layers)

    def begin(self, output: SchedulerOutput) -> None:
        """Rows were freed, filled and extended for this step."""

    def propose(self, step: DraftStep) -> dict[int, Draft]:
        """Row -> draft, at most as deep as its limit; rows without an idea are left out."""


class TextDrafting(RowDrafter):
    """Asks a `Drafter` or a `RequestDrafter`, row after row."""

    feature_layers: tuple[int, ...] = ()
    wants_hidden = False

    def __init__(self, drafter: Drafter | RequestDrafter, rows: DraftRows) -> None:
        self._rows = rows
        self._remembering = cast(RequestDrafter, drafter) if hasattr(drafter, "begin") else None
        self._forgetting = cast(Drafter, drafter)

    def begin(self, output: SchedulerOutput) -> None:
        """Tell a drafter that keeps state of the rows that were freed and filled."""
        drafter = self._remembering
        if drafter is None:
            return
        for row in output.freed_rows:
            drafter.end(row)
        for new in output.new_rows:
            try:
                drafter.begin(new.row, new.token_ids, new.num_prompt_tokens, new.cache_salt)
            except Exception:
                _logger.exception("the drafter failed; row %d goes on without drafts", new.row)

    def propose(self, step: DraftStep) -> dict[int, Draft]:
        """Row -> what the drafter proposes for it; rows for which it fails are left out."""
        proposals: dict[int, Draft] = {}
        for row, limit in step.limits.items():
            history = self._rows.history(row)
            try:
                if self._remembering is not None:
                    proposals[row] = Draft(self._remembering.propose(row, history, limit)[:limit])
                else:
                    proposals[row] = Draft(self._forgetting.propose(history, limit)[:limit])
            except Exception:
                # A guess that fails costs speed, never an answer.
                _logger.exception("the drafter failed; row %d goes on without drafts", row)
        return proposals
