"""Large request bodies: whether they hold too many values, or too large constraints, is found without parsing them in
this process.

Parsing JSON holds the interpreter lock, and with it the token streams of everybody else. So values are counted before
they are made, and fields that hold a constraint are measured as they were sent, by a reader that only looks for where
values end; what takes long is done by another process at low priority (`python -m quire_server.large_bodies`), once per
server, started with the first body that needs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import subprocess
import sys
import threading
from typing import Any

import msgspec

from quire_interfaces import RequestError
from quire_server.value_count import ValueBounds, count_values, may_exceed
from quire_structured_output.allowance import lower_priority, pauses

__all__ = ["BodyInspector", "find_too_large", "find_too_many", "main"]

CONSTRAINT_FIELDS = (
    "structured_outputs", "response_format", "text", "output_config", "output_format", "guided_json", "guided_regex",
    "guided_choice", "guided_grammar", "format", "json_schema", "grammar",
)  # fmt: skip
TOOLS_FACTOR = 4
"""The schemas of all tools together may have so many times the size of one constraint."""
MAX_PARTS = 50_000
"""A value with more parts than that is not looked into."""
_SHARE = 0.5
_PARAMS = (
    "response_format.json_schema.schema", "text.format.schema", "structured_outputs.json", "structured_outputs.regex",
    "structured_outputs.choice", "structured_outputs.grammar", "structured_outputs.structural_tag",
)  # fmt: skip
"""As a constraint's faults are named."""
_MAX_DEPTH = 12

_Fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_Elements = msgspec.json.Decoder(list[msgspec.Raw])


class TooLarge(msgspec.Struct, tag=True):
    """What a body is refused for."""

    field: str
    size: int
    limit: int
    part: str


class TooMany(msgspec.Struct, tag=True):
    """Of which values a body holds too many."""

    field: str
    num: int
    limit: int
    kind: str
    """What was counted, and the setting that bounds it."""


