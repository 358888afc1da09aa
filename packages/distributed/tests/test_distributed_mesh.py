"""The layout of ranks."""

from __future__ import annotations

import itertools

import pytest

from quire_distributed import MESH_AXES, Mesh
from quire_interfaces import ConfigError


def test_tensor_parallel_ranks_are_neighbours_then_stages_then_replicas() -> None:
    mesh = Mesh(tp=2, pp=2, dp=2, ep=4, dcp=2)
    assert mesh.world_size == 8
    assert mesh.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups("pp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.groups("dp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.groups("ep") == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert mesh.groups("dcp") == mesh.groups("tp")
    assert Mesh(tp=4, dcp=2).groups("dcp") == ((0, 1), (2, 3))
    assert Mesh(tp=4, ep=2).groups("ep") == ((0, 1), (2, 3))


def test_stages_know_their_place() -> None:
    stages = [Mesh(tp=2, pp=3, rank=rank) for rank in range(6)]
    assert [mesh.is_first_stage for mesh in stages] == [True, True, False, False, False, False]
    assert [mesh.is_last_stage for mesh in stages] == [False, False, False, False, True, True]


def test_every_rank_is_in_one_group_of_each_axis_at_its_own_number() -> None:
    for tp, pp, dp in itertools.product((1, 2, 3, 4), (1, 2, 3), (1, 2)):
        for ep, dcp in itertools.product((1, 2, tp, tp * dp), (1, 2, tp)):
            if (tp * dp) % ep or tp % dcp:
                continue
            mesh = Mesh(tp=tp, pp=pp, dp=dp, ep=ep, dcp=dcp)
            for axis in MESH_AXES:
                groups = mesh.groups(axis)
                assert sorted(itertools.chain(*groups)) == list(range(mesh.world_size))
                for group in groups:
                    assert len(group) == getattr(mesh, axis)
                    for number, rank in enumerate(group):
                        assert mesh.at(rank).group(axis) == group
                        assert mesh.at(rank).group_rank(axis) == number


@pytest.mark.parametrize(
    ("sizes", "field"),
    [
        ({"tp": 0}, "tp"),
        ({"pp": -1}, "pp"),
        ({"tp": 2, "rank": 2}, "rank"),
        ({"rank": -1}, "rank"),
        ({"tp": 4, "dcp": 3}, "dcp"),
        ({"tp": 2, "dp": 2, "ep": 3}, "ep"),
    ],
)
def test_what_cannot_be_is_refused(sizes: dict[str, int], field: str) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        Mesh(**sizes)
    assert caught.value.field == field
