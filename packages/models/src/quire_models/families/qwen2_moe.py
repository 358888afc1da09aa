"""Qwen1.5-MoE and Qwen2-MoE (Yang et al. 2024): Qwen2 with routed experts and one shared expert behind a gate; and
Qwen3-MoE (Yang et al. 2025): Qwen3 with routed experts and no shared one."""

from __future__ import annotations

from typing import Any

from quire_interfaces import CheckpointError, Fields
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes, expert_counts
from quire_models.families.qwen2 import qwen_windows
from quire_models.feed_forward_spec import Routing, SparseMoESpec
from quire_models.spec import NetworkSpec

__all__ = ["qwen_moe", "sparse_layers", "spec", "spec_of_qwen3_moe"]


def spec(config: Fields) -> NetworkSpec:
    """Biases on query, key and value; a shared expert beside the routed ones."""
    shared = config.integer("shared_expert_intermediate_size", default=5632, minimum=1)
    return _network(config, 1408, shared, qkv_bias=config.flag("qkv_bias", default=True))


def spec_of_qwen3_moe(config: Fields) -> NetworkSpec:
    """Heads are normalised; biases of the attention are an option."""
    return _network(config, 768, 0, bias=config.flag("attention_bias", default=False), has_norms=True)


def _network(config: Fields, inner: int, shared: int, *, has_norms: bool = False, **fields: Any) -> NetworkSpec:
    if config.get("num_experts") is None:
        config = config.named(num_experts="num_local_experts")  # as newer files name it
    sizes = decoder_sizes(config)
    moe = qwen_moe(config, sizes, inner=inner, shared=shared, renormalize=False)
    mlp, norms = sizes.gated_mlp(), sizes.head_norms() if has_norms else {}
    windows, sparse = qwen_windows(config, sizes.num_layers), sparse_layers(config, sizes.num_layers)
    return sizes.network(
        sizes.pre_norm(layer, sizes.attention(sliding_window=window, **fields, **norms), moe if sparse[layer] else mlp)
        for layer, window in enumerate(windows)
    )


def qwen_moe(config: Fields, sizes: DecoderSizes, *, inner: int, shared: int, renormalize: bool) -> SparseMoESpec:
    """The most probable experts, with a shared one behind a gate of one output.

    Args:
        inner: The class's default width within an expert; `renormalize` likewise of `norm_topk_prob`.
        shared: Width of the shared expert; 0 for none.
    """
    num_experts, per_token = expert_counts(config, "num_experts", "num_experts_per_tok")
    routing = Routing(
        top_k=per_token, scoring="softmax", renormalize=config.flag("norm_topk_prob", default=renormalize)
    )
    return sizes.moe(
        num_experts,
        config.integer("moe_intermediate_size", default=inner, minimum=1),
        routing,
        shared=sizes.gated_mlp("mlp.shared_expert", shared) if shared else None,
        shared_gate="shared_expert_gate" if shared else "",
    )


def sparse_layers(config: Fields, layers: int) -> tuple[bool, ...]:
    """Every `decoder_sparse_step`-th layer has experts, but none of `mlp_only_layers`."""
    step = config.integer("decoder_sparse_step", default=1, minimum=1)
    plain = config.get("mlp_only_layers") or []
    if not isinstance(plain, list) or any(type(layer) is not int for layer in plain):
        raise CheckpointError(f"{config.source}: mlp_only_layers must be a list of layers, is {plain!r}")
    return tuple((layer + 1) % step == 0 and layer not in plain for layer in range(layers))
