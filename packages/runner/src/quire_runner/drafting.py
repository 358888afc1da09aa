"""Between a step and the next one's drafts: what the runner asks of drafters, and those that look at token ids only.

Knows rows and how a drafter of either seam is asked; does not know networks (`draft_network.py`), nor how drafts are
verified.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol, cast

from torch import Tensor

from quire_interfaces import Drafter, RequestDrafter, SchedulerOutput
from quire_runner.inputs import HostPlan
from quire_runner.rows import Rows
from quire_spec_decode import Draft

__all__ = ["DraftStep", "RowDrafter", "TextDrafting", "ask"]

_logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class DraftStep:
    """A step that has run, as drafters see it; the rows' `num_tokens` count what it sampled."""

    plan: HostPlan
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


def ask(drafting: RowDrafter, step: DraftStep, rows: Rows, vocab_size: int) -> dict[int, Draft]:
    """What `drafting` proposes, as far as it can be sampled; nothing where it fails."""
    try:
        proposals = drafting.propose(step)
    except Exception:
        _logger.exception("the drafter failed; this step's requests go on without drafts")
        return {}
    drafts: dict[int, Draft] = {}
    for row, draft in proposals.items():
        if draft.token_ids and max(draft.token_ids) >= vocab_size:  # a drafter's padding
            draft = draft.first(next(i for i, token in enumerate(draft.token_ids) if token >= vocab_size))
        if draft.parents is None and rows.grammars.is_used:
            draft = Draft(rows.grammars.follow(row, draft.token_ids))
        if draft.token_ids:
            drafts[row] = draft
    return drafts


class TextDrafting(RowDrafter):
    """Asks a `Drafter` or a `RequestDrafter`, row after row."""

    feature_layers: tuple[int, ...] = ()
    wants_hidden = False

    def __init__(self, drafter: Drafter | RequestDrafter, rows: Rows) -> None:
        self._rows = rows
        self._remembering = cast(RequestDrafter, drafter) if hasattr(drafter, "begin") else None
        self._forgetting = cast(Drafter, drafter)

    def begin(self, output: SchedulerOutput) -> None:
        """See `RowDrafter`."""
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
        """See `RowDrafter`."""
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
