"""K-EXAONE (LG AI Research 2026): EXAONE 4's attention behind norms, and experts as in DeepSeek-V3 (sec. 2.1.2)."""

from __future__ import annotations

from dataclasses import replace

from quire_interfaces import Fields
from quire_models.config_fields import layer_kinds, layer_windows
from quire_models.decoder_sizes import decoder_sizes
from quire_models.families.glm4_moe import grouped_moe, grouped_network
from quire_models.spec import CheckpointNames, NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """Three sliding layers, then one of full attention, which knows no positions, unless `layer_types` names others."""
    sizes = decoder_sizes(config, eps=1e-5)
    period = config.get("sliding_window_pattern")
    every = len(period) if isinstance(period, str) and period else period or 4
    slides = tuple((layer + 1) % every != 0 for layer in sizes.layers)
    windows = layer_windows(config, sizes.num_layers, default=slides)
    dense = config.integer("first_k_dense_replace", default=1, minimum=0)
    kinds, default = {"dense": False, "sparse": True}, [layer >= dense for layer in sizes.layers]
    named = config.named(n_routed_experts="num_experts", n_shared_experts="num_shared_experts")
    norms = sizes.head_norms()
    attentions = [
        sizes.attention(
            sliding_window=window, rope=sizes.rope if window is not None or not any(windows) else None, **norms
        )
        for window in windows
    ]
    sparse = layer_kinds(config, "mlp_layer_types", sizes.num_layers, kinds, default)
    network = grouped_network(config, sizes, attentions, grouped_moe(named, sizes), sparse=sparse)
    names = CheckpointNames(
        ignored_prefixes=("mtp.",),
        renamed=((".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),),
    )
    return replace(network, checkpoint=names)
