"""IQuest Loop Coder (IQuest 2026): Llama whose layers run twice. In the second run each head attends to what the first
run kept of all tokens, and to what this run keeps of the last ones, and a gate mixes both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from quire_interfaces import Fields
from quire_models.decoder_sizes import decoder_sizes
from quire_models.mixer_spec import SelfAttentionSpec
from quire_models.spec import LayerSpec, NetworkSpec, Weight, recast

__all__ = ["FirstRunSpec", "LoopedLayerSpec", "LoopedNetworkSpec", "spec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRunSpec(SelfAttentionSpec):
    """Attention whose cache the second run reads, too."""

    built_by: ClassVar[str] = "quire_models.families.iquest_loop_coder_layers:FirstRunAttention"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopedLayerSpec(LayerSpec):
    """The second run of a layer: a cache of its own, the weights of the first, and those of its gate."""

    num_heads: int
    head_dim: int
    built_by: ClassVar[str] = "quire_models.families.iquest_loop_coder_layers:LoopedLayer"

    def weights(self) -> Iterator[Weight]:
        """The gate's: from each head's query to a number."""
        yield Weight(f"{self.name}.weight", (self.num_heads, self.head_dim), "attention")
        yield Weight(f"{self.name}.bias", (self.num_heads,), "attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopedNetworkSpec(NetworkSpec):
    """A network whose second half of layers are the first once more."""

    shares_heads: ClassVar[bool] = False
    built_by: ClassVar[str] = "quire_models.families.iquest_loop_coder_layers:LoopedLM"


def spec(config: Fields) -> NetworkSpec:
    """`loop_window_size` tokens are seen of the second run, the own one included."""
    config.fixed("loop_num", 2)
    sizes = decoder_sizes(config, theta=500000.0, eps=1e-5)
    bias = config.flag("attention_bias", default=False)
    mlp = sizes.gated_mlp(bias=config.flag("mlp_bias", default=False))
    attention = sizes.attention(bias=bias)
    first = [sizes.pre_norm(layer, recast(FirstRunSpec, attention), mlp) for layer in sizes.layers]
    window = config.integer("loop_window_size", default=64, minimum=1)
    second = [
        LoopedLayerSpec(
            name=f"model.gate_projections.{layer}",
            mixers=(replace(attention, sliding_window=window),),
            num_heads=sizes.num_heads,
            head_dim=sizes.head_dim,
        )
        for layer in sizes.layers
    ]
    return sizes.network([*first, *second], kind=LoopedNetworkSpec)
