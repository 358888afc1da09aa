"""What networks with an encoder and a decoder say of themselves. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire_interfaces import CrossAttentionSpec, KVCacheSpec
from quire_models.config import ModelConfig
from quire_models.mixer_shapes import WeightCount

__all__ = ["EncoderDecoderConfig", "EncoderOnlyConfig", "encoder_weights"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDecoderConfig(ModelConfig):
    """A decoder that attends to what an encoder made of another text. Heads, layers and widths of `ModelConfig` are the
    decoder's; `max_encoder_len` and `decoder_start_token_ids` are given, too."""

    num_encoder_layers: int
    encoder_intermediate_size: int
    encoder_num_heads: int
    weights: Mapping[str, WeightCount]
    """Part of the network -> its weights; embedding and LM head are not listed."""

    @property
    def inner_width(self) -> int:
        """See `ModelConfig.inner_width`."""
        return 3 * max(self.intermediate_size, self.encoder_intermediate_size)

    def kv_cache_specs(self, block_size: int, dtype: str) -> dict[str, KVCacheSpec]:
        """See `ModelConfig.kv_cache_specs`: first the decoder's own attention, then its cross attention, by layers."""
        specs = ModelConfig.kv_cache_specs(self, block_size, dtype)
        cross = CrossAttentionSpec(
            block_size=block_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=dtype,
            max_encoder_tokens=self.max_encoder_len,
        )
        return specs | {f"{name}.cross": cross for name in list(specs)}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderOnlyConfig(ModelConfig):
    """A network that reads whole texts, of up to `max_encoder_len` tokens, and keeps nothing of them."""

    def kv_cache_specs(self, block_size: int, dtype: str) -> dict[str, KVCacheSpec]:
        """Nothing."""
        return {}


def encoder_weights(values: Mapping[str, Any], config: Mapping[str, Any], *, gated: bool, bias: bool) -> dict[str, Any]:
    """Weights of attention and feed-forward networks of both stacks.

    Args:
        values: Fields of `ModelConfig`, of the decoder.
        config: The fields that `EncoderDecoderConfig` adds.
        gated: Feed-forward networks have a gate.
        bias: All linear layers have a bias.
    """
    hidden, width = values["hidden_size"], values["num_heads"] * values["head_dim"]
    above, below = values["num_layers"], config["num_encoder_layers"]
    num_attentions = 2 * above + below

    def mlp(inner: int, count: int) -> WeightCount:
        inputs = 2 if gated else 1
        return WeightCount(
            ((inner, hidden, inputs * count), (hidden, inner, count)), count * bias * (inputs * inner + hidden)
        )

    return {
        "attention": WeightCount(
            ((width, hidden, 3 * num_attentions), (hidden, width, num_attentions)),
            num_attentions * bias * (3 * width + hidden),
        ),
        "MLP": mlp(values["intermediate_size"], above),
        "encoder's MLP": mlp(config["encoder_intermediate_size"], below),
    }
