"""What a parity case says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["LLAMA_FIELDS", "ParityCase", "case", "without"]

LLAMA_FIELDS: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""A tiny network, in the names that most configurations use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityCase:
    """How to make a tiny random checkpoint of an architecture with Transformers, and how close logits have to be."""

    config: str
    """Configuration class of transformers."""
    fields: Mapping[str, Any] = field(default_factory=lambda: dict(LLAMA_FIELDS))
    """Arguments of the configuration class."""
    tolerance: float = 1e-4
    """Largest error of a logit, as a share of the largest logit, in float32."""
    int8_tolerance: float = 0.15
    """The same for int8 weights against the float32 oracle, where both chose the same tokens so far."""
    weight_scale: float = 0.2
    """Standard deviation of matrices; norms and biases move by as much from where the class starts them."""
    seed: int = 0
    keep: tuple[str, ...] = ()
    """Parameters whose names contain one of these stay as the class starts them."""
    uses_cache: bool = field(default=True, repr=False)
    """Transformers decodes with its cache. False where that gives this class other logits than without one."""
    num_unused: int = field(default=0, repr=False)
    """Parameters of the class that it never reads, and Quire does not load."""
    wide: tuple[str, ...] = field(default=(), repr=False)
    """Parameters whose names contain one of these stay in float32 when Transformers runs the class in bfloat16."""
    as_written: str = field(init=False, repr=False, compare=False)
    """The case as it was made: some configuration classes add to the objects that they are given."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "as_written", repr(self))


def case(
    config: str,
    base: Mapping[str, Any] = LLAMA_FIELDS,
    /,
    *,
    tolerance: float = 1e-4,
    weight_scale: float = 0.2,
    uses_cache: bool = True,
    seed: int = 0,
    num_unused: int = 0,
    **fields: Any,
) -> ParityCase:
    """The case of a configuration class.

    Args:
        base: Arguments of the class; `fields` come before those of the same name.
    """
    return ParityCase(
        config=config,
        fields={**base, **fields},
        tolerance=tolerance,
        weight_scale=weight_scale,
        uses_cache=uses_cache,
        seed=seed,
        num_unused=num_unused,
    )


def without(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Fields but those of these names, which a class spells in another way, or refuses."""
    return {name: value for name, value in fields.items() if name not in names}
