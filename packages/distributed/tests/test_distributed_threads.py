"""Groups of threads: results by rank, and the end of all where one fails."""

from __future__ import annotations

import pytest
import torch

from quire_distributed import Collectives, SingleRank, run_thread_ranks, thread_group
from quire_interfaces import RankDeadError


def test_results_are_by_rank() -> None:
    assert run_thread_ranks(3, lambda each: (each.rank, each.size)) == [(0, 3), (1, 3), (2, 3)]
    assert run_thread_ranks(1, lambda each: isinstance(each, SingleRank)) == [True]


def test_a_group_has_ranks() -> None:
    with pytest.raises(ValueError, match="size is 0"):
        thread_group(0)


def test_a_rank_that_raises_ends_the_others_and_its_error_is_raised() -> None:
    errors: list[RankDeadError] = []

    def fail_on_rank_1(each: Collectives) -> None:
        if each.rank == 1:
            raise KeyError("weights")
        try:
            each.barrier()
        except RankDeadError as error:
            errors.append(error)
            raise

    with pytest.raises(KeyError, match="weights"):
        run_thread_ranks(3, fail_on_rank_1)
    assert [(error.rank, error.cause) for error in errors] == [(1, "it raised KeyError: 'weights'")] * 2


def test_ranks_that_disagree_on_a_shape_say_so() -> None:
    def disagree(each: Collectives) -> None:
        each.all_reduce(torch.zeros(2 + each.rank))

    with pytest.raises(ValueError, match=r"sent torch.float32 of shape \(\d,\); rank \d expects"):
        run_thread_ranks(2, disagree)
