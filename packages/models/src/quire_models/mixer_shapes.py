"""The shapes of recurrent mixers: what they keep, and what they weigh. Free of torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from quire_interfaces import CheckpointError, Fields, StateTensor

__all__ = [
    "Mamba1Shape",
    "Mamba2Shape",
    "MixerShape",
    "ShortConvShape",
    "WeightCount",
    "dt_rank",
    "hybrid_mamba2",
    "time_step_limit",
]


class WeightCount(NamedTuple):
    """Weights of a part of the network."""

    matrices: tuple[tuple[int, int, int], ...] = ()
    """(outputs, inputs, how many) of linear layers, which a linear method may keep in another form."""
    others: int = 0
    """Numbers that are kept in the compute dtype."""
    wide: int = 0
    """Numbers that are kept in float32."""

    def share(self, parts: int) -> WeightCount:
        """Of one of `parts` equal parts."""
        matrices = tuple((outputs, inputs, count // parts) for outputs, inputs, count in self.matrices)
        return WeightCount(matrices, self.others // parts, self.wide // parts)


class MixerShape(Protocol):
    """What planners ask of a recurrent mixer."""

    @property
    def states(self) -> tuple[StateTensor, ...]:
        """What it keeps of a sequence."""

    @property
    def width(self) -> int:
        """See `RecurrentConfig.mixer_width`."""

    def weights(self, count: int) -> WeightCount:
        """Of `count` mixers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Shape:
    """A Mamba-2 mixer (Dao & Gu 2024, arXiv:2405.21060)."""

    hidden_size: int
    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_kernel: int
    conv_bias: bool
    proj_bias: bool
    eps: float
    """Of the norm behind the scan."""
    normed: bool = True
    """Behind the scan there is a norm beside the gate, over the channels of each group for themselves."""
    norm_before_gate: bool = False
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    """Bounds of the time steps."""

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: what goes into the state, and what writes and reads it."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def width(self) -> int:
        """See `RecurrentConfig.mixer_width`: projected, convolved, and the scan's copies."""
        inputs = 2 * (self.inner_size + self.conv_size) + self.num_heads
        return inputs + 2 * (4 * self.inner_size + 2 * self.num_heads * self.state_size)

    @property
    def states(self) -> tuple[StateTensor, ...]:
        return (
            StateTensor("conv", (self.conv_kernel - 1, self.conv_size), "float32"),
            StateTensor("ssm", (self.num_heads, self.head_dim, self.state_size), "float32"),
        )

    def check(self, source: str) -> None:
        """Raises CheckpointError when groups do not divide heads; `source` names the file."""
        if self.num_heads % self.num_groups:
            raise CheckpointError(
                f"{source}: {self.num_heads} Mamba heads cannot be shared out to {self.num_groups} groups"
            )

    def weights(self, count: int) -> WeightCount:
        """Of `count` mixers."""
        inputs = self.inner_size + self.conv_size + self.num_heads
        others = self.conv_size * (self.conv_kernel + self.conv_bias) + self.normed * self.inner_size
        others += self.proj_bias * (inputs + self.hidden_size)
        return WeightCount(
            ((inputs, self.hidden_size, count), (self.hidden_size, self.inner_size, count)),
            count * others,
            count * 3 * self.num_heads,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba1Shape:
    """A Mamba mixer (Gu & Dao 2023, arXiv:2312.00752)."""

    hidden_size: int
    inner_size: int
    state_size: int
    dt_rank: int
    """Width that time steps are projected from."""
    conv_kernel: int
    conv_bias: bool
    proj_bias: bool
    eps: float = 1e-6
    """Of the norms of time steps and projections."""
    norms: str = ""
    """"weighted" (Jamba): time steps and projections are normalised; "plain" (Falcon Mamba): so they are, without
    weights."""

    @property
    def width(self) -> int:
        """See `RecurrentConfig.mixer_width`: projected, convolved, and the scan's copies."""
        return 4 * self.inner_size + 2 * (5 * self.inner_size + 2 * self.state_size)

    @property
    def states(self) -> tuple[StateTensor, ...]:
        return (
            StateTensor("conv", (self.conv_kernel - 1, self.inner_size), "float32"),
            StateTensor("ssm", (self.inner_size, self.state_size), "float32"),
        )

    def weights(self, count: int) -> WeightCount:
        """Of `count` mixers."""
        inner, hidden = self.inner_size, self.hidden_size
        projected = self.dt_rank + 2 * self.state_size
        others = inner * (self.conv_kernel + self.conv_bias) + self.proj_bias * (2 * inner + hidden)
        others += projected if self.norms == "weighted" else 0
        matrices = ((2 * inner, hidden), (projected, inner), (inner, self.dt_rank), (hidden, inner))
        return WeightCount(
            tuple((outputs, inputs, count) for outputs, inputs in matrices),
            count * others,
            count * inner * (self.state_size + 2),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvShape:
    """A gated short convolution (LFM2)."""

    hidden_size: int
    conv_kernel: int
    bias: bool

    @property
    def width(self) -> int:
        """See `RecurrentConfig.mixer_width`."""
        return 6 * self.hidden_size

    @property
    def states(self) -> tuple[StateTensor, ...]:
        return (StateTensor("conv", (self.conv_kernel - 1, self.hidden_size), "float32"),)

    def weights(self, count: int) -> WeightCount:
        """Of `count` mixers."""
        hidden = self.hidden_size
        others = hidden * self.conv_kernel + self.bias * 5 * hidden
        return WeightCount(((3 * hidden, hidden, count), (hidden, hidden, count)), count * others)


def dt_rank(config: Fields, name: str, hidden_size: int) -> int:
    """Width that time steps are projected from; "auto" is a sixteenth of the hidden size, rounded up."""
    return math.ceil(hidden_size / 16) if config.get(name) in (None, "auto") else config.integer(name, minimum=1)


def hybrid_mamba2(config: Fields, values: dict[str, Any], **more: Any) -> Mamba2Shape:
    """The Mamba-2 mixer of a hybrid, under the names that Bamba gave its fields."""
    hidden = values["hidden_size"]
    heads = config.integer("mamba_n_heads", default=128, minimum=1)
    inner = config.integer("mamba_d_ssm", default=int(config.number("mamba_expand", default=2) * hidden), minimum=1)
    given = config.get("mamba_d_head")
    head_dim = inner // heads if given in (None, "auto") else config.integer("mamba_d_head", minimum=1)
    if heads * head_dim != inner:
        raise CheckpointError(
            f"{config.source}: mamba_n_heads ({heads}) heads of mamba_d_head ({head_dim}) are not the mixer's inner "
            f"width ({inner})"
        )
    shape = Mamba2Shape(
        hidden_size=hidden,
        num_heads=heads,
        head_dim=head_dim,
        state_size=config.integer("mamba_d_state", default=256, minimum=1),
        num_groups=config.integer("mamba_n_groups", default=1, minimum=1),
        conv_kernel=config.integer("mamba_d_conv", default=4, minimum=1),
        conv_bias=config.flag("mamba_conv_bias", default=True),
        proj_bias=config.flag("mamba_proj_bias", default=False),
        eps=values["rms_norm_eps"],
        dt_limit=time_step_limit(config),
        **more,
    )
    shape.check(config.source)
    return shape


def time_step_limit(config: Fields) -> tuple[float, float]:
    """`time_step_limit` of a config.json; an infinite bound may be written as {"__float__": "Infinity"}."""
    given = config.get("time_step_limit")
    if given is None:
        return (0.0, float("inf"))
    try:
        low, high = (float(bound["__float__"] if isinstance(bound, dict) else bound) for bound in given)
    except (TypeError, ValueError, KeyError):
        low = high = float("nan")
    if not low <= high:
        raise CheckpointError(
            f"{config.source}: time_step_limit must be two numbers, the smaller one first, is {given!r}"
        )
    return (low, high)
