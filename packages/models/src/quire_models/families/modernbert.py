"""ModernBERT (Warner et al. 2024): rotary positions, gates, and windows in most layers."""

from __future__ import annotations

from dataclasses import replace

from quire_interfaces import Fields
from quire_models.config_fields import ACTIVATIONS
from quire_models.decoder_sizes import decoder_sizes
from quire_models.mixer_spec import ProjectionNames
from quire_models.pooling_heads import (
    HeadKind,
    dense,
    head_activation,
    layer_norm,
    masked_lm,
    text_classifier,
    token_classifier,
)
from quire_models.rope_config import RopeConfig, parse_rope
from quire_models.spec import CheckpointNames, FusedRows, LayerSpec, NetworkSpec, NormSpec
from quire_pooling.spec import PoolerSpec

__all__ = ["NAMES", "pooler", "spec"]

NAMES = ProjectionNames("query", "key", "value", "Wo")


def spec(config: Fields) -> NetworkSpec:
    """Every third layer sees all of the text, the others a window, and rotates by another base. Before the first
    attention there is no norm, but one behind the embedding."""
    named = config.named(hidden_act="hidden_activation", rms_norm_eps="norm_eps", num_key_value_heads="-")
    sizes = decoder_sizes(named, tied=True, act="gelu", acts=ACTIVATIONS, eps=1e-5, rotary=False, context=8192)
    every = config.integer("global_attn_every_n_layers", default=3, minimum=1)
    kinds = config.texts("layer_types") or [
        "sliding_attention" if layer % every else "full_attention" for layer in sizes.layers
    ]
    window = config.integer("local_attention", default=128, minimum=2) // 2
    has_bias = config.flag("norm_bias", default=False)

    def rope(kind: str, theta: str, default: float) -> RopeConfig:
        base = config.number(theta, default=default, above=1.0)
        return parse_rope(config, max_position_embeddings=sizes.max_model_len, theta=base, layers=kind)

    def norm(name: str) -> NormSpec:
        return sizes.layer_norm(name, has_bias=has_bias)

    full = sizes.encoder_attention(
        "attn",
        bias=config.flag("attention_bias", default=False),
        rope=rope("full_attention", "global_rope_theta", 160_000.0),
        names=NAMES,
    )
    local = replace(full, sliding_window=window, rope=rope("sliding_attention", "local_rope_theta", 10_000.0))
    mlp = sizes.gated_mlp(bias=config.flag("mlp_bias", default=False), names=("gate", "up", "Wo"))
    layers = (
        LayerSpec(
            name=f"layers.{layer}",
            mixers=(full if kind == "full_attention" else local,),
            feed_forward=mlp,
            input_norm=norm("attn_norm") if layer else None,
            feed_forward_norm=norm("mlp_norm"),
        )
        for layer, kind in enumerate(kinds)
    )
    fused = (
        sizes.fused_qkv("attn.Wqkv", NAMES[:3]),
        FusedRows(module="mlp.Wi", parts=(("gate", sizes.intermediate_size), ("up", sizes.intermediate_size))),
    )
    embedding = sizes.embedding("embeddings.tok_embeddings", norm=norm("embeddings.norm"))
    checkpoint = CheckpointNames(
        removed_prefixes=("model.",), ignored_prefixes=("head.", "decoder.", "classifier."), fused=fused
    )
    return sizes.encoder_network(layers, embedding=embedding, final_norm=norm("final_norm"), checkpoint=checkpoint)


def pooler(config: Fields, kind: HeadKind, network: NetworkSpec) -> PoolerSpec:
    """All heads begin with the same dense layer and norm; classes of a text are those of its first token or of the mean
    of all, as config.json says."""
    size = network.hidden_size
    config.fixed("classifier_pooling", "cls", "mean")
    steps = (
        dense(
            "head.dense",
            size,
            size,
            head_activation(config, "classifier_activation", "gelu"),
            bias=config.flag("classifier_bias", default=False),
        ),
        layer_norm(
            "head.norm",
            size,
            config.number("norm_eps", default=1e-5, minimum=0.0),
            bias=config.flag("norm_bias", default=False),
        ),
    )
    if kind == "text_classifier":
        is_mean = config.text("classifier_pooling", default="cls") == "mean"
        return text_classifier(config, size, steps, method="MEAN" if is_mean else "CLS")
    if kind == "token_classifier":
        return token_classifier(config, size, steps)
    weight = network.embedding_name if network.head.tied else "decoder.weight"
    bias = "decoder.bias" if config.flag("decoder_bias", default=True) else None
    return masked_lm(size, network.vocab_size, steps, weight=weight, bias=bias)
