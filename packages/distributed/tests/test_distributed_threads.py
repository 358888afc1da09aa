"""Groups of threads: results by rank, and the end of all where one fails."""

from __future__ import annotations

import pytest
import torch

from quire_distributed import Collectives, Mesh, SingleRank, run_thread_ranks, subgroup, thread_group
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


def test_some_ranks_have_a_group_of_their_own() -> None:
    """Two tensor parallel groups of two ranks, and the stages across them."""

    def run(world: Collectives) -> tuple[list[int], list[int]]:
        mesh = Mesh(tp=2, pp=2, rank=world.rank)
        groups = [subgroup(world, mesh.group(axis)) for axis in ("tp", "pp")]
        own = torch.tensor([world.rank])
        tp, pp = (group.all_gather(own, dim=0).tolist() for group in groups)
        assert [group.rank for group in groups] == [mesh.tp_rank, mesh.pp_rank]
        return tp, pp

    assert run_thread_ranks(4, run) == [([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], [0, 2]), ([2, 3], [1, 3])]
