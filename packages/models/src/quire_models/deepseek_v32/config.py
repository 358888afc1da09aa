"""Config.json of DeepSeek-V3.2, and what other families with its index have in common with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire_interfaces import CheckpointError, Fields
from quire_models.deepseek_v2.config import LatentMoEConfig, latent_fields
from quire_models.glm4_moe.config import grouped_moe_fields

__all__ = ["SparseLatentConfig", "read_config", "sparse_fields"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseLatentConfig(LatentMoEConfig):
    """Latent attention over the tokens that an index finds. A row of the cache is the latent, the rotated key, and the
    index's key."""

    index_heads: int
    index_head_dim: int
    index_topk: int
    """Tokens that a token attends to at most."""
    index_layers: tuple[bool, ...]
    """Per layer: it has an index of its own. The others attend to what the layer before them attended to."""
    index_interleaved: bool
    """Of the index's heads, neighbouring dimensions are rotated as pairs, not halves."""

    @property
    def row_width(self) -> int:
        """See `LatentMoEConfig.row_width`."""
        return self.kv_lora_rank + self.rotary_dim + self.index_head_dim

    @property
    def inner_width(self) -> int:
        """See `ModelConfig.inner_width`. The index has queries of its own, rotated and in float32 for the scores."""
        # With arguments: a dataclass with slots is another class than the one that super() alone would mean.
        return super(SparseLatentConfig, self).inner_width + 4 * self.index_heads * self.index_head_dim


def read_config(config: Fields) -> SparseLatentConfig:
    """Every layer has an index."""
    return SparseLatentConfig(**sparse_fields(config), index_interleaved=False)


def sparse_fields(config: Fields, index_layers: tuple[bool, ...] | None = None) -> dict[str, Any]:
    """Fields of DeepSeek-V3, and of the index. Queries have a latent, which the index reads, too.

    Args:
        index_layers: Per layer, whether it has an index of its own; None for all.

    Raises:
        CheckpointError: No such latent, or an index whose heads are narrower than what is rotated.
    """
    config.fixed("topk_method", "noaux_tc")
    config.fixed("scoring_func", "sigmoid")
    config.fixed("moe_layer_freq", 1)
    config.fixed("rope_interleave", True)
    values = grouped_moe_fields(config, latent_fields(config), dense_layers=3, renormalize=True)
    q_rank, layers, hidden = values["q_lora_rank"], values["num_layers"], values["hidden_size"]
    if q_rank is None:
        raise CheckpointError(
            f"{config.source}: q_lora_rank is missing; the index is computed from the queries' latent"
        )
    heads = config.integer("index_n_heads", default=64, minimum=1)
    head_dim = config.integer("index_head_dim", default=128, minimum=1)
    if head_dim < values["rotary_dim"]:
        raise CheckpointError(
            f"{config.source}: index_head_dim ({head_dim}) must be at least qk_rope_head_dim ({values['rotary_dim']})"
        )
    indexed = index_layers or (True,) * layers
    matrices = ((heads * head_dim, q_rank), (head_dim, hidden))
    values["other_parameters"] += sum(indexed) * (heads * hidden + 2 * head_dim)
    if all(indexed):
        values["attention_matrices"] += matrices
    else:  # which says what every layer has
        values["other_parameters"] += sum(indexed) * sum(outputs * inputs for outputs, inputs in matrices)
    return values | {
        "sparse_layers": _sparse_layers(config, layers) or values["sparse_layers"],
        "index_heads": heads,
        "index_head_dim": head_dim,
        "index_topk": config.integer("index_topk", default=2048, minimum=1),
        "index_layers": indexed,
    }


def _sparse_layers(config: Fields, layers: int) -> tuple[bool, ...]:
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return ()
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in ("dense", "sparse") for kind in kinds):
        raise CheckpointError(
            f"{config.source}: mlp_layer_types must name dense or sparse for each of {layers} layers, is {kinds!r}"
        )
    return tuple(kind == "sparse" for kind in kinds)
