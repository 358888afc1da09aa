"""BERT (Devlin et al. 2019), and RoBERTa and XLM-RoBERTa, whose positions begin behind that of padding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from quire_interfaces import Fields
from quire_models.config_fields import ACTIVATIONS
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes
from quire_models.encoder_spec import EncoderSpec
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
from quire_models.spec import CheckpointNames, EmbeddingSpec, HeadSpec, LayerSpec, NetworkSpec, NormSpec
from quire_pooling.spec import PoolerSpec

__all__ = ["NAMES", "encoder_network", "pooler", "pooler_of_roberta", "spec", "spec_of_roberta"]

NAMES = ProjectionNames("self.query", "self.key", "self.value", "output.dense")


def spec(config: Fields) -> NetworkSpec:
    """Positions begin with the first row."""
    return _network(config, 0, "bert.")


def spec_of_roberta(config: Fields) -> NetworkSpec:
    """Positions begin behind that of padding."""
    return _network(config, config.integer("pad_token_id", default=1, minimum=0) + 1, "roberta.")


def _network(config: Fields, position_offset: int, body: str) -> NetworkSpec:
    """Norms behind the sums, biases everywhere, learned positions; `position_offset` rows of their table are not
    used.

    Args:
        body: What names of the body begin with in checkpoints of classes with a head.
    """
    config.fixed("position_embedding_type", "absolute")
    config.fixed("is_decoder", False)
    config.fixed("add_cross_attention", False)
    named = config.named(rms_norm_eps="layer_norm_eps", num_key_value_heads="-")
    sizes = decoder_sizes(named, tied=True, act="gelu", acts=ACTIVATIONS, eps=1e-12, rotary=False, context=512)
    sizes = replace(sizes, max_model_len=sizes.max_model_len - position_offset)
    attention = sizes.encoder_attention("attention", bias=True, names=NAMES)
    layers = (
        LayerSpec(
            name=f"encoder.layer.{layer}",
            mixers=(attention,),
            feed_forward=sizes.mlp("", ("intermediate.dense", "output.dense")),
            attention_out_norm=sizes.layer_norm("attention.output.LayerNorm"),
            feed_forward_out_norm=sizes.layer_norm("output.LayerNorm"),
            arrangement="post_ln",
        )
        for layer in sizes.layers
    )
    embedding = sizes.embedding(
        "embeddings.word_embeddings",
        num_token_types=config.integer("type_vocab_size", default=2, minimum=1),
        token_types="embeddings.token_type_embeddings",
        positions=sizes.positions("embeddings.position_embeddings", position_offset),
        norm=sizes.layer_norm("embeddings.LayerNorm"),
    )
    names = CheckpointNames(
        removed_prefix=body,
        ignored_prefixes=("pooler.", "cls.", "lm_head.", "classifier.", "embeddings.position_ids"),
        renamed=(("predictions.decoder.bias", "predictions.bias"), ("lm_head.decoder.bias", "lm_head.bias")),
    )
    return encoder_network(sizes, layers, None, embedding, names)


def pooler(config: Fields, kind: HeadKind, network: NetworkSpec) -> PoolerSpec | None:
    """Classes of a text come of the pooler's output, those of tokens of hidden states."""
    size = network.hidden_size
    if kind == "text_classifier":
        return text_classifier(config, size, [dense("pooler.dense", size, size, "tanh")])
    if kind == "token_classifier":
        return token_classifier(config, size)
    eps = config.number("layer_norm_eps", default=1e-12, minimum=0.0)
    act = head_activation(config, "hidden_act", "gelu")
    name = "cls.predictions.transform"
    steps = (dense(f"{name}.dense", size, size, act), layer_norm(f"{name}.LayerNorm", size, eps))
    weight = network.embedding_name if network.head.tied else "cls.predictions.decoder.weight"
    return masked_lm(size, network.vocab_size, steps, weight=weight, bias="cls.predictions.bias")


def pooler_of_roberta(config: Fields, kind: HeadKind, network: NetworkSpec) -> PoolerSpec | None:
    """Heads of their own: they do not use the pooler."""
    size = network.hidden_size
    if kind == "text_classifier":
        return text_classifier(
            config, size, [dense("classifier.dense", size, size, "tanh")], last="classifier.out_proj"
        )
    if kind == "token_classifier":
        return token_classifier(config, size)
    eps = config.number("layer_norm_eps", default=1e-12, minimum=0.0)
    steps = (dense("lm_head.dense", size, size, "gelu_erf"), layer_norm("lm_head.layer_norm", size, eps))
    weight = network.embedding_name if network.head.tied else "lm_head.decoder.weight"
    return masked_lm(size, network.vocab_size, steps, weight=weight, bias="lm_head.bias")


def encoder_network(
    sizes: DecoderSizes,
    layers: Iterable[LayerSpec],
    final_norm: NormSpec | None,
    embedding: EmbeddingSpec,
    checkpoint: CheckpointNames,
) -> NetworkSpec:
    """An encoder alone, whose names have no prefix."""
    return sizes.network(
        layers,
        kind=EncoderSpec,
        max_encoder_len=sizes.max_model_len,
        body="",
        embedding=embedding,
        final_norm=final_norm,
        head=HeadSpec(tied=sizes.tied),
        checkpoint=checkpoint,
    )
