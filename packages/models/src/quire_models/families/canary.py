"""Canary (Puvvada et al. 2024, "Less is More: Accurate Speech Recognition & Translation without Web-Scale Data"): a
Fast Conformer, and a decoder that writes what is said, in the language that is spoken or in another."""

from __future__ import annotations

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import ACTIVATIONS
from quire_models.decoder_sizes import decoder_sizes
from quire_models.encoder_spec import start_token_ids
from quire_models.families.fast_conformer import conformer_decoder, fast_conformer
from quire_models.spec import NetworkSpec, PositionSpec

__all__ = ["spec"]

_DECODER = {
    "vocab_size": 16384,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "intermediate_size": 4096,
    "head_dim": 128,
}
_START = (7,)
_LONGEST_S = 40
"""Longest sounds that the networks were trained on."""


def spec(config: Fields) -> NetworkSpec:
    """Positions are sines and cosines, and both stacks are as wide as each other."""
    decoder = config.object("decoder_config") or Fields({}, f"{config.source}: decoder_config")
    for field, value in {**_DECODER, "tie_word_embeddings": config.flag("tie_word_embeddings", default=True)}.items():
        decoder = decoder.with_default(field, value)
    named = decoder.named(rms_norm_eps="-")
    sizes = decoder_sizes(named, act="relu", acts=ACTIVATIONS, eps=1e-5, rotary=False, context=1024)
    conformer = fast_conformer(config, {"num_hidden_layers": 32, "num_mel_bins": 128, "scale_input": False})
    if conformer.hidden_size != sizes.hidden_size:
        raise CheckpointError(
            f"{config.source}: hidden_size is {conformer.hidden_size} in encoder_config and {sizes.hidden_size} in "
            "decoder_config: Canary is served where both are the same"
        )
    return conformer_decoder(
        sizes,
        conformer,
        bias=decoder.flag("attention_bias", default=True),
        positions=PositionSpec(name="", num_positions=sizes.max_model_len, size=sizes.hidden_size, is_scaled=True),
        projection=None,
        start_token_ids=start_token_ids(config, _START),
        longest_s=_LONGEST_S,
    )
