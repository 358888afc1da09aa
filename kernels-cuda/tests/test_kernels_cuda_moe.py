"""Experts against the reference: every form of weights and activation, experts with many tokens and with none."""

from __future__ import annotations

import pytest
import torch
from kernels_cuda_support import TOLERANCE, here, poison
from test_ops_fused_moe import make_experts, make_step, widened

from quire_interfaces import ConfigError
from quire_kernels_cuda.triton.moe import fused_moe
from quire_ops import Experts, LinearWeights, ops
from quire_ops.block_formats import block_header, in_planes
from quire_testkit.random_blocks import random_blocks

CASES = [
    # tokens, experts, experts per token, width, inner width, activation, form, bias, dtype
    (1, 8, 2, 64, 96, "silu", "plain", False, torch.bfloat16),
    (5, 4, 4, 128, 64, "gelu", "int8", True, torch.bfloat16),
    (40, 3, 1, 70, 41, "swigluoai", "plain", True, torch.float32),
    (20, 16, 3, 64, 48, "silu", "int4", True, torch.bfloat16),
    (9, 4, 2, 128, 64, "swigluoai", "int4", False, torch.float32),
    (3, 5, 5, 32, 32, "silu", "int8", False, torch.float32),
]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    torch.manual_seed(0)
    poison(monkeypatch)


def on_device(experts: Experts) -> Experts:
    def moved(layers):
        return tuple(here(layer) for layer in layers)

    return Experts(
        gate=moved(experts.gate), up=moved(experts.up), down=moved(experts.down), activation=experts.activation,
        limit=experts.limit,
    )  # fmt: skip


def check_experts(experts: Experts, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
    wanted = ops.fused_moe(widened(experts))(x.double(), ids, weights)
    placed = on_device(experts)
    got = fused_moe(placed)(here(x), here(ids), here(weights)).cpu()
    assert got.dtype == x.dtype
    assert got.isfinite().all()
    assert (got.double() - wanted).abs().max() <= TOLERANCE[x.dtype] * wanted.abs().max()


@pytest.mark.parametrize(("tokens", "num", "k", "width", "inner", "act", "kind", "bias", "dtype"), CASES)
def test_equals_reference(tokens, num, k, width, inner, act, kind, bias, dtype):
    experts = make_experts(num, width, inner, dtype, bias=bias, kind=kind, act=act)
    check_experts(experts, *make_step(tokens, width, num, k, dtype))


def test_uneven_shares_and_experts_that_are_not_hit():
    experts = make_experts(6, 64, 64, torch.bfloat16)
    for matrices in (experts.gate, experts.up, experts.down):
        matrices[3].weight.fill_(float("nan"))
    x, _, weights = make_step(70, 64, 6, 2, torch.bfloat16)
    ids = torch.tensor([[5, 0]]).repeat(70, 1)  # more than a tile for two experts, three have none
    ids[7] = torch.tensor([2, 5])
    check_experts(experts, x, ids, weights)


def test_no_tokens_and_no_such_activation():
    experts = make_experts(6, 64, 64, torch.bfloat16)
    placed = on_device(experts)
    assert fused_moe(placed)(*map(here, make_step(0, 64, 6, 2, torch.bfloat16))).shape == (0, 64)
    with pytest.raises(ConfigError, match="'tanh'; choose one of silu"):
        fused_moe(make_experts(2, 8, 8, torch.float32, act="tanh"))


def in_block_planes(form: str, outputs: int, inputs: int, seed: int) -> LinearWeights:
    weight, header = random_blocks(form, outputs, inputs, seed)
    constants = header[1:] if form == "NVFP4" else None
    return LinearWeights(in_planes(weight, form), scale=block_header(form, constants, planes=True))


@pytest.mark.parametrize(("form", "down"), [("NVFP4", "MXFP4"), ("Q4_K", "Q6_K")])
def test_experts_in_blocks(form, down):
    up = tuple(in_block_planes(form, 256, 256, seed) for seed in range(6))
    experts = Experts(
        gate=up[:3],
        up=up[3:],
        down=tuple(in_block_planes(down, 256, 256, seed) for seed in range(3)),
        activation="silu",
    )
    x, ids, weights = make_step(5, 256, 3, 2, torch.float32)
    wanted = ops.fused_moe(experts)(x, ids, weights)
    got = fused_moe(on_device(experts))(here(x), here(ids), here(weights)).cpu()
    assert (got - wanted).abs().max() <= TOLERANCE[torch.float32] * wanted.abs().max()


def test_experts_of_several_forms_are_refused():
    q4, q6 = (in_block_planes(form, 256, 256, 0) for form in ("Q4_K", "Q6_K"))
    with pytest.raises(ConfigError, match="one form of both"):
        fused_moe(on_device(Experts(gate=(q4,), up=(q6,), down=(q4,), activation="silu")))
    with pytest.raises(ConfigError, match="Q4_K and Q6_K; the kernel takes one form of a role"):
        fused_moe(on_device(Experts(gate=(q4, q6), up=(q4, q4), down=(q4, q4), activation="silu")))
