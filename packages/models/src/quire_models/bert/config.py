"""BERT's config.json."""

from __future__ import annotations

from dataclasses import dataclass

from quire_interfaces import Fields
from quire_models.config_fields import ACTIVATIONS, decoder_fields
from quire_models.encoder_config import EncoderOnlyConfig

__all__ = ["BertConfig", "bert_fields", "read_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BertConfig(EncoderOnlyConfig):
    """BERT, RoBERTa or XLM-RoBERTa."""

    num_kinds: int
    """Kinds of tokens, of which the first is taken: sentences of a pair are not told apart."""
    position_offset: int
    """Rows of the table of positions that are not used."""


def bert_fields(config: Fields, *, position_offset: int) -> BertConfig:
    """Norms behind the parts, biases everywhere, learned positions."""
    config.fixed("position_embedding_type", "absolute")
    config.fixed("is_decoder", False)
    config.fixed("add_cross_attention", False)
    named = config.named(rms_norm_eps="layer_norm_eps", num_key_value_heads="-")
    values = decoder_fields(named, tied=True, act="gelu", acts=ACTIVATIONS, eps=1e-12, rotary=False, context=512)
    values |= {"qkv_bias": True, "attention_out_bias": True, "mlp_bias": True, "mlp_gated": False, "norm_bias": True}
    values |= {"tie_word_embeddings": True}
    rows, kinds = values["max_model_len"], config.integer("type_vocab_size", default=2, minimum=1)
    length = rows - position_offset
    return BertConfig(
        **values | {"max_model_len": length},
        max_encoder_len=length,
        generates=False,
        other_parameters=(rows + kinds) * values["hidden_size"],
        num_kinds=kinds,
        position_offset=position_offset,
    )


def read_config(config: Fields) -> BertConfig:
    """Positions begin with the first row."""
    return bert_fields(config, position_offset=0)
