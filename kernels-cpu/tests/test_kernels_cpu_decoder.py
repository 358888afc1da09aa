"""The whole stack in one call against the reference made of ops, and its independence of how work is cut."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from kernels_cpu_steps import Layout
from torch import Tensor

from quire_kernels_cpu.decoder import decoder_stack
from quire_ops import (
    AttentionWeights,
    DecoderLayerWeights,
    DecoderStack,
    Experts,
    GatedWeights,
    LinearWeights,
    NormWeights,
    RoutedExperts,
    RoutingRule,
    ops,
)
from quire_ops.grouped import block_groups, pack_int4

HEADS, KV_HEADS, NUM_EXPERTS = 6, 2, 7
EPS = 1e-6
OF_LAYER = ("residual_factor", "parallel")
"""Options of a layer; others are of its attention."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.06, torch.float16: 8e-3}


def make_stack(
    dtype: torch.dtype,
    *,
    hidden: int = 64,
    inner: int = 160,
    head_dim: int = 32,
    qk_norm: bool = True,
    bias: bool = True,
    activation: str = "silu",
    windows: tuple[int | None, ...] = (None, 20, None),
    weights: str = "plain",
    experts: str | None = None,
    rule: RoutingRule | None = None,
    sinks: bool = False,
    shared: bool = False,
    rotary_dim: int | None = None,
    all_heads: bool = False,
    **options: Any,
) -> DecoderStack:
    """A random stack.

    Args:
        experts: How their weights are kept, where the first two layers have some; None for none.
        rule: How tokens choose; None: each takes all of them, which no rounding changes.
        shared: Beside experts there is a network that all tokens use, behind a gate where there are biases.
        all_heads: They have one norm.
        options: Other fields of each layer; of a norm whether it is there.
    """

    def linear(outputs: int, inputs: int, weights: str = weights) -> LinearWeights:
        added = torch.randn(outputs).mul(0.3).to(dtype) if bias else None
        if weights in ("int8", "w8a8"):
            weight = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
            scale = torch.rand(outputs).mul(0.03 * inputs**-0.5).to(dtype)
            input_scale = torch.zeros(1) if weights == "w8a8" else None
            return LinearWeights(weight, added, scale, input_scale=input_scale)
        scale = block_groups(torch.rand(outputs, -(-inputs // 64)).mul(0.3 * inputs**-0.5).to(dtype))
        if weights == "int4":
            weight = pack_int4(torch.randint(-8, 8, (outputs, inputs), dtype=torch.int8))
            zero = torch.randint(-2, 3, (outputs, -(-inputs // 64)), dtype=torch.int16)
            return LinearWeights(weight, added, scale, block_groups(zero))
        if weights == "fp8":
            return LinearWeights(torch.randn(outputs, inputs).mul(4).to(torch.float8_e4m3fn), added, scale)
        return LinearWeights(torch.randn(outputs, inputs).mul(inputs**-0.5).to(dtype), added)

    def vector(size: int) -> Tensor:
        return torch.rand(size).add(0.5).to(dtype)

    def norm() -> NormWeights:
        return NormWeights(weight=vector(hidden), eps=EPS)

    def gated(inner: int = inner) -> GatedWeights:
        return GatedWeights(linear(inner, hidden), linear(inner, hidden), linear(hidden, inner), activation)

    def routed(weights: str) -> RoutedExperts:
        chosen = rule or RoutingRule(top_k=NUM_EXPERTS, scoring="softmax_of_chosen")
        gate, up, down = (
            tuple(linear(*shape, weights) for _ in range(NUM_EXPERTS))
            for shape in ((96, hidden), (96, hidden), (hidden, 96))
        )
        return RoutedExperts(
            router=torch.randn(NUM_EXPERTS, hidden).mul(hidden**-0.5).to(dtype),
            router_bias=torch.randn(NUM_EXPERTS) if bias else None,
            choice_bias=torch.randn(NUM_EXPERTS) if chosen.scoring == "sigmoid" else None,
            rule=chosen,
            experts=Experts(
                gate=gate, up=up, down=down, activation="swigluoai" if bias else activation, limit=0.7 if bias else 0.0
            ),
            shared=gated(32) if shared else None,
            shared_gate=torch.randn(1, hidden).mul(hidden**-0.5).to(dtype) if shared and bias else None,
        )

    def of_layer() -> dict[str, Any]:
        there = {"input_norm": True, "feed_forward_norm": True, **options}
        names = ("input_norm", "attention_out_norm", "feed_forward_norm", "feed_forward_out_norm")
        norms = {name: norm() if there.get(name) else None for name in names}
        return norms | {name: value for name, value in options.items() if name in OF_LAYER}

    of_attention = {
        name: value for name, value in options.items() if not name.endswith("_norm") and name not in OF_LAYER
    }
    layers = tuple(
        DecoderLayerWeights(
            mixer=AttentionWeights(
                q_norm=vector(head_dim * (HEADS if all_heads else 1)) if qk_norm else None,
                k_norm=vector(head_dim * (KV_HEADS if all_heads else 1)) if qk_norm else None,
                norm_eps=EPS,
                head_dim=head_dim,
                q=linear(HEADS * head_dim, hidden),
                k=linear(KV_HEADS * head_dim, hidden),
                v=linear(KV_HEADS * head_dim, hidden),
                o=linear(hidden, HEADS * head_dim),
                sliding_window=window,
                sinks=torch.randn(HEADS).to(dtype) if sinks else None,
                **{"scale": head_dim**-0.5, **of_attention},
            ),
            cache=i,
            feed_forward=gated() if experts is None or i > 1 else routed(experts),
            **of_layer(),
        )
        for i, window in enumerate(windows)
    )
    return DecoderStack(
        layers=layers, final_norm=norm(), hidden_size=hidden, dtype=dtype, rotary_dim=rotary_dim or head_dim
    )


def head_dim_of(stack: DecoderStack) -> int:
    """Of the attention of all layers."""
    mixer = stack.layers[0].mixer
    assert isinstance(mixer, AttentionWeights)
    return mixer.head_dim


def angles(layout: Layout, head_dim: int, dtype: torch.dtype, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    positions = torch.cat([torch.arange(kv - q, kv) for q, kv in zip(layout.query_lens, layout.kv_lens, strict=True)])
    turns = positions[:, None] * base ** (-torch.arange(0, head_dim, 2) / head_dim)
    cos, sin = turns.cos(), turns.sin()
    return torch.cat([cos, cos], -1)[:, None].to(dtype), torch.cat([-sin, sin], -1)[:, None].to(dtype)


SHAPES = [
    {},
    {"hidden": 72, "inner": 100, "head_dim": 20, "qk_norm": False},
    {"activation": "gelu", "bias": False, "hidden": 96, "inner": 96, "head_dim": 64},
    {"weights": "int8", "inner": 192},
    {"weights": "int8", "hidden": 72, "inner": 100, "head_dim": 20},
    {"weights": "int4", "inner": 192},
    {"weights": "int4", "hidden": 72, "inner": 100, "head_dim": 20},
    {"weights": "fp8", "inner": 192},
    {"weights": "fp8", "hidden": 72, "inner": 100, "head_dim": 20},
    {"experts": "plain", "sinks": True},
    {"experts": "int4", "bias": False, "hidden": 72, "head_dim": 20},
    {"weights": "int8", "experts": "int8", "inner": 192},
    {"weights": "int4", "experts": "fp8", "inner": 192, "sinks": True},
    {"attention_out_norm": True, "feed_forward_out_norm": True, "soft_cap": 3.0, "rotation": 1, "scale": 0.4},
    {"input_norm": False, "feed_forward_norm": False, "attention_out_norm": True, "feed_forward_out_norm": True},
    {"input_norm": False, "feed_forward_norm": False, "hidden": 72, "inner": 100, "residual_factor": 0.3},
    {"rotary_dim": 12, "interleaved": True, "head_dim": 20, "hidden": 72, "attention_out_norm": True},
    {"all_heads": True, "rotary_dim": 16},
    {"all_heads": True, "hidden": 72, "inner": 100, "head_dim": 20, "input_norm": False, "attention_out_norm": True},
    {"rotation": None, "experts": "plain", "shared": True, "inner": 192, "residual_factor": 0.3},
    {
        "rotary_dim": 16,
        "norm_after_rotation": True,
        "experts": "int8",
        "shared": True,
        "weights": "int8",
        "bias": False,
    },
]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_a_mixed_step_equals_the_reference(dtype: torch.dtype, shape: dict[str, object], seed: int) -> None:
    torch.manual_seed(seed)
    chooser = random.Random(seed)
    stack = make_stack(dtype, **shape)  # type: ignore[arg-type]
    query_lens = [chooser.choice([1, 1, 5, 33]) for _ in range(chooser.choice([1, 5, 20]))]
    kv_lens = [count + chooser.choice([0, 3, 40, 200]) for count in query_lens]
    layouts = [Layout(chooser.choice([1, 7, 16]), query_lens, kv_lens) for _ in range(1)]
    groups = (0, 0, 0)
    caches = tuple(layouts[0].cache(KV_HEADS, head_dim_of(stack), dtype) for _ in stack.layers)
    expected_caches = tuple(cache.double() for cache in caches)
    wide = _widened(stack)
    x = torch.randn(sum(query_lens), stack.hidden_size).to(dtype)
    turns = [angles(layouts[0], stack.rotary_dim, dtype, base) for base in (10000.0, 100.0)]
    wide_turns = [(cos.double(), sin.double()) for cos, sin in turns]
    expected_taps = {layer: torch.empty_like(x, dtype=torch.float64) for layer in (0, 2, 3)}
    expected = ops.decoder_stack(wide)(x.double(), wide_turns, layouts, groups, expected_caches, taps=expected_taps)
    taps = {layer: torch.full_like(x, torch.nan) for layer in (0, 2, 3)}
    got = decoder_stack(stack)(x, turns, layouts, groups, caches, taps=taps)
    tolerance = TOLERANCE[dtype]
    assert got.dtype == dtype
    for layer, tap in taps.items():
        assert (tap.double() - expected_taps[layer]).abs().max() <= tolerance * expected_taps[layer].abs().max()
    assert (got.double() - expected).abs().max() <= tolerance * expected.abs().max()
    for cache, expected_cache in zip(caches, expected_caches, strict=True):
        written = expected_cache.isfinite()
        assert torch.equal(cache.isfinite(), written)
        assert (cache.double() - expected_cache)[written].abs().max() <= tolerance * expected_cache[written].abs().max()


RULES = [
    RoutingRule(top_k=2, scoring="softmax", renormalize=True),
    RoutingRule(top_k=3, scoring="sigmoid", renormalize=True, scale=2.5),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.scoring)
@pytest.mark.parametrize("seed", range(4))
def test_tokens_choose_their_experts_as_the_reference_does(rule: RoutingRule, seed: int) -> None:
    torch.manual_seed(seed)
    stack = make_stack(torch.float32, experts="plain", rule=rule)
    layout = Layout(16, [1, 30, 1, 4], [50, 30, 1, 9])
    caches = tuple(layout.cache(KV_HEADS, 32, torch.float32) for _ in stack.layers)
    wide_caches = tuple(cache.double() for cache in caches)
    x, (cos, sin) = torch.randn(36, 64), angles(layout, 32, torch.float32)
    wide = x.double(), [(cos.double(), sin.double())]
    expected = ops.decoder_stack(_widened(stack))(*wide, [layout], (0, 0, 0), wide_caches)
    got = decoder_stack(stack)(x, [(cos, sin)], [layout], (0, 0, 0), caches)
    assert (got.double() - expected).abs().max() <= 1e-5 * expected.abs().max()


def _widened(value: Any) -> Any:
    """A stack, or a part of one, in float64; matrices in another form keep it."""
    if isinstance(value, LinearWeights):
        weight = value.weight if value.scale is not None else value.weight.double()
        bias, scale = (None if part is None else part.double() for part in value[1:3])
        return LinearWeights(weight, bias, scale, value.zero)
    if isinstance(value, GatedWeights):
        return GatedWeights(*map(_widened, value))
    if isinstance(value, tuple):
        return tuple(map(_widened, value))
    if dataclasses.is_dataclass(value):
        return type(value)(**{each.name: _widened(getattr(value, each.name)) for each in dataclasses.fields(value)})
    if isinstance(value, torch.dtype):
        return torch.float64
    return value.double() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("weights", ["plain", "int8", "w8a8", "int4", "fp8"])
@pytest.mark.parametrize("routed", [False, True], ids=["dense", "experts"])
def test_chunks_and_neighbours_change_no_bit(dtype: torch.dtype, weights: str, routed: bool) -> None:
    torch.manual_seed(0)
    stack = make_stack(dtype, weights=weights, inner=192, experts=weights if routed else None, rule=RULES[0])
    run = decoder_stack(stack)
    lengths = [150, 1, 37]
    whole = Layout(16, lengths, lengths)
    xs = torch.randn(sum(lengths), 64).to(dtype)

    def fresh() -> tuple[Tensor, ...]:
        return tuple(torch.full((whole.num_blocks, 2, KV_HEADS, 16, 32), float("nan")).to(dtype) for _ in stack.layers)

    caches = fresh()
    together = run(xs, [angles(whole, 32, dtype)], [whole], (0, 0, 0), caches)
    again = fresh()
    for row, length in enumerate(lengths):
        begin, done = int(whole.query_start_loc[row]), 0
        while done < length:
            chunk = min(length - done, random.Random(done).choice([1, 1, 3, 17, 60]))
            alone = Layout(16, [chunk], [done + chunk], whole.block_table[row : row + 1].contiguous())
            rows = slice(begin + done, begin + done + chunk)
            got = run(xs[rows], [angles(alone, 32, dtype)], [alone], (0, 0, 0), again)
            assert torch.equal(got, together[rows])
            done += chunk
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(caches, again, strict=True))


def test_layers_may_read_different_block_tables() -> None:
    torch.manual_seed(1)
    stack = make_stack(torch.float32)
    layouts = [Layout(16, [1, 4], [50, 4]) for _ in range(2)]
    groups = (0, 1, 0)
    caches = tuple(layouts[group].cache(KV_HEADS, 32, torch.float32) for group in groups)
    expected_caches = tuple(cache.clone() for cache in caches)
    x, turns = torch.randn(5, 64), [angles(layouts[0], 32, torch.float32)]
    expected = ops.decoder_stack(stack)(x, turns, layouts, groups, expected_caches)
    got = decoder_stack(stack)(x, turns, layouts, groups, caches)
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
