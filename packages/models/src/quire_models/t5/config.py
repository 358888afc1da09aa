"""T5's config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from quire_interfaces import CheckpointError, Fields
from quire_models.config import start_token_ids
from quire_models.config_fields import ACTIVATIONS, GATED_ACTS, HIDDEN_ACTS, decoder_fields
from quire_models.encoder_config import EncoderDecoderConfig, encoder_weights
from quire_models.mixer_shapes import WeightCount

__all__ = ["T5Config", "read_config", "t5_fields"]

CONTEXT_TOKENS = 512
"""Length of the texts that T5 was trained on, for checkpoints that name none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Config(EncoderDecoderConfig):
    """T5 or one of its successors."""

    num_buckets: int
    """Of distances, each with a bias of its own."""
    max_distance: int
    """From here on all distances are in one bucket."""
    has_bias_in_every_layer: bool
    """Every layer has its own biases of distances (UMT5); else the first layer of each stack has those of all."""
    logits_scale: float
    """Factor of hidden states before the LM head."""
    head_may_differ: ClassVar[bool] = True


def t5_fields(config: Fields, *, scales_logits: bool | None, has_bias_in_every_layer: bool = False) -> T5Config:
    """No biases of linear layers, RMS norms before the parts, positions by biases of distances.

    Args:
        scales_logits: Whether hidden states are scaled before the LM head; None where config.json says it.
    """
    form = config.text("feed_forward_proj", default="relu")
    gated = form.startswith("gated-")
    act = "gelu_new" if form == "gated-gelu" else form.removeprefix("gated-")
    acts = GATED_ACTS if gated else ACTIVATIONS
    if HIDDEN_ACTS.get(act) not in acts:
        choices = ", ".join(known for known, name in HIDDEN_ACTS.items() if name in acts)
        raise CheckpointError(
            f"{config.source}: feed_forward_proj {form!r} is not supported; supported: "
            f"{'gated- with one of ' if gated else ''}{choices}"
        )
    encoder_layers = config.integer("num_layers", minimum=1)
    named = config.named(
        hidden_size="d_model",
        head_dim="d_kv",
        num_attention_heads="num_heads",
        num_hidden_layers="num_decoder_layers",
        intermediate_size="d_ff",
        hidden_act="-",
        num_key_value_heads="-",
        rms_norm_eps="layer_norm_epsilon",
        max_position_embeddings="n_positions",
    ).with_default("num_hidden_layers", encoder_layers)
    values = decoder_fields(named, tied=True, act=act, acts=acts, eps=1e-6, rotary=False, context=CONTEXT_TOKENS)
    values |= {"mlp_gated": gated}
    hidden, layers = values["hidden_size"], values["num_layers"]
    buckets = config.integer("relative_attention_num_buckets", default=32, minimum=4)
    own = {
        "num_encoder_layers": encoder_layers,
        "encoder_intermediate_size": values["intermediate_size"],
        "encoder_num_heads": values["num_heads"],
    }
    num_biases = layers + encoder_layers if has_bias_in_every_layer else 2
    num_norms = 3 * layers + 2 * encoder_layers + 2
    weights = encoder_weights(values, own, gated=gated, bias=False) | {
        "norms": WeightCount(others=hidden * num_norms),
        "position biases": WeightCount(others=num_biases * buckets * values["num_heads"]),
    }
    if scales_logits is None:
        scales_logits = config.flag("scale_decoder_outputs", default=values["tie_word_embeddings"])
    elif scales_logits:
        scales_logits = values["tie_word_embeddings"]
    return T5Config(
        **values,
        **own,
        weights=weights,
        max_encoder_len=values["max_model_len"],
        has_positions_without_end=True,
        decoder_start_token_ids=start_token_ids(config, config.token_ids("pad_token_id")[:1]),
        num_buckets=buckets,
        max_distance=config.integer("relative_attention_max_distance", default=128, minimum=2),
        has_bias_in_every_layer=has_bias_in_every_layer,
        logits_scale=hidden**-0.5 if scales_logits else 1.0,
    )


def read_config(config: Fields) -> T5Config:
    """The first T5 scales what its LM head gets; T5 1.1 and Flan-T5 do not."""
    return t5_fields(config, scales_logits=None)
