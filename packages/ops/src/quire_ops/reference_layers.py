"""The mixers and feed-forward networks of a decoder layer by the references of the ops that they are made of.

Shape legend: T tokens of the step, Hq query heads, Hkv key-value heads, D head dimension, R rotated dimensions of a
head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_ops.activations import GATED_ACTIVATIONS, activation, sigmoid_and_mul, silu_and_mul
from quire_ops.attention_ops import paged_attention
from quire_ops.fused_moe import fused_moe
from quire_ops.kv_cache_ops import rotary_embedding, write_kv_cache
from quire_ops.latent_attention import latent_attention, write_latent_cache
from quire_ops.layer_weights import (
    AttentionWeights,
    CrossAttentionWeights,
    FeedForwardWeights,
    GatedDeltaWeights,
    GatedNormWeights,
    LatentAttentionWeights,
    Mamba2Weights,
    MixerWeights,
    MLPWeights,
    RoutedExperts,
    ShortConvWeights,
)
from quire_ops.layout import PagedLayout
from quire_ops.linear_ops import head_linear, linear, lm_head
from quire_ops.linear_weights import GatedWeights, LinearWeights, reference_linear
from quire_ops.lora import LoraTokens
from quire_ops.norms import rms_norm
from quire_ops.recurrent import causal_conv1d, gated_delta_rule, mamba2_scan
from quire_ops.routing import route_experts

__all__ = ["LayerStep", "reference_feed_forward", "reference_mixer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStep:
    """What a mixer gets of a step beside its inputs; see `RunDecoder`."""

    rotations: Sequence[tuple[Tensor, Tensor]]
    layout: PagedLayout
    kv_cache: Tensor
    states: tuple[Tensor, ...]
    lora: LoraTokens | None


def reference_mixer(x: Tensor, mixer: MixerWeights, step: LayerStep) -> Tensor:
    """x [T, hidden_size] -> the same; writes keys and values, or states."""
    if isinstance(mixer, AttentionWeights):
        return _attention(x, mixer, step)
    if isinstance(mixer, CrossAttentionWeights):
        return _cross_attention(x, mixer, step)
    if isinstance(mixer, LatentAttentionWeights):
        return _latent_attention(x, mixer, step)
    if isinstance(mixer, Mamba2Weights):
        return _mamba2(x, mixer, step)
    if isinstance(mixer, GatedDeltaWeights):
        return _gated_delta(x, mixer, step)
    return _short_conv(x, mixer, step)


def reference_feed_forward(x: Tensor, weights: FeedForwardWeights, lora: LoraTokens | None) -> Tensor:
    """x [T, hidden_size] -> the same."""
    if isinstance(weights, GatedWeights):
        act_and_mul = GATED_ACTIVATIONS[weights.activation]
        inner = act_and_mul(reference_linear(x, weights.gate, lora=lora), reference_linear(x, weights.up, lora=lora))
        return reference_linear(inner, weights.down, lora=lora)
    if isinstance(weights, MLPWeights):
        inner = _activated(reference_linear(x, weights.up, lora=lora), weights.activation)
        return reference_linear(inner, weights.down, lora=lora)
    return _experts(x, weights)


def _activated(x: Tensor, name: str) -> Tensor:
    if name in ("relu", "relu2"):
        positive = torch.relu(x)
        return positive if name == "relu" else positive.square()
    return activation(x, name)


def _experts(x: Tensor, weights: RoutedExperts) -> Tensor:
    logits = lm_head(x, weights.router)
    if weights.router_bias is not None:
        logits = logits + weights.router_bias
    chosen = route_experts(logits, weights.choice_bias, weights.rule)
    out = fused_moe(weights.experts)(x, *chosen)
    if weights.shared is None:
        return out
    shared = reference_feed_forward(x, weights.shared, None)
    if weights.shared_gate is not None:
        shared = sigmoid_and_mul(linear(x, weights.shared_gate, None), shared)
    return out + shared


def _attention(x: Tensor, weights: AttentionWeights, step: LayerStep) -> Tensor:
    def heads(matrix: LinearWeights) -> Tensor:
        """[T, H, D]."""
        return reference_linear(x, matrix, lora=step.lora).view(len(x), -1, weights.head_dim)

    def placed(heads: Tensor, norm: Tensor | None) -> Tensor:
        if weights.rotation is None:
            return _head_norm(heads, norm, weights.norm_eps)
        cos, sin = step.rotations[weights.rotation]
        if weights.norm_after_rotation:
            return _head_norm(_rotated(heads, cos, sin, weights.interleaved), norm, weights.norm_eps)
        return _rotated(_head_norm(heads, norm, weights.norm_eps), cos, sin, weights.interleaved)

    query, gate = heads(weights.q), None
    if weights.gated:
        query, gate = query.unflatten(1, (-1, 2)).unbind(2)
    query, key = placed(query, weights.q_norm), placed(heads(weights.k), weights.k_norm)
    write_kv_cache(key, heads(weights.v), step.kv_cache, step.layout.slot_mapping, weights.kv_scale)
    attended = paged_attention(
        query,
        step.kv_cache,
        step.layout,
        scale=weights.scale,
        soft_cap=weights.soft_cap,
        sliding_window=weights.sliding_window,
        sinks=weights.sinks,
        alibi_slopes=weights.alibi_slopes,
        kv_scale=weights.kv_scale,
        int8_products=weights.int8_products,
    ).flatten(1)
    if gate is not None:
        attended = sigmoid_and_mul(gate.flatten(1), attended)
    return reference_linear(attended, weights.o, lora=step.lora)


def _cross_attention(x: Tensor, weights: CrossAttentionWeights, step: LayerStep) -> Tensor:
    query = reference_linear(x, weights.q, lora=step.lora).view(len(x), -1, weights.head_dim)
    attended = paged_attention(
        query, step.kv_cache, step.layout, scale=weights.scale, kv_scale=weights.kv_scale
    )  # fmt: skip
    return reference_linear(attended.flatten(1), weights.o, lora=step.lora)


def _head_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [T, H, D], each head or all of them behind an RMS norm."""
    if weight is None:
        return x
    return rms_norm(x.reshape(len(x), -1, weight.shape[0]), weight, eps).view(x.shape)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [T, H, D], of which the first dimensions are rotated."""
    part, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    if interleaved:
        part = torch.cat((part[..., ::2], part[..., 1::2]), dim=-1)
    return torch.cat((rotary_embedding(part, cos, sin), rest), dim=-1)


def _latent_attention(x: Tensor, weights: LatentAttentionWeights, step: LayerStep) -> Tensor:
    heads, rank, plain = weights.key_up.shape
    cos, sin = step.rotations[weights.rotation]
    latent, key = reference_linear(x, weights.kv_down).split((rank, cos.shape[-1]), dim=-1)
    norm = weights.kv_norm
    assert norm.weight is not None
    key = _rotated(key[:, None], cos, sin, weights.interleaved)[:, 0]
    row = torch.cat((rms_norm(latent, norm.weight, norm.eps), key), dim=-1)
    write_latent_cache(row, step.kv_cache, step.layout.slot_mapping, rank)
    query = reference_linear(x, weights.q_down)
    if weights.q_up is not None and weights.q_norm is not None and weights.q_norm.weight is not None:
        query = reference_linear(rms_norm(query, weights.q_norm.weight, weights.q_norm.eps), weights.q_up)
    still, turned = query.view(len(x), heads, -1).split((plain, cos.shape[-1]), dim=-1)
    turned = _rotated(turned, cos, sin, weights.interleaved)
    query = torch.cat((head_linear(still, weights.key_up), turned), dim=-1)
    attended = latent_attention(query, step.kv_cache, step.layout, scale=weights.scale, rank=rank)
    return reference_linear(head_linear(attended, weights.value_up).flatten(1), weights.o)


def _gated_norm(x: Tensor, gate: Tensor, norm: GatedNormWeights) -> Tensor:
    """x and gate [..., size]."""
    if not norm.before_gate:
        x = silu_and_mul(gate, x)
    if norm.weight is not None:
        parts = x.unflatten(-1, (norm.groups, -1))
        ones = torch.ones_like(norm.weight[: parts.shape[-1]])
        x = rms_norm(parts, ones, norm.eps).flatten(-2) * norm.weight
    return silu_and_mul(gate, x) if norm.before_gate else x


def _mamba2(x: Tensor, weights: Mamba2Weights, step: LayerStep) -> Tensor:
    conv_state, state = step.states
    heads, group = len(weights.a), weights.num_groups * weights.state_size
    inner = heads * weights.head_dim
    gate, mixed, dt = reference_linear(x, weights.in_proj).split((inner, inner + 2 * group, heads), dim=-1)
    mixed = causal_conv1d(mixed, weights.taps, weights.conv_bias, conv_state, step.layout, activation="silu")
    values, b, c = mixed.split((inner, group, group), dim=-1)
    out = mamba2_scan(
        values.unflatten(-1, (heads, -1)),
        dt,
        weights.a,
        b.unflatten(-1, (weights.num_groups, -1)),
        c.unflatten(-1, (weights.num_groups, -1)),
        weights.d,
        weights.dt_bias,
        state,
        step.layout,
        dt_limit=weights.dt_limit,
    )
    return reference_linear(_gated_norm(out.flatten(1), gate, weights.norm), weights.out_proj)


def _gated_delta(x: Tensor, weights: GatedDeltaWeights, step: LayerStep) -> Tensor:
    conv_state, state = step.states
    keys, values = weights.key_heads, len(weights.a_log)
    per_key, key_size, value_size = values // keys, keys * weights.key_dim, values * weights.value_dim
    projected = [reference_linear(x, each) for each in weights.in_proj]
    if weights.by_key_head:
        inner = per_key * weights.value_dim
        whole = projected[0].unflatten(-1, (keys, -1)).split((weights.key_dim, weights.key_dim, inner, inner), dim=-1)
        *parts, gate = (part.flatten(1) for part in whole)
        mixed = torch.cat(parts, dim=-1)
        b, a = (part.flatten(1) for part in projected[1].unflatten(-1, (keys, -1)).split(per_key, dim=-1))
    else:
        mixed, gate, a, b = projected
    mixed = causal_conv1d(mixed, weights.taps, None, conv_state, step.layout, activation="silu")
    query, key, value = mixed.split((key_size, key_size, value_size), dim=-1)
    out = gated_delta_rule(
        query.unflatten(-1, (keys, -1)),
        key.unflatten(-1, (keys, -1)),
        value.unflatten(-1, (values, -1)),
        a,
        b,
        weights.a_log,
        weights.dt_bias,
        state,
        step.layout,
    )
    return reference_linear(_gated_norm(out, gate.view(out.shape), weights.norm).flatten(1), weights.out_proj)


def _short_conv(x: Tensor, weights: ShortConvWeights, step: LayerStep) -> Tensor:
    (conv_state,) = step.states
    b, c, inner = reference_linear(x, weights.in_proj).chunk(3, dim=-1)
    mixed = causal_conv1d(b * inner, weights.taps, weights.conv_bias, conv_state, step.layout)
    return reference_linear(c * mixed, weights.out_proj)
