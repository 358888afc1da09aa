"""Fields of config.json that many families have: activations, head sizes, windows, dtype. Free of torch."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import TypeVar

from quire_interfaces import CheckpointError, Fields

__all__ = [
    "ACTIVATIONS",
    "DTYPE_BYTES",
    "GATED_ACTS",
    "HIDDEN_ACTS",
    "head_size",
    "hidden_act",
    "layer_kinds",
    "layer_thetas",
    "layer_windows",
    "stored_dtype",
]

Kind = TypeVar("Kind")

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Dtype of a checkpoint -> bytes of a number."""

HIDDEN_ACTS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu": "gelu_erf",
    "relu": "relu",
    "relu2": "relu2",
}
"""config.json's activation names -> which function is meant: "gelu" is the tanh approximation, "gelu_erf" the exact
one, "relu2" the square of relu."""

ACTIVATIONS = frozenset(HIDDEN_ACTS.values())
"""All of them: what networks without a gate take."""

GATED_ACTS = frozenset({"silu", "gelu"})
"""Activations that have a gated op."""


def head_size(config: Fields, hidden_size: int, heads: int, default: int | None = None) -> int:
    """Dimensions of an attention head: as given, or the class's default, or the hidden size divided."""
    if config.get("head_dim") is None and default is None and hidden_size % heads:
        raise CheckpointError(
            f"{config.source}: head_dim is not given, and hidden_size ({hidden_size}) is not a multiple of "
            f"num_attention_heads ({heads})"
        )
    return config.integer("head_dim", default=default or hidden_size // heads, minimum=1)


def hidden_act(config: Fields, *, default: str = "silu", acts: Container[str] = ACTIVATIONS) -> str:
    """The activation of the feed-forward network, one of `acts`."""
    name = config.text("hidden_act", default=default)
    if HIDDEN_ACTS.get(name) not in acts:
        supported = ", ".join(known for known, act in HIDDEN_ACTS.items() if act in acts)
        raise CheckpointError(f"{config.source}: hidden_act {name!r} is not supported; supported: {supported}")
    return HIDDEN_ACTS[name]


def layer_kinds(
    config: Fields, name: str, layers: int, known: Mapping[str, Kind], default: Sequence[Kind] | None = None
) -> Sequence[Kind]:
    """Per layer: what the kind means that config.json's list `name` gives it.

    Args:
        known: Name of a kind -> what it means.
        default: Per layer, where config.json does not say; None where it must.

    Raises:
        CheckpointError: No such list.
    """
    kinds = config.get(name)
    if not kinds and default is not None:
        return default
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in tuple(known) for kind in kinds):
        names = " or ".join(known) if len(known) == 2 else f"one of {', '.join(known)}"
        raise CheckpointError(f"{config.source}: {name} must name {names} for each of {layers} layers, is {kinds!r}")
    return [known[kind] for kind in kinds]


def layer_thetas(config: Fields, default: Sequence[float]) -> Sequence[float]:
    """Per layer: the base of its rotation, of config.json's list `layer_rope_theta`; 0 for no positions.

    Args:
        default: Per layer, where config.json does not say.

    Raises:
        CheckpointError: No such list.
    """
    thetas, layers = config.get("layer_rope_theta") or list(default), len(default)
    if (
        not isinstance(thetas, list)
        or len(thetas) != layers
        or not all(isinstance(each, int | float) for each in thetas)
    ):
        raise CheckpointError(f"{config.source}: layer_rope_theta must have a number for each of {layers} layers")
    return thetas


def layer_windows(config: Fields, layers: int, default: tuple[bool, ...] | None = None) -> tuple[int | None, ...]:
    """Per layer: the window of config.json's `sliding_window`, None where `layer_types` says full attention.

    Args:
        default: Per layer, whether it slides when config.json does not say; None when every layer does.
    """
    if config.get("sliding_window") is None:
        return (None,) * layers
    window = config.integer("sliding_window", minimum=1)
    known = {"full_attention": False, "sliding_attention": True}
    slides = layer_kinds(config, "layer_types", layers, known, default or (True,) * layers)
    return tuple(window if each else None for each in slides)


def stored_dtype(config: Fields) -> str:
    """The dtype of the checkpoint's weights."""
    name = config.text("dtype", default=config.text("torch_dtype", default="float32")).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise CheckpointError(f"{config.source}: dtype {name!r} is not supported; supported: {', '.join(DTYPE_BYTES)}")
    return name
