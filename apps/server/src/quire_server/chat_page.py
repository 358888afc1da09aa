"""The chat page, and what browsers are told to keep it from. Knows no engine."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.resources
import re

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from quire_server.context import ServerContext

__all__ = ["page"]


async def page(context: ServerContext, request: Request) -> Response:
    """The chat page."""
    text, policy = _page()
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",  # for browsers that do not know frame-ancestors
        "Referrer-Policy": "no-referrer",  # its address may hold a key
        "Cache-Control": "no-store",
    }
    return HTMLResponse(text, headers=headers)


@functools.cache
def _page() -> tuple[str, str]:
    """Its text and its Content-Security-Policy: its own script and style, requests to this server, and nothing else."""
    text = importlib.resources.files("quire_server").joinpath("chat.html").read_text(encoding="utf-8")
    [script], [style] = (re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL) for tag in ("script", "style"))
    return text, "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash(script)}",
            f"style-src {_hash(style)}",
            "img-src data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
