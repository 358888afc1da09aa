"""Which AMD GPUs have kernels, and what the package says where there is none."""

from __future__ import annotations

import pytest
import torch

from quire_kernels_cuda.ops import SERVED
from quire_kernels_rocm.ops import backends
from quire_kernels_rocm.platform import AMD_TARGETS, target_name
from quire_ops import OpRequest, builtin_table, ops


@pytest.mark.parametrize(
    ("arch", "target"),
    [
        ("gfx942:sramecc+:xnack-", "gfx942"),
        ("gfx950", "gfx950"),
        ("gfx1101", "gfx1100"),
        ("gfx1200", "gfx1201"),
        ("gfx906", None),
        ("gfx1030", None),
        ("gfx11000", None),
    ],
)
def test_target_of_an_architecture(arch: str, target: str | None) -> None:
    assert target_name(arch) == target


def test_kernels_are_in_the_table_and_say_why_they_do_not_serve() -> None:
    table = builtin_table()
    for backend in backends():
        table.add(backend)
    assert {backend.op for backend in backends()} == {served.op for served in SERVED}
    if torch.version.hip is None and torch.cuda.is_available():
        assert all("not for AMD" in (backend.unavailable or "") for backend in backends())
    choice = table.report(ops.paged_attention, OpRequest(sizes={"head_dim": 512}))
    assert choice.backend == "torch"
    assert "triton-rocm" in choice.refused


def test_limits_are_those_of_the_generations() -> None:
    assert AMD_TARGETS["gfx950"].shared_memory_bytes > AMD_TARGETS["gfx942"].shared_memory_bytes
    assert {target.warp_size for target in AMD_TARGETS.values()} == {32, 64}
