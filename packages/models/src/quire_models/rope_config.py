"""Rotary position embedding as a checkpoint declares it: every spelling, one record. Free of torch.

Knows the two spellings of config.json (`rope_parameters`, and the older top-level `rope_theta` with `rope_scaling`);
does not know how frequencies are computed (`layers/rotary.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire_interfaces import CheckpointError, Fields

__all__ = ["ROPE_KINDS", "RopeConfig", "parse_rope"]

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of a whole model. Fields that a kind does not use keep their defaults."""

    kind: str = "default"
    """One of `ROPE_KINDS`."""
    theta: float = 10000.0
    """Base of the frequencies."""
    factor: float = 1.0
    """How many times the context was extended."""
    original_max_position_embeddings: int = 0
    """Context of pre-training, in tokens (dynamic, llama3, yarn, longrope)."""
    low_freq_factor: float = 1.0
    """llama3."""
    high_freq_factor: float = 4.0
    """llama3."""
    beta_fast: float = 32.0
    """yarn: rotations above which a dimension is left as it is."""
    beta_slow: float = 1.0
    """yarn: rotations below which a dimension is fully interpolated."""
    attention_factor: float = 1.0
    """yarn, longrope: factor of cosines and sines."""
    truncate: bool = True
    """yarn: round the ramp's ends to whole dimensions."""
    divisors: tuple[float, ...] = ()
    """longrope: of the frequency of each pair of dimensions, while sequences may pass the original context."""
    short_divisors: tuple[float, ...] = ()
    """longrope: the same while none can."""
    partial_rotary_factor: float = 1.0
    """Share of a head's dimensions that are rotated."""
    mrope_section: tuple[int, ...] = ()
    """Pairs of dimensions that rotate by time, by height and by width (M-RoPE, Wang et al. 2024, "Qwen2-VL", sec.
    2.1); empty where tokens have one position."""
    mrope_interleaved: bool = False
    """These pairs come by turns (Bai et al. 2025, "Qwen3-VL"), not one kind behind the other."""

    def context_length(self, max_position_embeddings: int) -> int:
        """Tokens that the model can hold, given config.json's `max_position_embeddings`.

        Linear and dynamic scaling extend it by their factor; yarn extends the original context, which a checkpoint may
        already have written into `max_position_embeddings`; llama3 always has.
        """
        if self.kind in ("linear", "dynamic"):
            return int(max_position_embeddings * self.factor)
        if self.kind == "yarn":
            return max(max_position_embeddings, int(self.original_max_position_embeddings * self.factor))
        return max_position_embeddings

    def within(self, max_model_len: int) -> RopeConfig:
        """The rotation of an engine whose sequences have at most so many tokens. It differs for longrope only, which
        rotates by other factors where no sequence passes the original context.

        Transformers looks at how long a sequence is by now, and computes it anew once it passes. Keys in a cache, which
        other sequences may share, have to keep their rotation: here one choice serves all, as long as an engine runs.
        """
        if self.kind != "longrope" or max_model_len > self.original_max_position_embeddings:
            return self
        return replace(self, divisors=self.short_divisors)


