"""RWKV-4 (Peng et al. 2023, arXiv:2305.13048): every channel averages its past with weights that fade, and every
projection sees a mixture of a token and the one before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from quire_interfaces import Fields, StateTensor
from quire_models.mixer_spec import RecurrentSpec
from quire_models.recurrent_fields import attention_free_sizes
from quire_models.spec import HeadSpec, LayerSpec, LinearSpec, NetworkSpec, NormSpec, Weight, inside

__all__ = ["OUTER_NORM_EPS", "RwkvLayerSpec", "RwkvMixingSpec", "spec"]

OUTER_NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class RwkvMixingSpec(RecurrentSpec):
    """Time mixing and channel mixing, which both remember the token before (sec. 3.1)."""

    name: str = ""
    hidden_size: int
    attention_size: int
    """Channels of the time mixing."""
    intermediate_size: int
    """Channels within the channel mixing."""

    @property
    def width(self) -> int:
        """Mixtures and projections, and the average's copies."""
        return 4 * self.hidden_size + 2 * 5 * self.attention_size

    @property
    def states(self) -> tuple[StateTensor, ...]:
        """The token before, of each part, and the running average."""
        return (
            StateTensor("time mixing", (1, self.hidden_size), "float32"),
            StateTensor("wkv", (3, self.attention_size), "float32"),
            StateTensor("channel mixing", (1, self.hidden_size), "float32"),
        )

    def weights(self) -> Iterator[Weight]:
        """Projections, shares of the token before, and how the average fades."""
        hidden, size, inner = self.hidden_size, self.attention_size, self.intermediate_size
        time = {"key": (hidden, size), "value": (hidden, size), "receptance": (hidden, size), "output": (size, hidden)}
        channel = {"key": (hidden, inner), "value": (inner, hidden), "receptance": (hidden, hidden)}
        for name, part, sizes in (("attention", "time mixing", time), ("feed_forward", "channel mixing", channel)):
            for linear, (inputs, outputs) in sizes.items():
                layer = LinearSpec(name=linear, in_features=inputs, out_features=outputs)
                yield from inside(name, layer.weights(part))
        for name in ("key", "value", "receptance"):
            yield Weight(f"attention.time_mix_{name}", (1, 1, hidden), "time mixing")
        for name in ("time_decay", "time_first"):
            yield Weight(f"attention.{name}", (size,), "time mixing", is_wide=True)
        for name in ("key", "receptance"):
            yield Weight(f"feed_forward.time_mix_{name}", (1, 1, hidden), "channel mixing")


@dataclass(frozen=True, slots=True, kw_only=True)
class RwkvLayerSpec(LayerSpec):
    """x + time_mixing(norm(x)), then x + channel_mixing(norm(x)); the first layer norms the embedding first."""

    outer_norm: NormSpec | None
    built_by: ClassVar[str] = "quire_models.families.rwkv_layers:RwkvLayer"

    @property
    def norms(self) -> tuple[NormSpec, ...]:
        """Its norms."""
        norms = (self.outer_norm, self.input_norm, self.feed_forward_norm)
        return tuple(norm for norm in norms if norm is not None)


def spec(config: Fields) -> NetworkSpec:
    """`context_length` bounds requests, although the state does not grow with them. The stream is halved behind every
    `rescale_every` layers (0: never), as Transformers does at inference: seen in the eps of norms alone, for a stream
    that is not halved has variances four times as large."""
    sizes = attention_free_sizes(config.named(max_position_embeddings="context_length"), tied=False)
    hidden = sizes.hidden_size
    inner = config.integer("intermediate_size", default=4 * hidden, minimum=1)
    mixing = RwkvMixingSpec(
        hidden_size=hidden,
        attention_size=config.integer("attention_hidden_size", default=hidden, minimum=1),
        intermediate_size=inner,
    )
    every = max(0, config.integer("rescale_every", default=6))

    def norm(name: str, layer: int, eps: float) -> NormSpec:
        return sizes.layer_norm(name, eps=eps * float(4.0 ** (layer // every if every else 0)))

    layers = (
        RwkvLayerSpec(
            name=f"rwkv.blocks.{layer}",
            mixers=(mixing,),
            outer_norm=norm("pre_ln", layer, sizes.eps) if layer == 0 else None,
            input_norm=norm("ln1", layer, sizes.eps),
            feed_forward_norm=norm("ln2", layer, sizes.eps),
        )
        for layer in sizes.layers
    )
    return replace(sizes, intermediate_size=inner).network(
        layers,
        body="rwkv",
        embedding=sizes.embedding("embeddings"),
        final_norm=norm("ln_out", sizes.num_layers, OUTER_NORM_EPS),
        head=HeadSpec(name="head", tied=sizes.tied),
        caches_by_mixer=True,
    )
