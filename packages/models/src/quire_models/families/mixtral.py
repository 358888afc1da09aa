"""Mixtral (Jiang et al. 2024): Mistral with experts in the place of every feed-forward network."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.config_fields import layer_windows
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes, expert_counts
from quire_models.feed_forward_spec import Routing, SparseMoESpec, StackedExperts
from quire_models.spec import NetworkSpec

__all__ = ["mixtral_moe", "spec"]


def spec(config: Fields) -> NetworkSpec:
    """Every layer has experts, which are as wide as Mistral's feed-forward network."""
    sizes = decoder_sizes(config, theta=1e6)
    moe, windows = mixtral_moe(config, sizes), layer_windows(config, sizes.num_layers)
    return sizes.network(
        sizes.pre_norm(layer, sizes.attention(sliding_window=window), moe) for layer, window in enumerate(windows)
    )


def mixtral_moe(config: Fields, sizes: DecoderSizes) -> SparseMoESpec:
    """The two most probable experts of eight, their probabilities made to sum to one. Files keep experts one by one, or
    stacked under other names."""
    num_experts, per_token = expert_counts(config, "num_local_experts", "num_experts_per_tok")
    return sizes.moe(
        num_experts,
        sizes.intermediate_size,
        Routing(top_k=per_token, scoring="softmax", renormalize=True),
        name="block_sparse_moe",
        names=("w1", "w3", "w2"),
        stacked=StackedExperts(at="mlp", router="gate.weight"),
    )
