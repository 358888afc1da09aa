"""Config.json of DeepSeek-V2, and what all families with latent attention have in common."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from quire_interfaces import ConfigError, Fields, KVCacheSpec, LatentAttentionSpec
from quire_models.config import DTYPE_BYTES
from quire_models.config_fields import decoder_fields
from quire_models.glm4_moe.config import GroupedMoEConfig, grouped_moe_fields

__all__ = ["LatentMoEConfig", "latent_fields", "read_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentMoEConfig(GroupedMoEConfig):
    """Latent attention (see `layers/latent_attention.py`), and experts in groups. `head_dim` is that of a key."""

    q_lora_rank: int | None
    """Of the queries' latent; None where queries are projected at once."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int
    softmax_scale: float
    rope_interleaved: bool
    """Neighbouring dimensions are rotated as pairs."""
    latent_bias: bool
    """The projections to latents, and that of the output, have a bias."""

    @property
    def row_width(self) -> int:
        """Numbers of a row of the cache."""
        return self.kv_lora_rank + self.rotary_dim

    @property
    def inner_width(self) -> int:
        """See `ModelConfig.inner_width`. Queries and what they attended to are as wide as the latent."""
        # No zero-argument super: the class is made anew with slots.
        experts = GroupedMoEConfig.inner_width.fget(self)  # type: ignore[attr-defined]
        return int(max(experts, self.num_heads * (4 * self.kv_lora_rank + 3 * self.rotary_dim)))

    def kv_cache_specs(self, block_size: int, dtype: str) -> dict[str, KVCacheSpec]:
        """See `ModelConfig.kv_cache_specs`.

        Raises:
            ConfigError: A format of the cache in which latents are not kept.
        """
        if dtype not in DTYPE_BYTES:
            raise ConfigError(
                f"latents are not kept in {dtype}; a KV cache of {self.architecture} can be "
                f"{', '.join(DTYPE_BYTES)} (kv_cache_dtype auto)",
                field="kv_cache_dtype",
            )
        spec = LatentAttentionSpec(block_size=block_size, width=self.row_width, dtype=dtype)
        return {f"model.layers.{layer}": spec for layer in range(self.num_layers)}


def latent_fields(config: Fields) -> dict[str, Any]:
    """Fields of a decoder with latent attention, without those of its experts."""
    rope_dim = config.integer("qk_rope_head_dim", minimum=2)
    values = decoder_fields(config.named(head_dim="qk_rope_head_dim"))
    hidden, heads = values["hidden_size"], values["num_heads"]
    rank, nope = config.integer("kv_lora_rank", minimum=1), config.integer("qk_nope_head_dim", minimum=1)
    v_dim, head_dim = config.integer("v_head_dim", minimum=1), nope + rope_dim
    q_rank = config.integer("q_lora_rank", default=None, minimum=1)
    if q_rank is None:
        queries = [(heads * head_dim, hidden)]
    else:
        queries = [(q_rank, hidden), (heads * head_dim, q_rank)]
    bias = config.flag("attention_bias", default=False)
    biases = (q_rank or 0) + rank + rope_dim + hidden
    up = heads * (nope + v_dim) * rank  # kept as numbers, whatever the linear method
    return values | {
        "head_dim": head_dim,
        "num_kv_heads": heads,
        "rotary_dim": rope_dim,
        "q_lora_rank": q_rank,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": nope,
        "v_head_dim": v_dim,
        "softmax_scale": head_dim**-0.5 * _length_scale(config) ** 2,
        "rope_interleaved": config.flag("rope_interleave", default=True),
        "latent_bias": bias,
        "attention_matrices": (*queries, (rank + rope_dim, hidden), (hidden, heads * v_dim)),
        "other_parameters": values["num_layers"] * (up + (q_rank or 0) + rank + bias * biases),
    }


def _length_scale(config: Fields) -> float:
    """What scaled contexts add to the scores, for queries and keys each (DeepSeek-AI 2024, sec. 3.1.4)."""
    raw = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = Fields(raw, f"{config.source}: rope_scaling")
    weight = rope.number("mscale_all_dim", default=0.0)
    factor = rope.number("factor", default=1.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    return 0.1 * weight * math.log(factor) + 1.0 if weight and factor > 1.0 and kind != "default" else 1.0


def read_config(config: Fields) -> LatentMoEConfig:
    """Experts are the most probable ones, of the groups whose best is best, or of all."""
    config.fixed("topk_method", "greedy", "group_limited_greedy")
    config.fixed("scoring_func", "softmax")
    config.fixed("norm_topk_prob", False)
    config.fixed("moe_layer_freq", 1)
    if config.text("topk_method", default="greedy") == "greedy":
        config = config.named(n_group="-", topk_group="-")
    values = grouped_moe_fields(config, latent_fields(config), dense_layers=0, renormalize=False)
    return LatentMoEConfig(**values)
