"""Arguments that are one for all prompts, or one for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from quire_interfaces import RequestError

__all__ = ["one_each"]

Kind = TypeVar("Kind")


def one_each(name: str, value: Any, count: int, *kinds: type[Kind]) -> list[Kind]:
    """One value for all as one for each.

    Raises:
        RequestError: they are not as many as the prompts, or of another kind.
    """
    one_for_all = isinstance(value, kinds) or not isinstance(value, Sequence)
    values = [value] * count if one_for_all else list(value)
    expected = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
    for each in values:
        if not isinstance(each, kinds):
            raise RequestError(
                f"{name} must be {expected}, one for all or one each, got {type(each).__name__}", param=name
            )
    if len(values) != count:
        raise RequestError(
            f"{count} prompts came with {len(values)} values of {name}; give one for all or one each", param=name
        )
    return values
