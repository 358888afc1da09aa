"""Rotary position embedding: frequencies of every kind, and the cosines and sines of a step.

A token's angles depend on its position only, never on how the prompt was cut into chunks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire_models.layers.scope import Scope
from quire_models.rope_config import RopeConfig
from quire_ops import ops

__all__ = ["Rotary", "RotaryTable", "inverse_frequencies"]


class Rotary:
    """Rotary embedding of the first dimensions of each head, x [T, H, D] -> [T, H, D] (Su et al. 2021, sec. 3.4)."""

    __slots__ = ("_rotary_dim", "_rotate", "interleaved", "is_plain")

    interleaved: bool
    """Neighbours are the pairs that are rotated."""
    is_plain: bool
    """Whole heads are rotated in half-split order, as op `rotary_embedding` does it."""

    def __init__(
        self, scope: Scope, rotary_dim: int, *, head_dim: int | None = None, interleaved: bool = False
    ) -> None:
        """Args:
        rotary_dim: Dimensions that are rotated.
        head_dim: Dimensions of a head; None where the caller rotates parts of heads.
        interleaved: Neighbours are the pairs that are rotated (2i, 2i + 1), not (i, i + rotary_dim / 2). What comes
            back has the rotated dimensions in the order of the latter: alike for queries and keys, so that their
            products do not change.
        """
        self._rotate = scope.op(ops.rotary_embedding, head_dim=rotary_dim)
        self._rotary_dim = rotary_dim
        self.interleaved = interleaved
        self.is_plain = rotary_dim == head_dim and not interleaved

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        part = x[..., : self._rotary_dim]
        if self.interleaved:
            part = torch.cat((part[..., ::2], part[..., 1::2]), dim=-1)
        rotated: Tensor = self._rotate(part, cos, sin)
        if self._rotary_dim == x.shape[-1]:
            return rotated
        return torch.cat((rotated, x[..., self._rotary_dim :]), dim=-1)


class RotaryTable:
    """positions -> cosines and signed sines, [T, 1, head_dim] each, as op `rotary_embedding` takes them.

    Tokens have one position each, or three: time, height and width (M-RoPE, Wang et al. 2024, "Qwen2-VL", sec. 2.1).
    Positions that were seen once are looked up: the table grows with the longest sequence, by doubling.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._rope = rope
        self._dtype = dtype
        self._scale = rope.attention_factor
        self._exponents = (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim).to(device)  # [D/2]
        self._inverse = inverse_frequencies(rope, head_dim).to(device)  # [D/2]
        self._head_dim = head_dim
        self._axes = mrope_axes(rope, head_dim).to(device)  # [D]
        self._cos, self._sin = self._compute(torch.arange(0, device=device))

    def __call__(self, positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Args:
        positions: [T] or [3, T] int64, all below `length`.
        length: Tokens of the longest sequence of the step.
        """
        cos, sin = self.up_to(length)
        if positions.ndim == 2:
            return self._of_axes(cos, positions), self._of_axes(sin, positions)
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def _of_axes(self, table: Tensor, positions: Tensor) -> Tensor:
        """[T, 1, D]: each dimension of the table [P, 1, D] at the position [3, T] on its axis."""
        rows = table.index_select(0, positions.flatten()).unflatten(0, positions.shape)  # [3, T, 1, D]
        chosen: Tensor = rows.gather(0, self._axes.expand(1, *rows.shape[1:]))[0]
        return chosen

    def up_to(self, length: int) -> tuple[Tensor, Tensor]:
        """[P, 1, head_dim] each, for positions 0 to P - 1, P at least `length`."""
        if length > len(self._cos):
            size = 1 << max(9, (length - 1).bit_length())
            self._cos, self._sin = self._compute(torch.arange(size, device=self._inverse.device))
        return self._cos, self._sin

    def _compute(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        inverse = self._inverse if self._rope.kind != "dynamic" else self._dynamic(positions)
        angles = positions.float()[:, None] * inverse  # [T, D/2]
        cos, sin = angles.cos(), angles.sin()
        if self._scale != 1.0:
            cos, sin = cos * self._scale, sin * self._scale
        cosines = torch.cat((cos, cos), dim=-1).to(self._dtype)
        sines = torch.cat((-sin, sin), dim=-1).to(self._dtype)
        return cosines[:, None], sines[:, None]

    def _dynamic(self, positions: Tensor) -> Tensor:
        """[T, D/2]: inverse frequencies, each token with the base of the length at which it was last (dynamic NTK).

        Up to the original context the base is the model's own; a later token takes the base of a sequence that ends
        with it, so that neither chunks nor what follows changes what is in the cache.
        """
        rope, dim = self._rope, self._head_dim
        length = (positions + 1).clamp_min(rope.original_max_position_embeddings).float()
        stretch = rope.factor * length / rope.original_max_position_embeddings - (rope.factor - 1.0)
        base = rope.theta * stretch ** (dim / (dim - 2))  # [T]
        return 1.0 / base[:, None] ** self._exponents


def mrope_axes(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim] int64: the axis by which each dimension is rotated, 0 for time, 1 for height, 2 for width. Pairs of no
    section rotate by time."""
    axes = torch.zeros(head_dim // 2, dtype=torch.int64)
    begin = 0
    for axis, size in enumerate(rope.mrope_section):
        if rope.mrope_interleaved and axis:
            axes[axis : 3 * size : 3] = axis
        elif not rope.mrope_interleaved:
            axes[begin : begin + size] = axis
        begin += size
    return torch.cat((axes, axes))


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2] float32: radians per position of each pair of dimensions (Su et al. 2021, sec. 3.2.2).

    Linear: positions divided by the factor (Chen et al. 2023). llama3: long wavelengths divided, short ones kept, a
    smooth passage between (Llama 3.1). yarn: "NTK by parts" (Peng et al. 2023, sec. 3.2). longrope: each divided by a
    number of its own, which a search has found (Ding et al. 2024, sec. 3). Dynamic depends on the position: here is its
    beginning.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain, head_dim)
    if rope.kind == "longrope":
        return plain / torch.tensor(rope.divisors)
    return plain


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    rotations = rope.original_max_position_embeddings * plain / (2 * math.pi)  # in the original context
    kept = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * plain + (1 - kept) * plain / rope.factor


def _yarn(rope: RopeConfig, plain: Tensor, head_dim: int) -> Tensor:
    def dimension(rotations: float) -> float:
        """The pair that turns `rotations` times in the original context."""
        wavelength = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001  # a ramp of no width would divide by zero
    interpolated = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return interpolated * plain / rope.factor + (1 - interpolated) * plain
