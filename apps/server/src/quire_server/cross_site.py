"""The ASGI layer against web sites that use a visitor's browser to reach this server. Knows no route.

A server that wants no API key trusts whoever reaches its address; a browser on the same machine or network does, and
runs the code of strangers. Two ways lead here. A page may send requests to this address: they carry `Origin` or
`Sec-Fetch-Site`, which pages cannot forge. Or the page's own name may be made to point at this address (DNS
rebinding): then `Host` is that name. With keys neither page has one, and nothing is checked but `--allowed-hosts`.
"""

from __future__ import annotations

import ipaddress
import reprlib
import socket
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from quire_server.config import ServerConfig
from quire_server.errors import HTTPError, error_response
from quire_server.guard import PUBLIC_PATHS

__all__ = ["CrossSiteGuard"]

PRIVATE_SUFFIXES = ("localhost", "internal")
"""Names below these are nobody's on the internet: containers call their host "host.docker.internal"."""


class CrossSiteGuard:
    """Wraps the app, inside of the guard that looks at keys.

    Args:
        app: The routes.
        config: Its host, and the origins and hosts that it allows.
        is_open: Whether requests need no key.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, *, is_open: bool) -> None:
        self._app, self._is_open = app, is_open
        self._origins = frozenset(origin.lower().rstrip("/") for origin in config.allowed_origins)
        self._hosts = frozenset(host.lower() for host in config.allowed_hosts)
        self._own_names = frozenset({config.host.lower(), socket.gethostname().lower()})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] in ("http", "websocket") else None
        if refusal is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": str(refusal)})
        else:
            await error_response(refusal, scope)(scope, receive, send)

    def _refusal(self, scope: Scope) -> HTTPError | None:
        if scope["path"].removeprefix(scope.get("root_path", "")) in PUBLIC_PATHS:
            return None
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not self._is_host_allowed(host, scope):
            return HTTPError(
                403,
                f"this server is not called {reprlib.repr(host)}; name it with --allowed-hosts if it is",
                code="host_not_allowed",
            )
        is_browser = "origin" in headers or "sec-fetch-site" in headers
        if self._is_open and is_browser and not self._is_origin_allowed(scope, headers, host):
            origin = headers.get("origin")
            which = "other web sites" if origin is None else f"the web site {reprlib.repr(origin)}"
            return HTTPError(
                403, f"{which} may not use this server; allow it with --allowed-origins", code="origin_not_allowed"
            )
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        if is_browser and has_body and "content-type" not in headers:  # pages may send such without being asked for
            return HTTPError(
                415, "browsers must send Content-Type: application/json with a body", code="unsupported_media_type"
            )
        return None

    def _is_host_allowed(self, host: str, scope: Scope) -> bool:
        is_checked = bool(self._hosts) or (self._is_open and _is_loopback(scope))
        if not is_checked or "*" in self._hosts:
            return True
        name = _name_of(host)
        # Nobody can rebind an address, or a name without a dot, which is no name of the internet.
        if "." not in name or _is_address(name) or name in self._own_names or name in self._hosts:
            return True
        suffixes = [*PRIVATE_SUFFIXES, *(each[2:] for each in self._hosts if each.startswith("*."))]
        return any(name.endswith(f".{suffix}") for suffix in suffixes)

    def _is_origin_allowed(self, scope: Scope, headers: Headers, host: str) -> bool:
        if "*" in self._origins:
            return True
        origins = headers.getlist("origin")
        if origins:
            return all(
                origin.lower() in self._origins or urlsplit(origin.lower()).netloc == host.lower() != ""
                for origin in origins
            )
        if headers.get("sec-fetch-site") not in ("cross-site", "same-site"):
            return True
        is_link = headers.get("sec-fetch-mode") == "navigate" and scope.get("method") in ("GET", "HEAD")
        return is_link and headers.get("sec-fetch-dest") in (None, "document")


def _is_loopback(scope: Scope) -> bool:
    """Whether the connection was made to an address of this machine alone."""
    server = scope.get("server")
    return server is not None and _is_address(server[0]) and ipaddress.ip_address(server[0]).is_loopback


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name_of(host: str) -> str:
    """A `Host` header without its port and brackets."""
    name = host.lower().strip()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].removesuffix(".")
