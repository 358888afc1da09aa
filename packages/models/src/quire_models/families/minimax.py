"""MiniMax-Text-01 (MiniMax 2025, arXiv:2501.08313): lightning attention in most layers, softmax attention in some,
experts in all. Layers add to what their norm gave, not to what it took."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from quire_interfaces import Fields, StateTensor
from quire_models.config_fields import layer_kinds
from quire_models.decoder_sizes import decoder_sizes
from quire_models.families.mixtral import mixtral_moe
from quire_models.mixer_spec import RecurrentSpec
from quire_models.spec import CheckpointNames, LayerSpec, LinearSpec, NetworkSpec, Weight, inside

__all__ = ["DERIVED", "LAYER_TYPES", "LightningAttentionSpec", "MiniMaxLayerSpec", "spec"]

LAYER_TYPES = {"linear_attention": False, "full_attention": True}
"""Name of a layer's kind -> it attends to every token."""
DERIVED = (".slope_rate", ".query_decay", ".key_decay", ".diagonal_decay")
"""What files keep of each lightning attention although it follows from the number of the layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningAttentionSpec(RecurrentSpec):
    """Linear attention that forgets (Qin et al. 2024, arXiv:2401.04658)."""

    name: str = "self_attn"
    hidden_size: int
    num_heads: int
    head_dim: int
    act: str
    depth: float
    """Number of the layer, as a share of the last one's: late layers forget more slowly."""
    built_by: ClassVar[str] = "quire_models.families.minimax_layers:LightningAttention"

    @property
    def inner_size(self) -> int:
        """Width of all heads together."""
        return self.num_heads * self.head_dim

    @property
    def width(self) -> int:
        """Queries, keys and values, and the scan's copies of them."""
        return 4 * self.inner_size + 2 * 6 * self.inner_size

    @property
    def states(self) -> tuple[StateTensor, ...]:
        """A matrix of each head."""
        return (StateTensor("kv", (self.num_heads, self.head_dim, self.head_dim), "float32"),)

    def weights(self) -> Iterator[Weight]:
        """Projections, and the norm behind the heads."""
        inner, hidden, part = self.inner_size, self.hidden_size, "linear attention"
        sizes = {"qkv_proj": (hidden, 3 * inner), "output_gate": (hidden, inner), "out_proj": (inner, hidden)}
        for name, (inputs, outputs) in sizes.items():
            linear = LinearSpec(name=name, in_features=inputs, out_features=outputs)
            yield from inside(self.name, linear.weights(part))
        yield Weight(f"{self.name}.norm.weight", (inner,), part)


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniMaxLayerSpec(LayerSpec):
    """y = norm(x), z = norm(a * y + b * mixer(y)), c * z + d * experts(z)."""

    alpha: float
    """a."""
    beta: float
    """b."""
    mlp_alpha: float
    """c."""
    mlp_beta: float
    """d."""
    built_by: ClassVar[str] = "quire_models.families.minimax_layers:MiniMaxLayer"


def spec(config: Fields) -> NetworkSpec:
    """Layers take turns, full attention first, where config.json does not say."""
    config.fixed("sliding_window")
    sizes = decoder_sizes(config, theta=1e6, eps=1e-5)
    num = sizes.num_layers
    attends = layer_kinds(config, "layer_types", num, LAYER_TYPES, [layer % 2 == 0 for layer in sizes.layers])
    moe = mixtral_moe(config, sizes)

    def factor(part: str, name: str) -> float:
        return config.number(f"{part}_{name}_factor", default=1.0)

    def layer_of(layer: int, attends: bool) -> MiniMaxLayerSpec:
        lightning = LightningAttentionSpec(
            hidden_size=sizes.hidden_size,
            num_heads=sizes.num_heads,
            head_dim=sizes.head_dim,
            act=sizes.act,
            depth=layer / (num - 1 + 1e-5),
        )
        part = "full_attn" if attends else "linear_attn"
        return MiniMaxLayerSpec(
            name=f"model.layers.{layer}",
            mixers=(sizes.attention() if attends else lightning,),
            feed_forward=moe,
            input_norm=sizes.rms_norm("input_layernorm"),
            feed_forward_norm=sizes.rms_norm("post_attention_layernorm"),
            alpha=factor(part, "alpha"),
            beta=factor(part, "beta"),
            mlp_alpha=factor("mlp", "alpha"),
            mlp_beta=factor("mlp", "beta"),
        )

    return sizes.network(
        (layer_of(layer, is_full) for layer, is_full in enumerate(attends)),
        checkpoint=CheckpointNames(ignored_suffixes=DERIVED),
    )
