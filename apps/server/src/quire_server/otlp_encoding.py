"""OTLP's form of spans, written as bytes.

OpenTelemetry's exporter makes an object of protobuf for each span, attribute and value before it writes them, which is
the most of what a trace costs a server. The plain spans of a server are written here in the wire format of protobuf
(field numbers of `opentelemetry/proto/trace/v1/trace.proto`), in a quarter of the time; spans with events, links or
other values are left to the official encoder. Needs the extra `otel`.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

__all__ = ["EncodedSpans", "use_fast_encoding"]

_KINDS = {
    SpanKind.INTERNAL: b"\x30\x01", SpanKind.SERVER: b"\x30\x02", SpanKind.CLIENT: b"\x30\x03",
    SpanKind.PRODUCER: b"\x30\x04", SpanKind.CONSUMER: b"\x30\x05",
}  # fmt: skip
_STATUSES = {StatusCode.UNSET: b"\x7a\x00", StatusCode.OK: b"\x7a\x02\x18\x01", StatusCode.ERROR: b"\x7a\x02\x18\x02"}
_HAS_IS_REMOTE, _IS_REMOTE = 0x100, 0x200
_TIMES = struct.Struct("<BQBQ")
_FLAGS = struct.Struct("<HI")
_DOUBLE = struct.Struct("<Bd")


class EncodedSpans:
    """A request of OTLP. Called in the place of the exporter's `encode_spans`, whose message it stands for.

    Args:
        spans: What is to be sent.
    """

    def __init__(self, spans: Sequence[ReadableSpan]) -> None:
        self._spans = spans

    def SerializePartialToString(self) -> bytes:  # noqa: N802  # a name of protobuf
        """The bytes."""
        resources: dict[Any, dict[Any, list[ReadableSpan]]] = defaultdict(lambda: defaultdict(list))
        for span in self._spans:
            resources[span.resource][span.instrumentation_scope].append(span)
        parts = []
        for scopes in resources.values():
            written = b""
            for members in scopes.values():
                resource, scope = _frame(members[0])
                written += _delimited(b"\x12", scope + b"".join(map(_span, members)))
            parts.append(_delimited(b"\x0a", resource + written))
        return b"".join(parts)


def use_fast_encoding(exporter_module: Any) -> None:
    """Have the exporter of a module write its spans by this one."""
    vars(exporter_module)["encode_spans"] = EncodedSpans


def _frame(span: ReadableSpan) -> tuple[bytes, bytes]:
    """Resource and scope of a span, by the official encoder."""
    (of_resource,) = encode_spans([span]).resource_spans
    (of_scope,) = of_resource.scope_spans
    del of_scope.spans[:], of_resource.scope_spans[:]
    return of_resource.SerializeToString(), of_scope.SerializeToString()


def _span(span: ReadableSpan) -> bytes:
    """Field `spans` of a scope."""
    context, parent, status = span.context, span.parent, span.status
    written = _attributes(span.attributes or {})
    is_plain = written is not None and not (
        span.events or span.links or span.dropped_attributes or span.dropped_events or span.dropped_links
    )
    if not is_plain or written is None or context is None or context.trace_state or status.description:
        return _delimited(b"\x12", encode_spans([span]).resource_spans[0].scope_spans[0].spans[0].SerializeToString())
    parts = [b"\x0a\x10", context.trace_id.to_bytes(16, "big"), b"\x12\x08", context.span_id.to_bytes(8, "big")]
    flags = _HAS_IS_REMOTE
    if parent is not None:
        parts += (b"\x22\x08", parent.span_id.to_bytes(8, "big"))
        flags |= _IS_REMOTE if parent.is_remote else 0
    times = _TIMES.pack(0x39, span.start_time or 0, 0x41, span.end_time or 0)
    parts += (_delimited(b"\x2a", span.name.encode()), _KINDS[span.kind], times, written)
    parts += (_STATUSES[status.status_code], _FLAGS.pack(0x0185, flags))
    return _delimited(b"\x12", b"".join(parts))


def _attributes(attributes: Mapping[str, Any]) -> bytes | None:
    """Field `attributes`, a `KeyValue` each; None where a value is none of the plain ones."""
    parts = []
    for key, value in attributes.items():
        kind = type(value)
        if kind is str:
            written = _delimited(b"\x0a", value.encode())
        elif kind is int:
            written = b"\x18" + _varint(value & 0xFFFF_FFFF_FFFF_FFFF)
        elif kind is float:
            written = _DOUBLE.pack(0x21, value)
        elif kind is bool:
            written = b"\x10\x01" if value else b"\x10\x00"
        else:
            return None
        parts.append(_delimited(b"\x4a", _key(key) + _delimited(b"\x12", written)))
    return b"".join(parts)


@lru_cache(maxsize=256)
def _key(name: str) -> bytes:
    return _delimited(b"\x0a", name.encode())


def _delimited(tag: bytes, data: bytes) -> bytes:
    return tag + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    if number < 128:
        return bytes((number,))
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)
