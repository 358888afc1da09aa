"""GET /v1/engine/events, GET /v1/requests and GET /v1/requests/{id}/explain."""

from __future__ import annotations

import asyncio
import contextlib
import reprlib
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire_engine import EngineClient, HubClient
from quire_interfaces import QuireError, RequestError
from quire_observability import LoggedRequest, RequestLog, explain_request
from quire_server.context import ServerContext
from quire_server.engine_view.events import Viewer, event_of
from quire_server.engine_view.watcher import EngineWatcher
from quire_server.errors import HTTPError
from quire_server.streaming import EventStream

__all__ = ["EngineView", "request_explanations", "request_list"]

ANSWER_PREFIXES = ("chatcmpl-", "cmpl-", "msg_", "embd-", "rerank-", "pool-", "resp_", "score-", "classify-")
"""Of answers' ids, behind which the id of their request stands."""
ASK_TIMEOUT_S = 2.0
"""How long to wait for what the engine itself knows of a request; then the rest is told."""
MAX_LISTED = 200


class EngineView:
    """Routes that look into the engine.

    Args:
        context: Of the server.
    """

    def __init__(self, context: ServerContext) -> None:
        self._watcher = EngineWatcher(context.llm.client)

    async def events(self, context: ServerContext, request: Request) -> Response:
        """What the engines do, as server-sent events: steps, rows, requests and who holds which KV block, a few times a
        second until the client leaves. Of other callers' requests neither ids nor anything else but numbers is told; to
        administrators everything is. `?num_events=N` ends after as many, `?engine=RANK` shows one engine."""
        limit = _number(request, "num_events", 1)
        rank = _number(request, "engine", 0)
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        if rank is not None and rank not in await context.llm.client.engine_ranks():
            raise RequestError(f"there is no engine of rank {rank}", param="engine")
        return EventStream(self._events(context, _viewer(context), rank, limit))

    async def _events(
        self, context: ServerContext, viewer: Viewer, rank: int | None, limit: int | None
    ) -> AsyncGenerator[bytes, None]:
        num_events = 0
        async with contextlib.aclosing(self._watcher.news()) as source:
            async for news in source:
                if (
                    context.state.is_leaving or context.state.is_draining
                ):  # a stream without end would keep the server from its own
                    return
                if rank is not None and news.rank != rank:
                    continue
                yield b"data: " + msgspec.json.encode(event_of(news, viewer)) + b"\n\n"
                num_events += 1
                if num_events == limit:
                    return

    async def requests(self, context: ServerContext, request: Request) -> Response:
        """The caller's requests that the engine has, and the last ones that ended, the newest first."""
        viewer = _viewer(context)
        client = context.llm.client
        if isinstance(client, HubClient):
            data = await client.call("list_requests", tenant=viewer.tenant)
        else:
            data = request_list(context.metrics.requests, viewer.tenant)
        return JSONResponse({"object": "list", "data": data})

    async def explain(self, context: ServerContext, request: Request) -> Response:
        """Why a request took as long as it did, in numbers and in sentences: waiting, cached and missed tokens,
        chunks, preemptions, grammar, drafts. `{id}` is the `X-Request-Id` of its answer, or the answer's id. Of running
        requests and of the last ones of each caller that ended."""
        name, viewer, client = request.path_params["id"], _viewer(context), context.llm.client
        if isinstance(client, HubClient):
            data = await client.call("explain", request_name=name, tenant=viewer.tenant, hides_salts=viewer.hides_salts)
        else:
            data = await request_explanations(client, context.metrics.requests, name, *viewer)
        if not data:
            raise HTTPError(
                404,
                f"no request {reprlib.repr(name)} of yours is running or among the last ones that ended; ids are the "
                "X-Request-Id of answers (GET /v1/requests lists them)",
                code="not_found",
            )
        return JSONResponse({"id": name, "object": "request.explanation", "requests": data})


def _viewer(context: ServerContext) -> Viewer:
    caller = context.caller
    hides_salts = context.api_keys.num_keys > 1 and not caller.is_admin
    return Viewer(None if caller.is_admin else caller.tenant, hides_salts)


def _number(request: Request, name: str, low: int) -> int | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= low):
        raise RequestError(f"{name} must be a whole number of at least {low}, got {reprlib.repr(text)}", param=name)
    return int(text)


def request_list(log: RequestLog, tenant: str | None) -> list[dict[str, Any]]:
    """What is told of requests without explaining them, the newest first.

    Args:
        log: Has them.
        tenant: Whose; None for everybody's.
    """
    found = sorted(log.of(tenant), key=lambda each: -each.times.arrival_time_s)[:MAX_LISTED]
    return [_listed(each) for each in found]


def _listed(request: LoggedRequest) -> dict[str, Any]:
    times = request.times
    return {
        "id": times.client_request_id or times.request_id,
        "engine_request_id": times.request_id,
        "tenant": times.tenant,
        "arrived_at": request.added_at,
        "finish_reason": None if request.finish_reason is None else str(request.finish_reason),
        "total_s": (times.finished_time_s or time.monotonic()) - times.arrival_time_s,
        "num_prompt_tokens": times.num_prompt_tokens,
        "num_output_tokens": times.num_generation_tokens,
    }


async def request_explanations(
    client: EngineClient, log: RequestLog, name: str, tenant: str | None, hides_salts: bool
) -> list[dict[str, Any]]:
    """Explanations of what the engine ran for one request of a client; none for one that is not known.

    Args:
        client: The engine, or engines, which may know more of what runs.
        log: Has the requests.
        name: Of the request, or of its answer.
        tenant: Whose it must be; None for anybody's.
        hides_salts: See `explain_request`.
    """
    found = log.find(name, tenant)
    if not found:
        prefix = next((each for each in ANSWER_PREFIXES if name.startswith(each)), "")
        found = log.find(name.removeprefix(prefix), tenant) if prefix else []
    explanations = []
    for each in found:
        record = None
        if not each.is_finished:
            with contextlib.suppress(QuireError, TimeoutError):
                async with asyncio.timeout(ASK_TIMEOUT_S):
                    record = await client.explain_request(each.times.request_id)
        explanations.append(explain_request(each, time.monotonic(), record, hides_salts=hides_salts))
    return explanations
