"""GLM-5's config.json. Its network is DeepSeek-V3.2's."""

from __future__ import annotations

from quire_interfaces import CheckpointError, Fields
from quire_models.deepseek_v32.config import SparseLatentConfig, sparse_fields

__all__ = ["read_config"]

KINDS = {"full": True, "shared": False, "F": True, "S": False}
"""Name of a layer's kind -> it has an index of its own."""


def read_config(config: Fields) -> SparseLatentConfig:
    """Layers may share what an index found; heads of the index are rotated as those of the attention."""
    layers = config.integer("num_hidden_layers", minimum=1)
    return SparseLatentConfig(**sparse_fields(config, _index_layers(config, layers)), index_interleaved=True)


def _index_layers(config: Fields, layers: int) -> tuple[bool, ...]:
    """As `indexer_types` or `index_topk_pattern` say, or every so many layers."""
    name = "indexer_types" if config.get("indexer_types") is not None else "index_topk_pattern"
    kinds = config.get(name)
    if kinds is None:
        every = max(1, config.integer("index_topk_freq", default=1))
        offset = config.integer("index_skip_topk_offset", default=2)
        return tuple(max(layer - offset + 1, 0) % every == 0 for layer in range(layers))
    known = isinstance(kinds, (list, str)) and len(kinds) == layers and all(kind in KINDS for kind in kinds)
    if not known or not KINDS[kinds[0]]:
        raise CheckpointError(
            f"{config.source}: {name} must say full or shared for each of {layers} layers, full for the first, "
            f"is {kinds!r}"
        )
    return tuple(KINDS[kind] for kind in kinds)
