"""gpt-oss (OpenAI 2025): attention with sinks, windows in every other layer, experts with a clipped gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from quire_interfaces import Fields
from quire_models.config_fields import layer_windows
from quire_models.decoder_sizes import decoder_sizes, expert_counts
from quire_models.feed_forward_spec import Routing, SparseMoESpec
from quire_models.spec import NetworkSpec

__all__ = ["GptOssMoESpec", "spec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GptOssMoESpec(SparseMoESpec):
    """Experts whose files have inputs first, and rows of gate and up by turns, or all of it in MXFP4."""

    built_by: ClassVar[str] = "quire_models.families.gpt_oss_layers:make_moe"


def spec(config: Fields) -> NetworkSpec:
    """Windows in every other layer, sinks in all; matrices have biases. The chosen experts are those of the largest
    logits; their weights are the softmax over these."""
    config.fixed("hidden_act", "silu")
    config.fixed("swiglu_alpha", 1.702)
    bias = config.flag("attention_bias", default=True)
    sizes = decoder_sizes(config, head_dim=64, theta=150000.0)
    num_experts, per_token = expert_counts(config, "num_local_experts", "num_experts_per_tok")
    moe = GptOssMoESpec(
        hidden_size=sizes.hidden_size,
        num_experts=num_experts,
        intermediate_size=sizes.intermediate_size,
        act="swigluoai",
        limit=config.number("swiglu_limit", default=7.0, above=0.0),
        routing=Routing(top_k=per_token, scoring="softmax_of_chosen"),
        router="router",
        router_bias=True,
        expert_bias=True,
        stacked=None,
    )
    windows = layer_windows(config, sizes.num_layers, default=tuple(layer % 2 == 0 for layer in sizes.layers))
    return sizes.network(
        sizes.pre_norm(layer, sizes.attention(bias=bias, sliding_window=window, sinks=True), moe)
        for layer, window in enumerate(windows)
    )
