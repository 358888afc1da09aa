"""DistilBERT (Sanh et al. 2019): BERT without token types."""

from __future__ import annotations

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
from quire_models.spec import CheckpointNames, LayerSpec, NetworkSpec
from quire_pooling.spec import PoolerSpec

__all__ = ["EPS", "NAMES", "pooler", "spec"]

NAMES = ProjectionNames("q_lin", "k_lin", "v_lin", "out_lin")
EPS = 1e-12
"""Of every norm: config.json has no field for it."""


def spec(config: Fields) -> NetworkSpec:
    """Norms behind the sums, biases everywhere, learned positions."""
    named = config.named(
        hidden_size="dim",
        num_attention_heads="n_heads",
        num_hidden_layers="n_layers",
        intermediate_size="hidden_dim",
        hidden_act="activation",
        rms_norm_eps="-",
        num_key_value_heads="-",
    )
    sizes = decoder_sizes(named, tied=True, act="gelu", acts=ACTIVATIONS, eps=EPS, rotary=False, context=512)
    layers = (
        LayerSpec(
            name=f"transformer.layer.{layer}",
            mixers=(sizes.encoder_attention("attention", bias=True, names=NAMES),),
            feed_forward=sizes.mlp("ffn", ("lin1", "lin2")),
            attention_out_norm=sizes.layer_norm("sa_layer_norm"),
            feed_forward_out_norm=sizes.layer_norm("output_layer_norm"),
            arrangement="post_ln",
        )
        for layer in sizes.layers
    )
    embedding = sizes.embedding(
        "embeddings.word_embeddings",
        positions=sizes.positions("embeddings.position_embeddings"),
        norm=sizes.layer_norm("embeddings.LayerNorm"),
    )
    names = CheckpointNames(
        removed_prefixes=("distilbert.",),
        ignored_prefixes=("pre_classifier.", "classifier.", "vocab_", "embeddings.position_ids"),
    )
    return sizes.encoder_network(layers, embedding=embedding, checkpoint=names)


def pooler(config: Fields, kind: HeadKind, network: NetworkSpec) -> PoolerSpec:
    """Classes of a text come of its first token."""
    size = network.hidden_size
    if kind == "text_classifier":
        return text_classifier(config, size, [dense("pre_classifier", size, size, "relu")])
    if kind == "token_classifier":
        return token_classifier(config, size)
    act = head_activation(config, "activation", "gelu")
    steps = (dense("vocab_transform", size, size, act), layer_norm("vocab_layer_norm", size, EPS))
    weight = network.embedding_name if network.head.tied else "vocab_projector.weight"
    return masked_lm(size, network.vocab_size, steps, weight=weight, bias="vocab_projector.bias")