def find_too_many(data: bytes, bounds: ValueBounds) -> TooMany | None:
    """The field with the most values of a body that holds too many of them; None for a body within the bounds."""
    if not may_exceed(data, bounds) or not count_values(data, bounds).exceeds(bounds):
        return None
    try:
        fields: dict[str, bytes] = {name: bytes(raw) for name, raw in _Fields.decode(data).items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        fields = {}
    counts = {name: count_values(raw, bounds) for name, raw in (fields or {"body": data}).items()}
    if sum(count.num_objects for count in counts.values()) > bounds.max_objects:
        name = max(counts, key=lambda name: counts[name].num_objects)
        kind = "lists and objects are allowed (--max-body-objects)"
        return TooMany(name, counts[name].num_objects, bounds.max_objects, kind)
    name = max(counts, key=lambda name: counts[name].num_values)
    return TooMany(name, counts[name].num_values, bounds.max_values, "values are allowed (--max-body-values)")


def find_too_large(data: bytes, max_bytes: int) -> TooLarge | None:
    """The field of a body that holds too large a constraint; None for none, or for a body that is no JSON object.

    Args:
        data: The body.
        max_bytes: Of one constraint.
    """
    if len(data) <= max_bytes:
        return None
    try:
        fields = _Fields.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # whoever parses it says what is wrong
    for name in (*CONSTRAINT_FIELDS, "tools"):
        limit = max_bytes * (TOOLS_FACTOR if name == "tools" else 1)
        if name in fields and len(fields[name]) > limit:
            return TooLarge(name, len(fields[name]), limit, _largest_part(name, bytes(fields[name])))
    return None


def _largest_part(path: str, raw: bytes) -> str:
    """Walk down while one value holds more than half of what is left."""
    for _ in range(_MAX_DEPTH):
        parts = _parts(raw)
        if not parts:
            break
        step = max(parts, key=lambda step: len(parts[step]))
        if len(parts[step]) < _SHARE * len(raw):
            break
        path += f"[{step}]" if isinstance(step, int) else f".{step[:40]}"
        raw = bytes(parts[step])
    return f"{path} ({len(raw)} bytes)"


def _parts(raw: bytes) -> dict[Any, msgspec.Raw]:
    """The values in an object or a list, by name or place; nothing for far too many."""
    if raw.count(b",") > MAX_PARTS:
        return {}
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        if raw[:1] == b"{":
            return _Fields.decode(raw)
        if raw[:1] == b"[":
            return dict(enumerate(_Elements.decode(raw)))
    return {}


class BodyInspector:
    """Refuses bodies with too many values or too large constraints. One per server.

    Args:
        max_bytes: Of one constraint, as it is sent.
        bounds: On the number of values of a body.
    """

    def __init__(self, max_bytes: int, bounds: ValueBounds) -> None:
        self._max_bytes = max_bytes
        self._bounds = bounds
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    async def check(self, data: bytes) -> None:
        """Let a body pass, or not.

        Raises:
            RequestError: it holds too many values, or a field holds too large a constraint; the message names the
                field, and of a constraint the largest part.
        """
        if len(data) < min(self._max_bytes, *self._bounds):
            return
        excess = await asyncio.to_thread(self._find, data)
        if isinstance(excess, TooMany):
            raise RequestError(
                f"{excess.field} holds {excess.num} values; in the whole request body, {excess.limit} {excess.kind}",
                param=excess.field,
                code="too_many_values",
            )
        if excess is not None:
            raise RequestError(
                f"{excess.field} has {excess.size} bytes, at most {excess.limit} are taken "
                f"(--structured-output-max-bytes); the largest part is {excess.part}",
                param=next((each for each in _PARAMS if excess.part.startswith(each)), excess.field),
                code="grammar_too_large",
            )

    async def close_at_end(self) -> None:
        """Wait until this task is cancelled, as a server's end does, and end the other process."""
        try:
            await asyncio.Event().wait()
        finally:
            with self._lock:
                self._end_process()

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _find(self, data: bytes) -> TooMany | TooLarge | None:
        is_small = len(data) <= self._max_bytes
        return None if is_small and not may_exceed(data, self._bounds) else self._ask(data)

    def _ask(self, data: bytes) -> TooMany | TooLarge | None:
        """Waits for the other process, without the interpreter lock."""
        with self._lock:
            for _ in range(2):  # once more if it died, of this body or long ago
                with contextlib.suppress(OSError, struct.error):
                    return self._answer(data)
                self._end_process()
        raise RequestError(
            "the request body is too large or too deeply nested to be looked into; make it smaller",
            param="body",
            code="grammar_too_large",
        )

    def _answer(self, data: bytes) -> TooMany | TooLarge | None:
        if self._process is None:
            command = [sys.executable, "-m", "quire_server.large_bodies"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(_HEAD.pack(self._max_bytes, *self._bounds, len(data)))
        stdin.write(data)
        stdin.flush()
        [size] = struct.unpack("=Q", stdout.read(8))
        return msgspec.json.decode(stdout.read(size), type=TooMany | TooLarge | None)


_HEAD = struct.Struct("=QQQQ")
"""Largest constraint, most values, most lists and objects, size of the body that follows."""


def main() -> None:
    """Look into bodies until standard input ends, giving way to what else wants to run; not altogether, for somebody
    waits for the answer, and an engine on the CPU leaves no core idle."""
    lower_priority(0, starve=False)
    while head := sys.stdin.buffer.read(_HEAD.size):
        max_bytes, max_values, max_objects, size = _HEAD.unpack(head)
        with pauses():
            data = sys.stdin.buffer.read(size)
            excess = find_too_many(data, ValueBounds(max_values, max_objects)) or find_too_large(data, max_bytes)
            answer = msgspec.json.encode(excess)
            del data
        sys.stdout.buffer.write(struct.pack("=Q", len(answer)) + answer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        main()
