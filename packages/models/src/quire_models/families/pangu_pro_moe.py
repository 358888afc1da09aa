"""openPangu Pro MoE V2 (Huawei 2026): learned keys and values in front of every sequence, values narrower than keys,
and the experts and norms of openPangu Ultra MoE."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from quire_interfaces import CheckpointError, Fields
from quire_models.decoder_sizes import decoder_sizes
from quire_models.families.mimo_v2_flash import NarrowValueSpec
from quire_models.families.pangu_ultra_moe import pangu_network
from quire_models.rope_config import RopeConfig
from quire_models.spec import NetworkSpec, Weight, inside

__all__ = ["LearnedSinkSpec", "spec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedSinkSpec(NarrowValueSpec):
    """Attention to all tokens before, and to learned keys that have no position."""

    num_sinks: int
    has_sink_values: bool
    """What they give is learned, too; else it is zero."""
    built_by: ClassVar[str] = "quire_models.families.pangu_pro_moe_layers:LearnedSinkAttention"

    def sink_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the learned keys, and of the values where there are any."""
        shapes: dict[str, tuple[int, ...]] = {"param_sink_key": (self.num_sinks, self.num_kv_heads, self.head_dim)}
        if self.has_sink_values:
            shapes["param_sink_value"] = (self.num_sinks, self.num_kv_heads, self.value_dim)
        return shapes

    def weights(self) -> Iterator[Weight]:
        """Projections, the norm of keys, and the sinks."""
        assert self.k_norm is not None
        for each in self.projections():
            yield from inside(self.name, each.weights("attention"))
        yield from inside(self.name, self.k_norm.weights())
        for name, shape in self.sink_shapes().items():
            yield Weight(f"{self.name}.{name}", shape, "attention")


def spec(config: Fields) -> NetworkSpec:
    """Keys are normalised before they are rotated, in their first `qk_rope_dim` dimensions, and by base 10000 whatever
    `rope_theta` says, as vLLM rotates them."""
    rotary, plain = config.integer("qk_rope_dim", minimum=2), config.integer("qk_nope_dim", minimum=0)
    width = config.integer("v_channels", minimum=1)
    config.fixed("interleaved_sliding_window")
    config.fixed("rope_scaling")
    config.fixed("is_causal", True)
    config.fixed("mlp_bias", False)
    if rotary % 2 or width > rotary + plain:
        raise CheckpointError(
            f"{config.source}: qk_rope_dim ({rotary}) must be even, and v_channels ({width}) at most qk_rope_dim + "
            f"qk_nope_dim ({rotary + plain})"
        )
    config = config.named(head_dim="head size").with_default("head_dim", rotary + plain)
    sizes = decoder_sizes(config)
    bias = config.flag("attention_bias", default=config.flag("bias", default=False))
    attention = LearnedSinkSpec(
        hidden_size=sizes.hidden_size,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        scale=sizes.head_dim**-0.5,
        rope=RopeConfig(partial_rotary_factor=rotary / sizes.head_dim),
        rotary_dim=rotary,
        interleaved=True,
        qkv_bias=config.flag("qkv_bias", default=bias),
        out_bias=bias,
        k_norm=sizes.rms_norm("k_layernorm", sizes.head_dim),
        value_dim=width,
        value_factor=1.0,
        num_sinks=config.integer("param_sink_number", minimum=1),
        has_sink_values=config.flag("param_sink_with_value", default=False),
    )
    return pangu_network(config, sizes, attention)