def parse_rope(
    config: Fields, *, max_position_embeddings: int, theta: float = 10000.0, partial: float = 1.0, layers: str = ""
) -> RopeConfig:
    """The rotary embedding of a config.json.

    Args:
        theta: The family's base when config.json does not say; `partial` likewise its partial_rotary_factor.
        layers: The kind of layers ("full_attention", ...) where `rope_parameters` holds one object for each kind.

    Raises:
        CheckpointError: An unknown kind, or a field that its kind needs is missing or wrong.
    """
    theta = config.number("rope_theta", default=theta, above=1.0)
    partial = config.number("partial_rotary_factor", default=partial, above=0.0)
    spelled = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    raw = config.get(spelled)
    if isinstance(raw, Mapping) and layers and isinstance(raw.get(layers), Mapping):
        raw = raw[layers]
    if raw is None:
        return RopeConfig(theta=theta, partial_rotary_factor=_share(partial, config))
    if not isinstance(raw, Mapping):
        raise CheckpointError(f"{config.source}: {spelled} must be an object, is {raw!r}")
    rope = Fields(raw, f"{config.source}: {spelled}")
    theta = rope.number("rope_theta", default=theta, above=1.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "mrope":
        kind = "default"  # positions on three axes, each of which rotates as any position
    if kind == "su" or (kind == "yarn" and rope.get("long_factor") is not None):
        kind = "longrope"  # as the first Phi-3 checkpoints call it
    if kind not in ROPE_KINDS:
        raise CheckpointError(
            f"{config.source}: {spelled} has the rope type {kind!r}; Quire computes {', '.join(ROPE_KINDS)}"
        )
    partial = _share(rope.number("partial_rotary_factor", default=partial, above=0.0), rope)
    if not layers and config.get("original_max_position_embeddings") is not None:
        original = config.integer("original_max_position_embeddings", minimum=1)
        rope = Fields({**raw, "original_max_position_embeddings": original}, rope.source)
    return replace(
        _of_kind(kind, theta, rope, max_position_embeddings),
        partial_rotary_factor=partial,
        mrope_section=_mrope_section(rope),
        mrope_interleaved=rope.flag("mrope_interleaved", default=False),
    )


def _mrope_section(rope: Fields) -> tuple[int, ...]:
    section = rope.get("mrope_section")
    if section is None:
        return ()
    if not isinstance(section, list) or len(section) != 3 or not all(isinstance(size, int) for size in section):
        raise CheckpointError(f"{rope.source}: mrope_section must be three whole numbers, is {section!r}")
    return tuple(section)


def _share(value: float, config: Fields) -> float:
    if value > 1.0:
        raise CheckpointError(f"{config.source}: partial_rotary_factor must be at most 1, is {value}")
    return value


def _of_kind(kind: str, theta: float, rope: Fields, max_position_embeddings: int) -> RopeConfig:
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind in ("yarn", "longrope") and rope.get("factor") is None:
        original = rope.integer("original_max_position_embeddings", default=max_position_embeddings, minimum=1)
        factor = max_position_embeddings / original
    else:
        factor = rope.number("factor", minimum=1.0)
    if kind == "linear":
        return RopeConfig(kind=kind, theta=theta, factor=factor)
    if kind == "dynamic":
        return RopeConfig(
            kind=kind, theta=theta, factor=factor, original_max_position_embeddings=max_position_embeddings
        )
    original = rope.integer("original_max_position_embeddings", default=max_position_embeddings, minimum=1)
    if kind == "llama3":
        low = rope.number("low_freq_factor", minimum=0.0)
        high = rope.number("high_freq_factor", minimum=0.0)
        if high <= low:
            raise CheckpointError(
                f"{rope.source}: high_freq_factor ({high}) must be greater than low_freq_factor ({low})"
            )
        return RopeConfig(
            kind=kind,
            theta=theta,
            factor=factor,
            original_max_position_embeddings=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    if kind == "longrope":
        return RopeConfig(
            kind=kind,
            theta=theta,
            factor=factor,
            original_max_position_embeddings=original,
            attention_factor=_longrope_attention_factor(rope, factor, original),
            divisors=_divisors(rope, "long_factor"),
            short_divisors=_divisors(rope, "short_factor"),
        )
    return RopeConfig(
        kind=kind,
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=rope.number("beta_fast", default=32.0) or 32.0,
        beta_slow=rope.number("beta_slow", default=1.0) or 1.0,
        attention_factor=_yarn_attention_factor(rope, factor),
        truncate=rope.flag("truncate", default=True),
    )


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    """Given, or from `mscale` and `mscale_all_dim`, or 0.1 ln(factor) + 1 (YaRN, Peng et al. 2023, sec. 3.4)."""
    given: Any = rope.get("attention_factor")
    if given is not None:
        return rope.number("attention_factor", minimum=0.0)

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    mscale = rope.number("mscale", default=0.0)
    mscale_all_dim = rope.number("mscale_all_dim", default=0.0)
    if mscale and mscale_all_dim:
        return scale(mscale) / scale(mscale_all_dim)
    return scale(1.0)


def _longrope_attention_factor(rope: Fields, factor: float, original: int) -> float:
    """Given, or sqrt(1 + ln(factor) / ln(original context)) (LongRoPE, Ding et al. 2024, sec. 4)."""
    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor", minimum=0.0)
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1.0 and original > 1 else 1.0


def _divisors(rope: Fields, name: str) -> tuple[float, ...]:
    values = rope.get(name)
    numbers = isinstance(values, list) and all(isinstance(each, int | float) and each > 0 for each in values)
    if not numbers:
        raise CheckpointError(
            f"{rope.source}: longrope needs {name}, a list of one number above 0 for each pair of rotated dimensions; "
            f"it is {values!r}"
        )
    return tuple(map(float, values))
