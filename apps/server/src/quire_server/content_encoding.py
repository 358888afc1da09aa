"""Compressed request bodies: gzip, deflate, zstd and br, inflated piece by piece within the bound on bodies.

The bound counts what comes out, so that a small body that inflates to a huge one is refused when it passes the bound,
not when memory is full. Knows bytes and header values; knows no request.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence

import brotli
import zstandard

from quire_interfaces import RequestError
from quire_server.errors import HTTPError

__all__ = ["ACCEPTED_ENCODINGS", "encoding_of", "inflated"]

ACCEPTED_ENCODINGS = ("gzip", "deflate", "zstd", "br")
_PIECE_BYTES = 1 << 16
_ZSTD_WINDOW_BYTES = 1 << 23
"""What RFC 9659 lets senders use."""
_ZSTD_INPUT_BYTES = 256
"""Taken in one step, whose output has no bound but the format's: at most 128 KiB for four bytes."""
_BROKEN = (zlib.error, zstandard.ZstdError, brotli.error, EOFError)


def encoding_of(values: Sequence[str]) -> str | None:
    """The one encoding of a body; None for none.

    Args:
        values: Those of its Content-Encoding headers.

    Raises:
        HTTPError: 415 for an encoding that is not known, or several of them.
    """
    names = [name.strip().lower() for value in values for name in value.split(",")]
    names = [name.removeprefix("x-") for name in names if name not in ("", "identity")]
    if not names:
        return None
    accepted = ", ".join(ACCEPTED_ENCODINGS)
    if len(names) > 1 or names[0] not in ACCEPTED_ENCODINGS:
        what = f"{', '.join(names)!r:.200}"
        raise HTTPError(
            415,
            f"the content encoding {what} is not read here; send the body as it is, or in one of {accepted}",
            code="unsupported_content_encoding",
            headers={"Accept-Encoding": accepted},
        )
    return names[0]


def inflated(data: bytes, encoding: str, max_bytes: int) -> bytes:
    """What was compressed.

    Args:
        data: The body as it was sent.
        encoding: As `encoding_of` returns it.
        max_bytes: Of the result.

    Raises:
        HTTPError: 413 as soon as the result is larger than that.
        RequestError: the data are broken or end too early.
    """
    parts, size = [], 0
    try:
        for part in _READERS[encoding](data, max_bytes):
            size += len(part)
            if size > max_bytes:
                raise HTTPError(
                    413,
                    f"the request body is larger than {max_bytes} bytes (--max-body-bytes) when it is inflated",
                    code="body_too_large",
                )
            parts.append(part)
    except _BROKEN as error:
        raise RequestError(
            f"the request body is not valid {encoding}, which its Content-Encoding says it is: {error}",
            param="body",
            code="invalid_content_encoding",
        ) from None
    return b"".join(parts)


def _gzip(data: bytes, max_bytes: int) -> Iterator[bytes]:
    """All members, one after the other."""
    while data:
        inflater = zlib.decompressobj(16 + zlib.MAX_WBITS)
        yield from _zlib_pieces(inflater, data)
        data = inflater.unused_data


def _deflate(data: bytes, max_bytes: int) -> Iterator[bytes]:
    """With zlib's head, as the standard says, or without, as some clients send it."""
    has_head = len(data) > 1 and data[0] & 0x0F == zlib.DEFLATED and int.from_bytes(data[:2], "big") % 31 == 0
    inflater = zlib.decompressobj(zlib.MAX_WBITS if has_head else -zlib.MAX_WBITS)
    yield from _zlib_pieces(inflater, data)
    if inflater.unused_data:
        raise zlib.error("something stands behind the end")


def _zlib_pieces(inflater: zlib._Decompress, data: bytes) -> Iterator[bytes]:
    while data:
        yield inflater.decompress(data, _PIECE_BYTES)
        data = inflater.unconsumed_tail
    yield inflater.flush()
    if not inflater.eof:
        raise EOFError("it ends too early")


def _zstd(data: bytes, max_bytes: int) -> Iterator[bytes]:
    """All frames, one after the other."""
    # A frame that is one segment needs a window of its own size.
    context = zstandard.ZstdDecompressor(max_window_size=max(_ZSTD_WINDOW_BYTES, max_bytes))
    inflater, rest = context.decompressobj(), memoryview(data)
    while rest:
        piece, rest = rest[:_ZSTD_INPUT_BYTES], rest[_ZSTD_INPUT_BYTES:]
        yield inflater.decompress(piece)
        if inflater.eof:
            rest = memoryview(inflater.unused_data + bytes(rest))
            inflater = context.decompressobj()
            if not rest:
                return
    raise EOFError("it ends too early")


def _brotli(data: bytes, max_bytes: int) -> Iterator[bytes]:
    inflater = brotli.Decompressor()
    part = inflater.process(data, output_buffer_limit=_PIECE_BYTES)
    while part:
        yield part
        part = inflater.process(b"", output_buffer_limit=_PIECE_BYTES)
    if not inflater.is_finished():
        raise EOFError("it ends too early")


_READERS: dict[str, Callable[[bytes, int], Iterator[bytes]]] = {
    "gzip": _gzip,
    "deflate": _deflate,
    "zstd": _zstd,
    "br": _brotli,
}
