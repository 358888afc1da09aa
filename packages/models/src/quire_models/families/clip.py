"""The texts of CLIP (Radford et al. 2021) and SigLIP (Zhai et al. 2023): a network that reads them, and the layer that
gives a vector where images have theirs. Images are read by a tower (`quire_models.towers.clip`).
"""

from __future__ import annotations

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import ACTIVATIONS
from quire_models.decoder_sizes import decoder_sizes
from quire_models.mixer_spec import BART_NAMES
from quire_models.pooling_heads import dense
from quire_models.spec import CheckpointNames, LayerSpec, NetworkSpec
from quire_models.towers.reading import activation_name
from quire_pooling.spec import DenseSpec, DualEncoderSpec, PoolerSpec, PoolingHeadSpec

__all__ = ["spec", "spec_of_siglip"]

_BODY = "text_model"


def spec(config: Fields) -> NetworkSpec:
    """Tokens see those before them. The vector is that of the end of the text."""
    head = dense("text_projection", config.integer("hidden_size"), config.integer("projection_dim"), bias=False)
    return _network(config, head, act="quick_gelu", eps=1e-5, context=77, is_causal=True)


def spec_of_siglip(config: Fields) -> NetworkSpec:
    """Tokens see each other, those behind the end of the text too, with which texts are filled up: the vector is that
    of the last one."""
    size, length = config.integer("hidden_size"), config.integer("max_position_embeddings", default=64, minimum=1)
    head = dense(f"{_BODY}.head", size, config.integer("projection_size", default=size, minimum=1))
    return _network(config, head, act="gelu_pytorch_tanh", eps=1e-6, context=64, text_length=length)


def _network(
    config: Fields,
    head: DenseSpec,
    *,
    act: str,
    eps: float,
    context: int,
    is_causal: bool = False,
    text_length: int | None = None,
) -> NetworkSpec:
    """The network of both: norms before the parts, learned positions, biases everywhere.

    Args:
        config: The part of the network that reads texts, complete.
        head: What the vector of a token goes through.
        act: The class's default activation.
        eps: The class's default epsilon of norms.
        context: The class's default number of positions.
        is_causal: Tokens see only those before them.
        text_length: Tokens that texts are filled up to; None where they are not.
    """
    named = config.named(rms_norm_eps="layer_norm_eps", num_key_value_heads="-", hidden_act="-")
    sizes = decoder_sizes(named, tied=True, act="gelu", acts=ACTIVATIONS, eps=eps, rotary=False, context=context)
    name = config.text("hidden_act", default=act)
    if (function := activation_name(name)) is None:
        raise CheckpointError(f"{config.source}: hidden_act {name!r} is not supported")
    attention = sizes.encoder_attention("self_attn", bias=True, names=BART_NAMES)
    layers = (
        LayerSpec(
            name=f"{_BODY}.encoder.layers.{layer}",
            mixers=(attention,),
            feed_forward=sizes.mlp(act=function),
            input_norm=sizes.layer_norm("layer_norm1"),
            feed_forward_norm=sizes.layer_norm("layer_norm2"),
        )
        for layer in sizes.layers
    )
    return sizes.encoder_network(
        layers,
        body=_BODY,
        embedding=sizes.embedding(
            "embeddings.token_embedding", positions=sizes.positions("embeddings.position_embedding")
        ),
        final_norm=sizes.layer_norm("final_layer_norm"),
        is_causal=is_causal,
        pooler=PoolerSpec(
            hidden_size=sizes.hidden_size,
            head=PoolingHeadSpec(steps=(head,)),
            tasks=frozenset({"embed"}),
            similarity="cosine",
            dual_encoder=DualEncoderSpec(text_length=text_length),
        ),
        checkpoint=CheckpointNames(ignored_prefixes=(f"{_BODY}.embeddings.position_ids",)),
    )
