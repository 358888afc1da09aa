"""GTE (Zhang et al. 2024, "mGTE"), as `NewModel` too: BERT with rotary positions and gates."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.config_fields import ACTIVATIONS
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes
from quire_models.mixer_spec import ProjectionNames
from quire_models.pooling_heads import HeadKind, dense, layer_norm, masked_lm, text_classifier, token_classifier
from quire_models.rope_config import RopeConfig
from quire_models.spec import CheckpointNames, FusedRows, LayerSpec, NetworkSpec
from quire_pooling.spec import PoolerSpec

__all__ = ["NAMES", "pooler", "spec"]

NAMES = ProjectionNames("q_proj", "k_proj", "v_proj", "o_proj")


def spec(config: Fields) -> NetworkSpec:
    """Norms behind the sums; no biases of gates, and of what they weigh."""
    config.fixed("position_embedding_type", "rope")
    config.fixed("layer_norm_type", "layer_norm")
    config.fixed("logn_attention_scale", False)
    config.fixed("pack_qkv", True)
    named = config.named(rms_norm_eps="layer_norm_eps", num_key_value_heads="-")
    scaling = config.get("rope_scaling")
    is_ntk = isinstance(scaling, dict) and scaling.get("type", scaling.get("rope_type")) == "ntk"
    unscaled = named.named(rope_scaling="-") if is_ntk else named
    sizes = decoder_sizes(unscaled, tied=True, act="gelu", acts=ACTIVATIONS, eps=1e-12, theta=160_000.0, context=8192)
    rope = _ntk(config, sizes) if is_ntk else sizes.rope
    attention = sizes.encoder_attention("attention", bias=True, names=NAMES, rope=rope)
    layers = (
        LayerSpec(
            name=f"encoder.layer.{layer}",
            mixers=(attention,),
            feed_forward=sizes.gated_mlp("mlp", out_bias=True),
            attention_out_norm=sizes.layer_norm("attn_ln"),
            feed_forward_out_norm=sizes.layer_norm("mlp_ln"),
            arrangement="post_ln",
        )
        for layer in sizes.layers
    )
    embedding = sizes.embedding(
        "embeddings.word_embeddings",
        num_token_types=config.integer("type_vocab_size", default=1, minimum=0),
        token_types="embeddings.token_type_embeddings",
        norm=sizes.layer_norm("embeddings.LayerNorm"),
    )
    inner = sizes.intermediate_size
    names = CheckpointNames(
        removed_prefixes=("new.", "gte."),
        ignored_prefixes=("pooler.", "lm_head.", "classifier."),
        fused=(
            sizes.fused_qkv("attention.qkv_proj"),
            FusedRows(module="mlp.up_gate_proj", parts=(("up_proj", inner), ("gate_proj", inner))),
        ),
    )
    return sizes.encoder_network(layers, embedding=embedding, checkpoint=names)


def _ntk(config: Fields, sizes: DecoderSizes) -> RopeConfig:
    """Frequencies of a base that grows with the context, all of them divided by the same number (fixed NTK scaling, as
    the code that came with the network has it)."""
    scaling = config.object("rope_scaling")
    assert scaling is not None
    assert sizes.rope is not None
    scaling.fixed("mixed_b")
    factor = scaling.number("factor", minimum=1.0)
    return RopeConfig(kind="linear", theta=sizes.rope.theta * factor, factor=factor ** (2 / sizes.head_dim))


def pooler(config: Fields, kind: HeadKind, network: NetworkSpec) -> PoolerSpec:
    """Classes of a text come of the pooler's output, those of tokens of hidden states."""
    size = network.hidden_size
    if kind == "text_classifier":
        return text_classifier(config, size, [dense("pooler.dense", size, size, "tanh")])
    if kind == "token_classifier":
        return token_classifier(config, size)
    eps = config.number("layer_norm_eps", default=1e-12, minimum=0.0)
    steps = (dense("lm_head.dense", size, size, "gelu_erf"), layer_norm("lm_head.norm", size, eps))
    weight = network.embedding_name if network.head.tied else "lm_head.decoder.weight"
    return masked_lm(size, network.vocab_size, steps, weight=weight, bias="lm_head.decoder.bias")
