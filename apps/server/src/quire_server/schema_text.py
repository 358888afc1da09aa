"""Request bodies whose JSON schemas stay text: this process only hands them on.

Parsing a schema of 150 kB with thousands of objects takes 5 ms, in which every stream of this process waits, and it
would be written as text again for the engine. Knows where requests carry schemas; knows nothing of what is in them.
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["SchemaText", "decode_around_schemas"]

_Decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_PLACES: dict[str, tuple[str, ...]] = {
    "structured_outputs": ("json",),
    "response_format": ("json_schema", "schema"),
    "guided_json": (),
    "output_config": ("format", "schema"),
    "output_format": ("schema",),
}
"""Field -> the way from there to the schema."""


class SchemaText(str):
    """A JSON object that was not parsed."""

    __slots__ = ()


def decode_around_schemas(data: bytes) -> Any:
    """As `msgspec.json.decode`, but for schemas in the fields of requests that have them: those become `SchemaText`.

    Raises:
        msgspec.DecodeError: no JSON, as far as it was read.
        UnicodeDecodeError: no UTF-8.
        RecursionError: nested too deeply.
    """
    if data.lstrip()[:1] != b"{":
        return msgspec.json.decode(data)
    fields = _Decoder.decode(data)
    return {name: _value(raw, _PLACES.get(name)) for name, raw in fields.items()}


def _value(raw: msgspec.Raw, way: tuple[str, ...] | None) -> Any:
    """The value, with what lies at the end of `way` as text; None for no such place."""
    content = bytes(raw)
    if way is None or not content.startswith(b"{"):
        return msgspec.json.decode(content)
    if not way:
        return SchemaText(content.decode())
    return {name: _value(each, way[1:] if name == way[0] else None) for name, each in _Decoder.decode(content).items()}
