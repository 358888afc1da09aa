"""The ASGI layer around all routes: who calls (`scope["state"]["caller"]`), and the request's id."""

from __future__ import annotations

from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire_observability import current_request_id
from quire_server.callers import KEYLESS, APIKeys
from quire_server.client_secrets import PREFIX, read_client_secret
from quire_server.errors import HTTPError, error_response
from quire_server.request_ids import request_id_of

__all__ = ["Guard"]

PUBLIC_PATHS = frozenset({"/health", "/ping", "/ready"})
PAGE_FILES = "/page/"
"""Paths of the chat page's scripts and styles begin so. They are the same everywhere, and browsers ask for them without
headers of the page's own."""

KEY_PROTOCOL = "openai-insecure-api-key."
"""Before the key, in the subprotocol by which browsers send one to a websocket."""
SECRETS_OPEN = "/v1/realtime"
"""All that a client secret is for."""


class Guard:
    """Wraps the app.

    Args:
        app: The routes.
        api_keys: Unless the server is open, every request but to `PUBLIC_PATHS` and `PAGE_FILES` must carry one: as a
            bearer token, as `x-api-key`, or, for the chat page, which a browser opens without headers, as `/?key=KEY`.
        root_path: Prefix under which a proxy shows this server; requests arrive with it or without.
    """

    def __init__(self, app: ASGIApp, api_keys: APIKeys, root_path: str = "") -> None:
        self._app = app
        self._root_path = "/" + root_path.strip("/") if root_path.strip("/") else ""
        self._keys = api_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = request_id_of(headers)
        current_request_id.set(request_id)
        state = {**scope.get("state", {}), "request_id": request_id}
        scope = {**scope, "state": state}

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                answered = MutableHeaders(scope=message)
                answered["x-request-id"] = answered["request-id"] = request_id  # OpenAI's name and Anthropic's
            await send(message)

        path = scope["path"]
        if self._root_path:
            if path.startswith(self._root_path + "/"):
                path = path.removeprefix(self._root_path)
            scope = {**scope, "root_path": self._root_path, "path": self._root_path + path}
        key = _given_key(scope, path, headers)
        caller = self._keys.caller_of(key)
        if scope["type"] == "websocket" and key.startswith(PREFIX.encode()) and caller in (None, KEYLESS):
            secret = read_client_secret(self._keys, key) if path == SECRETS_OPEN else None
            caller = None if secret is None else self._keys.caller_of_owner(secret.owner)
            state["realtime_update"] = None if secret is None else secret.update
        if caller is None and (path in PUBLIC_PATHS or path.startswith(PAGE_FILES)):
            caller = KEYLESS
        if caller is None and scope["type"] == "websocket":
            await receive()
            reason = "the API key is missing, wrong, or has expired"
            await send({"type": "websocket.close", "code": 1008, "reason": reason})
            return
        if caller is None:
            await error_response(_refusal(key), scope)(scope, receive, send_with_id)
            return
        state["caller"] = caller
        await self._app(scope, receive, send_with_id)


def _given_key(scope: Scope, path: str, headers: Headers) -> bytes:
    """The key that a request carries, b"" for none."""
    kind, _, token = headers.get("authorization", "").partition(" ")
    key = token.strip().encode("latin-1") if kind.lower() == "bearer" else b""
    if not key:  # as Anthropic's clients send it
        key = headers.get("x-api-key", "").strip().encode("latin-1")
    if not key and scope["type"] == "websocket":  # as browsers send it, which send no other header
        offered = (each.strip() for each in headers.get("sec-websocket-protocol", "").split(","))
        keys = (each.removeprefix(KEY_PROTOCOL) for each in offered if each.startswith(KEY_PROTOCOL))
        key = next(keys, "").encode("latin-1")
    if not key and path == "/":
        key = parse_qs(scope["query_string"].decode("latin-1")).get("key", [""])[0].encode()
    return key


def _refusal(key: bytes) -> HTTPError:
    what = "is wrong" if key else "is missing"
    return HTTPError(401, f"the API key {what}; send the header 'Authorization: Bearer KEY'", code="invalid_api_key")
