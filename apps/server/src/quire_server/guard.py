"""The ASGI layer around all routes: credentials and request ids."""

from __future__ import annotations

import hmac
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire_server.errors import HTTPError, error_response
from quire_server.request_ids import request_id_of

__all__ = ["Guard"]

PUBLIC_PATHS = frozenset({"/health", "/ping"})


class Guard:
    """Wraps the app.

    Args:
        app: The routes.
        api_keys: When there are any, every request but to `PUBLIC_PATHS` must carry one: as a bearer token, as
            `x-api-key`, or, for the chat page, which a browser opens without headers, as `/?key=KEY`.
        root_path: Prefix under which a proxy shows this server; requests arrive with it or without.
    """

    def __init__(self, app: ASGIApp, api_keys: tuple[str, ...], root_path: str = "") -> None:
        self._app = app
        self._root_path = "/" + root_path.strip("/") if root_path.strip("/") else ""
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = request_id_of(headers)
        scope = {**scope, "state": {**scope.get("state", {}), "request_id": request_id}}

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
        if self._keys and path not in PUBLIC_PATHS:
            refusal = self._key_refusal(scope, path, headers)
            if refusal is not None and scope["type"] == "websocket":
                await receive()
                await send({"type": "websocket.close", "code": 1008, "reason": "the API key is missing or wrong"})
                return
            if refusal is not None:
                await error_response(refusal, scope)(scope, receive, send_with_id)
                return
        await self._app(scope, receive, send_with_id)

    def _key_refusal(self, scope: Scope, path: str, headers: Headers) -> HTTPError | None:
        kind, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip().encode("latin-1") if kind.lower() == "bearer" else b""
        if not given:  # as Anthropic's clients send it
            given = headers.get("x-api-key", "").strip().encode("latin-1")
        if not given and path == "/":
            given = parse_qs(scope["query_string"].decode("latin-1")).get("key", [""])[0].encode()
        # All keys are compared, whichever fits, so that the time tells nothing.
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        if any(matches):
            return None
        what = "is wrong" if given else "is missing"
        return HTTPError(
            401, f"the API key {what}; send the header 'Authorization: Bearer KEY'", code="invalid_api_key"
        )
