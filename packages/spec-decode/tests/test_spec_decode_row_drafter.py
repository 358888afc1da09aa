"""Drafters of text, row after row: what they are asked, and that one that fails costs drafts and nothing else."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from quire_interfaces import NewRow, SamplingParams, SchedulerOutput
from quire_ops import RowTable
from quire_spec_decode import NgramDrafter, SuffixDrafter
from quire_spec_decode.row_drafter import DraftStep, RowBlocks, TextDrafting


class TextRows:
    """Rows of a runner that hold token ids and nothing else (a `DraftRows`)."""

    def __init__(self, num_rows: int, max_tokens: int = 64) -> None:
        self.token_ids = torch.zeros((num_rows, max_tokens), dtype=torch.int32)
        self.num_tokens = np.zeros(num_rows, dtype=np.int64)
        self.block_tables: Sequence[RowBlocks] = ()
        self.row_tables: tuple[RowTable, ...] = ()
        self.failed: set[int] = set()

    def append(self, row: int, token_ids: Sequence[int]) -> None:
        start = int(self.num_tokens[row])
        self.token_ids[row, start : start + len(token_ids)] = torch.tensor(token_ids, dtype=torch.int32)
        self.num_tokens[row] += len(token_ids)

    def history(self, row: int) -> array[int]:
        return array("i", self.token_ids[row, : self.num_tokens[row]].tolist())

    def write_next(self, rows: NDArray[np.int64], positions: NDArray[np.int64], token_ids: torch.Tensor) -> None:
        self.token_ids[rows, positions + 1] = token_ids.int()


class Layout:
    """A step without tokens of its own: drafters of text do not look at it."""

    def __init__(self) -> None:
        self.rows = self.start = self.ends = self.query_start_loc = np.zeros(0, dtype=np.int64)
        self.kept: dict[int, list[int]] = {}


def step_output(new: dict[int, list[int]], freed: Sequence[int] = ()) -> SchedulerOutput:
    """The plan of a step in which rows are filled and freed."""
    output = SchedulerOutput(
        step_id=0, rows=[], request_ids=[], num_computed_tokens=[], num_scheduled_tokens=[], samples=[]
    )
    output.freed_rows = list(freed)
    output.new_rows = [
        NewRow(
            row=row,
            request_id=f"r{row}",
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            num_computed_tokens=0,
            block_ids=(),
            sampling_params=SamplingParams(),
            seed=0,
        )
        for row, token_ids in new.items()
    ]
    return output


def fill(rows: TextRows, drafting: TextDrafting, new: dict[int, list[int]], freed: Sequence[int] = ()) -> None:
    """Free and fill rows, as a runner does at the beginning of a step."""
    drafting.begin(step_output(new, freed))
    for row in [*freed, *new]:
        rows.num_tokens[row] = 0
    for row, token_ids in new.items():
        rows.append(row, token_ids)


def proposals(drafting: TextDrafting, limits: dict[int, int]) -> dict[int, list[int]]:
    return {row: draft.token_ids for row, draft in drafting.propose(DraftStep(plan=Layout(), limits=limits)).items()}


REPEATING = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]


def test_each_row_is_drafted_from_its_own_tokens_up_to_its_limit() -> None:
    rows = TextRows(3)
    drafting = TextDrafting(NgramDrafter(), rows)
    fill(rows, drafting, {0: REPEATING, 1: [9, 8, 7, 9, 8], 2: [5, 6]})
    assert proposals(drafting, {0: 3, 1: 1, 2: 4}) == {0: [3, 4, 1], 1: [7], 2: []}
    assert proposals(drafting, {1: 2}) == {1: [7, 9]}


def test_a_row_that_is_filled_anew_has_nothing_of_the_request_before() -> None:
    rows = TextRows(1)
    drafting = TextDrafting(SuffixDrafter(max_cached_requests=0), rows)
    fill(rows, drafting, {0: REPEATING})
    assert proposals(drafting, {0: 2}) == {0: [3, 4]}
    fill(rows, drafting, {0: [7, 1, 2]}, freed=[0])
    assert proposals(drafting, {0: 2}) == {0: []}


def test_a_request_that_is_cancelled_midway_leaves_its_output_to_others() -> None:
    rows = TextRows(2)
    drafting = TextDrafting(SuffixDrafter(), rows)
    fill(rows, drafting, {0: [50, 51]})
    rows.append(0, [1, 2, 3, 4])
    proposals(drafting, {0: 1})
    fill(rows, drafting, {1: [60, 1, 2]}, freed=[0])
    assert proposals(drafting, {1: 4}) == {1: [3, 4]}


class Moody:
    """A drafter that proposes the last token again, and raises where that is in `bad`."""

    def __init__(self, bad: set[int]) -> None:
        self.bad = bad

    def propose(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        if token_ids[-1] in self.bad:
            raise RuntimeError("not in the mood")
        return [token_ids[-1]] * (max_tokens + 2)  # more than it may


class MoodyFromTheStart(Moody):
    """One that keeps state, and refuses to."""

    def begin(self, key: int, token_ids: Sequence[int], num_prompt_tokens: int, salt: str | None = None) -> None:
        if token_ids[-1] in self.bad:
            raise RuntimeError("not today")

    def end(self, key: int) -> None:
        pass

    def propose(self, key: int, token_ids: Sequence[int], max_tokens: int) -> list[int]:  # type: ignore[override]
        return super().propose(token_ids, max_tokens)


@pytest.mark.parametrize("kind", [Moody, MoodyFromTheStart])
@settings(max_examples=40)
@given(
    last=st.lists(st.integers(0, 5), min_size=1, max_size=5), bad=st.sets(st.integers(0, 5)), limit=st.integers(1, 4)
)
def test_rows_whose_drafter_fails_go_on_without(kind: type[Moody], last: list[int], bad: set[int], limit: int) -> None:
    logger = logging.getLogger("quire_spec_decode.row_drafter")
    logger.disabled = True  # it writes a traceback for each failure
    try:
        rows = TextRows(len(last))
        drafting = TextDrafting(kind(bad), rows)
        fill(rows, drafting, {row: [token] for row, token in enumerate(last)})
        drafts = proposals(drafting, dict.fromkeys(range(len(last)), limit))
    finally:
        logger.disabled = False
    assert drafts == {row: [token] * limit for row, token in enumerate(last) if token not in bad}


def test_a_failure_is_logged_with_its_row(caplog: pytest.LogCaptureFixture) -> None:
    rows = TextRows(4)
    drafting = TextDrafting(Moody({5}), rows)
    fill(rows, drafting, {3: [5]})
    assert proposals(drafting, {3: 1}) == {}
    assert "row 3 goes on without drafts" in caplog.text
    assert "not in the mood" in caplog.text
