"""Experts against the reference: few and many tokens per expert, all activations, biases, int8, rows on their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire_ops import Experts, LinearWeights, OpBackend, OpRequest, op_table, ops
from quire_ops.block_formats import decode_blocks
from quire_ops.grouped import block_groups, pack_int4
from quire_testkit.random_blocks import random_blocks

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
"""Of the largest result."""

CASES = [
    (backend, dtype)
    for backend in op_table().backends(ops.fused_moe)
    for dtype in TOLERANCE
    if backend.name != "reference" and backend.refusal(OpRequest(dtype=dtype)) is None
]
INVARIANT = [case for case in CASES if case[0].batch_invariant]
each_backend = pytest.mark.parametrize(("backend", "dtype"), CASES, ids=[f"{b.name}-{d}" for b, d in CASES])


def make_experts(
    num: int, width: int, inner: int, dtype: torch.dtype, *, bias: bool = False, kind: str = "plain", act: str = "silu"
) -> Experts:
    def linear(outputs: int, inputs: int) -> LinearWeights:
        offset = torch.randn(outputs).to(dtype) if bias else None
        if kind in ("int8", "w8a8"):
            weight = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
            input_scale = torch.zeros(1) if kind == "w8a8" else None
            scale = (torch.rand(outputs) * 0.02 / inputs**0.5).to(dtype)
            return LinearWeights(weight, offset, scale, input_scale=input_scale)
        if kind == "int4":
            elements = torch.randint(-8, 8, (outputs, inputs), dtype=torch.int8)
            groups = (outputs, -(-inputs // 32))
            scale = block_groups((torch.rand(groups) * 0.3 / inputs**0.5).to(dtype))
            return LinearWeights(pack_int4(elements), offset, scale, block_groups(torch.randint(-8, 8, groups).short()))
        return LinearWeights((torch.randn(outputs, inputs) * inputs**-0.5).to(dtype), offset)

    return Experts(
        gate=tuple(linear(inner, width) for _ in range(num)),
        up=tuple(linear(inner, width) for _ in range(num)),
        down=tuple(linear(width, inner) for _ in range(num)),
        activation=act,
        limit=1.5,
    )


def make_step(tokens: int, width: int, num: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.stack([torch.randperm(num)[:k] for _ in range(tokens)]) if tokens else torch.empty(0, k).long()
    return torch.randn(tokens, width).to(dtype), ids, torch.rand(tokens, k)


def widened(experts: Experts) -> Experts:
    def wide(matrices: tuple[LinearWeights, ...]) -> tuple[LinearWeights, ...]:
        return tuple(
            LinearWeights(
                one.weight.double() if one.scale is None else one.weight,
                None if one.bias is None else one.bias.double(),
                None if one.scale is None else one.scale.double(),
                one.zero,
                one.input_scale,
            )
            for one in matrices
        )

    return Experts(
        gate=wide(experts.gate), up=wide(experts.up), down=wide(experts.down), activation=experts.activation,
        limit=experts.limit,
    )  # fmt: skip


def check(got: Tensor, expected: Tensor, dtype: torch.dtype, kind: str = "plain") -> None:
    assert got.dtype == dtype
    assert got.isfinite().all()
    # What experts have inside is rounded to the dtype before it is rounded to int8: it may end up one step away.
    steps = 1 / 127 if kind == "w8a8" and dtype != torch.float32 else 0.0
    assert (got.double() - expected).abs().max() <= (TOLERANCE[dtype] + steps) * expected.abs().max()


@each_backend
@pytest.mark.parametrize(("act", "bias"), [("silu", False), ("gelu", True), ("swigluoai", True)])
@pytest.mark.parametrize("kind", ["plain", "int8", "w8a8", "int4"])
@pytest.mark.parametrize(
    ("tokens", "num", "k", "width", "inner"),
    [(1, 8, 2, 64, 96), (5, 4, 4, 128, 64), (40, 3, 1, 70, 41), (70, 16, 3, 64, 48)],
)
def test_equals_reference(
    backend: OpBackend, dtype: torch.dtype, act: str, bias: bool, kind: str, tokens: int, num: int, k: int, width: int,
    inner: int,
) -> None:  # fmt: skip
    torch.manual_seed(tokens)
    experts = make_experts(num, width, inner, dtype, bias=bias, kind=kind, act=act)
    x, ids, weights = make_step(tokens, width, num, k, dtype)
    before = x.clone()
    run = backend.function(experts)
    expected = ops.fused_moe(widened(experts))(x.double(), ids, weights)
    for _ in range(2):
        check(run(x, ids, weights), expected, dtype, kind)
    assert torch.equal(x, before)


@each_backend
def test_experts_in_blocks_are_those_that_they_are_decoded_to(backend: OpBackend, dtype: torch.dtype) -> None:
    """With formats of all kinds side by side; to the bit where they are decoded, and not multiplied as they are."""
    torch.manual_seed(0)
    packed: dict[str, tuple[LinearWeights, ...]] = {}
    decoded: dict[str, tuple[LinearWeights, ...]] = {}
    for role, forms in (
        ("gate", ("MXFP4", "Q4_K", "Q6_K")),
        ("up", ("NVFP4", "Q5_K", "Q4_1")),
        ("down", ("Q5_0",) * 3),
    ):
        shape = (256, 512) if role != "down" else (512, 256)
        blocks = [random_blocks(form, *shape, seed=number) for number, form in enumerate(forms)]
        packed[role] = tuple(LinearWeights(weight, scale=header) for weight, header in blocks)
        decoded[role] = tuple(LinearWeights(decode_blocks(*each).to(dtype)) for each in blocks)
    x, ids, weights = make_step(21, 512, 3, 2, dtype)
    run = backend.function(Experts(**packed, activation="silu"))
    got = run(x * 0.1, ids, weights)
    if backend.name != "cpu" or dtype == torch.float32:
        assert torch.equal(got, backend.function(Experts(**decoded, activation="silu"))(x * 0.1, ids, weights))
    exact = {
        role: tuple(LinearWeights(decode_blocks(weight.weight, weight.scale).double()) for weight in of_role)
        for role, of_role in packed.items()
    }
    check(got, ops.fused_moe(Experts(**exact, activation="silu"))((x * 0.1).double(), ids, weights), dtype)
    assert got.abs().max() > 0


@each_backend
def test_no_tokens_and_uneven_shares(backend: OpBackend, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    experts = make_experts(6, 64, 64, dtype)
    run = backend.function(experts)
    assert run(*make_step(0, 64, 6, 2, dtype)).shape == (0, 64)
    x, _, weights = make_step(50, 64, 6, 2, dtype)
    ids = torch.tensor([[5, 0]]).repeat(50, 1)  # all tokens share two experts, four have none
    ids[7] = torch.tensor([2, 5])
    check(run(x, ids, weights), ops.fused_moe(widened(experts))(x.double(), ids, weights), dtype)


@each_backend
def test_an_expert_that_is_not_hit_is_not_read(backend: OpBackend, dtype: torch.dtype) -> None:
    experts = make_experts(5, 64, 64, dtype)
    for matrices in (experts.gate, experts.up, experts.down):
        matrices[3].weight.fill_(float("nan"))
    x, ids, weights = make_step(9, 64, 3, 2, dtype)  # experts 0 to 2 only
    assert backend.function(experts)(x, ids, weights).isfinite().all()


@pytest.mark.parametrize("kind", ["plain", "int8", "int4"])
@pytest.mark.parametrize(("backend", "dtype"), INVARIANT, ids=[f"{b.name}-{d}" for b, d in INVARIANT])
def test_a_row_depends_on_itself_alone(backend: OpBackend, dtype: torch.dtype, kind: str) -> None:
    torch.manual_seed(1)
    run = backend.function(make_experts(8, 128, 192, dtype, kind=kind))
    x, ids, weights = make_step(67, 128, 8, 3, dtype)
    together = run(x, ids, weights)
    for row in range(67):
        assert torch.equal(run(x[row : row + 1], ids[row : row + 1], weights[row : row + 1])[0], together[row])
    turned = torch.randperm(67)
    assert torch.equal(run(x[turned], ids[turned].flip(1), weights[turned].flip(1)), together[turned])
