"""DeBERTa v2 and v3 (He et al. 2021; 2023): scores of contents and of positions apart (disentangled attention)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from quire_interfaces import Fields
from quire_models.config_fields import ACTIVATIONS
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes
from quire_models.encoder_spec import EncoderAttentionSpec, EncoderSpec
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
from quire_models.spec import CheckpointNames, LayerSpec, LinearSpec, NetworkSpec, NormSpec, Weight, inside, recast
from quire_pooling.spec import PoolerSpec

__all__ = ["NAMES", "DebertaSpec", "DisentangledAttentionSpec", "PositionsSpec", "pooler", "spec"]

NAMES = ProjectionNames("self.query_proj", "self.key_proj", "self.value_proj", "output.dense")


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionsSpec:
    """Embeddings of distances, which all layers share: one row for each range of distances, before and behind."""

    num_buckets: int
    """Ranges of distances in one direction."""
    max_distance: int
    """Distances from here on are in the last range."""
    has_log_buckets: bool
    """Far distances share ranges, by their logarithm; otherwise each distance has its own."""
    norm: NormSpec | None
    """Of each row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DisentangledAttentionSpec(EncoderAttentionSpec):
    """Attention whose scores are of contents to contents, contents to positions, and positions to contents (He et al.
    2021, sec. 3.1)."""

    terms: tuple[str, ...]
    """Scores besides those of contents: "c2p", "p2c"."""
    shares_projections: bool
    """Positions are projected as contents are."""
    built_by: ClassVar[str] = "quire_models.families.deberta_v2_layers:DisentangledAttention"

    def position_projections(self) -> dict[str, LinearSpec]:
        """Term -> what projects positions for it; none where projections are shared."""
        size = self.num_heads * self.head_dim
        names = {"c2p": "self.pos_key_proj", "p2c": "self.pos_query_proj"}
        return {
            term: LinearSpec(name=names[term], in_features=self.hidden_size, out_features=size, bias=True)
            for term in (() if self.shares_projections else self.terms)
        }

    def weights(self) -> Iterator[Weight]:
        """Those of any attention, and what projects positions."""
        yield from EncoderAttentionSpec.weights(self)
        for linear in self.position_projections().values():
            yield from inside(self.name, linear.weights("attention"))


@dataclass(frozen=True, slots=True, kw_only=True)
class DebertaSpec(EncoderSpec):
    """DeBERTa v2 or v3."""

    positions: PositionsSpec
    built_by: ClassVar[str] = "quire_models.families.deberta_v2_layers:DebertaEncoder"

    def weights(self) -> Iterator[Weight]:
        """Those of any encoder, and the embeddings of distances."""
        yield from EncoderSpec.weights(self)
        yield Weight("encoder.rel_embeddings.weight", (2 * self.positions.num_buckets, self.hidden_size), "embedding")
        if self.positions.norm is not None:
            yield from self.positions.norm.weights()


def spec(config: Fields) -> NetworkSpec:
    """Norms behind the sums, biases everywhere; the embedding may have learned positions besides."""
    config.fixed("relative_attention", True)
    config.fixed("conv_kernel_size", 0)
    named = config.named(rms_norm_eps="layer_norm_eps", num_key_value_heads="-")
    sizes = decoder_sizes(named, tied=True, act="gelu", acts=ACTIVATIONS, eps=1e-7, rotary=False, context=512)
    config.fixed("embedding_size", sizes.hidden_size)
    config.fixed("attention_head_size", sizes.head_dim)
    attention = _attention(config, sizes)
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
    has_positions = config.flag("position_biased_input", default=True)
    embedding = sizes.embedding(
        "embeddings.word_embeddings",
        num_token_types=config.integer("type_vocab_size", default=0, minimum=0),
        token_types="embeddings.token_type_embeddings",
        positions=sizes.positions("embeddings.position_embeddings") if has_positions else None,
        norm=sizes.layer_norm("embeddings.LayerNorm"),
    )
    ignored = ["pooler.", "cls.", "lm_predictions.", "mask_predictions.", "classifier.", "embeddings.position_ids"]
    if not has_positions:
        ignored.append("embeddings.position_embeddings.")
    names = CheckpointNames(
        removed_prefixes=("deberta.",),
        ignored_prefixes=tuple(ignored),
        renamed=(("cls.predictions.decoder.bias", "cls.predictions.bias"),),
    )
    network = sizes.encoder_network(layers, embedding=embedding, checkpoint=names)
    return recast(DebertaSpec, network, positions=_positions(config, sizes))


def _attention(config: Fields, sizes: DecoderSizes) -> DisentangledAttentionSpec:
    terms = config.get("pos_att_type") or ()
    terms = tuple(terms.lower().split("|")) if isinstance(terms, str) else config.texts("pos_att_type")
    terms = tuple(term for term in ("c2p", "p2c") if term in terms)
    plain = sizes.encoder_attention(
        "attention", bias=True, names=NAMES, scale=(sizes.head_dim * (1 + len(terms))) ** -0.5
    )
    shares = config.flag("share_att_key", default=False)
    return recast(DisentangledAttentionSpec, plain, terms=terms, shares_projections=shares)


def _positions(config: Fields, sizes: DecoderSizes) -> PositionsSpec:
    most = config.integer("max_relative_positions", default=-1)
    most = most if most > 0 else sizes.max_model_len
    buckets = config.integer("position_buckets", default=-1)
    normed = "layer_norm" in config.text("norm_rel_ebd", default="none").lower()
    return PositionsSpec(
        num_buckets=buckets if buckets > 0 else most,
        max_distance=most,
        has_log_buckets=buckets > 0,
        norm=sizes.layer_norm("encoder.LayerNorm") if normed else None,
    )


def pooler(config: Fields, kind: HeadKind, network: NetworkSpec) -> PoolerSpec:
    """Classes of a text come of its first token."""
    size = network.hidden_size
    if kind == "text_classifier":
        act = head_activation(config, "pooler_hidden_act", "gelu")
        return text_classifier(config, size, [dense("pooler.dense", size, size, act)])
    if kind == "token_classifier":
        return token_classifier(config, size)
    eps = config.number("layer_norm_eps", default=1e-7, minimum=0.0)
    act = head_activation(config, "hidden_act", "gelu")
    is_legacy = config.flag("legacy", default=True)
    transform = "cls.predictions.transform" if is_legacy else "lm_predictions.lm_head"
    steps = (dense(f"{transform}.dense", size, size, act), layer_norm(f"{transform}.LayerNorm", size, eps))
    bias = "cls.predictions.bias" if is_legacy else f"{transform}.bias"
    weight = network.embedding_name if network.head.tied or not is_legacy else "cls.predictions.decoder.weight"
    return masked_lm(size, network.vocab_size, steps, weight=weight, bias=bias)
