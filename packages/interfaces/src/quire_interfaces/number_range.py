"""Ranges of the numbers among the sampling parameters, as metadata of their types.

The field `top_n_sigma: Annotated[float, NumberRange(0, 1e6, off=-1)] = 0.0` of a dataclass says what validation, JSON
bodies and documentation need of an option: name, type, default, range and other names. `number_fields` reads them.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Any, NamedTuple

from quire_interfaces.errors import wrong_value

__all__ = ["NumberField", "NumberRange", "number_fields"]


@dataclasses.dataclass(frozen=True, slots=True)
class NumberRange:
    """Values that a number may have: from `low` to `high`, both included."""

    low: float
    high: float
    _: dataclasses.KW_ONLY
    above: bool = False
    """`low` itself is excluded."""
    off: float | None = None
    """A value outside the range that is allowed, too, and switches the option off."""
    aliases: tuple[str, ...] = ()
    """Other names of the field in JSON."""
    edits_logits: bool = False
    """The option changes logits, so that it matters to greedy requests, too."""

    def check(self, name: str, value: Any, *, whole: bool) -> None:
        """Check a value of the field `name`.

        Args:
            whole: Whether it must be an int.

        Raises:
            RequestError: It is no number, not finite, or out of range; `param` is `name`.
        """
        if whole and (isinstance(value, bool) or not isinstance(value, int)):
            raise wrong_value(name, value, "be a whole number")
        # Whole numbers are finite; isfinite would overflow on those that no float holds.
        is_number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
        if isinstance(value, bool) or not is_number:
            raise wrong_value(name, value, "be a finite number")
        is_inside = self.low <= value <= self.high and not (self.above and value == self.low)
        if not is_inside and value != self.off:
            raise wrong_value(name, value, f"be {self}")

    def __str__(self) -> str:
        limits = f"above {self.low} and at most {self.high}" if self.above else f"from {self.low} to {self.high}"
        return limits if self.off is None else f"{limits}, or {self.off} to switch it off"


class NumberField(NamedTuple):
    """A field of a dataclass that has a `NumberRange`."""

    name: str
    type: type[int] | type[float]
    default: Any
    range: NumberRange

    def check(self, value: Any) -> None:
        """Check a value of this field; the default always passes.

        Raises:
            RequestError: The value is no number, not finite, or out of range.
        """
        if value != self.default or type(value) is not type(self.default):
            self.range.check(self.name, value, whole=self.type is int)


def number_fields(cls: type) -> tuple[NumberField, ...]:
    """The fields of a dataclass with a `NumberRange`, in their order."""
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = []
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        for metadata in getattr(hint, "__metadata__", ()):
            if isinstance(metadata, NumberRange):
                types = typing.get_args(hint.__origin__) or (hint.__origin__,)
                fields.append(NumberField(field.name, types[0], field.default, metadata))
    return tuple(fields)
