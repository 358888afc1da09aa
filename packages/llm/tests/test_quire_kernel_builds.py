"""What ranks decide together about graphs, and what becomes of a start whose steps fail."""

from __future__ import annotations

from typing import Any

import pytest

from quire.kernel_builds import agreement_of, watch_kernels
from quire.parallel.rank_groups import RankGroups
from quire_distributed import Collectives, Mesh, run_thread_ranks


def answers(group: Collectives, **sizes: int) -> list[bool]:
    """To: yes on all, on rank 1 alone, on no rank."""
    agree = agreement_of(RankGroups.of(group, Mesh(rank=group.rank, **sizes)))
    assert agree is not None
    return [agree(True), agree(group.rank == 1), agree(False)]


def test_ranks_that_share_layers_do_what_all_can() -> None:
    assert run_thread_ranks(2, lambda group: answers(group, tp=2)) == [[True, False, False]] * 2


def test_stages_decide_for_themselves() -> None:
    each = run_thread_ranks(2, lambda group: answers(group, pp=2))
    assert each == [[True, False, False], [True, True, False]]
    assert agreement_of(None) is None


class OutOfMemory:
    """A runner whose steps need more memory than there is."""

    def warm_up(self, capture_s: float, agree: Any) -> None:
        raise MemoryError("out of memory")


def test_a_rank_whose_warm_up_fails_does_not_leave_the_others_waiting() -> None:
    runner: Any = OutOfMemory()
    watch_kernels(runner, 0.0, None)
    with pytest.raises(MemoryError):
        watch_kernels(runner, 0.0, lambda own: own)
