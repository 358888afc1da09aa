"""Nomic Embed (Nussbaum et al. 2024), and Snowflake Arctic Embed M long: BERT with rotary positions and SwiGLU."""

from __future__ import annotations

from dataclasses import replace

from quire_interfaces import Fields
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

__all__ = ["NAMES", "pooler", "spec"]

NAMES = ProjectionNames("q_proj", "k_proj", "v_proj", "out_proj")
_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "rms_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rotary_emb_base",
    "hidden_act": "-",
}
"""Names of fields in the checkpoints that came with code of their own."""


def spec(config: Fields) -> NetworkSpec:
    """Norms behind the sums, no biases. Texts are as long as those that it was trained on: the code that came with the
    network scales rotations beyond, text by text."""
    named = config.named(rms_norm_eps="layer_norm_eps", num_key_value_heads="-")
    theta = 1000.0
    if config.get("n_embd") is not None:
        named, theta = _of_own_code(config), 10_000.0
    sizes = decoder_sizes(named, tied=True, eps=1e-12, theta=theta, inner_factor=4, context=2048)
    trained = config.integer("max_trained_positions", default=sizes.max_model_len, minimum=1)
    sizes = replace(sizes, max_model_len=min(sizes.max_model_len, trained))
    attention = sizes.encoder_attention("attn", bias=False, names=NAMES, rope=sizes.rope)
    layers = (
        LayerSpec(
            name=f"encoder.layers.{layer}",
            mixers=(attention,),
            feed_forward=sizes.gated_mlp("mlp", names=("fc12", "fc11", "fc2")),
            attention_out_norm=sizes.layer_norm("norm1"),
            feed_forward_out_norm=sizes.layer_norm("norm2"),
            arrangement="post_ln",
        )
        for layer in sizes.layers
    )
    embedding = sizes.embedding(
        "embeddings.word_embeddings",
        num_token_types=config.integer("type_vocab_size", default=2, minimum=0),
        token_types="embeddings.token_type_embeddings",
        norm=sizes.layer_norm("emb_ln"),
    )
    names = CheckpointNames(
        removed_prefixes=("nomic_bert.", "bert."),
        ignored_prefixes=("pooler.", "cls.", "classifier."),
        renamed=(("predictions.decoder.bias", "predictions.bias"),),
        fused=(sizes.fused_qkv("attn.Wqkv", NAMES[:3]),),
    )
    return sizes.encoder_network(layers, embedding=embedding, checkpoint=names)


def _of_own_code(config: Fields) -> Fields:
    """A config.json in the names of GPT-2, of which one kind of network is served.

    Raises:
        CheckpointError: It is another kind: mixtures of experts (Nomic Embed v2), biases, norms before the parts.
    """
    config.fixed("activation_function", "swiglu")
    config.fixed("rotary_emb_fraction", 1, 1.0)
    config.fixed("moe_every_n_layers", 0)
    for name in (
        "prenorm",
        "parallel_block",
        "use_rms_norm",
        "rotary_emb_interleaved",
        "qkv_proj_bias",
        "mlp_fc1_bias",
    ):
        config.fixed(name, False)
    config.fixed("mlp_fc2_bias", False)
    config.fixed("rotary_emb_scale_base")
    return config.named(**_GPT2_NAMES, num_key_value_heads="-")


def pooler(config: Fields, kind: HeadKind, network: NetworkSpec) -> PoolerSpec:
    """Classes of a text come of the pooler's output, those of tokens of hidden states."""
    size = network.hidden_size
    if kind == "text_classifier":
        return text_classifier(config, size, [dense("pooler.dense", size, size, "tanh")])
    if kind == "token_classifier":
        return token_classifier(config, size)
    eps = config.number("layer_norm_eps", default=1e-12, minimum=0.0)
    act = head_activation(config, "hidden_act", "silu")
    name = "cls.predictions.transform"
    steps = (dense(f"{name}.dense", size, size, act), layer_norm(f"{name}.layer_norm", size, eps))
    return masked_lm(size, network.vocab_size, steps, weight=network.embedding_name, bias="cls.predictions.bias")
