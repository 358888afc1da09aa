"""LFM2 (Liquid AI 2025): gated short convolutions in most layers, attention in some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire_interfaces import Fields
from quire_models.config_fields import layer_kinds
from quire_models.decoder_sizes import decoder_sizes
from quire_models.mixer_spec import ProjectionNames, ShortConvSpec
from quire_models.spec import CheckpointNames, NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """The feed-forward width is adjusted as the class does."""
    inner_name = "block_ff_dim" if config.get("block_ff_dim") is not None else "intermediate_size"
    tied_name = "tie_embedding" if config.get("tie_embedding") is not None else "tie_word_embeddings"
    config = config.named(rms_norm_eps="norm_eps", intermediate_size=inner_name, tie_word_embeddings=tied_name)
    sizes = decoder_sizes(config.with_default("norm_eps", 1e-5).with_default("rope_theta", 1e6), tied=True)
    sizes = replace(sizes, intermediate_size=_adjusted(config, sizes.intermediate_size))
    convolution = ShortConvSpec(
        hidden_size=sizes.hidden_size,
        conv_kernel=config.integer("conv_L_cache", default=3, minimum=1),
        bias=config.flag("conv_bias", default=False),
    )
    attention = sizes.attention(names=ProjectionNames(out="out_proj"), **sizes.head_norms("q_layernorm", "k_layernorm"))
    mixers, mlp = (convolution, attention), sizes.gated_mlp("feed_forward")
    layers = (
        sizes.pre_norm(layer, mixers[attends], mlp, norms=("operator_norm", "ffn_norm"))
        for layer, attends in enumerate(_attends(config, sizes.num_layers))
    )
    renamed = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    names = tuple((f".feed_forward.{old}.", f".feed_forward.{new}.") for old, new in renamed.items())
    return sizes.network(layers, final_norm="embedding_norm", checkpoint=CheckpointNames(renamed=names))


def _adjusted(config: Fields, size: int) -> int:
    if not config.flag("block_auto_adjust_ff_dim", default=True):
        return size
    size = int(2 * size / 3)
    size = int(config.number("block_ffn_dim_multiplier", default=1.0, above=0.0) * size)
    multiple = config.integer("block_multiple_of", default=256, minimum=1)
    return -(-size // multiple) * multiple


def _attends(config: Fields, layers: int) -> Sequence[bool]:
    listed = config.get("full_attn_idxs")
    default = [listed is None or layer in listed for layer in range(layers)]
    return layer_kinds(config, "layer_types", layers, {"conv": False, "full_attention": True}, default)
