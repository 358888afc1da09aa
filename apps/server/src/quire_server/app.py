"""The ASGI app: routes joined to the served engine. Everything a route needs comes through `ServerContext`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import reprlib
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp
from starlette.websockets import WebSocket

from quire import __version__
from quire_engine import HubClient
from quire_interfaces import EngineDeadError, QuireError, RequestError
from quire_observability import CONTENT_TYPE
from quire_server.access_log import AccessLog
from quire_server.adapters import (
    LoadLoRAAdapterRequest,
    UnloadLoRAAdapterRequest,
    load_lora_adapter,
    unload_lora_adapter,
)
from quire_server.administration import ADMIN_PATHS, for_admins
from quire_server.batches.line_answers import BATCH_ENDPOINTS
from quire_server.batches.load import InteractiveWatch
from quire_server.batches.service import BatchesService, BatchRequest
from quire_server.callers import KeyLimits
from quire_server.chat import batch_chat_completions, chat_completions
from quire_server.chat_page import chat_settings, page, page_file
from quire_server.cohere_chat import COHERE_CHAT_ROUTES
from quire_server.completions import completions
from quire_server.config import ServerConfig
from quire_server.context import ServerContext
from quire_server.conversations import ConversationRequest, ConversationsService, ItemsRequest, MetadataRequest
from quire_server.cross_site import CrossSiteGuard
from quire_server.derender_stream import (
    DerenderedChatChunk,
    DerenderedCompletionChunk,
    derender_chat_completions,
    derender_completions,
)
from quire_server.door_route import DoorRoute
from quire_server.elastic import ScaleRequest, is_scaling, restart_engines, scale
from quire_server.engine_view import EngineView
from quire_server.errors import ClientGoneError, HTTPError, error_response
from quire_server.files.file_parts import reading_files
from quire_server.files.service import FilesService
from quire_server.files.upload import FORM
from quire_server.guard import Guard
from quire_server.invocations import make_invocations
from quire_server.keep_alive import KeepAlive
from quire_server.live_config_routes import LIVE_CONFIG_ROUTES, join_live_settings
from quire_server.llama_cpp import LLAMA_CPP_ROUTES
from quire_server.messages import count_tokens, messages
from quire_server.messages_request import CountTokensRequest, MessagesRequest
from quire_server.middleware import with_middleware
from quire_server.ollama import OLLAMA_ROUTES
from quire_server.openapi import (
    BATCH_PAGE,
    BYTES,
    EVENTS,
    FILE_PAGE,
    HTML,
    ITEM_PAGE,
    JSON,
    JSON_OR_EVENTS,
    LIST,
    LISTS,
    NOTHING,
    OBJECT_OR_LISTS,
    TEXT,
    Bodies,
    Form,
    Media,
    Query,
    RouteDocument,
    json_of,
)
from quire_server.pooling_answers import TEIInfo
from quire_server.pooling_protocol import (
    ClassificationRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from quire_server.pooling_routes import POOLING_ROUTES
from quire_server.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from quire_server.rate_limits import RATE_LIMIT_HEADERS
from quire_server.readiness import ConnectionCloser, health, ready, refuse_while_draining
from quire_server.render import render_chat, render_completion, render_messages
from quire_server.render_client import RENDER_PATHS, renders_only
from quire_server.responses import ChatCompletion, Completion
from quire_server.responses_api import ResponsesService
from quire_server.responses_request import CompactRequest, ResponsesRequest
from quire_server.responses_socket import responses_socket
from quire_server.resting import (
    is_paused,
    is_sleeping,
    pause,
    reset_encoder_cache,
    reset_mm_cache,
    reset_prefix_cache,
    resume,
    sleep,
    wake_up,
)
from quire_server.sglang import SGLANG_ROUTES
from quire_server.speech.live import live_socket
from quire_server.speech.routes import add_speech_routes
from quire_server.speech.service import hears_only, served_tasks
from quire_server.tei import info as tei_info
from quire_server.tei_tokens import DecodeRequest, decode
from quire_server.token_protocol import (
    AbortRequest,
    BatchChatCompletionRequest,
    DerenderChatRequest,
    DerenderChatStreamRequest,
    DerenderCompletionRequest,
    DerenderCompletionStreamRequest,
    GenerateRequest,
)
from quire_server.token_routes import TOKEN_PATHS, GeneratedText, GeneratedTokens, abort_here, abort_requests, generate
from quire_server.tokenization import detokenize, tokenize, tokenizer_info
from quire_server.usage_report import USAGE_QUERY, usage
from quire_server.vllm_routes import VLLM_ROUTES

__all__ = ["make_app", "post_handlers"]

STATS_TIMEOUT_S = 1.0
"""A scrape waits this long for figures of this moment; then the last ones that the engine sent are given."""

_logger = logging.getLogger(__name__)

INVOCATIONS = (
    ChatCompletionRequest, CompletionRequest, EmbeddingRequest, ClassificationRequest, RerankRequest, ScoreRequest,
    PoolingRequest,
)  # fmt: skip
"""What POST /invocations takes: the bodies of the routes that it stands for."""

_OTHER_WORK = (
    "/", "/invocations", "/v1/chat/completions/batch", "/embed", "/embed_all", "/embed_sparse", "/predict",
    "/similarity", "/v1/embed", "/inference/v1/generate", "/v1/audio/transcriptions", "/v1/audio/translations",
)  # fmt: skip
"""Routes beside those of batches whose requests lines of batches make way for."""

_DOORS = (
    *OLLAMA_ROUTES, *LLAMA_CPP_ROUTES, *SGLANG_ROUTES, *VLLM_ROUTES, *COHERE_CHAT_ROUTES, *LIVE_CONFIG_ROUTES,
)  # fmt: skip

Handler = Callable[[ServerContext, Request], Awaitable[Response]]


def post_handlers(context: ServerContext) -> Mapping[str, Handler]:
    """Path -> what answers a POST to it, for who asks without HTTP."""
    return _make_routes(context)[1].handlers


def _make_routes(context: ServerContext) -> tuple[FastAPI, _Routes, FilesService, BatchesService]:
    shown_at = None if context.config.disable_fastapi_docs else "/openapi.json"
    app = FastAPI(title="Quire", version=__version__, docs_url=None, redoc_url=None, openapi_url=shown_at)
    app.state.renders_only = renders_only(context.llm)
    app.state.tokens_only = context.config.tokens_only
    conversations = ConversationsService(context.config)
    responses = ResponsesService(context.config, conversations)
    join_live_settings(context)
    context.state.on_notices["cancel_response"] = responses.cancel_here
    context.state.on_notices["abort_requests"] = functools.partial(abort_here, context)
    files = FilesService(context.config, has_several_owners=context.api_keys.num_keys > 1)
    routes = _Routes(app, context, files)
    chat, completion = json_of(ChatCompletion, events=True), json_of(Completion, events=True)
    chat_part = json_of(ChatCompletion, DerenderedChatChunk, events=True)
    completion_part = json_of(Completion, DerenderedCompletionChunk, events=True)
    chat_derender = (DerenderChatRequest, DerenderChatStreamRequest)
    completion_derender = (DerenderCompletionRequest, DerenderCompletionStreamRequest)
    for path, handler, body, answers in (
        ("/v1/chat/completions", chat_completions, ChatCompletionRequest, chat),
        ("/v1/chat/completions/batch", batch_chat_completions, BatchChatCompletionRequest, json_of(ChatCompletion)),
        ("/v1/chat/completions/render", render_chat, ChatCompletionRequest, JSON),
        ("/v1/chat/completions/derender", derender_chat_completions, chat_derender, chat_part),
        ("/v1/completions", completions, CompletionRequest, completion),
        ("/v1/completions/render", render_completion, CompletionRequest, LIST),
        ("/v1/completions/derender", derender_completions, completion_derender, completion_part),
        ("/inference/v1/generate", generate, GenerateRequest, json_of(GeneratedTokens, GeneratedText, events=True)),
        ("/v1/messages", messages, MessagesRequest, JSON_OR_EVENTS),
        ("/v1/messages/render", render_messages, MessagesRequest, JSON),
        ("/v1/messages/count_tokens", count_tokens, CountTokensRequest, JSON),
        ("/v1/responses", responses.create, ResponsesRequest, JSON_OR_EVENTS),
        ("/v1/responses/render", responses.render, ResponsesRequest, JSON),
        ("/v1/responses/compact", responses.compact, CompactRequest, JSON),
        ("/v1/responses/input_tokens", responses.input_tokens, ResponsesRequest, JSON),
        ("/v1/conversations", conversations.create, ConversationRequest, JSON),
        ("/v1/conversations/{id}", conversations.update, MetadataRequest, JSON),
        ("/v1/conversations/{id}/items", conversations.add_items, ItemsRequest, JSON),
    ):
        routes.add("POST", path, _generating(handler), answers, body=body)
    routes.add(
        "POST",
        "/inference/v1/abort_requests",
        _generating(abort_requests),
        NOTHING,
        body=AbortRequest,
        is_limited=False,
    )
    routes.add("POST", "/tokenize", tokenize, OBJECT_OR_LISTS, body=TokenizeRequest)
    routes.add("POST", "/detokenize", detokenize, body=DetokenizeRequest)
    for path, pooling_handler, pooling_body, answers in POOLING_ROUTES:
        routes.add("POST", path, pooling_handler, answers, body=pooling_body, needs_awake=False)
    routes.add("POST", "/decode", decode, LISTS, body=DecodeRequest, needs_awake=False)
    invocations = make_invocations(routes.handlers)
    routes.add("POST", "/invocations", invocations, {**JSON_OR_EVENTS, **BYTES}, body=INVOCATIONS, needs_awake=False)
    routes.add("GET", "/info", tei_info, json_of(TEIInfo))
    routes.add("GET", "/health", health, NOTHING)
    routes.add("GET", "/ready", ready, NOTHING)
    routes.add("GET", "/ping", health, NOTHING)
    routes.add("POST", "/ping", health, NOTHING)  # as SageMaker may ask
    routes.add("GET", "/version", version)
    routes.add("GET", "/load", load)
    routes.add("GET", "/v1/models", models)
    routes.add("GET", "/v1/usage", usage, query=USAGE_QUERY)
    routes.add("GET", "/v1/models/{name:path}", one_model)
    routes.add("GET", "/metrics", metrics, TEXT)
    routes.add("GET", "/", page, HTML)
    routes.add("GET", "/page/{name}", page_file, TEXT)
    routes.add("GET", "/chat_settings", chat_settings)
    view, rank = EngineView(context), {"type": "integer", "minimum": 0, "maximum": 999999999}
    bounds = {"num_events": {**rank, "minimum": 1}, "engine": rank}
    routes.add("GET", "/v1/engine/events", view.events, EVENTS, query=bounds)
    routes.add("GET", "/v1/requests", view.requests)
    routes.add("GET", "/v1/requests/{id:path}/explain", view.explain)
    speech = add_speech_routes(routes, context)
    for door in _DOORS:
        routes.add_door(door)
    if not (app.state.renders_only or context.config.tokens_only):
        _socket(app, context, "/v1/responses", functools.partial(responses_socket, responses.preparer))
        _socket(app, context, "/v1/realtime", functools.partial(live_socket, speech))
    part = {"stream": {"type": "boolean"}, "starting_after": {"type": "integer"}}
    routes.add("GET", "/v1/responses/{id}/input_items", responses.input_items, query=ITEM_PAGE)
    routes.add("GET", "/v1/responses/{id}", responses.retrieve, JSON_OR_EVENTS, query=part)
    routes.add("POST", "/v1/responses/{id}/cancel", responses.cancel)
    routes.add("DELETE", "/v1/responses/{id}", responses.delete)
    routes.add("GET", "/v1/conversations/{id}/items/{item}", conversations.item)
    routes.add("GET", "/v1/conversations/{id}/items", conversations.list_items, query=ITEM_PAGE)
    routes.add("GET", "/v1/conversations/{id}", conversations.retrieve)
    routes.add("DELETE", "/v1/conversations/{id}/items/{item}", conversations.delete_item)
    routes.add("DELETE", "/v1/conversations/{id}", conversations.delete)
    if context.config.enable_tokenizer_info_endpoint:
        routes.add("GET", "/tokenizer_info", tokenizer_info)
    _add_admin_routes(routes, context)
    batches = _add_files_and_batches(routes, context, files)
    for status in (404, 405):
        app.add_exception_handler(status, _not_routed)
    return app, routes, files, batches


def make_app(context: ServerContext) -> ASGIApp:
    """The whole HTTP surface of one served engine."""
    app, routes, files, batches = _make_routes(context)
    inner: ASGIApp = app
    if context.config.sse_keep_alive_interval:
        inner = KeepAlive(inner, context.config.sse_keep_alive_interval)
    if files.keeps_files:
        work = routes.handlers.keys() & {*BATCH_ENDPOINTS, *_OTHER_WORK}
        inner = InteractiveWatch(inner, batches.load, work | routes.door_work)
    same_site = CrossSiteGuard(inner, context.config, is_open=context.api_keys.is_open)
    layered: ASGIApp = Guard(same_site, context.api_keys, context.config.root_path)
    if context.config.allowed_origins:
        # Around the guard: preflight requests carry no key, and a browser shows a refusal only with these headers.
        layered = _with_cors(layered, context.config)
    layered = ConnectionCloser(with_middleware(layered, context.config.middleware), context)
    if context.config.access_log:
        layered = AccessLog(layered, context.config.disable_access_log_for_endpoints)
    return layered if context.config.otlp_traces_endpoint is None else _traced(layered, context)


def _traced(app: ASGIApp, context: ServerContext) -> ASGIApp:
    from quire_server.tracing import SpanSender, Tracing

    sender = SpanSender(context.config.otlp_traces_endpoint or "")
    context.state.span_sender = sender
    context.state.background.append(sender.run)
    return Tracing(app, sender, context.model_names[0])


def _add_files_and_batches(routes: _Routes, context: ServerContext, files: FilesService) -> BatchesService:
    batches = BatchesService(context, files, routes.handlers)
    routes.add("POST", "/v1/files", files.create, body=Form(FORM), needs_awake=False)
    routes.add("GET", "/v1/files", files.list_files, query=FILE_PAGE)
    routes.add("GET", "/v1/files/{id}/content", files.content, BYTES)
    routes.add("GET", "/v1/files/{id}", files.retrieve)
    routes.add("DELETE", "/v1/files/{id}", files.delete)
    routes.add("POST", "/v1/batches", batches.create, body=BatchRequest, needs_awake=False)
    routes.add("GET", "/v1/batches", batches.list_batches, query=BATCH_PAGE)
    routes.add("POST", "/v1/batches/{id}/cancel", batches.cancel)
    routes.add("GET", "/v1/batches/{id}", batches.retrieve)
    return batches


def _with_cors(app: ASGIApp, config: ServerConfig) -> ASGIApp:
    return CORSMiddleware(
        app,
        allow_origins=config.allowed_origins,
        allow_methods=config.allowed_methods,
        allow_headers=config.allowed_headers,
        allow_credentials=config.allow_credentials,
        expose_headers=["x-request-id", "request-id", "retry-after", *RATE_LIMIT_HEADERS],
    )


def _add_admin_routes(routes: _Routes, context: ServerContext) -> None:
    if context.config.enable_sleep_mode:
        level = {"type": "integer", "enum": [0, 1, 2], "default": 1}
        modes = {"type": "string", "enum": ["keep", "wait", "abort"], "default": "keep"}
        tags = {"type": "array", "items": {"type": "string", "enum": ["weights", "kv_cache", "scheduling"]}}
        routes.add("POST", "/sleep", for_admins(sleep), query={"level": level, "mode": modes})
        routes.add("POST", "/wake_up", for_admins(wake_up), NOTHING, query={"tags": tags})
        routes.add("GET", "/is_sleeping", for_admins(is_sleeping))
    if context.config.enable_admin_routes or context.api_keys.has_admins:
        modes = {"type": "string", "enum": ["abort", "keep", "wait"], "default": "abort"}
        switch = {"type": "boolean"}
        routes.add("POST", "/pause", for_admins(pause), query={"mode": modes, "clear_cache": switch})
        routes.add("POST", "/resume", for_admins(resume))
        routes.add("GET", "/is_paused", for_admins(is_paused))
        query = {"reset_running_requests": switch, "reset_external": switch}
        routes.add("POST", "/scale_elastic_ep", for_admins(scale), body=ScaleRequest, is_limited=False)
        routes.add("POST", "/is_scaling_elastic_ep", for_admins(is_scaling))
        drain = {"type": "number", "minimum": 0, "maximum": 86400, "default": 120}
        routes.add("POST", "/restart_engines", for_admins(restart_engines), query={"drain_timeout": drain})
        routes.add("POST", "/reset_encoder_cache", for_admins(reset_encoder_cache), NOTHING)
        routes.add("POST", "/reset_mm_cache", for_admins(reset_mm_cache), NOTHING)
        routes.add("POST", "/reset_prefix_cache", for_admins(reset_prefix_cache), NOTHING, query=query)
        routes.add(
            "POST",
            "/v1/load_lora_adapter",
            for_admins(load_lora_adapter, is_own=True),
            TEXT,
            body=LoadLoRAAdapterRequest,
            is_limited=False,
        )
        routes.add(
            "POST",
            "/v1/unload_lora_adapter",
            for_admins(unload_lora_adapter, is_own=True),
            TEXT,
            body=UnloadLoRAAdapterRequest,
            is_limited=False,
        )


class _Routes:
    """Routes of the app, each with its place in /openapi.json."""

    def __init__(self, app: FastAPI, context: ServerContext, files: FilesService) -> None:
        self._app, self._context, self._files = app, context, files
        self._document = RouteDocument(app)
        self.handlers: dict[str, Handler] = {}
        """Path -> what answers a POST to it."""
        self.door_work: set[str] = set()
        """Paths of doors whose requests the model computes for."""

    def add(
        self,
        method: str,
        path: str,
        handler: Handler,
        answers: Media = JSON,
        *,
        body: Bodies | None = None,
        query: Query | None = None,
        needs_awake: bool = True,
        is_limited: bool = True,
    ) -> None:
        """A route that answers with what the handler returns, or with the error that it raised. What has a body needs
        the engine to run, unless `needs_awake` is false, and the limits of the caller's key to allow it, unless
        `is_limited` is false. Name and docstring of the handler are shown."""
        if self._app.state.renders_only and path not in RENDER_PATHS:
            return
        if self._context.config.tokens_only and path not in TOKEN_PATHS:
            return
        run = handler
        if self._files.keeps_files and body is not None and not isinstance(body, Form):
            run = reading_files(run, self._files)
        if body is not None:
            run = _while_serving(run, needs_awake=needs_awake, is_limited=is_limited)
        if method == "POST":
            self.handlers[path] = run

        async def endpoint(request: Request) -> Response:
            return await _answered(run, self._context.of_caller(request.state.caller), request)

        described = self._document.describe(path, answers, body, query or {})
        name, text = getattr(handler, "__name__", ""), inspect.getdoc(handler) or ""
        self._app.add_api_route(path, endpoint, methods=[method], name=name, description=text, **described)
        if method == "GET":
            self._app.add_api_route(path, endpoint, methods=["HEAD"], response_model=None, include_in_schema=False)

    def add_door(self, route: DoorRoute) -> None:
        """A route of a door; one for administrators only where there are some, or --enable-admin-routes."""
        handler = _generating(route.handler) if route.generates else route.handler
        if route.is_admin:
            if not (self._context.config.enable_admin_routes or self._context.api_keys.has_admins):
                return
            handler = for_admins(handler)
        method, path = route.method, route.path
        if route.is_work:
            self.door_work.add(path)
        self.add(
            method, path, handler, route.answers, body=route.body, query=route.query, needs_awake=route.needs_awake,
            is_limited=route.is_limited and not route.is_admin,
        )  # fmt: skip


def _socket(
    app: FastAPI, context: ServerContext, path: str, handler: Callable[[ServerContext, WebSocket], Awaitable[None]]
) -> None:
    async def endpoint(socket: WebSocket) -> None:
        await handler(context.of_caller(socket.state.caller), socket)

    app.add_api_websocket_route(path, endpoint)


def _while_serving(handler: Handler, *, needs_awake: bool, is_limited: bool) -> Handler:
    """The handler, for requests that are refused while the server drains, while a limit of the caller's key is reached
    and, of the served model, while it sleeps.

    Args:
        handler: What runs.
        needs_awake: Whether all requests are for the served model; others look themselves which model they are for.
        is_limited: Whether requests count to the limits of the caller's key.
    """

    async def checked(context: ServerContext, request: Request) -> Response:
        refuse_while_draining(context)
        if needs_awake:
            context.check_awake()
        if is_limited and not getattr(request.state, "is_admitted", False):
            context.rate_limiter.admit(context.caller)
            request.state.is_admitted = True  # /invocations asks other routes
        return await handler(context, request)

    return checked


def _generating(handler: Handler) -> Handler:
    """The handler, for requests that need a model which generates."""

    @functools.wraps(handler)
    async def checked(context: ServerContext, request: Request) -> Response:
        info = context.llm.engine.info
        if hears_only(info):
            raise HTTPError(
                400,
                f"{info.model} reads sound and no text: send recordings to /v1/audio/transcriptions",
                param="model",
                code="unsupported_task",
            )
        if info.runner == "pooling":
            raise HTTPError(
                404,
                f"{info.model} generates no text here: this server only pools ({', '.join(info.pooling_tasks)}); serve "
                "a model that generates (--runner generate)",
                code="unsupported_task",
            )
        return await handler(context, request)

    return checked


async def _answered(handler: Handler, context: ServerContext, request: Request) -> Response:
    """The handler's response, or the error body of what it raised; with what is left of the caller's limits."""
    response = await _unlimited_answer(handler, context, request)
    if context.caller.limits != KeyLimits():
        told = context.rate_limiter.headers(context.caller)
        response.raw_headers.extend((name.encode(), value.encode()) for name, value in told.items())
    return response


async def _unlimited_answer(handler: Handler, context: ServerContext, request: Request) -> Response:
    try:
        context.data_parallel_rank = _data_parallel_rank(request)
        return await handler(context, request)
    except QuireError as error:
        return error_response(error, request.scope)
    except ClientGoneError:
        return Response(status_code=499)  # nobody reads it
    except Exception as error:
        _logger.exception("%s %s failed", request.method, request.url.path)
        return error_response(error, request.scope)


def _data_parallel_rank(request: Request) -> int | None:
    """Rank of the engine that the request is for, in vLLM's header; None where it names none."""
    text = request.headers.get("x-data-parallel-rank")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise RequestError(f"the header X-data-parallel-rank must be a rank, got {reprlib.repr(text)}", param=None)
    return int(text)


