"""OLMoE (Muennighoff et al. 2024): many small experts; queries and keys are normalised over all heads at once. And
FlexOlmo (Shi et al. 2025): the layers of OLMo 2 with experts, which were trained apart from each other."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes, expert_counts
from quire_models.feed_forward_spec import Routing, SparseMoESpec
from quire_models.mixer_spec import SelfAttentionSpec
from quire_models.spec import NetworkSpec

__all__ = ["spec", "spec_of_flex_olmo"]


def spec(config: Fields) -> NetworkSpec:
    """Every layer has experts."""
    sizes, attention, moe = _parts(config, theta=10000.0)
    return sizes.network(sizes.pre_norm(layer, attention, moe) for layer in sizes.layers)


def spec_of_flex_olmo(config: Fields) -> NetworkSpec:
    """Norms stand behind the parts."""
    sizes, attention, moe = _parts(config, theta=500000.0)
    return sizes.network(sizes.post_norm(layer, attention, moe) for layer in sizes.layers)


def _parts(config: Fields, *, theta: float) -> tuple[DecoderSizes, SelfAttentionSpec, SparseMoESpec]:
    config.fixed("clip_qkv")
    bias = config.flag("attention_bias", default=False)
    sizes = decoder_sizes(config, theta=theta)
    num_experts, per_token = expert_counts(config, "num_experts", "num_experts_per_tok")
    renormalize = config.flag("norm_topk_prob", default=False)
    routing = Routing(top_k=per_token, scoring="softmax", renormalize=renormalize)
    moe = sizes.moe(num_experts, sizes.intermediate_size, routing)
    return sizes, sizes.attention(bias=bias, **sizes.projection_norms()), moe
