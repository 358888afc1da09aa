"""What networks with gated delta nets say of themselves (Qwen3-Next, Qwen3.5). Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire_interfaces import CheckpointError, Fields, StateTensor
from quire_models.config_fields import decoder_fields
from quire_models.mixer_shapes import WeightCount
from quire_models.recurrent_config import LayerCache, RecurrentConfig

__all__ = ["DeltaShape", "GatedDeltaConfig", "attention_layers", "delta_fields"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaShape:
    """A gated delta net (Yang et al. 2024, arXiv:2412.06464)."""

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    eps: float
    """Of the norm behind it."""

    @property
    def key_size(self) -> int:
        """Width of all keys together, and of all queries."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_size(self) -> int:
        return 2 * self.key_size + self.value_size

    @property
    def width(self) -> int:
        """See `RecurrentConfig.mixer_width`: projected, convolved, and copies in float32 with a key per value head."""
        copies = 4 * self.num_value_heads * (self.key_head_dim + self.value_head_dim)
        return 2 * self.conv_size + 3 * self.value_size + 2 * copies

    @property
    def states(self) -> tuple[StateTensor, ...]:
        state = (self.num_value_heads, self.key_head_dim, self.value_head_dim)
        return (
            StateTensor("conv", (self.conv_kernel - 1, self.conv_size), "float32"),
            StateTensor("delta", state, "float32"),
        )

    def weights(self, count: int) -> WeightCount:
        """Of `count` of them."""
        inputs = self.conv_size + self.value_size + 2 * self.num_value_heads
        return WeightCount(
            ((inputs, self.hidden_size, count), (self.hidden_size, self.value_size, count)),
            count * (self.conv_size * self.conv_kernel + self.value_head_dim),
            count * 2 * self.num_value_heads,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaConfig(RecurrentConfig):
    """Gated delta nets in most layers, gated attention in the others."""

    delta: DeltaShape
    attention_layers: tuple[bool, ...]
    """Per layer: it attends."""
    num_mtp_layers: int
    """Layers of the checkpoint that predict further tokens (`mtp.layers`). Where config.json does not say, which
    Qwen3-Next's does not, one: published checkpoints have it."""


def attention_layers(config: Fields, layers: int) -> tuple[bool, ...]:
    """`layer_types`, or every fourth layer (`full_attention_interval`)."""
    kinds = config.get("layer_types")
    if kinds is None:
        interval = config.integer("full_attention_interval", default=4, minimum=1)
        return tuple((layer + 1) % interval == 0 for layer in range(layers))
    known = ("full_attention", "linear_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise CheckpointError(
            f"{config.source}: layer_types must name {' or '.join(known)} for each of {layers} layers, is {kinds!r}"
        )
    return tuple(kind == "full_attention" for kind in kinds)


def delta_fields(config: Fields, *, intermediate_size: int, value_heads: int) -> dict[str, Any]:
    """Fields of `GatedDeltaConfig` but the weights of the feed-forward networks. The arguments are class defaults."""
    config.fixed("hidden_act", "silu", "swish")  # the mixers take it, too
    config = config.with_default("intermediate_size", intermediate_size)
    values = decoder_fields(config, head_dim=256, partial=0.25)
    hidden, layers = values["hidden_size"], values["num_layers"]
    bias = config.flag("attention_bias", default=False)
    delta = DeltaShape(
        hidden_size=hidden,
        num_key_heads=config.integer("linear_num_key_heads", default=16, minimum=1),
        num_value_heads=config.integer("linear_num_value_heads", default=value_heads, minimum=1),
        key_head_dim=config.integer("linear_key_head_dim", default=128, minimum=1),
        value_head_dim=config.integer("linear_value_head_dim", default=128, minimum=1),
        conv_kernel=config.integer("linear_conv_kernel_dim", default=4, minimum=1),
        eps=values["rms_norm_eps"],
    )
    if delta.num_value_heads % delta.num_key_heads:
        raise CheckpointError(
            f"{config.source}: linear_num_value_heads ({delta.num_value_heads}) must be a multiple of "
            f"linear_num_key_heads ({delta.num_key_heads})"
        )
    attends = attention_layers(config, layers)
    query, kv = (values[heads] * values["head_dim"] for heads in ("num_heads", "num_kv_heads"))
    num_attending = sum(attends)
    attention = WeightCount(
        ((2 * query, hidden, num_attending), (kv, hidden, 2 * num_attending), (hidden, query, num_attending)),
        num_attending * (2 * values["head_dim"] + bias * (2 * query + 2 * kv + hidden)),
    )
    return values | {
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "qk_norm": True,
        "delta": delta,
        "num_mtp_layers": config.integer("mtp_num_hidden_layers", default=1, minimum=0),
        "mixer_width": delta.width,
        "attention_layers": attends,
        "caches": tuple(
            LayerCache(f"model.layers.{layer}", () if attends[layer] else delta.states) for layer in range(layers)
        ),
        "weights": {
            "attention": attention,
            "linear attention": delta.weights(layers - num_attending),
            "norms": WeightCount(others=(2 * layers + 1) * hidden),
        },
    }
