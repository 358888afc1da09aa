"""TeleChat and TeleChat2 (TeleAI 2024, arXiv:2401.03804): Llama in the names of BLOOM, whose last matrices have
biases."""

from __future__ import annotations

import math
from dataclasses import replace

from quire_interfaces import CheckpointError, Fields
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes
from quire_models.mixer_spec import ProjectionNames
from quire_models.spec import CheckpointNames, FusedRows, NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """Keys and values are one matrix, head by head."""
    config.fixed("embed_layernorm", False)
    config.fixed("apply_residual_connection_post_layernorm", False)
    config = config.named(
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        intermediate_size="ffn_hidden_size",
        rms_norm_eps="layer_norm_epsilon",
        max_position_embeddings="max_position_embeddings" if config.get("max_position_embeddings") else "seq_length",
    )
    sizes, notes = _within_training(config, decoder_sizes(config, eps=1e-5))
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
        notes=notes,
    )


def _within_training(config: Fields, sizes: DecoderSizes) -> tuple[DecoderSizes, tuple[str, ...]]:
    """The sizes with the base of the rotation that texts of up to `training_seqlen` tokens have, and what to say of it.

    The base is multiplied by alpha^(d / (d - 2)) with alpha = 2^ceil(log2(training_seqlen / base_seqlen) + 1) - 1.
    Longer texts would have another alpha at each doubling of their length, and keys in the cache keep theirs.
    """
    training = config.integer("training_seqlen", default=sizes.max_model_len, minimum=1)
    base = config.integer("base_seqlen", default=training, minimum=1)
    alpha = max(2 ** math.ceil(math.log2(training / base) + 1) - 1, 1)
    if sizes.rope is not None and alpha > 1:
        if sizes.head_dim <= 2:
            raise CheckpointError(f"{config.source}: training_seqlen above base_seqlen needs a head_dim greater than 2")
        theta = sizes.rope.theta * alpha ** (sizes.head_dim / (sizes.head_dim - 2))
        sizes = replace(sizes, rope=replace(sizes.rope, theta=theta))
    if sizes.max_model_len <= training:
        return sizes, ()
    note = f"at most training_seqlen ({training}) tokens: the network rotates longer texts by bases of their own"
    return replace(sizes, max_model_len=training), (note,)
