"""What serves on NVIDIA's GPUs serves on AMD's, or says why not: op by op, and the attention backends by name."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from quire_attention import select_attention_backend
from quire_interfaces import ConfigError
from quire_kernels_cuda import availability
from quire_kernels_cuda.ops import backends as cuda_backends
from quire_kernels_cuda.ops import op_backends
from quire_kernels_cuda.platform import NVIDIA
from quire_kernels_rocm.ops import backends
from quire_kernels_rocm.platform import AMD, AMD_RELATIVES, AMD_TARGETS, target_name
from quire_ops import OpRequest, op_report, ops

FP8 = {"fp8_linear": "does not multiply 8-bit floats of this kind"}
LATENT = dict.fromkeys(("latent_attention", "sparse_latent_attention"), "rows do not fit into the registers")
REFUSED = {
    "gfx90a": FP8,
    "gfx942": FP8,
    "gfx950": {},
    "gfx1100": FP8 | LATENT,
    "gfx1101": FP8 | LATENT,
    "gfx1102": FP8 | LATENT,
    "gfx1200": LATENT,
    "gfx1201": LATENT,
}
FACTS = (
    "dtypes",
    "sizes",
    "cache_dtypes",
    "features",
    "batch_invariant",
    "device_lengths",
    "trees",
    "priority",
    "devices",
)
COUNTERPARTS = {"triton": "triton-rocm", "sdpa": "sdpa-rocm", "flashinfer": None, "flash-attn": None}
"""Attention backends on NVIDIA's GPUs -> those on AMD's; None for libraries that are for NVIDIA's."""


@pytest.mark.parametrize("name", REFUSED)
def test_every_op_is_served_or_refused_with_a_reason(name: str) -> None:
    target = {**AMD_TARGETS, **AMD_RELATIVES}[name]
    assert target_name(name) in AMD_TARGETS
    theirs = {each.op.name: each for each in op_backends("triton", NVIDIA, None, target=NVIDIA.targets["sm_90"])}
    ours = {each.op.name: each for each in op_backends("triton-rocm", AMD, None, target=target)}
    assert all(each.unavailable is None for each in theirs.values())
    assert {op for op, each in ours.items() if each.unavailable} == set(REFUSED[name])
    for op, reason in REFUSED[name].items():
        assert reason in (ours[op].unavailable or "")
        with pytest.raises(ConfigError, match=reason):
            ours[op].function()
    for op, backend in theirs.items():
        assert [getattr(ours[op], fact) for fact in FACTS] == [getattr(backend, fact) for fact in FACTS], op


def test_every_target_is_accounted_for() -> None:
    assert set(REFUSED) == {*AMD_TARGETS, *AMD_RELATIVES}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU is not taken for another")
def test_attention_backends_of_nvidia_have_counterparts_or_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reasons are those of a machine whose torch is for AMD GPUs."""
    ours = {each.name for each in backends() if each.op is ops.paged_attention}
    theirs = {each.name for each in cuda_backends() if each.op is ops.paged_attention}
    assert theirs == set(COUNTERPARTS)
    assert ours == {name for name in COUNTERPARTS.values() if name is not None}
    for name in ours:  # an attention backend has writers of its own
        assert {each.op.name for each in backends() if each.name == name} >= {"write_kv_cache", "rope_and_write_kv"}
    rocm_availability = import_module("quire_kernels_rocm.availability")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "kernels are in quire-kernels-rocm (triton-rocm)" in str(availability.unavailable.__wrapped__())
    assert rocm_availability.unavailable.__wrapped__() == "torch finds no AMD GPU"
    monkeypatch.setattr(torch.version, "hip", None)
    assert rocm_availability.unavailable.__wrapped__() == "this build of torch is not for AMD GPUs"


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted where there is no GPU")
@pytest.mark.parametrize("name", ["triton-rocm", "sdpa-rocm"])
def test_an_attention_backend_is_had_by_name(name: str) -> None:
    request = OpRequest(sizes={"head_dim": 32, "queries_per_kv_head": 2}, dtype=torch.bfloat16)
    assert select_attention_backend(request, name).backend.name == name


def test_the_report_says_why_amd_kernels_do_not_serve_here() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for choice in op_report(OpRequest(device=device, dtype=torch.bfloat16)):
        if choice.op in {each.op.name for each in backends()} and choice.backend != "triton-rocm":
            assert choice.refused["triton-rocm"]
