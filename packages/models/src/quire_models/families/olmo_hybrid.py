"""OLMo Hybrid (OLMo Team 2026): gated delta nets whose states may also turn over, with norms before the parts, and
every fourth layer OLMo 3's, with norms behind them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from quire_interfaces import CheckpointError, Fields, StateTensor
from quire_models.config_fields import layer_kinds
from quire_models.decoder_sizes import decoder_sizes
from quire_models.mixer_spec import RecurrentSpec
from quire_models.spec import CheckpointNames, LinearSpec, NetworkSpec, StateInputs, Weight, inside

__all__ = ["OlmoDeltaSpec", "spec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OlmoDeltaSpec(RecurrentSpec):
    """A gated delta net (Yang et al. 2024, arXiv:2412.06464), whose strengths go up to 1, or to 2 (Grazzi et al. 2024,
    arXiv:2411.12537)."""

    name: str = "linear_attn"
    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    most_strength: float
    built_by: ClassVar[str] = "quire_models.families.olmo_hybrid_layers:OlmoDeltaNet"

    @property
    def key_size(self) -> int:
        """Width of all keys together, and of all queries."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Width of all values together."""
        return self.num_value_heads * self.value_head_dim

    @property
    def width(self) -> int:
        """Projected, convolved, and copies in float32 with a key per value head."""
        copies = 6 * self.num_value_heads * (self.key_head_dim + self.value_head_dim)
        return 2 * (2 * self.key_size + self.value_size) + 3 * self.value_size + 2 * copies

    @property
    def states(self) -> tuple[StateTensor, ...]:
        """The last inputs of the convolutions, and a matrix of each value head."""
        channels = 2 * self.key_size + self.value_size
        return (
            StateTensor("conv", (self.conv_kernel - 1, channels), "float32"),
            StateTensor("delta", (self.num_value_heads, self.key_head_dim, self.value_head_dim), "float32"),
        )

    @property
    def state_inputs(self) -> StateInputs:
        """What is convolved; queries and keys of each value head, and values; a decay of each dimension of these keys
        and a strength of each head, in float32."""
        keys = self.num_value_heads * self.key_head_dim
        return StateInputs(2 * self.key_size + 2 * self.value_size + 2 * keys, wide=keys + self.num_value_heads)

    def channels(self) -> dict[str, int]:
        """Name of a convolution's taps -> its channels."""
        return {"q_conv1d": self.key_size, "k_conv1d": self.key_size, "v_conv1d": self.value_size}

    def projections(self) -> tuple[LinearSpec, ...]:
        """Layers that take the input: queries, keys, values, gate, decays, strengths."""
        sizes = {"q_proj": self.key_size, "k_proj": self.key_size, "v_proj": self.value_size, "g_proj": self.value_size}
        sizes |= {"a_proj": self.num_value_heads, "b_proj": self.num_value_heads}
        return tuple(
            LinearSpec(name=name, in_features=self.hidden_size, out_features=size) for name, size in sizes.items()
        )

    def weights(self) -> Iterator[Weight]:
        """Projections, convolutions, what decays are made of, and the norm."""
        part = "linear attention"
        out = LinearSpec(name="o_proj", in_features=self.value_size, out_features=self.hidden_size)
        for linear in (*self.projections(), out):
            yield from inside(self.name, linear.weights(part))
        for name, size in self.channels().items():
            yield Weight(f"{self.name}.{name}.weight", (size, 1, self.conv_kernel), part)
        yield Weight(f"{self.name}.o_norm.weight", (self.value_head_dim,), part)
        for name in ("A_log", "dt_bias"):
            yield Weight(f"{self.name}.{name}", (self.num_value_heads,), part, is_wide=True)


def spec(config: Fields) -> NetworkSpec:
    """Without a base of the rotation in config.json, which published files do not have, there are no positions."""
    config.fixed("hidden_act", "silu", "swish")  # the delta nets take it, too
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rotates = config.get("rope_theta") is not None or rope.get("rope_theta") is not None
    sizes = decoder_sizes(config, rotary=rotates)
    key_heads = config.integer("linear_num_key_heads", default=sizes.num_heads, minimum=1)
    key_dim = config.integer("linear_key_head_dim", default=3 * sizes.hidden_size // (4 * key_heads), minimum=1)
    delta = OlmoDeltaSpec(
        hidden_size=sizes.hidden_size,
        num_key_heads=key_heads,
        num_value_heads=config.integer("linear_num_value_heads", default=sizes.num_heads, minimum=1),
        key_head_dim=key_dim,
        value_head_dim=config.integer("linear_value_head_dim", default=2 * key_dim, minimum=1),
        conv_kernel=config.integer("linear_conv_kernel_dim", default=4, minimum=2),
        most_strength=2.0 if config.flag("linear_allow_neg_eigval", default=True) else 1.0,
    )
    if delta.num_value_heads % key_heads:
        raise CheckpointError(
            f"{config.source}: linear_num_value_heads ({delta.num_value_heads}) must be a multiple of "
            f"linear_num_key_heads ({key_heads})"
        )
    config.skip("linear_a_log_*", "linear_dt_*")
    attention = sizes.attention(bias=config.flag("attention_bias", default=False), **sizes.projection_norms())
    default = [layer % 4 == 3 for layer in sizes.layers]
    if not any(default):
        default[-1] = True
    kinds = {"full_attention": True, "linear_attention": False}
    attends = layer_kinds(config, "layer_types", sizes.num_layers, kinds, default)
    return sizes.network(
        (
            sizes.post_norm(layer, attention) if attends[layer] else sizes.pre_norm(layer, delta)
            for layer in sizes.layers
        ),
        checkpoint=CheckpointNames(
            renamed=(
                (".attention_layer_norm.", ".input_layernorm."),
                (".feedforward_layer_norm.", ".post_attention_layernorm."),
            )
        ),
    )
