"""LFM2's config.json."""

from __future__ import annotations

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import decoder_fields
from quire_models.mixer_shapes import ShortConvShape
from quire_models.recurrent_config import HybridConfig, gated_mlp_weights, hybrid_fields

__all__ = ["read_config"]


def read_config(config: Fields) -> HybridConfig:
    """The feed-forward width is adjusted as the class does."""
    inner_name = "block_ff_dim" if config.get("block_ff_dim") is not None else "intermediate_size"
    tied_name = "tie_embedding" if config.get("tie_embedding") is not None else "tie_word_embeddings"
    config = config.named(rms_norm_eps="norm_eps", intermediate_size=inner_name, tie_word_embeddings=tied_name)
    values = decoder_fields(config.with_default("norm_eps", 1e-5).with_default("rope_theta", 1e6), tied=True)
    values |= {"qk_norm": True, "intermediate_size": _adjusted(config, values["intermediate_size"])}
    mixer = ShortConvShape(
        hidden_size=values["hidden_size"],
        conv_kernel=config.integer("conv_L_cache", default=3, minimum=1),
        bias=config.flag("conv_bias", default=False),
    )
    fields = hybrid_fields(values, mixer, _attends(config, values["num_layers"]), kind="convolution")
    fields["weights"]["MLP"] = gated_mlp_weights(
        values["hidden_size"], values["intermediate_size"], values["num_layers"]
    )
    return HybridConfig(**fields)


def _adjusted(config: Fields, size: int) -> int:
    if not config.flag("block_auto_adjust_ff_dim", default=True):
        return size
    size = int(2 * size / 3)
    size = int(config.number("block_ffn_dim_multiplier", default=1.0, above=0.0) * size)
    multiple = config.integer("block_multiple_of", default=256, minimum=1)
    return -(-size // multiple) * multiple


def _attends(config: Fields, layers: int) -> list[bool]:
    kinds = config.get("layer_types")
    if kinds is None:
        listed = config.get("full_attn_idxs")
        return [listed is None or layer in listed for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in ("conv", "full_attention") for k in kinds):
        raise CheckpointError(
            f"{config.source}: layer_types must name conv or full_attention for each of {layers} layers, is {kinds!r}"
        )
    return [kind == "full_attention" for kind in kinds]
