"""GPT-2 (Radford et al. 2019): pre-norm with layer norms, learned positions, matrices stored inputs first; and
StarCoder (Li et al. 2023), whose query heads share one key-value head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire_interfaces import Fields
from quire_models.config_fields import ACTIVATIONS
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes
from quire_models.mixer_spec import ProjectionNames
from quire_models.spec import CheckpointNames, NetworkSpec

__all__ = ["GPT2_NAMES", "MASKS", "spec", "spec_of_bigcode"]

MASKS = (".attn.bias", ".attn.masked_bias")
"""The causal mask, which the first checkpoints hold."""
GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
    "rms_norm_eps": "layer_norm_epsilon",
    "num_key_value_heads": "-",
}
"""Field of a decoder -> its name in config.json; "-" where it has none."""


def spec(config: Fields) -> NetworkSpec:
    """Scores are divided by the root of the head's size, and by the number of the layer where the file says so. The
    first checkpoints have no prefix."""
    config.fixed("add_cross_attention", False)
    sizes = _sizes(config, act="gelu_new")
    scale = sizes.head_dim**-0.5 if config.flag("scale_attn_weights", default=True) else 1.0
    by_layer = config.flag("scale_attn_by_inverse_layer_idx", default=False)
    scales = [scale / (layer + 1) if by_layer else scale for layer in sizes.layers]
    return _network(
        sizes,
        scales,
        CheckpointNames(
            ignored_suffixes=MASKS,
            default_prefix="transformer.",
            transposed=("c_attn.weight", "c_proj.weight", "c_fc.weight"),
            fused=(sizes.fused_qkv("attn.c_attn"),),
        ),
    )


def spec_of_bigcode(config: Fields) -> NetworkSpec:
    """One key-value head for all query heads, or one for each, which are then stored head by head."""
    config.fixed("add_cross_attention", False)
    config.fixed("scale_attn_weights", True)
    sizes = _sizes(config, act="gelu_pytorch_tanh")
    if config.flag("multi_query", default=True):
        sizes = replace(sizes, num_kv_heads=1)
    fused = sizes.fused_heads if sizes.num_kv_heads > 1 else sizes.fused_qkv
    names = CheckpointNames(ignored_suffixes=MASKS, fused=(fused("attn.c_attn"),))
    return _network(sizes, [sizes.head_dim**-0.5] * sizes.num_layers, names)


def _sizes(config: Fields, *, act: str) -> DecoderSizes:
    return decoder_sizes(
        config.named(**GPT2_NAMES), tied=True, act=act, acts=ACTIVATIONS, eps=1e-5, rotary=False, inner_factor=4
    )


def _network(sizes: DecoderSizes, scales: Sequence[float], checkpoint: CheckpointNames) -> NetworkSpec:
    names, mlp = ProjectionNames(out="c_proj"), sizes.mlp(names=("c_fc", "c_proj"))
    return sizes.network(
        (
            sizes.pre_norm(
                layer,
                sizes.attention(name="attn", bias=True, scale=scale, names=names),
                mlp,
                prefix="transformer.h",
                norms=("ln_1", "ln_2"),
                norm=sizes.layer_norm,
            )
            for layer, scale in enumerate(scales)
        ),
        body="transformer",
        embedding=sizes.embedding("wte", positions=sizes.positions("wpe")),
        final_norm=sizes.layer_norm("ln_f"),
        checkpoint=checkpoint,
    )
