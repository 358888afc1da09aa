"""POST /v1/files: a form with a file in it, written to disk as it arrives.

Little of a body is in memory at any time, parts are parsed and written in worker threads, and a client that leaves, or
sends too slowly, leaves nothing behind. Knows no store's rows.
"""

from __future__ import annotations

import asyncio
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from quire_interfaces import RequestError
from quire_server.errors import ClientGoneError, HTTPError

__all__ = ["FORM", "MAX_EXPIRY_S", "MIN_EXPIRY_S", "PURPOSES", "Form", "UploadLimits", "read_form"]

PURPOSES = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")
"""What a client may say that a file is for."""
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 30 * 86400
"""Bounds of expires_after[seconds], as OpenAI has them."""

FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": list(PURPOSES)},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": MIN_EXPIRY_S, "maximum": MAX_EXPIRY_S},
    },
}
"""JSON schema of the form."""

PIECE_BYTES = 1 << 18
"""What is collected before it is handed to a thread."""
SLOWEST_BYTES_PER_S = 1 << 15
"""Who sends slower is refused, after the time that every body has."""
MAX_FIELD_BYTES = 1024
"""Of a field that is no file."""
MAX_PARTS = 64
"""Of a form."""
MAX_NAME_CHARS = 512
"""Of a file's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadLimits:
    """What one upload may take."""

    max_bytes: int
    """Of the file."""
    timeout_s: float
    """For the first bytes, and in which a slow client may fall behind."""
    max_field_bytes: int = MAX_FIELD_BYTES
    """Of a field that is no file."""
    flag: str = "--files-max-bytes"
    """The setting that `max_bytes` comes from."""


@dataclass(slots=True)
class Form:
    """What stood in a form beside the content of its file."""

    fields: dict[str, str] = field(default_factory=dict)
    values: list[tuple[str, str]] = field(default_factory=list)
    """All fields in order, those of the same name too."""
    filename: str | None = None
    """Of its file; None where there was none."""

    def purpose(self) -> str:
        """What the file is for.

        Raises:
            RequestError: it is missing or unknown.
        """
        purpose = self.fields.get("purpose")
        if purpose not in PURPOSES:
            told = (
                "is required"
                if purpose is None
                else f"must be one of {', '.join(PURPOSES)}, got {reprlib.repr(purpose)}"
            )
            raise RequestError(f"purpose {told}", param="purpose")
        return purpose

    def expires_after_s(self) -> int | None:
        """How long the file is kept; None for ever.

        Raises:
            RequestError: it is no time within the bounds.
        """
        anchor, text = self.fields.get("expires_after[anchor]"), self.fields.get("expires_after[seconds]")
        if anchor is None and text is None:
            return None
        if anchor not in (None, "created_at"):
            raise RequestError(
                f"expires_after[anchor] must be created_at, got {reprlib.repr(anchor)}", param="expires_after"
            )
        is_number = text is not None and text.isascii() and text.isdigit() and len(text) < 10
        if not is_number or not MIN_EXPIRY_S <= int(text or 0) <= MAX_EXPIRY_S:
            raise RequestError(
                f"expires_after[seconds] must be from {MIN_EXPIRY_S} to {MAX_EXPIRY_S}, got {reprlib.repr(text)}",
                param="expires_after",
            )
        return int(text or 0)


async def read_form(request: Request, limits: UploadLimits, write: Callable[[bytes], None]) -> Form:
    """The form of a request.

    Args:
        request: Its body is not read yet.
        limits: Of its file.
        write: Takes the content of the file, piece by piece, in worker threads.

    Raises:
        HTTPError: 413 for too large a file, 415 where it is no form, 408 where it comes too slowly.
        RequestError: the form is damaged, or what `write` raises.
        ClientGoneError: the client closed the connection before all of it was there.
    """
    parser = _FormParser(_boundary(request), limits, write)
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > limits.max_bytes + MAX_PARTS * limits.max_field_bytes * 4:
        raise parser.too_large()
    await _feed(request, limits, parser)
    if not parser.is_whole:
        raise RequestError("the form ends before its last boundary", param="body")
    return parser.form


async def _feed(request: Request, limits: UploadLimits, parser: _FormParser) -> None:
    start_s, num_bytes = asyncio.get_running_loop().time(), 0
    piece = bytearray()
    chunks = aiter(request.stream())
    try:
        while True:
            async with asyncio.timeout_at(start_s + limits.timeout_s + num_bytes / SLOWEST_BYTES_PER_S):
                chunk = await anext(chunks, None)
            if chunk is None:
                break
            num_bytes += len(chunk)
            piece += chunk
            if len(piece) >= PIECE_BYTES:
                await asyncio.to_thread(parser.feed, bytes(piece))
                piece.clear()
        if piece:
            await asyncio.to_thread(parser.feed, bytes(piece))
    except TimeoutError:
        raise HTTPError(
            408,
            f"the upload comes too slowly: less than {SLOWEST_BYTES_PER_S} bytes a second after {limits.timeout_s:g} s "
            "(--body-timeout-s)",
            code="timeout",
        ) from None
    except ClientDisconnect:
        raise ClientGoneError from None


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        raise HTTPError(
            415,
            "the content type must be multipart/form-data with a boundary, and a field file",
            code="unsupported_media_type",
        )
    if "content-encoding" in request.headers:
        raise HTTPError(415, "uploads are taken as they are, without a content encoding", code="unsupported_encoding")
    return boundary


# Many attributes: the state of a parser that is fed piece by piece.
class _FormParser:
    """Reads a form, and gives the content of its part `file` away."""

    def __init__(self, boundary: bytes, limits: UploadLimits, write: Callable[[bytes], None]) -> None:
        self.form = Form()
        self.is_whole = False
        self._limits, self._write = limits, write
        self._num_bytes = self._num_parts = 0
        self._header_name, self._header_value = bytearray(), bytearray()
        self._disposition = b""
        self._name = ""
        self._is_file = False
        self._value = bytearray()
        callbacks: Any = {
            "on_part_begin": self._begin_part,
            "on_header_field": lambda data, start, end: self._header_name.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._header_value.extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._take,
            "on_part_end": self._end_part,
            "on_end": self._end,
        }
        try:
            self._parser = MultipartParser(boundary, callbacks)
        except FormParserError as error:
            raise RequestError(f"the form is damaged: {error}", param="body") from None

    def feed(self, data: bytes) -> None:
        """More of the body. Raises RequestError or HTTPError, or what `write` does."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise RequestError(f"the form is damaged: {error}", param="body") from None

    def too_large(self) -> HTTPError:
        return HTTPError(
            413,
            f"the file is larger than {self._limits.max_bytes} bytes ({self._limits.flag})",
            code="file_too_large",
            param="file",
        )

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise RequestError(f"the form has more than {MAX_PARTS} parts", param="body")
        self._disposition, self._name, self._is_file = b"", "", False
        self._value.clear()

    def _end_header(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)
        self._header_name.clear()
        self._header_value.clear()

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition.decode("latin-1"))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = self._name == "file"
        if not self._is_file:
            return
        if self.form.filename is not None:
            raise RequestError("the form has two files; send one at a time", param="file")
        name = options.get(b"filename", b"").decode("utf-8", "replace")
        self.form.filename = "".join(each for each in name if each.isprintable())[:MAX_NAME_CHARS] or "upload"
        if "purpose" in self.form.fields:
            self.form.purpose()  # so that a wrong one costs no upload

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._num_bytes += end - start
            if self._num_bytes > self._limits.max_bytes:
                raise self.too_large()
            self._write(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > self._limits.max_field_bytes:
            raise RequestError(
                f"{self._name[:64]!r} is longer than {self._limits.max_field_bytes} bytes", param=self._name[:64]
            )

    def _end_part(self) -> None:
        if not self._is_file:
            value = self._value.decode("utf-8", "replace")
            self.form.fields[self._name] = value
            self.form.values.append((self._name, value))

    def _end(self) -> None:
        self.is_whole = True
