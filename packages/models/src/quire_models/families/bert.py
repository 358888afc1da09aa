"""BERT (Devlin et al. 2019), and RoBERTa and XLM-RoBERTa, whose positions begin behind that of padding."""

from __future__ import annotations

from dataclasses import replace

from quire_interfaces import Fields
from quire_models.config_fields import ACTIVATIONS
from quire_models.decoder_sizes import decoder_sizes
from quire_models.families import jina_embeddings_v3
from quire_models.mixer_spec import ProjectionNames
from quire_models.pooling_heads import (
    HeadKind,
    dense,
    head_activation,
    layer_norm,
    masked_lm,
    roberta_heads,
    text_classifier,
    token_classifier,
)
from quire_models.spec import CheckpointNames, LayerSpec, LinearSpec, NetworkSpec
from quire_pooling.spec import PoolerSpec

__all__ = ["NAMES", "bert_network", "pooler", "pooler_of_roberta", "spec", "spec_of_roberta"]

NAMES = ProjectionNames("self.query", "self.key", "self.value", "output.dense")


def spec(config: Fields) -> NetworkSpec:
    """Positions begin with the first row."""
    return bert_network(config, "bert.")


def spec_of_roberta(config: Fields) -> NetworkSpec:
    """Positions begin behind that of padding; those of Jina's networks come by rotation."""
    if config.get("position_embedding_type") == "rotary":
        return jina_embeddings_v3.spec(config)
    return bert_network(config, "roberta.", config.integer("pad_token_id", default=1, minimum=0) + 1)


def bert_network(
    config: Fields, body: str, position_offset: int = 0, *, embedding_size: int = 0, ignored: tuple[str, ...] = ()
) -> NetworkSpec:
    """Norms behind the sums, biases everywhere, learned positions; `position_offset` rows of their table are not
    used.

    Args:
        body: What names of the body begin with in checkpoints of classes with a head.
        embedding_size: Width of the embedding, which is projected to the hidden size behind its norm (ELECTRA); 0 for
            the hidden size.
        ignored: What names of further heads begin with.
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
    width = embedding_size or sizes.hidden_size
    project = LinearSpec(name="embeddings_project", in_features=width, out_features=sizes.hidden_size, bias=True)
    embedding = sizes.embedding(
        "embeddings.word_embeddings",
        size=width,
        num_token_types=config.integer("type_vocab_size", default=2, minimum=1),
        token_types="embeddings.token_type_embeddings",
        positions=replace(sizes.positions("embeddings.position_embeddings", position_offset), size=width),
        norm=sizes.layer_norm("embeddings.LayerNorm", width),
        project_in=None if width == sizes.hidden_size else project,
        projects_last=True,
    )
    names = CheckpointNames(
        removed_prefixes=(body,),
        ignored_prefixes=("pooler.", "cls.", "lm_head.", "classifier.", "embeddings.position_ids", *ignored),
        renamed=(("predictions.decoder.bias", "predictions.bias"), ("lm_head.decoder.bias", "lm_head.bias")),
    )
    return sizes.encoder_network(layers, embedding=embedding, checkpoint=names)


def pooler(config: Fields, kind: HeadKind, network: NetworkSpec) -> PoolerSpec:
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


def pooler_of_roberta(config: Fields, kind: HeadKind, network: NetworkSpec) -> PoolerSpec:
    """Heads of their own: they do not use the pooler."""
    return roberta_heads(config, kind, network)
