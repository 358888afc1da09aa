"""Files named by their ids in requests, put in place of their names before a route reads the body.

What a part with an id can be is what it can be inline: images, sounds and videos as data URLs, texts as text. Knows the
parts of the chat API, of Responses and of Anthropic's Messages.
"""

from __future__ import annotations

import asyncio
import base64
import mimetypes
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire_interfaces import RequestError
from quire_renderers import modality_of
from quire_server.body import read_body
from quire_server.context import ServerContext
from quire_server.errors import HTTPError
from quire_server.files.file_store import StoredFile
from quire_server.files.service import FilesService, unknown_file
from quire_server.invocations import with_body

__all__ = ["reading_files"]

Handler = Callable[[ServerContext, Request], Awaitable[Response]]

_MEDIA = ("image", "audio", "video")
_PLACES = ("messages", "input", "content", "output", "documents", "queries", "data_1", "data_2")
"""Fields in which parts stand; in others, as in schemas of tools, an id is no file's."""


class _Part(NamedTuple):
    """Something that names a file."""

    holder: list[Any]
    """The list it stands in."""
    place: int
    """In the list."""
    path: str
    """In the body."""
    file_id: str


def reading_files(handler: Handler, files: FilesService) -> Handler:
    """The handler, for requests that may name files.

    Args:
        handler: Knows no files.
        files: Those of the server.
    """

    async def reading(context: ServerContext, request: Request) -> Response:
        data = await read_body(request, context.config)
        if b'"file_id"' in data:
            data = await _with_contents(context, files, data)
        path = request.scope["path"]
        return await handler(context, with_body(request, path, data))

    reading.__name__, reading.__doc__ = getattr(handler, "__name__", ""), handler.__doc__
    return reading


async def _with_contents(context: ServerContext, files: FilesService, data: bytes) -> bytes:
    """The body with contents in place of ids.

    Raises:
        HTTPError: a file is not there (404), or the body would be too large (413).
        RequestError: a file cannot be read as such a part.
    """
    await context.inspector.check(data)
    try:
        body = await asyncio.to_thread(msgspec.json.decode, data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return data  # the route says what is wrong
    left = context.config.max_body_bytes - len(data)
    found = list(_parts(body))
    for part in found:
        try:
            file = await files.file(context, part.file_id)
        except HTTPError as error:
            raise (unknown_file(part.file_id, part.path) if error.status == 404 else error) from None
        left -= file.num_bytes * 4 // 3
        if left < 0:
            raise HTTPError(
                413,
                f"with the file {file.id} at {part.path} the request is larger than "
                f"{context.config.max_body_bytes} bytes (--max-body-bytes)",
                code="body_too_large",
                param=part.path,
            )
        path = await files.path(file)
        part.holder[part.place] = await asyncio.to_thread(_inline, part.holder[part.place], file, path, part.path)
    return await asyncio.to_thread(msgspec.json.encode, body) if found else data


def _parts(body: Any) -> Iterator[_Part]:
    """All parts that name a file, wherever parts may stand."""
    if not isinstance(body, dict):
        return
    waiting: list[tuple[Any, str]] = [(body[name], name) for name in _PLACES if name in body]
    while waiting:
        value, path = waiting.pop()
        if isinstance(value, dict):
            waiting += [(value[name], f"{path}.{name}") for name in _PLACES if name in value]
        elif isinstance(value, list):
            for place, each in enumerate(value):
                at = f"{path}[{place}]"
                if (file_id := _file_id(each)) is not None:
                    yield _Part(value, place, at, file_id)
                else:
                    waiting.append((each, at))


def _file_id(part: Any) -> str | None:
    """The file that a part names, and has no content of its own beside."""
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        return None
    kind: str = part["type"]
    holder: Any = part
    if kind == "file":
        holder = part.get("file")
    elif kind in ("image", "document") and isinstance(part.get("source"), dict):
        holder = part["source"] if part["source"].get("type") == "file" else None
    elif kind != "input_file" and modality_of(kind) is None:
        return None
    if not isinstance(holder, dict) or any(holder.get(key) for key in ("file_data", "file_url", kind, "url")):
        return None
    file_id = holder.get("file_id")
    return file_id if isinstance(file_id, str) else None


def _inline(part: dict[str, Any], file: StoredFile, path: Path, at: str) -> dict[str, Any]:
    """The part with the content in it. Raises RequestError where it cannot be."""
    try:
        content = path.read_bytes()
    except OSError:
        raise unknown_file(file.id, at) from None
    kind = part["type"]
    guessed = mimetypes.guess_type(file.filename)[0] or ""
    modality: str | None = modality_of(kind) if kind not in ("file", "input_file", "document") else None
    if modality is None and guessed.partition("/")[0] in _MEDIA:
        modality = guessed.partition("/")[0]
    if modality is None:
        return _text_part(part, file, _text(content, file, guessed, at))
    media_type = guessed if guessed.startswith(f"{modality}/") else f"{modality}/*"
    encoded = base64.b64encode(content).decode()
    url = f"data:{media_type};base64,{encoded}"
    if "source" in part:
        return {**part, "type": "image", "source": {"type": "base64", "media_type": media_type, "data": encoded}}
    if kind == "input_file":
        rest = {name: value for name, value in part.items() if name != "file_id"}
        return {**rest, "file_data": url, "filename": file.filename}
    if kind == "input_image":
        return {**{name: value for name, value in part.items() if name != "file_id"}, "image_url": url}
    return {"type": f"{modality}_url", f"{modality}_url": {"url": url}}


def _text(content: bytes, file: StoredFile, guessed: str, at: str) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = None
    if text is None or "\0" in text or guessed == "application/pdf":
        raise RequestError(
            f"{at} names {file.filename!r}, which is neither an image, a sound, a video nor text in UTF-8"
            + (" (PDF is not read here)" if guessed == "application/pdf" else ""),
            param=at,
            code="unsupported_file",
        )
    return text


def _text_part(part: dict[str, Any], file: StoredFile, text: str) -> dict[str, Any]:
    """The text of a file, under its name."""
    if "source" in part:
        title = {"title": file.filename} if not part.get("title") else {}
        return {
            **part,
            "type": "document",
            **title,
            "source": {"type": "text", "media_type": "text/plain", "data": text},
        }
    kind = "input_text" if part["type"] == "input_file" else "text"
    return {"type": kind, "text": f"{file.filename}:\n{text}\n"}
