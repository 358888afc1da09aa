"""Reading what decoder-only families have in common from config.json, under the names of Llama. Free of torch.

A family's `read_config` gives its own names (`Fields.named`), calls `decoder_fields`, and adds what is its own.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from quire_interfaces import CheckpointError, Fields
from quire_models.config import DTYPE_BYTES
from quire_models.registry import architecture_entry, architecture_of
from quire_models.rope_config import RopeConfig, parse_rope

__all__ = [
    "ACTIVATIONS",
    "GATED_ACTS",
    "HIDDEN_ACTS",
    "decoder_fields",
    "head_size",
    "hidden_act",
    "layer_windows",
    "stored_dtype",
]

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


def decoder_fields(
    config: Fields,
    *,
    tied: bool = False,
    head_dim: int | None = None,
    act: str = "silu",
    acts: Container[str] = GATED_ACTS,
    partial: float | None = None,
    theta: float = 10000.0,
    eps: float = 1e-6,
    rotary: bool = True,
    inner_factor: int | None = None,
    context: int | None = None,
) -> dict[str, Any]:
    """Fields of `ModelConfig` that are read alike everywhere, for full attention and whole-head rotation.

    Args:
        tied: Whether embedding and LM head share weights when config.json does not say.
        head_dim: The class's own default; None divides the hidden size.
        act: The class's default activation, as config.json would name it; `acts` are those that the network takes.
        partial: The class's default share of a head that is rotated; None when the network rotates whole heads.
        theta: The class's default base of the rotation.
        eps: The class's default epsilon of norms.
        rotary: Positions come by rotation; nothing of it is read otherwise.
        context: The class's default context in tokens; None when it must be given.
        inner_factor: The class's default width of the feed-forward network in hidden sizes; None for none.
    """
    heads = config.integer("num_attention_heads", minimum=1)
    kv_heads = config.integer("num_key_value_heads", default=heads, minimum=1)
    if heads % kv_heads:
        raise CheckpointError(
            f"{config.source}: num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})"
        )
    layers = config.integer("num_hidden_layers", minimum=1)
    hidden_size = config.integer("hidden_size", minimum=1)
    given = {} if context is None else {"default": context}
    positions = config.integer("max_position_embeddings", minimum=1, **given)
    size = head_size(config, hidden_size, heads, head_dim)
    rope = RopeConfig()
    if rotary:
        rope = _rope(config, positions, size, theta=theta, partial=partial)
    inner = {} if inner_factor is None else {"default": inner_factor * hidden_size}
    architecture = architecture_of(config)
    return {
        "architecture": architecture,
        "model_type": architecture_entry(architecture).model_type,
        "vocab_size": config.integer("vocab_size", minimum=1),
        "hidden_size": hidden_size,
        "intermediate_size": config.integer("intermediate_size", minimum=1, **inner),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": size,
        "rotary_dim": int(size * rope.partial_rotary_factor) if rotary else 0,
        "rms_norm_eps": config.number("rms_norm_eps", default=eps, minimum=0.0),
        "hidden_act": hidden_act(config, default=act, acts=acts),
        "rope": rope,
        "qkv_bias": False,
        "attention_out_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "tie_word_embeddings": config.flag("tie_word_embeddings", default=tied),
        "sliding_windows": (None,) * layers,
        "max_model_len": rope.context_length(positions),
        "dtype": stored_dtype(config),
        "bos_token_id": next(iter(config.token_ids("bos_token_id")), None),
        "eos_token_ids": config.token_ids("eos_token_id"),
    }


def _rope(config: Fields, positions: int, size: int, *, theta: float, partial: float | None) -> RopeConfig:
    rope = parse_rope(config, max_position_embeddings=positions, theta=theta, partial=partial or 1.0)
    if partial is None and rope.partial_rotary_factor != 1.0:
        raise CheckpointError(
            f"{config.source}: partial_rotary_factor {rope.partial_rotary_factor} is not supported; this architecture "
            "rotates whole heads"
        )
    rotary_dim = int(size * rope.partial_rotary_factor)
    if rotary_dim % 2 or rotary_dim < 2:
        raise CheckpointError(f"{config.source}: head_dim must be even for rotary embedding, is {size}")
    if rope.kind == "dynamic" and rotary_dim == 2:
        raise CheckpointError(f"{config.source}: dynamic rope scaling needs a head_dim greater than 2")
    for name, divisors in (("long_factor", rope.divisors), ("short_factor", rope.short_divisors)):
        if rope.kind == "longrope" and len(divisors) != rotary_dim // 2:
            raise CheckpointError(
                f"{config.source}: {name} must have {rotary_dim // 2} numbers, one for each pair of rotated "
                f"dimensions, has {len(divisors)}"
            )
    return rope


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


def layer_windows(config: Fields, layers: int, default: tuple[bool, ...] | None = None) -> tuple[int | None, ...]:
    """Per layer: the window of config.json's `sliding_window`, None where `layer_types` says full attention.

    Args:
        default: Per layer, whether it slides when config.json does not say; None when every layer does.
    """
    if config.get("sliding_window") is None:
        return (None,) * layers
    window = config.integer("sliding_window", minimum=1)
    kinds = config.get("layer_types")
    if kinds is None:
        return tuple(window if slides else None for slides in default or (True,) * layers)
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise CheckpointError(
            f"{config.source}: layer_types must name {' or '.join(known)} for each of {layers} layers, is {kinds!r}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def stored_dtype(config: Fields) -> str:
    """The dtype of the checkpoint's weights."""
    name = config.text("dtype", default=config.text("torch_dtype", default="float32")).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise CheckpointError(f"{config.source}: dtype {name!r} is not supported; supported: {', '.join(DTYPE_BYTES)}")
    return name
