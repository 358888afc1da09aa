"""InternLM2 (Cai et al. 2024): Llama in other names, whose queries, keys and values are one matrix."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.decoder_sizes import decoder_sizes
from quire_models.mixer_spec import ProjectionNames
from quire_models.spec import CheckpointNames, HeadSpec, NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """All linear layers of attention have a bias, or none has."""
    sizes = decoder_sizes(config)
    attention = sizes.attention(
        name="attention", names=ProjectionNames(out="wo"), bias=config.flag("bias", default=False)
    )
    mlp = sizes.gated_mlp("feed_forward", names=("w1", "w3", "w2"))
    return sizes.network(
        (sizes.pre_norm(layer, attention, mlp, norms=("attention_norm", "ffn_norm")) for layer in sizes.layers),
        embedding=sizes.embedding("tok_embeddings"),
        head=HeadSpec(name="output", tied=sizes.tied),
        checkpoint=CheckpointNames(fused=(sizes.fused_heads("attention.wqkv"),)),
    )
