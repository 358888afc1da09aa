"""An encoder in one call: against the reference in float64, and with the same bits whatever else is read."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from test_kernels_cpu_decoder import _widened
from torch import Tensor

from quire_kernels_cpu.encoder import encoder_stack
from quire_ops import (
    EncoderAttentionWeights,
    EncoderLayerWeights,
    EncoderStack,
    GatedWeights,
    LinearWeights,
    MLPWeights,
    NormWeights,
    ops,
)
from quire_ops.encoder_stack import INPUT_GROUP
from quire_ops.grouped import block_groups

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 0.02, torch.float16: 3e-3}
"""Of the largest number of the result. Activations of plain bfloat16 weights are rounded before each product."""
LENS = [5, 1, 33, 130, 16, 17, 0, 64]
ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "bert": {},
    "modernbert": {"is_post_ln": False, "gated": True, "rotary": 16, "windows": (None, 3, 40), "biases": False},
    "nomic": {"gated": True, "rotary": 32, "activation": "silu"},
    "rms": {"is_post_ln": False, "norm": "rms", "activation": "relu2"},
    "odd sizes": {"hidden": 60, "heads": 3, "head_dim": 20, "inner": 100, "activation": "gelu"},
    "t5": {"is_post_ln": False, "norm": "rms", "activation": "relu", "biases": False, "max_distance": 20},
    "mpnet": {"max_distance": 3, "windows": (None, 30)},
    "eurobert": {"is_post_ln": False, "norm": "rms", "gated": True, "rotary": 32, "kv_heads": 1, "biases": False},
    "large": {"hidden": 320, "heads": 5, "head_dim": 64, "inner": 704},
}


class Maker:
    """Random layers of one dtype, with weights as they are, in int8, or in int8 in groups where inputs are rounded."""

    def __init__(self, dtype: torch.dtype, form: str = "plain") -> None:
        self.dtype, self.form = dtype, form

    def linear(self, outputs: int, inputs: int, *, bias: bool = True) -> LinearWeights:
        added = torch.randn(outputs).mul(0.3).to(self.dtype) if bias else None
        if self.form == "int8":
            scale = torch.rand(outputs).add(0.5).mul(inputs**-0.5 / 64).to(self.dtype)
            return LinearWeights(torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8), added, scale)
        if self.form == "rounded":
            scale = torch.rand(outputs, -(-inputs // INPUT_GROUP)).add(0.5).mul(inputs**-0.5 / 64).to(self.dtype)
            weight = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
            return LinearWeights(weight, added, block_groups(scale))
        return LinearWeights(torch.randn(outputs, inputs).mul(inputs**-0.5).to(self.dtype), added)

    def norm(self, kind: str, size: int) -> NormWeights:
        weight = torch.rand(size).add(0.5).to(self.dtype)
        bias = torch.randn(size).to(self.dtype) if kind == "layer" else None
        return NormWeights(kind=kind, weight=weight, bias=bias, eps=1e-5)

    def stack(
        self,
        *,
        hidden: int = 96,
        heads: int = 3,
        kv_heads: int | None = None,
        head_dim: int = 32,
        inner: int = 224,
        activation: str = "gelu_erf",
        gated: bool = False,
        is_post_ln: bool = True,
        norm: str = "layer",
        rotary: int = 0,
        windows: tuple[int | None, ...] = (None, None),
        biases: bool = True,
        max_distance: int | None = None,
    ) -> EncoderStack:
        width, kv_width = heads * head_dim, (kv_heads or heads) * head_dim

        def layer(index: int, window: int | None) -> EncoderLayerWeights:
            q, k, v = (self.linear(size, hidden, bias=biases) for size in (width, kv_width, kv_width))
            up, down = self.linear(inner, hidden, bias=biases), self.linear(hidden, inner, bias=biases)
            part: GatedWeights | MLPWeights = MLPWeights(up=up, down=down, activation=activation)
            if gated:
                part = GatedWeights(self.linear(inner, hidden, bias=biases), up, down, activation)
            return EncoderLayerWeights(
                attention=EncoderAttentionWeights(
                    q=q,
                    k=k,
                    v=v,
                    o=self.linear(hidden, width, bias=biases),
                    num_heads=heads,
                    scale=head_dim**-0.5,
                    bias=None if max_distance is None else torch.randn(heads, 2 * max_distance + 1).to(self.dtype),
                    sliding_window=window,
                    rotation=index % 2 if rotary else None,
                ),
                attention_norm=None if index == 0 and not is_post_ln else self.norm(norm, hidden),
                feed_forward=part,
                feed_forward_norm=self.norm(norm, hidden),
                is_post_ln=is_post_ln,
            )

        return EncoderStack(
            layers=tuple(layer(index, window) for index, window in enumerate(windows)),
            final_norm=None if is_post_ln else self.norm(norm, hidden),
            hidden_size=hidden,
            dtype=self.dtype,
            rotary_dim=rotary,
            rounds_inputs=self.form == "rounded",
        )


def rotations(stack: EncoderStack, lens: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Cosines and signed sines of two rotations."""
    if not stack.rotary_dim:
        return []
    positions = torch.cat([torch.arange(length) for length in lens])
    turns = []
    for base in (10000.0, 100.0):
        angles = positions[:, None] / base ** (torch.arange(0, stack.rotary_dim, 2) / stack.rotary_dim)
        cos, sin = angles.cos(), angles.sin()
        both = torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]
        turns.append((both[0].to(stack.dtype), both[1].to(stack.dtype)))
    return turns


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", ["plain", "int8"])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_it_computes_what_the_reference_does(arrangement: str, form: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    stack = Maker(dtype, form).stack(**ARRANGEMENTS[arrangement])
    x, turns = torch.randn(sum(LENS), stack.hidden_size).to(dtype), rotations(stack, LENS)
    wide_turns = [(cos.double(), sin.double()) for cos, sin in turns]
    expected = ops.encoder_stack(_widened(stack))(x.double(), LENS, wide_turns)
    hidden = encoder_stack(stack)(x, LENS, turns)
    assert hidden.dtype == dtype
    assert (hidden.double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.parametrize(
    ("form", "dtype"), [*itertools.product(("plain", "int8"), TOLERANCE), ("rounded", torch.float32)]
)
@pytest.mark.parametrize("arrangement", ["bert", "modernbert", "t5", "mpnet", "eurobert", "odd sizes"])
@pytest.mark.parametrize("repeats", [1, 4], ids=["together", "each thread its own texts"])
def test_neighbours_order_and_threads_change_no_bit(
    arrangement: str, form: str, dtype: torch.dtype, repeats: int
) -> None:
    torch.manual_seed(0)
    stack = Maker(dtype, form).stack(**ARRANGEMENTS[arrangement])
    run, lens = encoder_stack(stack), LENS * repeats
    x, turns = torch.randn(sum(lens), stack.hidden_size).to(dtype), rotations(stack, lens)
    together = run(x, lens, turns).split(lens)

    def alone(text: int) -> Tensor:
        begin = sum(lens[:text])
        span = slice(begin, begin + lens[text])
        return run(x[span], [lens[text]], [(cos[span], sin[span]) for cos, sin in turns])

    for text in range(len(lens)):
        assert torch.equal(alone(text), together[text]), f"text {text}"
    torch.set_num_threads(1)
    try:
        assert torch.equal(run(x, lens, turns), torch.cat(together))
    finally:
        torch.set_num_threads(2)


ODD_INPUTS: dict[str, Any] = {"hidden": 70, "heads": 2, "head_dim": 21, "inner": 131}
"""No size is a multiple of four."""


def _rounded_and_exact(stack: EncoderStack, x: Tensor, lens: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """What the kernel gives, what the reference gives in float64, and what that gives with inputs as they are."""
    turns = rotations(stack, lens)
    wide_turns = [(cos.double(), sin.double()) for cos, sin in turns]
    wide = _widened(stack)
    expected = ops.encoder_stack(wide)(x.double(), lens, wide_turns)
    exact = ops.encoder_stack(dataclasses.replace(wide, rounds_inputs=False))(x.double(), lens, wide_turns)
    return encoder_stack(stack)(x, lens, turns).double(), expected, exact


@pytest.mark.parametrize("arrangement", [*ARRANGEMENTS, "odd inputs"])
def test_inputs_are_rounded_as_the_reference_rounds_them(arrangement: str) -> None:
    """In one layer of texts of one token, where a number in the middle of two steps costs its own token alone: some
    hundred numbers of each are rounded, and one in ten thousand is as near to the middle as float32 is exact."""
    torch.manual_seed(0)
    windows = ARRANGEMENTS.get(arrangement, {}).get("windows", (None,))[:1]
    stack = Maker(torch.float32, "rounded").stack(**ARRANGEMENTS.get(arrangement, ODD_INPUTS) | {"windows": windows})
    x = torch.randn(70, stack.hidden_size)
    x[:, 3] *= 30  # which costs its own group alone
    hidden, expected, exact = _rounded_and_exact(stack, x, [1] * len(x))
    is_equal = ((hidden - expected).abs() <= TOLERANCE[torch.float32] * expected.abs().max()).all(dim=1)
    assert is_equal.float().mean() >= 0.8
    assert ((exact - expected).abs() > TOLERANCE[torch.float32] * expected.abs().max()).any(dim=1).all()


@pytest.mark.parametrize(
    ("arrangement", "dtype"),
    [
        *itertools.product((*ARRANGEMENTS, "odd inputs"), [torch.float32]),
        ("bert", torch.bfloat16),
        ("bert", torch.float16),
    ],
)
def test_rounded_inputs_cost_what_they_cost_the_reference(arrangement: str, dtype: torch.dtype) -> None:
    """In networks where tokens meet, one number that is rounded the other way changes what others are rounded to: what
    is compared is the distance to inputs as they are."""
    torch.manual_seed(0)
    stack = Maker(dtype, "rounded").stack(**ARRANGEMENTS.get(arrangement, ODD_INPUTS))
    x = torch.randn(sum(LENS), stack.hidden_size).to(dtype)
    hidden, expected, exact = _rounded_and_exact(stack, x, LENS)
    cost, rounding = (hidden - exact).norm(), (expected - exact).norm()
    of_dtype = (exact.to(dtype).double() - exact).norm()
    assert 0.9 * rounding <= cost <= 1.1 * rounding + of_dtype


def test_inputs_beyond_numbers_spoil_their_own_token_alone() -> None:
    torch.manual_seed(0)
    stack = Maker(torch.float32, "rounded").stack(windows=(None,))
    x = torch.randn(6, 96)
    x[1], x[2] = 0.0, 3e-40
    run = encoder_stack(stack)
    hidden = run(x, [1] * 6, [])
    assert hidden.isfinite().all()
    for number in (float("inf"), float("-inf"), float("nan")):
        x[4, 70] = number
        broken = run(x, [1] * 6, [])
        assert broken[4].isnan().all()
        assert torch.equal(broken[[0, 1, 2, 3, 5]], hidden[[0, 1, 2, 3, 5]])
    (layer,) = stack.layers
    assert isinstance(layer.feed_forward, MLPWeights)
    bias = layer.feed_forward.up.bias
    assert bias is not None
    bias[7] = float("nan")  # between two products, where nothing else carries it on
    assert encoder_stack(stack)(torch.randn(6, 96), [1] * 6, []).isnan().all()


def test_a_long_text_is_computed_in_chunks() -> None:
    torch.manual_seed(0)
    stack = Maker(torch.float32).stack(**ARRANGEMENTS["modernbert"])
    lens = [1100, 3]
    x, turns = torch.randn(sum(lens), stack.hidden_size), rotations(stack, lens)
    expected = ops.encoder_stack(_widened(stack))(
        x.double(), lens, [(cos.double(), sin.double()) for cos, sin in turns]
    )
    hidden = encoder_stack(stack)(x, lens, turns)
    assert (hidden.double() - expected).abs().max() <= 2e-6 * expected.abs().max()
    short = [(cos[1100:], sin[1100:]) for cos, sin in turns]
    assert torch.equal(encoder_stack(stack)(x[1100:], [3], short), hidden[1100:])


def test_no_text_at_all() -> None:
    stack = Maker(torch.float32).stack()
    assert encoder_stack(stack)(torch.empty(0, 96), [], []).shape == (0, 96)


def test_what_is_no_number_stays_in_its_text() -> None:
    torch.manual_seed(0)
    stack = Maker(torch.float32).stack()
    x = torch.randn(12, 96)
    expected = encoder_stack(stack)(x, [5, 7], [])
    x[2] = float("nan")
    hidden = encoder_stack(stack)(x, [5, 7], [])
    assert hidden[:5].isnan().all()
    assert torch.equal(hidden[5:], expected[5:])
