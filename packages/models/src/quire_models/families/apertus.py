"""Apertus (Swiss AI 2025): normalised heads, and xIELU (Huang & Schlag 2024) instead of a gate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from quire_interfaces import Fields
from quire_models.decoder_sizes import decoder_sizes
from quire_models.feed_forward_spec import MLPSpec
from quire_models.spec import NetworkSpec, Weight

__all__ = ["XieluMLPSpec", "spec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class XieluMLPSpec(MLPSpec):
    """down(xielu(up(x))), with an activation of two learned weights and two constants."""

    built_by: ClassVar[str] = "quire_models.families.apertus_layers:make_mlp"

    def weights(self) -> Iterator[Weight]:
        """Both matrices, and what the activation has."""
        yield from MLPSpec.weights(self)
        for name, shape, is_buffer in (("alpha_p", (1,), False), ("alpha_n", (1,), False)):
            yield Weight(f"{self.name}.act_fn.{name}", shape, "MLP", is_buffer=is_buffer)
        for name in ("beta", "eps"):
            yield Weight(f"{self.name}.act_fn.{name}", (), "MLP", is_buffer=True)


def spec(config: Fields) -> NetworkSpec:
    """Norms have names of their own."""
    config.fixed("hidden_act", "xielu")
    bias = config.flag("attention_bias", default=False)
    sizes = decoder_sizes(config.named(hidden_act="-"), theta=12000000.0, eps=1e-5)
    attention = sizes.attention(bias=bias, **sizes.head_norms())
    mlp = XieluMLPSpec(
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        act="xielu",
        bias=False,
        names=("up_proj", "down_proj"),
    )
    norms = ("attention_layernorm", "feedforward_layernorm")
    return sizes.network(sizes.pre_norm(layer, attention, mlp, norms=norms) for layer in sizes.layers)
