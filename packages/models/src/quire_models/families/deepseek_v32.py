"""DeepSeek-V3.2 (DeepSeek-AI 2025): DeepSeek-V3, whose attention reads the tokens that a lightning indexer finds; and
GLM-5 (Z.ai 2026), in which layers may share what an indexer found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import layer_kinds
from quire_models.families.deepseek_v2 import latent_attention
from quire_models.families.glm4_moe import grouped_moe, grouped_network
from quire_models.mixer_spec import IndexerSpec, LatentSelfAttentionSpec
from quire_models.spec import NetworkSpec, recast

__all__ = ["KINDS", "SparseLatentSelfAttentionSpec", "indexed_attentions", "indexed_layers", "spec", "spec_of_glm5"]

KINDS = {"full": True, "shared": False, "F": True, "S": False}
"""Name of a layer's kind in GLM-5 -> it has an indexer of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseLatentSelfAttentionSpec(LatentSelfAttentionSpec):
    """Latent attention over the tokens that its indexer finds."""

    built_by: ClassVar[str] = "quire_models.families.deepseek_v32_layers:SparseLatentAttention"


def spec(config: Fields) -> NetworkSpec:
    """Every layer has an indexer."""
    return _network(config, (True,) * config.integer("num_hidden_layers", minimum=1), interleaved=False)


def spec_of_glm5(config: Fields) -> NetworkSpec:
    """Layers may share what an indexer found; heads of the indexer are rotated as those of the attention."""
    layers = config.integer("num_hidden_layers", minimum=1)
    return _network(config, indexed_layers(config, layers), interleaved=True)


def _network(config: Fields, indexed: Sequence[bool], *, interleaved: bool) -> NetworkSpec:
    """The network of DeepSeek-V3 with indexers; see `indexed_attentions`."""
    config.fixed("topk_method", "noaux_tc")
    config.fixed("scoring_func", "sigmoid")
    config.fixed("moe_layer_freq", 1)
    config.fixed("rope_interleave", True)
    sizes, attention = latent_attention(config)
    moe = grouped_moe(config, sizes)
    mixers = indexed_attentions(
        config, recast(SparseLatentSelfAttentionSpec, attention), indexed, interleaved=interleaved
    )
    sparse = None
    if config.get("mlp_layer_types") is not None:
        sparse = layer_kinds(config, "mlp_layer_types", sizes.num_layers, {"dense": False, "sparse": True})
    return grouped_network(config, sizes, mixers, moe, dense_layers=3, sparse=sparse)


def indexed_attentions(
    config: Fields, attention: SparseLatentSelfAttentionSpec, indexed: Sequence[bool], *, interleaved: bool
) -> list[SparseLatentSelfAttentionSpec]:
    """The attention of each layer, with an indexer. Queries have a latent, which an indexer reads, too.

    Args:
        indexed: Per layer, whether it has an indexer of its own.
        interleaved: See `IndexerSpec`.

    Raises:
        CheckpointError: No such latent, or an indexer whose heads are narrower than what is rotated.
    """
    if attention.q_lora_rank is None:
        raise CheckpointError(
            f"{config.source}: q_lora_rank is missing; the index is computed from the queries' latent"
        )
    indexer = IndexerSpec(
        num_heads=config.integer("index_n_heads", default=64, minimum=1),
        head_dim=config.integer("index_head_dim", default=128, minimum=1),
        topk=config.integer("index_topk", default=2048, minimum=1),
        interleaved=interleaved,
    )
    if indexer.head_dim < attention.rotary_dim:
        raise CheckpointError(
            f"{config.source}: index_head_dim ({indexer.head_dim}) must be at least qk_rope_head_dim "
            f"({attention.rotary_dim})"
        )
    return [replace(attention, indexer=replace(indexer, is_shared=not is_own)) for is_own in indexed]


def indexed_layers(config: Fields, layers: int) -> tuple[bool, ...]:
    """Per layer, whether it has an indexer of its own: as `indexer_types` or `index_topk_pattern` say, or every so many
    layers."""
    name = "indexer_types" if config.get("indexer_types") is not None else "index_topk_pattern"
    kinds = config.get(name)
    if kinds is None:
        every = max(1, config.integer("index_topk_freq", default=1))
        offset = config.integer("index_skip_topk_offset", default=2)
        return tuple(max(layer - offset + 1, 0) % every == 0 for layer in range(layers))
    is_known = isinstance(kinds, (list, str)) and len(kinds) == layers and all(kind in KINDS for kind in kinds)
    if not is_known or not KINDS[kinds[0]]:
        raise CheckpointError(
            f"{config.source}: {name} must say full or shared for each of {layers} layers, full for the first, "
            f"is {kinds!r}"
        )
    return tuple(KINDS[kind] for kind in kinds)
