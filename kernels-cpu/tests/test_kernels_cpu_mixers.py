"""Every kind of layer in the one call: against the reference, and with the same bits however a prompt is cut."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels_cpu_steps import Layout
from test_kernels_cpu_decoder import TOLERANCE, _widened, angles
from torch import Tensor

from quire_kernels_cpu.decoder import decoder_stack
from quire_ops import (
    AttentionWeights,
    DecoderLayerWeights,
    DecoderStack,
    GatedDeltaWeights,
    GatedNormWeights,
    GatedWeights,
    LatentAttentionWeights,
    LinearWeights,
    Mamba2Weights,
    MixerWeights,
    MLPWeights,
    NormWeights,
    ShortConvWeights,
    ops,
)
from quire_ops.grouped import block_groups, pack_int4

HIDDEN, INNER, ROTARY = 64, 96, 16
States = tuple[tuple[int, ...], ...]
"""Shapes of what a mixer keeps of a sequence."""


class Maker:
    """Random weights of one dtype, matrices in one form."""

    def __init__(self, dtype: torch.dtype, form: str = "plain") -> None:
        self.dtype, self.form = dtype, form

    def linear(self, outputs: int, inputs: int = HIDDEN, *, bias: bool = False) -> LinearWeights:
        added = torch.randn(outputs).mul(0.3).to(self.dtype) if bias else None
        if self.form == "int4":
            scale = block_groups(torch.rand(outputs, -(-inputs // 32)).mul(0.3 * inputs**-0.5).to(self.dtype))
            return LinearWeights(pack_int4(torch.randint(-8, 8, (outputs, inputs), dtype=torch.int8)), added, scale)
        return LinearWeights(torch.randn(outputs, inputs).mul(inputs**-0.5).to(self.dtype), added)

    def vector(self, size: int) -> Tensor:
        return torch.rand(size).add(0.5).to(self.dtype)

    def norm(self, kind: str = "rms", size: int = HIDDEN) -> NormWeights:
        bias = torch.randn(size).to(self.dtype) if kind == "layer" else None
        return NormWeights(kind=kind, weight=self.vector(size), bias=bias, eps=1e-5)

    def taps(self, channels: int, count: int = 4) -> Tensor:
        return torch.randn(count, channels).mul(0.5).to(self.dtype).t()

    def attention(self, **options: Any) -> tuple[MixerWeights, States]:
        heads, kv_heads, dim = 4, 2, 32
        gated = options.get("gated", False)
        weights = AttentionWeights(
            q=self.linear(heads * dim * (2 if gated else 1), bias=True),
            k=self.linear(kv_heads * dim),
            v=self.linear(kv_heads * dim),
            o=self.linear(HIDDEN, heads * dim),
            head_dim=dim,
            q_norm=self.vector(dim),
            k_norm=self.vector(dim),
            norm_eps=1e-6,
            scale=dim**-0.5,
            **options,
        )
        return weights, ()

    def latent(self, *, q_rank: int | None = 40, **options: Any) -> tuple[MixerWeights, States]:
        heads, plain, rank, value = 3, 24, 48, 20
        queries = heads * (plain + ROTARY)
        query: dict[str, Any] = {"q_down": self.linear(queries)}
        if q_rank is not None:
            query = {
                "q_down": self.linear(q_rank),
                "q_norm": self.norm(size=q_rank),
                "q_up": self.linear(queries, q_rank),
            }
        weights = LatentAttentionWeights(
            **query,
            kv_down=self.linear(rank + ROTARY),
            kv_norm=self.norm(size=rank),
            key_up=torch.randn(heads, rank, plain).mul(plain**-0.5).to(self.dtype),
            value_up=torch.randn(heads, value, rank).mul(rank**-0.5).to(self.dtype),
            o=self.linear(HIDDEN, heads * value),
            scale=0.2,
            **options,
        )
        return weights, ()

    def mamba2(self, *, norm_groups: int = 1, before_gate: bool = False) -> tuple[MixerWeights, States]:
        heads, dim, groups, numbers, taps = 6, 16, 2, 20, 4
        inner, channels = heads * dim, heads * dim + 2 * groups * numbers
        weight = self.vector(inner) if norm_groups else None
        weights = Mamba2Weights(
            in_proj=self.linear(inner + channels + heads, bias=True),
            taps=self.taps(channels, taps),
            conv_bias=torch.randn(channels).to(self.dtype),
            a=-torch.rand(heads) - 0.5,
            d=torch.randn(heads),
            dt_bias=torch.randn(heads),
            dt_limit=(0.01, 2.0),
            head_dim=dim,
            num_groups=groups,
            state_size=numbers,
            norm=GatedNormWeights(weight=weight, groups=norm_groups or 1, before_gate=before_gate, eps=1e-5),
            out_proj=self.linear(HIDDEN, inner),
        )
        return weights, ((taps - 1, channels), (heads, dim, numbers))

    def gated_delta(self, *, by_key_head: bool) -> tuple[MixerWeights, States]:
        keys, values, key_dim, value_dim, taps = 2, 6, 24, 20, 4
        value_size, channels = values * value_dim, 2 * keys * key_dim + values * value_dim
        sizes = (channels + value_size, 2 * values) if by_key_head else (channels, value_size, values, values)
        weights = GatedDeltaWeights(
            in_proj=tuple(self.linear(size) for size in sizes),
            by_key_head=by_key_head,
            taps=self.taps(channels, taps),
            a_log=torch.randn(values),
            dt_bias=torch.randn(values),
            key_heads=keys,
            key_dim=key_dim,
            value_dim=value_dim,
            norm=GatedNormWeights(weight=self.vector(value_dim), before_gate=True, eps=1e-6),
            out_proj=self.linear(HIDDEN, value_size),
        )
        return weights, ((taps - 1, channels), (values, key_dim, value_dim))

    def short_conv(self) -> tuple[MixerWeights, States]:
        weights = ShortConvWeights(
            in_proj=self.linear(3 * HIDDEN, bias=True),
            taps=self.taps(HIDDEN, 3),
            conv_bias=torch.randn(HIDDEN).to(self.dtype),
            out_proj=self.linear(HIDDEN),
        )
        return weights, ((2, HIDDEN),)

    def gated(self) -> GatedWeights:
        return GatedWeights(self.linear(INNER), self.linear(INNER), self.linear(HIDDEN, INNER))

    def mlp(self, activation: str) -> MLPWeights:
        return MLPWeights(
            up=self.linear(INNER, bias=True), down=self.linear(HIDDEN, INNER, bias=True), activation=activation
        )


Mixer = Callable[[Maker], tuple[MixerWeights, States]]
MIXERS: dict[str, Mixer] = {
    "attention": lambda make: make.attention(),
    "gated attention": lambda make: make.attention(gated=True, rotates_in_steps=True),
    "alibi": lambda make: make.attention(rotation=None, alibi_slopes=torch.rand(4)),
    "latent": lambda make: make.latent(),
    "latent, queries whole": lambda make: make.latent(q_rank=None, interleaved=True),
    "mamba2": lambda make: make.mamba2(),
    "mamba2, groups": lambda make: make.mamba2(norm_groups=2, before_gate=True),
    "mamba2, no norm": lambda make: make.mamba2(norm_groups=0),
    "gated delta": lambda make: make.gated_delta(by_key_head=False),
    "gated delta by key head": lambda make: make.gated_delta(by_key_head=True),
    "short convolution": lambda make: make.short_conv(),
}


def make_stack(dtype: torch.dtype, mixer: str, form: str, *, rounds_steps: bool) -> tuple[DecoderStack, States]:
    """Layers of every arrangement around a mixer, and its states: sequential with RMS norms, parallel with layer norms,
    the mixer alone, a feed-forward network alone."""
    make = Maker(dtype, form)
    (first, states), (second, _), (third, _) = (MIXERS[mixer](make) for _ in range(3))
    layers = (
        DecoderLayerWeights(
            input_norm=make.norm(), mixer=first, cache=0, feed_forward_norm=make.norm(), feed_forward=make.gated()
        ),
        DecoderLayerWeights(
            input_norm=make.norm("layer"),
            mixer=second,
            cache=1,
            feed_forward_norm=make.norm("layer"),
            feed_forward=make.mlp("gelu_erf"),
            parallel=True,
        ),
        DecoderLayerWeights(input_norm=make.norm(), mixer=third, cache=2, feed_forward=None, residual_factor=0.7),
        DecoderLayerWeights(input_norm=None, mixer=None, feed_forward_norm=make.norm(), feed_forward=make.mlp("relu2")),
    )
    stack = DecoderStack(
        layers=layers,
        final_norm=make.norm("layer"),
        hidden_size=HIDDEN,
        dtype=dtype,
        rotary_dim=32 if isinstance(first, AttentionWeights) else ROTARY,
        rounds_steps=rounds_steps,
    )
    return stack, states


class Caches:
    """Of three layers, all in one group; what nobody has written holds NaN."""

    def __init__(self, stack: DecoderStack, states: States, num_blocks: int, block_size: int) -> None:
        mixer = stack.layers[0].mixer
        shape: tuple[int, ...] = (num_blocks, 2, 2, block_size, 32)
        if isinstance(mixer, LatentAttentionWeights):
            shape = (num_blocks, block_size, mixer.key_up.shape[1] + ROTARY)
        self.kv = tuple(torch.full(shape, torch.nan).to(stack.dtype) for _ in range(3))
        self.states = tuple(tuple(torch.full((num_blocks, *size), torch.nan) for size in states) for _ in range(3))

    def widened(self) -> tuple[tuple[Tensor, ...], tuple[tuple[Tensor, ...], ...]]:
        states = tuple(tuple(state.clone() for state in held) for held in self.states)
        return tuple(cache.double() for cache in self.kv), states


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", ["plain", "int4"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_prompts_and_the_steps_behind_them_equal_the_reference(mixer: str, form: str, dtype: torch.dtype) -> None:
    torch.manual_seed(len(mixer))
    stack, states = make_stack(dtype, mixer, form, rounds_steps=True)
    run, reference = decoder_stack(stack), ops.decoder_stack(_widened(stack))
    lengths = [21, 1, 9]
    whole = Layout(8, lengths, [length + 3 for length in lengths])
    caches = Caches(stack, states, whole.num_blocks, 8)
    wide_kv, wide_states = caches.widened()
    for step in range(4):
        queries = lengths if step == 0 else [1] * 3
        layout = Layout(8, queries, [length + step for length in lengths], whole.block_table)
        x = torch.randn(sum(queries), HIDDEN).to(dtype)
        turns = [angles(layout, stack.rotary_dim, dtype)]
        wide_turns = [(cos.double(), sin.double()) for cos, sin in turns]
        groups = (0, 0, 0)
        expected = reference(x.double(), wide_turns, [layout], groups, wide_kv, wide_states)
        got = run(x, turns, [layout], groups, caches.kv, caches.states)
        assert (got.double() - expected).abs().max() <= 2 * TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mixer", MIXERS)
def test_chunks_and_neighbours_change_no_bit(mixer: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    stack, states = make_stack(dtype, mixer, "plain", rounds_steps=False)
    run, lengths = decoder_stack(stack), [70, 1, 23]
    whole = Layout(16, lengths, lengths)
    together, alone = (Caches(stack, states, whole.num_blocks, 16) for _ in range(2))
    x = torch.randn(sum(lengths), HIDDEN).to(dtype)
    groups = (0, 0, 0)
    expected = run(x, [angles(whole, stack.rotary_dim, dtype)], [whole], groups, together.kv, together.states)
    for row, length in enumerate(lengths):
        begin, done = int(whole.query_start_loc[row]), 0
        while done < length:
            chunk = min(length - done, random.Random(done).choice([1, 1, 3, 17, 40]))
            layout = Layout(16, [chunk], [done + chunk], whole.block_table[row : row + 1].contiguous())
            part = slice(begin + done, begin + done + chunk)
            turns = [angles(layout, stack.rotary_dim, dtype)]
            got = run(x[part], turns, [layout], groups, alone.kv, alone.states)
            assert torch.equal(got, expected[part])
            done += chunk
