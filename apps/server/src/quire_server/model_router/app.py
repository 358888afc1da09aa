"""The routes of a router of models: what is there, loading and unloading; all others go to the model that they name."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quire import __version__
from quire_interfaces import QuireError, RequestError
from quire_server.access_log import AccessLog
from quire_server.body import read_body
from quire_server.callers import APIKeys
from quire_server.chat_page import chat_page, chat_page_file
from quire_server.config import ServerConfig
from quire_server.context import in_thread_when
from quire_server.cross_site import CrossSiteGuard
from quire_server.errors import ClientGoneError, HTTPError, error_response
from quire_server.guard import PAGE_FILES, Guard
from quire_server.model_router.pool import ModelPool
from quire_server.model_router.process import ModelProcess
from quire_server.model_router.relay import relay
from quire_server.ollama.models import NEVER, OLLAMA_VERSION, unloaded_card
from quire_server.ollama.protocol import FOREVER, keep_alive_s
from quire_server.responses import json_response

__all__ = ["RouterApp", "layered"]


class _Named(msgspec.Struct):
    """Fields of a body that tell which model it is for, and how long that stays."""

    model: Any = None
    name: Any = None
    keep_alive: Any = None
    prompt: Any = None
    messages: Any = None
    input: Any = None


_decode_named = msgspec.json.Decoder(_Named).decode


class RouterApp:
    """The ASGI app.

    Args:
        pool: The models.
        config: Of the router.
        api_keys: Who may load and unload models.
    """

    def __init__(self, pool: ModelPool, config: ServerConfig, api_keys: APIKeys) -> None:
        self._pool, self._config, self._api_keys = pool, config, api_keys
        self._started_s = int(time.time())
        self.is_leaving = False
        """The server was asked to stop."""
        self._own: dict[tuple[str, str], Callable[[Request], Awaitable[Response]]] = {
            ("GET", "/health"): self._health,
            ("GET", "/ping"): self._health,
            ("GET", "/ready"): self._ready,
            ("GET", "/v1/health"): self._health,
            ("GET", "/version"): self._version,
            ("GET", "/"): self._page,
            ("GET", "/v1/models"): self._list,
            ("GET", "/models"): self._list,
            ("POST", "/models/load"): self._load,
            ("POST", "/models/unload"): self._unload,
            ("GET", "/api/tags"): self._tags,
            ("GET", "/api/ps"): self._ps,
            ("GET", "/api/version"): self._ollama_version,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": "a router of models passes on no sockets"})
            return
        if scope["type"] != "http":
            return
        try:
            await self._answer(scope, receive, send)
        except QuireError as error:
            await error_response(error, scope)(scope, receive, send)
        except ClientGoneError:
            await Response(status_code=499)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        query = QueryParams(scope["query_string"])
        if (method, path) in self._own:
            await (await self._own[method, path](request))(scope, receive, send)
        elif method == "GET" and path.startswith("/v1/models/"):
            response = json_response(self._card(self._pool.find(path.removeprefix("/v1/models/"))))
            await response(scope, receive, send)
        elif method == "GET" and path.startswith(PAGE_FILES):
            await chat_page_file(request, path.removeprefix(PAGE_FILES))(scope, receive, send)
        elif path == "/metrics" and "model" not in query:
            await self._metrics()(scope, receive, send)
        else:
            await self._pass_on(request, path, query, send)

    async def _pass_on(self, request: Request, path: str, query: QueryParams, send: Send) -> None:
        """To the model that the body or the query names, or the only one there is."""
        body = await read_body(request, self._config, any_content_type=True) if request.method != "GET" else b""
        named = _named(body)
        name = named.model or named.name or query.get("model") or self._only()
        if not isinstance(name, str):
            raise RequestError(f"model must be a text, got {name!r:.100}", param="model")
        ttl_s = keep_alive_s(named.keep_alive) if path.startswith("/api/") else None
        if ttl_s == 0 and path in ("/api/generate", "/api/chat") and not (named.prompt or named.messages):
            await self._pool.unload(name)
            await _unloaded(name, path)(request.scope, request.receive, send)
            return
        autoload = query.get("autoload", str(self._config.models_autoload)).lower() in ("true", "1")
        is_begun = False

        async def send_noticed(message: Any) -> None:
            nonlocal is_begun
            is_begun = True
            await send(message)

        for attempt in range(2):
            async with self._pool.using(name, loads=autoload) as model:
                if ttl_s is not None:
                    model.ttl_s = ttl_s
                try:
                    # Names with a tag are the router's; the model's server knows one name.
                    sent = _with_model(body, model.name) if named.model not in (None, model.name) else body
                    await relay(request.scope, sent, model.socket_path, request.receive, send_noticed)
                    return
                except HTTPError as error:
                    if attempt or is_begun or error.code != "model_gone":
                        raise
                    await model.notice_end()
            # It died before it answered: the second attempt starts it again.

    def _only(self) -> str:
        """The model of a request that names none. Raises RequestError where that is not clear."""
        for names in ([each.name for each in self._pool.loaded], list(self._pool.models)):
            if len(names) == 1:
                return names[0]
        raise RequestError("model is required: this server has several (GET /v1/models lists them)", param="model")

    async def _health(self, request: Request) -> Response:
        return json_response({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        if self.is_leaving:
            raise HTTPError(503, "the server is shutting down", code="draining")
        return Response()

    async def _version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def _page(self, request: Request) -> Response:
        return chat_page()

    async def _list(self, request: Request) -> Response:
        self._pool.refresh()
        cards = [self._card(each) for each in self._pool.models.values()]
        return json_response({"object": "list", "data": cards})

    def _card(self, model: ModelProcess) -> dict[str, Any]:
        status: dict[str, Any] = {"value": model.status if model.is_alive or not model.pid else "unloaded"}
        if model.failure:
            status |= {"failed": True, "exit_code": model.exit_code, "message": model.failure}
        return {
            "id": model.name,
            "object": "model",
            "created": self._started_s,
            "owned_by": "quire",
            "path": str(model.path),
            "status": status,
        }

    async def _load(self, request: Request) -> Response:
        self._check_admin(request)
        async with self._pool.using(await self._named_model(request)):
            return json_response({"success": True})

    async def _unload(self, request: Request) -> Response:
        self._check_admin(request)
        await self._pool.unload(await self._named_model(request))
        return json_response({"success": True})

    async def _named_model(self, request: Request) -> str:
        name = _named(await read_body(request, self._config, any_content_type=True)).model
        if not isinstance(name, str) or not name:
            raise RequestError("model is required", param="model")
        return name

    def _check_admin(self, request: Request) -> None:
        """Raises HTTPError where administrators have keys, and this is none of theirs."""
        if self._api_keys.has_admins and not request.state.caller.is_admin:
            raise HTTPError(
                403, "models are loaded and unloaded with the key of an administrator (--admin-api-key)",
                code="not_an_admin",
            )  # fmt: skip

    async def _tags(self, request: Request) -> Response:
        self._pool.refresh()
        models = list(self._pool.models.values())
        cards = await in_thread_when(True, lambda: [unloaded_card(each.name, each.path) for each in models])
        return json_response({"models": cards})

    async def _ps(self, request: Request) -> Response:
        models = [each for each in self._pool.loaded if each.status == "loaded"]
        cards = await in_thread_when(True, lambda: [unloaded_card(each.name, each.path) for each in models])
        for card, model in zip(cards, models, strict=True):
            card |= {"size_vram": 0, "expires_at": self._expires_at(model)}
        return json_response({"models": cards})

    def _expires_at(self, model: ModelProcess) -> str:
        ttl_s = (self._config.models_ttl_s or FOREVER) if model.ttl_s is None else model.ttl_s
        if ttl_s > 1e9:
            return NEVER
        left_s = ttl_s if model.num_requests else ttl_s - (time.monotonic() - model.last_used_s)
        return (datetime.now(UTC) + timedelta(seconds=left_s)).isoformat().replace("+00:00", "Z")

    async def _ollama_version(self, request: Request) -> Response:
        return json_response({"version": OLLAMA_VERSION, "quire": __version__})

    def _metrics(self) -> Response:
        """What is loaded; the figures of a model are at /metrics?model=NAME."""
        prefix = self._config.metrics_prefix
        lines = [
            f"# HELP {prefix}_router_model_loaded Whether the model is loaded.",
            f"# TYPE {prefix}_router_model_loaded gauge",
            *(
                f'{prefix}_router_model_loaded{{model_name="{_label(each.name)}"}} {int(each.status == "loaded")}'
                for each in self._pool.models.values()
            ),
            f"# HELP {prefix}_router_requests Requests that are being answered.",
            f"# TYPE {prefix}_router_requests gauge",
            *(
                f'{prefix}_router_requests{{model_name="{_label(each.name)}"}} {each.num_requests}'
                for each in self._pool.models.values()
            ),
        ]
        return PlainTextResponse("\n".join(lines) + "\n")


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _named(body: bytes) -> _Named:
    try:
        return _decode_named(body) if body else _Named()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Named()  # the model's server says what is wrong


def _with_model(body: bytes, name: str) -> bytes:
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return msgspec.json.encode({**fields, "model": name})


def _unloaded(name: str, path: str) -> Response:
    answer = {"model": name, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}
    text: dict[str, Any] = {"response": ""} if path == "/api/generate" else {
        "message": {"role": "assistant", "content": ""}
    }  # fmt: skip
    return json_response({**answer, **text, "done": True, "done_reason": "unload"})


def layered(app: RouterApp, config: ServerConfig, api_keys: APIKeys) -> ASGIApp:
    """The app behind the guards that look at keys and at browsers, as one model's."""
    guarded: ASGIApp = Guard(CrossSiteGuard(app, config, is_open=api_keys.is_open), api_keys, config.root_path)
    return AccessLog(guarded) if config.access_log else guarded
