"""Checked reading of a JSON object: every field by name, with its type and range, and errors that name the file.

A checkpoint's object may say something that nobody reads, and then a model runs that is another one. Whoever reads a
whole object asks at the end what was left (`Fields.unread`), and refuses it (`Fields.refuse_unread`) or reports it.
"""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quire_interfaces.errors import CheckpointError

__all__ = ["Fields", "read_json"]

_REQUIRED: Any = object()
_LONGEST_VALUE = 100
"""Characters of a value in a message."""


class Fields:
    """One JSON object. A field that is missing or null takes its default; without a default it is an error.

    It remembers which fields were asked for, of objects inside (`object`, `objects`) too:

        fields = Fields(values, "adapter_config.json")
        rank = fields.integer("r")
        fields.skip("lora_dropout", "loftq_*")
        fields.refuse_unread("merge the adapter into its model")
    """

    __slots__ = ("_is_inside", "_names", "_objects", "_values", "names_read", "source")

    def __init__(self, values: Mapping[str, Any], source: str, names: Mapping[str, str] | None = None) -> None:
        """Args:
        source: Where the object comes from, for messages: a file, or a file and a key.
        names: Name as asked for -> name in the object, where the two differ.

        Raises:
            CheckpointError: `values` is no object.
        """
        if not isinstance(values, Mapping):
            raise CheckpointError(f"{source} must be an object, is {_shortened(values)}")
        self._values = values
        self._names = dict(names or {})
        self.source = source
        self.names_read: set[str] = set()
        """Every field that was asked for, by its name in the object; one set for all views of it."""
        self._is_inside = False
        """It is an object inside another."""
        self._objects: dict[str, Fields] = {}
        """The objects inside that were asked for, by their names; shared in the same way."""

    def _view(self, values: Mapping[str, Any], names: Mapping[str, str]) -> Fields:
        view = Fields(values, self.source, names)
        view.names_read, view._objects, view._is_inside = self.names_read, self._objects, self._is_inside
        return view

    def named(self, **names: str) -> Fields:
        """This object for readers that ask by other names: `named(hidden_size="n_embd")`."""
        return self._view(self._values, {**self._names, **names})

    def with_default(self, name: str, value: Any) -> Fields:
        """This object with a value for a field that is missing or null."""
        stored = self._names.get(name, name)
        return self if self.get(name) is not None else self._view({**self._values, stored: value}, self._names)

    def get(self, name: str) -> Any:
        """The value as it is; None when missing or null."""
        stored = self._names.get(name, name)
        self.names_read.add(stored)
        return self._values.get(stored)

    def is_null(self, name: str) -> bool:
        """Whether the field is there, and null."""
        stored = self._names.get(name, name)
        return stored in self._values and self.get(name) is None

    def object(self, name: str) -> Fields | None:
        """An object inside, whose fields have to be read in their turn; None when missing or null."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self._wrong(name, value, "an object")
        stored = self._names.get(name, name)
        if stored not in self._objects:
            inner = Fields(value, f"{self.source}{'.' if self._is_inside else ': '}{stored}")
            inner._is_inside = True
            self._objects[stored] = inner
        return self._objects[stored]

    def objects(self, name: str) -> dict[str, Fields]:
        """An object whose members are objects, by their names; empty when missing or null."""
        outer = self.object(name)
        if outer is None:
            return {}
        found = {member: outer.object(member) for member in outer._values}
        return {member: inner for member, inner in found.items() if inner is not None}

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings; empty when missing or null."""
        value = self.get(name)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
            raise self._wrong(name, value, "a list of strings")
        return tuple(value)

    def skip(self, *patterns: str) -> None:
        """Fields that are known to make no difference here, as good as read; `*` stands for any characters."""
        for pattern in patterns:
            self.names_read.update(fnmatch.filter(self._values, pattern) if "*" in pattern else [pattern])

    def unread(self) -> dict[str, Any]:
        """Fields that are set (not null, false, zero or empty) and were neither read nor skipped -> their values, in
        the file's order; those of objects inside as "outer.inner"."""
        return dict(self._unread())

    def _unread(self) -> Iterator[tuple[str, Any]]:
        for name, value in self._values.items():
            inner = self._objects.get(name)
            if inner is not None:
                yield from ((f"{name}.{path}", unread) for path, unread in inner._unread())
            elif name not in self.names_read and value:
                yield name, value

    def refuse_unread(self, advice: str) -> None:
        """Have no field left unread that is set.

        Args:
            advice: What to do about one.

        Raises:
            CheckpointError: There are such fields; the message names the file, and each with its value.
        """
        unread = self.unread()
        if unread:
            listed = ", ".join(f"{name} ({_shortened(value)})" for name, value in unread.items())
            raise CheckpointError(f"{self.source}: {listed} {'is' if len(unread) == 1 else 'are'} set, "
                                  f"which is not supported; {advice}")  # fmt: skip

    def fixed(self, name: str, *values: Any) -> None:
        """A field that changes the arithmetic in a way that is not built: missing, null, or one of `values`."""
        value = self.get(name)
        if value is not None and value not in values:
            choices = ", ".join(map(repr, values)) or "no value"
            raise CheckpointError(
                f"{self.source}: {self._names.get(name, name)} {value!r} is not supported; supported: {choices}"
            )

    def integer(self, name: str, *, default: Any = _REQUIRED, minimum: int | None = None) -> int:
        """A whole number."""
        value = self._given(name, default)
        if value is default:
            return value  # type: ignore[no-any-return]
        if not _is_whole(value):
            raise self._wrong(name, value, "a whole number")
        if minimum is not None and value < minimum:
            raise self._wrong(name, value, f"at least {minimum}")
        return int(value)

    def number(
        self, name: str, *, default: Any = _REQUIRED, minimum: float | None = None, above: float | None = None
    ) -> float:
        """A finite number, at least `minimum`, greater than `above`."""
        value = self._given(name, default)
        if value is default:
            return value  # type: ignore[no-any-return]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self._wrong(name, value, "a number")
        if minimum is not None and value < minimum:
            raise self._wrong(name, value, f"at least {minimum}")
        if above is not None and value <= above:
            raise self._wrong(name, value, f"greater than {above}")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """true or false."""
        value = self._given(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, name: str, *, default: Any = _REQUIRED) -> str:
        """A string."""
        value = self._given(name, default)
        if value is default:
            return value  # type: ignore[no-any-return]
        if not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """A token id or a list of them; empty when missing or null."""
        value = self.get(name)
        if value is None:
            return ()
        values = value if isinstance(value, list) else [value]
        if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in values):
            raise self._wrong(name, value, "a token id or a list of token ids")
        return tuple(values)

    def _given(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise CheckpointError(
                f"{self.source}: {self._names.get(name, name)} is missing; it must be given for this architecture"
            )
        return default

    def _wrong(self, name: str, value: Any, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: {self._names.get(name, name)} must be {wanted}, is {value!r}")


def _shortened(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def _is_whole(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value) and value == int(value)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        CheckpointError: No such file, not readable, not JSON, or not an object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}; download the file again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must hold a JSON object, holds {type(values).__name__}")
    return values
