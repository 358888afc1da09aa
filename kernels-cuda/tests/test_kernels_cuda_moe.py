"""Experts against the reference: every form of weights and activation, experts with many tokens and with none."""

from __future__ import annotations

import pytest
import torch
from kernels_cuda_support import TOLERANCE, here, poison
from test_ops_fused_moe import make_experts, make_step, widened

from quire_interfaces import ConfigError
from quire_kernels_cuda.triton.moe import fused_moe
from quire_ops import Experts, ops

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