async def _not_routed(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    if status == 405:
        message = f"{request.method} is not allowed on {request.url.path}"
    else:
        message = f"there is no route {request.method} {request.url.path}; GET /openapi.json lists them"
        if request.app.state.renders_only:
            message += "; this server renders and tokenizes only (quire launch render)"
        elif request.app.state.tokens_only:
            message += "; this server takes and answers token ids only (--tokens-only)"
        elif request.url.path in ADMIN_PATHS:
            message += ", and --enable-admin-routes or --admin-api-key add this one"
    code = "method_not_allowed" if status == 405 else "not_found"
    response = error_response(HTTPError(status, message, code=code), request.scope)
    response.headers.update(getattr(error, "headers", None) or {})
    return response


async def version(context: ServerContext, request: Request) -> Response:
    return JSONResponse({"version": __version__})


async def load(context: ServerContext, request: Request) -> Response:
    """How many requests are being answered, in vLLM's shape."""
    client = context.llm.client
    num_requests = await client.call("num_requests") if isinstance(client, HubClient) else context.num_requests
    return JSONResponse({"server_load": num_requests})


async def models(context: ServerContext, request: Request) -> Response:
    """The served model under each of its names, and its adapters."""
    names = (*context.model_names, *(name for name in context.adapters if name not in context.model_names))
    cards = [_model_card(context, name) for name in names]
    if context.pooling_model is not None:
        cards.append(_model_card(context.for_pooling(context.pooling_model), context.pooling_model))
    ends = {"first_id": names[0], "last_id": cards[-1]["id"], "has_more": False}  # for Anthropic's clients
    return JSONResponse({"object": "list", "data": cards, **ends})


async def one_model(context: ServerContext, request: Request) -> Response:
    """One of them."""
    context = context.for_pooling(request.path_params["name"])
    return JSONResponse(_model_card(context, context.resolve_model(request.path_params["name"])))


def _model_card(context: ServerContext, name: str) -> dict[str, Any]:
    """What OpenAI's clients read, vLLM's, and Anthropic's."""
    info, adapter = context.llm.engine.info, context.adapter_of(name)
    return {
        "id": name,
        "object": "model",
        "created": context.started_s,
        "owned_by": "quire",
        "root": info.model if adapter is None else context.llm.client.adapters[adapter],
        "parent": None if adapter is None else context.model_names[0],
        "max_model_len": info.max_model_len,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(context.started_s, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": info.max_model_len,
        "tasks": served_tasks(context.llm),
        "pooling_tasks": list(info.pooling_tasks),
        "input_modalities": ["text", *([] if context.llm.media is None else context.llm.media.placeholders)],
    }


async def metrics(context: ServerContext, request: Request) -> Response:
    """Prometheus text; what was counted remains readable when the engine is gone, restarts, or is deep in a step."""
    client = context.llm.client
    if isinstance(client, HubClient):  # who has the engines counts for all API processes
        return Response(await client.call("exposition", timeout_s=STATS_TIMEOUT_S), media_type=CONTENT_TYPE)
    with contextlib.suppress(EngineDeadError, TimeoutError):
        async with asyncio.timeout(STATS_TIMEOUT_S):
            await context.llm.client.stats()
    text = context.metrics.exposition()
    if context.pooling_llm is not None and context.pooling_metrics is not None:
        with contextlib.suppress(EngineDeadError, TimeoutError):
            async with asyncio.timeout(STATS_TIMEOUT_S):
                await context.pooling_llm.client.stats()
        text += context.pooling_metrics.exposition()
    return Response(text, media_type=CONTENT_TYPE)
