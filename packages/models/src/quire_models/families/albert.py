"""ALBERT (Lan et al. 2020): BERT whose layers are a few, each of which runs several times."""

from __future__ import annotations

from dataclasses import replace

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import ACTIVATIONS
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes
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
from quire_models.spec import CheckpointNames, LayerSpec, LinearSpec, NetworkSpec
from quire_pooling.spec import PoolerSpec

__all__ = ["NAMES", "pooler", "spec"]

NAMES = ProjectionNames("query", "key", "value", "dense")


def spec(config: Fields) -> NetworkSpec:
    """Norms behind the sums, biases everywhere, learned positions; the embedding is projected behind its norm."""
    config.fixed("position_embedding_type", "absolute")
    named = config.named(rms_norm_eps="layer_norm_eps", num_key_value_heads="-")
    sizes = decoder_sizes(named, tied=True, act="gelu_new", acts=ACTIVATIONS, eps=1e-12, rotary=False, context=512)
    width = config.integer("embedding_size", default=128, minimum=1)
    embedding = sizes.embedding(
        "embeddings.word_embeddings",
        size=width,
        num_token_types=config.integer("type_vocab_size", default=2, minimum=1),
        token_types="embeddings.token_type_embeddings",
        positions=replace(sizes.positions("embeddings.position_embeddings"), size=width),
        norm=sizes.layer_norm("embeddings.LayerNorm", width),
        project_in=LinearSpec(
            name="encoder.embedding_hidden_mapping_in", in_features=width, out_features=sizes.hidden_size, bias=True
        ),
        projects_last=True,
    )
    names = CheckpointNames(
        removed_prefixes=("albert.",),
        ignored_prefixes=("pooler.", "predictions.", "classifier.", "sop_classifier.", "embeddings.position_ids"),
        renamed=(("predictions.decoder.bias", "predictions.bias"),),
    )
    layers = (_layer(sizes, name) for name in _layer_names(config, sizes))
    return sizes.encoder_network(layers, embedding=embedding, checkpoint=names)


def _layer_names(config: Fields, sizes: DecoderSizes) -> list[str]:
    """Name of each layer that runs, in order.

    Raises:
        CheckpointError: There are more groups than layers.
    """
    groups = config.integer("num_hidden_groups", default=1, minimum=1)
    inner = config.integer("inner_group_num", default=1, minimum=1)
    if groups > sizes.num_layers:
        raise CheckpointError(f"{config.source}: num_hidden_groups ({groups}) is more than num_hidden_layers")
    return [
        f"encoder.albert_layer_groups.{layer * groups // sizes.num_layers}.albert_layers.{index}"
        for layer in sizes.layers
        for index in range(inner)
    ]


def _layer(sizes: DecoderSizes, name: str) -> LayerSpec:
    return LayerSpec(
        name=name,
        mixers=(sizes.encoder_attention("attention", bias=True, names=NAMES),),
        feed_forward=sizes.mlp("", ("ffn", "ffn_output")),
        attention_out_norm=sizes.layer_norm("attention.LayerNorm"),
        feed_forward_out_norm=sizes.layer_norm("full_layer_layer_norm"),
        arrangement="post_ln",
    )


def pooler(config: Fields, kind: HeadKind, network: NetworkSpec) -> PoolerSpec:
    """Classes of a text come of the pooler's output, those of tokens of hidden states."""
    size, width = network.hidden_size, network.embedding.size
    if kind == "text_classifier":
        return text_classifier(config, size, [dense("pooler", size, size, "tanh")])
    if kind == "token_classifier":
        return token_classifier(config, size)
    eps = config.number("layer_norm_eps", default=1e-12, minimum=0.0)
    act = head_activation(config, "hidden_act", "gelu_new")
    steps = (dense("predictions.dense", size, width, act), layer_norm("predictions.LayerNorm", width, eps))
    weight = network.embedding_name if network.head.tied else "predictions.decoder.weight"
    return masked_lm(size, network.vocab_size, steps, weight=weight, bias="predictions.bias", width=width)
