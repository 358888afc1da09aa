"""Calls that stand for a tuned kernel's problem: ops on random tensors of the sizes and traits that it says.

On device "meta" the same calls only say what they would launch.

Shape legend: N rows, I inputs, O outputs, G groups of inputs; S sequences, L tokens of each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire_interfaces import FEW_TOKENS
from quire_kernels_cuda.platform import Platform
from quire_kernels_cuda.tuned import Problem
from quire_ops import Experts, LinearWeights, PagedLayout, QuantizedTokens, kv_cache_shape
from quire_ops.activation_quant import FP8_GROUP
from quire_ops.grouped import block_groups
from quire_ops.kv_cache_ops import torch_write_kv_cache

__all__ = ["CONTEXT", "make_call"]

CONTEXT = 4096
"""Tokens of each sequence of a decode that is measured, unless asked otherwise."""
TOP_K = 8


def make_call(
    problem: Problem, platform: Platform, device: torch.device, *, context: int = CONTEXT
) -> Callable[[], Tensor]:
    """What solves the problem, to be called as often as wanted.

    Args:
        context: Tokens of each sequence of a decode.
    """
    facts: dict[str, Any] = {**dict(problem.sizes), **dict(problem.traits)}
    facts |= {name: getattr(torch, value) for name, value in facts.items() if name.endswith("dtype")}
    return _MAKERS[problem.kernel](facts, platform, device, context)


def _random(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.randn(shape, device=device).to(dtype)


def _weights(outputs: int, inputs: int, facts: dict[str, Any], device: torch.device) -> LinearWeights:
    """A weight [O, I] of small numbers, in a form of `triton.matmul`, with zeros as a bias where there is one."""
    form, group, scale_dtype = facts["form"], facts["group"], facts["scale_dtype"]
    bias = torch.zeros(outputs, dtype=facts["dtype"], device=device) if facts.get("bias") else None
    if form == "plain":
        return LinearWeights(_random(outputs, inputs, dtype=facts["dtype"], device=device), bias)
    width = -(-inputs // 128) * 64 if form == "int4" else inputs
    # Any bits are numbers in these forms, but two of fp8; the sign is left out, which leaves one of them.
    bits = torch.randint(0, 120, (outputs, width), dtype=torch.uint8, device=device)
    weight = {"int4": bits, "int8": bits.view(torch.int8), "fp8": bits.view(torch.float8_e4m3fn)}[form]
    if not group:
        return LinearWeights(weight, bias, torch.full((outputs,), 0.01, dtype=scale_dtype, device=device))
    groups = (outputs, -(-inputs // group))
    scale = block_groups(torch.full(groups, 0.01, dtype=scale_dtype, device=device))
    zero = block_groups(torch.full(groups, 3, dtype=torch.int16, device=device)) if facts["zero"] else None
    return LinearWeights(weight, bias, scale, zero)


def _matmul(facts: dict[str, Any], platform: Platform, device: torch.device, context: int) -> Callable[[], Tensor]:
    from quire_kernels_cuda.triton.matmul import run_matmul

    x = _random(facts["rows"], facts["inputs"], dtype=facts["dtype"], device=device)
    weights = _weights(facts["outputs"], facts["inputs"], facts, device)
    return partial(
        run_matmul, x, weights.weight, form=facts["form"], scale=weights.scale, zero=weights.zero,
        out_dtype=facts["out_dtype"], platform=platform,
    )  # fmt: skip


def _skinny(facts: dict[str, Any], platform: Platform, device: torch.device, context: int) -> Callable[[], Tensor]:
    from quire_kernels_cuda.triton.linear import linear

    x = _random(facts["rows"], facts["inputs"], dtype=facts["dtype"], device=device)
    weight = _random(facts["outputs"], facts["inputs"], dtype=facts["dtype"], device=device)
    return partial(linear, x, weight, None, platform=platform)


def _gated(facts: dict[str, Any], platform: Platform, device: torch.device, context: int) -> Callable[[], Tensor]:
    from quire_kernels_cuda.triton.gated import gated_linear

    x = _random(facts["rows"], facts["inputs"], dtype=facts["dtype"], device=device)
    weight = _random(2 * facts["outputs"], facts["inputs"], dtype=facts["dtype"], device=device)
    return partial(gated_linear, x, weight, None, facts["activation"], platform=platform)


def _bytes(facts: dict[str, Any], platform: Platform, device: torch.device, context: int) -> Callable[[], Tensor]:
    from quire_kernels_cuda.triton.fp8 import fp8_linear
    from quire_kernels_cuda.triton.w8a8 import w8a8_linear

    inputs, outputs, dtype = facts["inputs"], facts["outputs"], facts["dtype"]
    rows = [_random(number, inputs, dtype=torch.float32, device=device) for number in (facts["rows"], outputs)]
    given = torch.zeros(1, device=device)
    if facts["form"] == "int8":
        numbers, weight = ((each * 30).clamp(-127, 127).to(torch.int8) for each in rows)
        tokens = QuantizedTokens(numbers, torch.full((facts["rows"],), 0.01, device=device), dtype)
        scale = torch.full((outputs,), 0.01, dtype=dtype, device=device)
        return partial(w8a8_linear, tokens, weight, scale, given, None, platform=platform)
    numbers, weight = (each.to(torch.float8_e4m3fn) for each in rows)
    groups = 1 if facts["form"] == "fp8" else inputs // FP8_GROUP
    steps, scale = (torch.full((len(each), groups), 0.01, device=device) for each in rows)
    tokens = QuantizedTokens(numbers, steps, dtype)
    return partial(fp8_linear, tokens, weight, scale, given, None, platform=platform)


def _layout(
    num_seqs: int, query_len: int, kv_len: int, block_size: int, device: torch.device
) -> tuple[PagedLayout, int]:
    """The layout, and how many blocks it has, the null block included."""
    blocks = -(-kv_len // block_size)
    num_blocks = 1 + num_seqs * blocks
    table = (1 + torch.randperm(num_seqs * blocks)).view(num_seqs, blocks)
    positions = torch.arange(kv_len)  # all slots, so that a cache can be filled by them
    slots = table[:, positions // block_size] * block_size + positions % block_size
    layout = PagedLayout(
        query_lens=[query_len] * num_seqs, kv_lens=[kv_len] * num_seqs, block_size=block_size,
        block_table=table.int().to(device), slot_mapping=slots.flatten().to(device),
        query_start_loc=(torch.arange(num_seqs + 1) * query_len).int().to(device),
        seq_lens=torch.full((num_seqs,), kv_len, dtype=torch.int32, device=device),
    )  # fmt: skip
    return layout, num_blocks


def _attention(
    facts: dict[str, Any], platform: Platform, device: torch.device, lens: tuple[int, int, int]
) -> Callable[[], Tensor]:
    """lens: sequences, tokens of each in the step, tokens of each in all."""
    from quire_kernels_cuda.triton.attention import paged_attention

    kv_heads, head_dim, dtype, cache_dtype = (
        facts[name] for name in ("kv_heads", "head_dim", "dtype", "cache_dtype")
    )  # fmt: skip
    num_heads = kv_heads * facts["queries_per_kv_head"]
    layout, num_blocks = _layout(*lens, facts["block_size"], device)
    row_size = {torch.int8: head_dim + 4, torch.uint8: head_dim // 2 + 4}.get(cache_dtype, head_dim)
    sizes = kv_cache_shape(num_blocks, facts["block_size"], kv_heads, row_size)
    cache = torch.zeros(sizes, dtype=cache_dtype, device=device)
    for slots in () if device.type == "meta" else layout.slot_mapping.split(1 << 16):
        key, value = (_random(len(slots), kv_heads, head_dim, dtype=dtype, device=device) for _ in range(2))
        torch_write_kv_cache(key, value, cache, slots)
    query = _random(lens[0] * lens[1], num_heads, head_dim, dtype=dtype, device=device)
    per_head = partial(torch.ones, num_heads, device=device)
    return partial(
        paged_attention, query, cache, layout, scale=head_dim**-0.5,
        sliding_window=facts["sliding_window"] or None, soft_cap=50.0 if facts["soft_cap"] else None,
        sinks=per_head() if facts["sinks"] else None, alibi_slopes=per_head() / 64 if facts["alibi"] else None,
        platform=platform,
    )  # fmt: skip


def _decode(facts: dict[str, Any], platform: Platform, device: torch.device, context: int) -> Callable[[], Tensor]:
    return _attention(facts, platform, device, (facts["sequences"], facts["tokens"], max(context, facts["tokens"])))


def _prefill(facts: dict[str, Any], platform: Platform, device: torch.device, context: int) -> Callable[[], Tensor]:
    tokens = max(facts["tokens"], FEW_TOKENS + 1)
    return _attention(facts, platform, device, (1, tokens, tokens))


def _moe(facts: dict[str, Any], platform: Platform, device: torch.device, context: int) -> Callable[[], Tensor]:
    from quire_kernels_cuda.triton.moe import fused_moe

    num_experts, top_k = facts["experts"], min(TOP_K, facts["experts"], facts["pairs"])
    tokens = facts["pairs"] // top_k

    def layers(outputs: int, inputs: int) -> tuple[LinearWeights, ...]:
        return tuple(_weights(outputs, inputs, facts, device) for _ in range(num_experts))

    inputs, inner = facts["inputs"], facts["inner"]
    experts = Experts(
        gate=layers(inner, inputs), up=layers(inner, inputs), down=layers(inputs, inner),
        activation=facts["activation"], limit=7.0,
    )  # fmt: skip
    x = _random(tokens, inputs, dtype=facts["dtype"], device=device)
    ids = torch.rand(tokens, num_experts, device=device).topk(top_k).indices
    weights = torch.full((tokens, top_k), 1 / top_k, device=device)
    return partial(fused_moe(experts, platform=platform), x, ids, weights)


_MAKERS: dict[str, Callable[[dict[str, Any], Platform, torch.device, int], Callable[[], Tensor]]] = {
    "decode_attention": _decode,
    "prefill_attention": _prefill,
    "matmul": _matmul,
    "skinny_matmul": _skinny,
    "gated_matmul": _gated,
    "byte_matmul": _bytes,
    "fused_moe": _moe,
}
