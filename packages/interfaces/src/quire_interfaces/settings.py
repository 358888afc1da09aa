"""How a component declares its configuration: a frozen, keyword-only dataclass whose fields explain themselves.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class SchedulerConfig(Settings):
        max_num_seqs: int = setting(256, help="Requests that may run at the same time.", unit="requests",
                                    check=at_least(1), flag="--max-num-seqs")

The command line, the YAML file and the environment are filled from these declarations; this module knows none of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire_interfaces.errors import ConfigError

__all__ = ["OneOf", "Settings", "at_least", "between", "one_of", "setting"]

Check = Callable[[Any], str | None]
"""Returns None when the value is fine, else the end of the sentence "NAME must ..."."""


def setting(
    default: Any,
    *,
    help: str,
    unit: str = "",
    check: Check | None = None,
    flag: str | None = None,
    secret: bool = False,
    nonempty: bool = False,
) -> Any:
    """Declare one field of a configuration.

    Args:
        default: Value when nobody says otherwise (immutable, or None meaning "decided from the rest").
        help: One sentence: what the field does.
        unit: Unit of the value ("tokens", "seconds", "bytes"), empty for none.
        check: Returns what the value must be when it is not; None values are not checked.
        flag: Command-line flag; None derives `--field-name` from the field's name.
        secret: The value is never shown: not by `repr`, not in errors.
        nonempty: Who sets it means a value: an empty one, such as an unset variable of a shell, is an error instead of
            the same as the default.
    """
    metadata = {"help": help, "unit": unit, "check": check, "flag": flag, "secret": secret, "nonempty": nonempty}
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Base of every configuration dataclass: runs each field's check when an instance is made.

    Raises:
        ConfigError: naming the field, the value and what it must be.
    """

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            check = spec.metadata.get("check")
            value = getattr(self, spec.name)
            if value is None:
                continue
            if isinstance(value, (float, bool)) and str(spec.type).split(" ")[0] == "int":
                raise ConfigError(f"{spec.name} must be a whole number, got {value!r}", field=spec.name)
            complaint = None if check is None else check(value)
            if complaint is not None:
                got = "" if spec.metadata.get("secret") else f", got {value!r}"
                raise ConfigError(f"{spec.name} must {complaint}{got}", field=spec.name)


def at_least(minimum: float) -> Check:
    """Check for a number not below `minimum`."""

    def check(value: Any) -> str | None:
        ok = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= minimum
        return None if ok else f"be a number of at least {minimum}"

    return check


def between(low: float, high: float) -> Check:
    """Check for a number in the closed range [`low`, `high`]."""

    def check(value: Any) -> str | None:
        ok = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
        return None if ok else f"be a number from {low} to {high}"

    return check


@dataclass(frozen=True, slots=True)
class OneOf:
    """Check for membership in `choices`."""

    choices: tuple[Any, ...]

    def __call__(self, value: Any) -> str | None:
        return None if value in self.choices else f"be one of {', '.join(map(str, self.choices))}"


def one_of(*choices: Any) -> OneOf:
    """Check for membership in `choices`, which help and completion show."""
    return OneOf(choices)
