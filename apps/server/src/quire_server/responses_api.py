"""OpenAI's Responses API: /v1/responses and what belongs to it, over the same turns as chat completions.

The routes, and the responses that run in the background. How a response is prepared stands in `responses_turns.py`, how
it runs in `responses_run.py`. Source of the shapes: OpenAI's public API reference.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import replace

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire_engine import HubClient
from quire_engine.hub_messages import FrontReport
from quire_interfaces import RequestError
from quire_server.body import read_model
from quire_server.compaction import naming_full_context, summary_of
from quire_server.config import ServerConfig
from quire_server.context import ServerContext, in_thread_when, unless_disconnected
from quire_server.conversations import ConversationsService
from quire_server.errors import HTTPError, error_body, naming_fields
from quire_server.item_lists import item_page, whole_number
from quire_server.mcp_tools import MCPTools
from quire_server.render import rendered_turn
from quire_server.request_ids import answer_id
from quire_server.response_store import StoredResponse
from quire_server.responses_history import ResponseHistory
from quire_server.responses_request import CompactRequest, ResponsesRequest
from quire_server.responses_run import Event, LiveResponse, ResponseRun, usage_of
from quire_server.responses_tools import client_tools_of
from quire_server.responses_turns import ResponsePreparer
from quire_server.sealing import Summary, pack_summary
from quire_server.streaming import EventStream
from quire_server.turn import raise_failed, render_turn

__all__ = ["ResponsesService"]

CANCEL_POLLS, CANCEL_POLL_S = 40, 0.05
"""How often, and in which intervals, to look whether another API process has ended a response."""
MAX_LIVE_KEPT = 256
"""Finished background responses whose events can still be read as a stream."""


class ResponsesService:
    """The routes, and what they share: the store and the responses that run in the background."""

    def __init__(self, config: ServerConfig, conversations: ConversationsService) -> None:
        self._history = ResponseHistory(config, conversations)
        self.preparer = ResponsePreparer(config, self._history)
        """Also for who speaks another protocol than HTTP."""
        self._live: dict[str, LiveResponse] = {}
        self._cancelling: set[asyncio.Future[None]] = set()

    async def create(self, context: ServerContext, request: Request) -> Response:
        """POST /v1/responses."""
        body = await read_model(context, request, ResponsesRequest)
        run = await self.preparer.prepare(context, body)
        if body.background:
            return await self._in_background(context, run, stream=bool(body.stream))
        if body.stream:
            return await _event_stream(run.events())
        return JSONResponse(await unless_disconnected(request, run.whole()))

    def _live_of(self, context: ServerContext, request: Request) -> LiveResponse | None:
        """The caller's response of this id that runs in the background, or lately did."""
        live = self._live.get(request.path_params["id"])
        return live if live is not None and live.run.owner == context.caller.owner else None

    async def _in_background(self, context: ServerContext, run: ResponseRun, *, stream: bool) -> Response:
        queued = await run.queue()  # before it runs: what is kept later is the newer state
        live = LiveResponse(run)
        self._live[run.id] = live
        client = context.llm.client
        if isinstance(client, HubClient):
            client.tell(FrontReport(name="began", arguments=[run.id]))
            live.task.add_done_callback(lambda _: _tell_ended(client, run.id))
        finished = [name for name, each in self._live.items() if each.task.done()]
        for name in finished[: max(0, len(finished) - MAX_LIVE_KEPT)]:
            del self._live[name]
        if stream:
            return await _event_stream(live.events(0))
        return JSONResponse(queued)

    async def retrieve(self, context: ServerContext, request: Request) -> Response:
        """GET /v1/responses/ID, also as the stream of a response that runs in the background."""
        live = self._live_of(context, request)
        response = (await self._stored(context, request)).response if live is None else live.run.snapshot()
        if request.query_params.get("stream", "").lower() not in ("true", "1"):
            return JSONResponse(response)
        if live is None:
            if isinstance(context.llm.client, HubClient) and response.get("background"):
                raise RequestError(
                    "this response runs, or ran, in another API process (--api-server-count): read it without stream",
                    param="stream",
                    code="unsupported",
                )
            raise RequestError("only responses made in the background can be read as a stream", param="stream")
        return await _event_stream(live.events(whole_number(request.query_params, "starting_after", -1) + 1))

    async def delete(self, context: ServerContext, request: Request) -> Response:
        """DELETE /v1/responses/ID; one that runs is cancelled."""
        name, live, is_known = request.path_params["id"], self._live_of(context, request), False
        if live is not None:
            await live.cancel()
        else:
            await self._cancel_elsewhere(context, name)
        if self._history.store is not None:
            is_known = await self._history.store.ask(lambda store: store.delete(name, owner=context.caller.owner))
        if live is None and not is_known:
            raise _unknown(name)
        self._live.pop(name, None)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def cancel(self, context: ServerContext, request: Request) -> Response:
        """POST /v1/responses/ID/cancel, for responses made in the background."""
        live = self._live_of(context, request)
        if live is None:
            stored = await self._stored(context, request)
            if not stored.response.get("background"):
                raise RequestError(
                    "Cannot cancel a synchronous response. Only those made with background=true can be cancelled",
                    param="id",
                )
            if await self._cancel_elsewhere(context, stored.id):
                stored = await self._stored(context, request)
            return JSONResponse(stored.response)
        await live.cancel()
        return JSONResponse(live.run.latest)

    async def _cancel_elsewhere(self, context: ServerContext, name: str) -> bool:
        """Cancel a response that another API process of this server may run; whether there are others. Waits until it
        is kept as ended, as long as that usually takes."""
        client = context.llm.client
        if not isinstance(client, HubClient):
            return False
        client.tell_others("cancel_response", name, context.caller.owner)
        owner, store = context.caller.owner, self._history.store
        for _ in range(CANCEL_POLLS if store is not None else 0):
            stored = await store.ask(lambda store: store.get(name, owner=owner)) if store is not None else None
            if stored is None or stored.response.get("status") not in ("queued", "in_progress"):
                break
            await asyncio.sleep(CANCEL_POLL_S)
        return True

    def cancel_here(self, name: str, owner: str) -> None:
        """Cancel a response that runs in this process, if it does."""
        live = self._live.get(name)
        if live is not None and live.run.owner == owner:
            task = asyncio.ensure_future(live.cancel())
            self._cancelling.add(task)
            task.add_done_callback(self._cancelling.discard)

    async def input_items(self, context: ServerContext, request: Request) -> Response:
        """GET /v1/responses/ID/input_items: everything that the response answered."""
        stored = await self._stored(context, request)
        items = await self._history.conversation_items(context, stored.previous_id) + stored.input_items
        return JSONResponse(item_page(items, request.query_params))

    async def compact(self, context: ServerContext, request: Request) -> Response:
        """POST /v1/responses/compact: the conversation as one item that a later request can begin with."""
        body = await read_model(context, request, CompactRequest)
        context.resolve_model(body.model)
        with naming_full_context(), naming_fields(body.field_names()):
            items = await self._history.conversation_items(
                context, body.previous_response_id
            ) + await self._history.new_items(context, body)
            body.stream = False
            running = await self.preparer.start_summary(context, body, items)
        output = await unless_disconnected(request, anext(running.outputs))
        raise_failed(output)
        running.choices[0].take(output.outputs[0])
        sealer = self.preparer.sealer(context) if context.caller.owner else None
        summary = pack_summary(Summary(summary_of(running), replaces=False), sealer)
        item = {"id": f"cmp_{secrets.token_hex(12)}", "type": "compaction", "encrypted_content": summary}
        return JSONResponse(
            {
                "id": f"resp_{secrets.token_hex(16)}",
                "object": "response.compaction",
                "created_at": int(time.time()),
                "output": [item],
                "usage": usage_of(context, running, output),
            }
        )

    async def input_tokens(self, context: ServerContext, request: Request) -> Response:
        """POST /v1/responses/input_tokens: how many tokens the prompt would have."""
        body = await read_model(context, request, ResponsesRequest)
        context.resolve_model(body.model)
        body.take_format()
        with naming_full_context(), naming_fields(body.field_names()):
            items = await self._history.earlier_items(context, body) + await self._history.new_items(context, body)
            tools = body.tools or ()
            offered = await in_thread_when(True, lambda: client_tools_of(tools, items))
            mcp = await MCPTools.of(tools, context.mcp_servers, offered.shown_names())
            prompt = await render_turn(
                context, lambda: self.preparer.turn(context, body, mcp, offered, items), is_large=True
            )
        return JSONResponse({"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)})

    async def render(self, context: ServerContext, request: Request) -> Response:
        """POST /v1/responses/render: what the engine would be given, for /inference/v1/generate. Nothing that is kept
        here is read: the request must bring the whole conversation."""
        body = await read_model(context, request, ResponsesRequest)
        model = context.resolve_model(body.model)
        body.take_format()
        for name in ("previous_response_id", "conversation"):
            if getattr(body, name) is not None:
                raise RequestError(f"{name} cannot be rendered: send the conversation itself as input", param=name)
        with naming_fields(body.field_names()):
            items = await in_thread_when(body.is_large, body.input_items)
            tools = body.tools or ()
            offered = await in_thread_when(body.is_large, lambda: client_tools_of(tools, items))
            mcp = await MCPTools.of(tools, context.mcp_servers, offered.shown_names())
            name = answer_id(request, "resp_", body.request_id)
            return await rendered_turn(
                context, body, name, model, lambda: self.preparer.turn(context, body, mcp, offered, items)
            )

    async def _stored(self, context: ServerContext, request: Request) -> StoredResponse:
        """The caller's kept response. Raises HTTPError where it has none of this id."""
        name = request.path_params["id"]
        stored = await self._history.stored(context, name)
        if stored is None:
            raise _unknown(name)
        client = context.llm.client
        if stored.response["status"] not in ("queued", "in_progress") or name in self._live:
            return stored
        if not isinstance(client, HubClient) or not await client.call("is_running", response_id=name):
            error = {"code": "server_error", "message": "it was not finished: its client left, or the server stopped"}
            stored = replace(stored, response={**stored.response, "status": "failed", "error": error})
        return stored


def _tell_ended(client: HubClient, name: str) -> None:
    if not client.is_dead:
        client.tell(FrontReport(name="ended", arguments=[name]))


def _unknown(name: str) -> HTTPError:
    return HTTPError(
        404,
        f"Response with id {name!r} not found. It was never kept here, or is not any more",
        code="response_not_found",
        param="id",
    )


_encoder = msgspec.json.Encoder()


async def _event_stream(batches: AsyncGenerator[list[Event], None]) -> EventStream:
    return await EventStream.begin(_encoded(batches), end=b"", on_error=_error_event)


async def _encoded(batches: AsyncGenerator[list[Event], None]) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(batches) as source:
        async for events in source:
            yield b"".join(map(_sse, events))


def _sse(event: Event) -> bytes:
    kind: str = event["type"]
    return b"event: " + kind.encode() + b"\ndata: " + _encoder.encode(event) + b"\n\n"


def _error_event(error: BaseException) -> bytes:
    fields = error_body(error)["error"]
    event = {"type": "error", "code": fields["code"], "message": fields["message"], "param": fields["param"]}
    return _sse({**event, "sequence_number": 0})
