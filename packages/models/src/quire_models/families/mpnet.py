"""MPNet (Song et al. 2020): BERT without token types, with learned positions and biases by distance."""

from __future__ import annotations

from dataclasses import replace

from quire_interfaces import Fields
from quire_models.config_fields import ACTIVATIONS
from quire_models.decoder_sizes import decoder_sizes
from quire_models.encoder_spec import DistanceBiasSpec
from quire_models.mixer_spec import ProjectionNames
from quire_models.pooling_heads import HeadKind, roberta_heads
from quire_models.spec import CheckpointNames, LayerSpec, NetworkSpec
from quire_pooling.spec import PoolerSpec

__all__ = ["NAMES", "pooler", "spec"]

NAMES = ProjectionNames("q", "k", "v", "o")
_NUM_BUCKETS, _MAX_DISTANCE = 32, 128
"""Ranges of distances, and where the last one begins, which the class has as constants."""
_FIRST_POSITION = 2
"""Row of the table of positions that the first token takes, whatever the padding token is."""


def spec(config: Fields) -> NetworkSpec:
    """Norms behind the sums, biases everywhere; all layers share the biases by distance."""
    config.fixed("relative_attention_num_buckets", _NUM_BUCKETS)
    named = config.named(rms_norm_eps="layer_norm_eps", num_key_value_heads="-")
    sizes = decoder_sizes(named, tied=True, act="gelu", acts=ACTIVATIONS, eps=1e-12, rotary=False, context=512)
    sizes = replace(sizes, max_model_len=sizes.max_model_len - _FIRST_POSITION)
    layers = (
        LayerSpec(
            name=f"encoder.layer.{layer}",
            mixers=(sizes.encoder_attention("attention.attn", bias=True, names=NAMES),),
            feed_forward=sizes.mlp("", ("intermediate.dense", "output.dense")),
            attention_out_norm=sizes.layer_norm("attention.LayerNorm"),
            feed_forward_out_norm=sizes.layer_norm("output.LayerNorm"),
            arrangement="post_ln",
        )
        for layer in sizes.layers
    )
    embedding = sizes.embedding(
        "embeddings.word_embeddings",
        positions=sizes.positions("embeddings.position_embeddings", _FIRST_POSITION),
        norm=sizes.layer_norm("embeddings.LayerNorm"),
    )
    names = CheckpointNames(
        removed_prefixes=("mpnet.",),
        ignored_prefixes=("pooler.", "lm_head.", "classifier.", "embeddings.position_ids"),
        renamed=(("lm_head.decoder.bias", "lm_head.bias"),),
    )
    bias = DistanceBiasSpec(
        names=("encoder.relative_attention_bias",),
        num_heads=sizes.num_heads,
        num_buckets=_NUM_BUCKETS,
        max_distance=_MAX_DISTANCE,
    )
    return sizes.encoder_network(layers, embedding=embedding, checkpoint=names, distance_bias=bias)


def pooler(config: Fields, kind: HeadKind, network: NetworkSpec) -> PoolerSpec:
    """Those of RoBERTa."""
    return roberta_heads(config, kind, network)
