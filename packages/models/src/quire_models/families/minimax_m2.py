"""MiniMax-M2 (MiniMax 2025): experts scored by sigmoids; queries and keys are normalised over all heads at once."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.decoder_sizes import decoder_sizes, expert_counts
from quire_models.families.glm4_moe import LEAST_SCORES
from quire_models.feed_forward_spec import Routing
from quire_models.spec import NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """Part of each head is rotated: `rotary_dim` of its dimensions, where the file has that. The best experts by score
    and bias are chosen, and their scores made to sum to one."""
    size = config.integer("head_dim", default=128, minimum=1)
    rotated = config.integer("rotary_dim", default=size, minimum=2)
    sizes = decoder_sizes(config, head_dim=128, partial=rotated / size, theta=5e6)
    num_experts, per_token = expert_counts(config, "num_local_experts", "num_experts_per_tok")
    moe = sizes.moe(
        num_experts,
        sizes.intermediate_size,
        Routing(top_k=per_token, scoring="sigmoid", renormalize=True, minimum=LEAST_SCORES),
        name="block_sparse_moe",
        names=("w1", "w3", "w2"),
        correction_bias="e_score_correction_bias",
        stacked=None,
    )
    attention = sizes.attention(**sizes.projection_norms())
    return sizes.network(sizes.pre_norm(layer, attention, moe) for layer in sizes.layers)
