"""Cohere's mixtures of experts (Cohere 2026): Cohere 2 with experts, chosen by logits, beside shared ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from quire_interfaces import Fields
from quire_models.config_fields import layer_kinds, layer_windows
from quire_models.decoder_sizes import DecoderSizes, expert_counts
from quire_models.families.cohere import cohere_parts
from quire_models.families.glm4_moe_lite import MLP_KINDS
from quire_models.feed_forward_spec import Routing, SparseMoESpec
from quire_models.spec import LayerSpec, NetworkSpec, NormSpec

__all__ = ["AveragedMoESpec", "spec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragedMoESpec(SparseMoESpec):
    """The mean of what routed experts and shared ones give, instead of their sum."""

    built_by: ClassVar[str] = "quire_models.families.cohere2_moe_layers:AveragedMoE"


def spec(config: Fields) -> NetworkSpec:
    """The first `first_k_dense_replace` layers have no experts, and count their windows for themselves. Layers without
    a window know no positions, unless every layer without experts is one."""
    sizes, attention, head = cohere_parts(config.with_default("head_dim", 128), theta=10000.0)
    num_dense = config.integer("first_k_dense_replace", default=0, minimum=0)
    sparse = layer_kinds(
        config, "mlp_layer_types", sizes.num_layers, MLP_KINDS, [layer >= num_dense for layer in sizes.layers]
    )
    period = config.integer("sliding_window_pattern", default=4, minimum=1)
    dense_period = config.integer("prefix_dense_sliding_window_pattern", default=1, minimum=1)
    slides = [(layer + 1) % dense_period != 0 for layer in range(num_dense)]
    slides += [(layer + 1) % period != 0 for layer in range(sizes.num_layers - num_dense)]
    windows = layer_windows(config.with_default("sliding_window", 4096), sizes.num_layers, tuple(slides))
    is_rms = config.get("rms_norm_eps") is not None
    eps = config.number("rms_norm_eps", default=1e-5, minimum=0.0)

    def norm(name: str) -> NormSpec:
        return sizes.rms_norm(name, eps=eps) if is_rms else sizes.layer_norm(name, has_bias=False)

    moe = _moe(config, sizes)
    mlp = sizes.gated_mlp(inner=config.integer("prefix_dense_intermediate_size", default=None, minimum=1))
    rotates = _rotates(windows, sparse, always=dense_period == 1)
    return sizes.network(
        (
            LayerSpec(
                name=f"model.layers.{layer}",
                mixers=(replace(attention, sliding_window=window, rope=sizes.rope if rotates[layer] else None),),
                feed_forward=moe if sparse[layer] else mlp,
                input_norm=norm("input_layernorm"),
                arrangement="parallel",
            )
            for layer, window in enumerate(windows)
        ),
        final_norm=norm("norm"),
        head=head,
    )


def _rotates(windows: Sequence[int | None], sparse: Sequence[bool], *, always: bool) -> list[bool]:
    """Per layer, whether it knows positions; `always` for all layers without experts."""
    return [
        window is not None or (always and not has_experts) for window, has_experts in zip(windows, sparse, strict=True)
    ]


def _moe(config: Fields, sizes: DecoderSizes) -> SparseMoESpec:
    num_experts, per_token = expert_counts(config, "num_experts", "num_experts_per_tok")
    config.fixed("expert_selection_fn", "softmax", "sigmoid")
    config.fixed("shared_expert_combination_strategy", "average", "sum")
    routing = Routing(top_k=per_token, scoring="softmax_of_chosen")
    if config.get("expert_selection_fn") == "sigmoid":
        routing = replace(routing, scoring="sigmoid", renormalize=config.flag("norm_topk_prob", default=True))
    shared = sizes.intermediate_size * config.integer("num_shared_experts", default=0, minimum=0)
    averages = shared > 0 and config.text("shared_expert_combination_strategy", default="average") == "average"
    return (AveragedMoESpec if averages else SparseMoESpec)(
        hidden_size=sizes.hidden_size,
        num_experts=num_experts,
        intermediate_size=sizes.intermediate_size,
        act=sizes.act,
        routing=routing,
        shared=sizes.gated_mlp("mlp.shared_experts", shared) if shared else None,
    )
