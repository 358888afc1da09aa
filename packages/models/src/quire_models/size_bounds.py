"""Sizes in config.json that no network has: refused by name, before anything is made of them. Free of torch.

A plan makes an entry for each layer, so that a number of layers may not be anything; whether sizes that are merely
large fit into memory, the plan says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from quire_interfaces import CheckpointError

__all__ = ["check_sizes"]

BOUNDS: tuple[tuple[str, int], ...] = (
    (r"(?:num|n|encoder|decoder)_(?:\w+_)?layers?|(?:num|n)_(?:\w+_)?(?:blocks|stacks|cycles)|[HL]_cycles", 10_000),
    (r"(?:num|n)_(?:\w+_)?(?:heads|groups|experts)|n_head|num_(?:\w+_)?experts(?:_per_tok)?", 1 << 20),
    (r"vocab_size|\w+_vocab_size", (1 << 31) - 1),
    (r"\w*(?:hidden|intermediate|embedding|state|conv|inner|ffn|ff|rank|dim|size|width|model|embd)", 1 << 40),
    (r"max_\w*(?:positions?|embeddings|len)|n_positions|n_ctx|\w*window\w*|\w*period", 1 << 62),
)
"""Pattern of a field's name -> the largest number that it may be."""


def check_sizes(values: Mapping[str, Any], source: str) -> None:
    """Refuse numbers that are no sizes of a network.

    Args:
        values: A config.json; objects inside are looked at, too.
        source: Its name, for messages.

    Raises:
        CheckpointError: naming the field, the number and the bound.
    """
    for path, name, value in _numbers(values, ""):
        bound = next((bound for pattern, bound in BOUNDS if re.fullmatch(pattern, name)), None)
        if bound is not None and value > bound:
            raise CheckpointError(f"{source}: {path} must be at most {bound}, is {value:.6g}")


def _numbers(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str, float]]:
    """(path, name, value) of all whole numbers, floats among them."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and value % 1 == 0:
            yield prefix + name, name, value
