"""Jina Embeddings v3 (Sturua et al. 2024): XLM-RoBERTa whose positions come by rotation."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.config_fields import ACTIVATIONS
from quire_models.decoder_sizes import decoder_sizes
from quire_models.mixer_spec import ProjectionNames
from quire_models.pooling_heads import HeadKind, roberta_heads
from quire_models.spec import CheckpointNames, LayerSpec, NetworkSpec
from quire_pooling.spec import PoolerSpec

__all__ = ["NAMES", "pooler", "spec"]

NAMES = ProjectionNames("q_proj", "k_proj", "v_proj", "out_proj")


def spec(config: Fields) -> NetworkSpec:
    """Norms behind the sums, biases everywhere. Adapters of tasks, which the first checkpoints have beside each weight,
    are left out: texts are embedded as without a task."""
    named = config.named(rms_norm_eps="layer_norm_eps", num_key_value_heads="-")
    if config.get("rotary_emb_base") is not None:
        named = named.named(rope_theta="rotary_emb_base")
    sizes = decoder_sizes(named, tied=True, act="gelu", acts=ACTIVATIONS, eps=1e-5, theta=20_000.0, context=8194)
    attention = sizes.encoder_attention("mixer", bias=True, names=NAMES, rope=sizes.rope)
    layers = (
        LayerSpec(
            name=f"encoder.layers.{layer}",
            mixers=(attention,),
            feed_forward=sizes.mlp("mlp", ("fc1", "fc2")),
            attention_out_norm=sizes.layer_norm("norm1"),
            feed_forward_out_norm=sizes.layer_norm("norm2"),
            arrangement="post_ln",
        )
        for layer in sizes.layers
    )
    embedding = sizes.embedding(
        "embeddings.word_embeddings",
        num_token_types=config.integer("type_vocab_size", default=1, minimum=1),
        token_types="embeddings.token_type_embeddings",
        norm=sizes.layer_norm("emb_ln"),
    )
    names = CheckpointNames(
        removed_prefixes=("roberta.",),
        ignored_prefixes=("pooler.", "lm_head.", "classifier."),
        ignored_suffixes=(".lora_A", ".lora_B"),
        renamed=(("parametrizations.weight.original", "weight"), ("lm_head.decoder.bias", "lm_head.bias")),
        fused=(sizes.fused_qkv("mixer.Wqkv", NAMES[:3]),),
    )
    return sizes.encoder_network(layers, embedding=embedding, checkpoint=names)


def pooler(config: Fields, kind: HeadKind, network: NetworkSpec) -> PoolerSpec:
    """Those of RoBERTa."""
    return roberta_heads(config, kind, network)
