"""Grok 1 and 2 (xAI 2024, 2025): experts beside a dense network, soft caps of scores, routers and logits, and attention
whose softmax sharpens with the logarithm of the position (Nakanishi 2025, scalable softmax).

From the published configurations, and what other engines compute of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from quire_interfaces import CheckpointError, Fields
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes, expert_counts
from quire_models.feed_forward_spec import Routing, SparseMoESpec
from quire_models.mixer_spec import SelfAttentionSpec
from quire_models.spec import CheckpointNames, HeadSpec, LayerSpec, NetworkSpec, NormSpec, recast

__all__ = ["CappedRouterMoESpec", "TemperedAttentionSpec", "spec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TemperedAttentionSpec(SelfAttentionSpec):
    """Attention whose capped scores are multiplied, for queries at a position p > L, with log(p) / log(L)."""

    temperature_len: int
    """L."""
    built_by: ClassVar[str] = "quire_models.families.grok_layers:TemperedAttention"
    score_copies: ClassVar[int] = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CappedRouterMoESpec(SparseMoESpec):
    """Experts whose router's logits have a soft cap."""

    router_cap: float
    """c in logit -> c * tanh(logit / c)."""
    built_by: ClassVar[str] = "quire_models.families.grok_layers:CappedRouterMoE"


def spec(config: Fields) -> NetworkSpec:
    """Grok 2's names; Grok 1 says `num_experts` and `max_attn_value`, and has no dense network beside its experts.

    An RMS norm of (mlp(x) + experts(x)) / sqrt(2) is that of the sum with twice the epsilon. Probabilities of chosen
    experts are not divided by their sum; in Grok 1, too, which the norm behind them makes up for, but for its epsilon.
    Both networks have the tanh approximation of GELU, which the configurations do not say."""
    for name, *values in (("rope_type", "default"), ("sliding_window_size", -1, 0), ("global_attn_every_n", 1)):
        config.fixed(name, *values)
    config = config.with_default("num_local_experts", config.get("num_experts"))
    halves = config.flag("rope_rotate_half_dims", default=False)
    sizes = decoder_sizes(config, act="gelu_pytorch_tanh", acts={"gelu"}, eps=1e-5, partial=0.5 if halves else None)
    attention, residual = _attention(config, sizes), config.flag("residual_moe", default=False)
    moe = _moe(config, sizes, residual=residual)

    def norm(name: str, shrunk: bool = False) -> NormSpec:
        return sizes.rms_norm(name, eps=2 * sizes.eps if shrunk else sizes.eps)

    layers = (
        LayerSpec(
            name=f"model.layers.{layer}",
            mixers=(attention,),
            feed_forward=moe,
            input_norm=norm("pre_attn_norm"),
            attention_out_norm=norm("post_attn_norm"),
            feed_forward_norm=norm("pre_moe_norm"),
            feed_forward_out_norm=norm("post_moe_norm", shrunk=residual),
        )
        for layer in sizes.layers
    )
    return sizes.network(
        layers,
        embedding=sizes.embedding(factor=config.number("embedding_multiplier_scale", default=78.38367176906169)),
        head=HeadSpec(
            tied=sizes.tied,
            factor=config.number("output_multiplier_scale", default=0.5773502691896257),
            soft_cap=config.number("final_logit_softcapping", default=None, above=0.0),
        ),
        checkpoint=CheckpointNames(renamed=_GROK_1_NAMES),
    )


_GROK_1_NAMES = (
    (".attn.", ".self_attn."),
    (".moe_block.", ".block_sparse_moe."),
    (".linear.", ".w1."),
    (".linear_v.", ".w3."),
    (".linear_1.", ".w2."),
)


def _attention(config: Fields, sizes: DecoderSizes) -> SelfAttentionSpec:
    """Grok 1's `attn_output_multiplier` is the scale of its scores."""
    multiplier = config.number("attn_output_multiplier", default=1.0)
    if multiplier != 1.0 and not math.isclose(multiplier, sizes.head_dim**-0.5, rel_tol=1e-6):
        raise CheckpointError(
            f"{config.source}: attn_output_multiplier {multiplier} is not supported; supported: 1, and the scale of "
            f"scores of heads with {sizes.head_dim} dimensions, {sizes.head_dim**-0.5}"
        )
    named = config.with_default("attn_logit_softcapping", config.get("max_attn_value"))
    attention = sizes.attention(soft_cap=named.number("attn_logit_softcapping", default=30.0, above=0.0))
    length = config.integer("attn_temperature_len", default=None, minimum=2)
    if length is None or sizes.max_model_len <= length + 1:
        return attention
    return recast(TemperedAttentionSpec, attention, temperature_len=length)


def _moe(config: Fields, sizes: DecoderSizes, *, residual: bool) -> SparseMoESpec:
    num_experts, per_token = expert_counts(config, "num_local_experts", "num_experts_per_tok")
    inner = config.integer("moe_intermediate_size", default=sizes.intermediate_size, minimum=1)
    moe = sizes.moe(
        num_experts,
        inner,
        Routing(top_k=per_token, scoring="softmax"),
        name="block_sparse_moe",
        names=("w1", "w3", "w2"),
        stacked=None,
        shared=sizes.gated_mlp() if residual else None,
    )
    cap = config.number("router_logit_softcapping", default=30.0, above=0.0)
    return recast(CappedRouterMoESpec, moe, router_cap=cap)
