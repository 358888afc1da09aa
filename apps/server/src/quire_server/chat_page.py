"""The chat page: its files, what browsers are told to keep it from, and what it asks of the server. Knows no engine."""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import reprlib
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire_interfaces import SamplingParams
from quire_interfaces.number_range import NumberField, number_fields
from quire_server.context import ServerContext
from quire_server.errors import HTTPError

__all__ = ["chat_page", "chat_page_file", "chat_settings", "page", "page_file"]

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "media-src data: blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # text of a model never becomes markup, whatever a script does
        "trusted-types 'none'",
    )
)
"""Content-Security-Policy: files and requests of this server alone, nothing inline, no frames."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",  # for browsers that do not know frame-ancestors
    "Referrer-Policy": "no-referrer",  # its address may hold a key
}
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Ending of a file's name -> its media type."""
_NOT_ASKED = ("n", "best_of", "logprobs", "prompt_logprobs", "max_tokens")
"""Numbers that the page has no plain field for."""


class PageFile(NamedTuple):
    """A file of the page."""

    content: bytes
    media_type: str
    etag: str


async def page(context: ServerContext, request: Request) -> Response:
    """The chat page."""
    return chat_page()


def chat_page() -> Response:
    """The page, with what browsers are told to keep it from."""
    file = _files()["index.html"]
    return Response(file.content, headers={**HEADERS, "Cache-Control": "no-store"}, media_type=file.media_type)


async def page_file(context: ServerContext, request: Request) -> Response:
    """A script, style or picture of the chat page; the same for everybody, so that it needs no key."""
    return chat_page_file(request, request.path_params["name"])


def chat_page_file(request: Request, name: str) -> Response:
    """A file of the page. Raises HTTPError (404) where there is none of this name."""
    file = _files().get(name)
    if file is None:
        raise HTTPError(404, f"the chat page has no file {reprlib.repr(name)}", code="not_found")
    headers = {**HEADERS, "Cache-Control": "no-cache", "ETag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)


async def chat_settings(context: ServerContext, request: Request) -> Response:
    """What the chat page offers: sampling parameters with their ranges, the model's defaults, labels of MCP servers."""
    llm = context.llm
    numbers = [field for field in number_fields(SamplingParams) if field.name not in _NOT_ASKED]
    return JSONResponse(
        {
            "sampling": [_described(field) for field in numbers],
            "defaults": {
                name: value
                for name, value in llm.generation_defaults.items()
                if isinstance(value, int | float) and not isinstance(value, bool)
            },
            "mcp_servers": sorted(context.mcp_servers),
            "max_logprobs": llm.config.model.max_logprobs,
        }
    )


def _described(field: NumberField) -> dict[str, Any]:
    limits = field.range
    return {
        "name": field.name,
        "whole": field.type is int,
        "default": field.default,
        "low": limits.low if limits.off is None else min(limits.low, limits.off),
        "high": limits.high,
        "above": limits.above,
    }


@functools.cache
def _files() -> dict[str, PageFile]:
    """Name -> each file of the page."""
    files = {}
    for file in importlib.resources.files("quire_server").joinpath("page").iterdir():
        media_type = MEDIA_TYPES.get(file.name[file.name.rfind(".") :])
        if media_type is not None:
            content = file.read_bytes()
            files[file.name] = PageFile(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return files
