"""TeleChat and TeleChat2 (TeleAI 2024): Llama in the names of BLOOM, whose last matrices have biases."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.decoder_sizes import decoder_sizes
from quire_models.mixer_spec import ProjectionNames
from quire_models.spec import CheckpointNames, FusedRows, NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """Keys and values are one matrix, head by head."""
    config = config.named(
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        intermediate_size="ffn_hidden_size",
        rms_norm_eps="layer_norm_epsilon",
        max_position_embeddings="max_position_embeddings" if config.get("max_position_embeddings") else "seq_length",
    )
    sizes = decoder_sizes(config, eps=1e-5)
    names = ProjectionNames(query="query", out="dense")
    attention = sizes.attention(name="self_attention", names=names, out_bias=True)
    mlp = sizes.gated_mlp(out_bias=True)
    rows = FusedRows(
        module="self_attention.key_value",
        parts=(("k_proj", sizes.head_dim), ("v_proj", sizes.head_dim)),
        groups=sizes.num_kv_heads,
    )
    return sizes.network(
        (sizes.pre_norm(layer, attention, mlp, prefix="transformer.h") for layer in sizes.layers),
        body="transformer",
        embedding=sizes.embedding("word_embeddings"),
        final_norm="ln_f",
        checkpoint=CheckpointNames(fused=(rows,)),
    )
