"""OpenAI's Responses API: /v1/responses and what belongs to it, over the same turns as chat completions.

The routes, and what they share: the store, the responses that run in the background, and the key of the thoughts. How
one response is made stands in `responses_run.py`. Source of the shapes: OpenAI's public API reference.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire_interfaces import ContextLengthError, RequestError
from quire_server.approved_calls import ApprovedCalls
from quire_server.body import read_model
from quire_server.client_tools import ClientTools
from quire_server.compaction import full_context_told, start_summary, summary_of
from quire_server.config import ServerConfig
from quire_server.context import ServerContext, in_thread_when, unless_disconnected
from quire_server.conversations import ConversationsService
from quire_server.errors import HTTPError, error_body, naming_fields
from quire_server.item_lists import item_page, whole_number
from quire_server.mcp_tools import MCPTools
from quire_server.render import rendered_turn
from quire_server.request_ids import answer_id
from quire_server.response_store import ResponseStore, StoredResponse, make_response_store, store_path
from quire_server.responses_items import ItemReader, last_question
from quire_server.responses_request import CompactRequest, ResponsesRequest
from quire_server.responses_run import Compaction, Event, LiveResponse, ResponseRun, usage_of
from quire_server.responses_tools import client_tools_of, responses_tool_use
from quire_server.sealing import Sealer, Summary, make_sealer, pack_summary
from quire_server.store_access import StoreAccess
from quire_server.streaming import EventStream
from quire_server.turn import ChatTurn, RunningTurn, raise_failed, render_turn, start_turn

__all__ = ["RecentResponse", "ResponsesService"]

MAX_CHAIN = 10_000
"""Responses that one conversation may have."""
MAX_LIVE_KEPT = 256
"""Finished background responses whose events can still be read as a stream."""


@dataclass(slots=True)
class RecentResponse:
    """The last response of one connection that was not to be stored: the connection alone can go on from it."""

    id: str | None = None
    items: list[dict[str, Any]] = field(default_factory=list)
    """All that was said, up to and with it."""

    async def remember(self, response_id: str, items: list[dict[str, Any]]) -> None:
        """Take this one in place of the last."""
        self.id, self.items = response_id, items


class ResponsesService:
    """The routes, and what they share: the store and the responses that run in the background."""

    def __init__(self, config: ServerConfig, conversations: ConversationsService) -> None:
        self._conversations = conversations
        self._store: StoreAccess[ResponseStore] | None = None
        if config.response_store != "none":
            self._store = StoreAccess("responses", lambda: make_response_store(config))
        self._live: dict[str, LiveResponse] = {}
        self._approved_calls = ApprovedCalls(config)
        self._sealers: dict[str, Sealer] = {}
        """By owner."""

    async def create(self, context: ServerContext, request: Request) -> Response:
        """POST /v1/responses."""
        body = await read_model(context, request, ResponsesRequest)
        run = await self.prepare(context, body)
        if body.background:
            return await self._in_background(run, stream=bool(body.stream))
        if body.stream:
            return await _event_stream(run.events())
        return JSONResponse(await unless_disconnected(request, run.whole()))

    async def prepare(
        self, context: ServerContext, body: ResponsesRequest, recent: RecentResponse | None = None
    ) -> ResponseRun:
        """A response that was checked and can run.

        Args:
            recent: The connection's own memory of a response that is kept nowhere else.

        Raises:
            RequestError: naming the field at fault.
        """
        model = context.resolve_model(body.model)
        keeps = body.store is not False
        store = self._store
        if store is None and (body.store or body.background):
            raise RequestError(
                "this server keeps no responses (--response-store none); leave store and background out", param="store"
            )
        body.take_format()
        with full_context_told(), naming_fields(body.field_names()):
            await in_thread_when(body.is_large, lambda: context.sampling_params(body))
            items = await self._input(context, body)
            earlier = await self._earlier(context, body, recent)
            is_large = body.is_large or bool(earlier)
            tools = body.tools or ()
            offered = await in_thread_when(is_large, lambda: client_tools_of(tools, [*earlier, *items]))
            mcp = await MCPTools.of(body.tools or (), context.mcp_servers, offered.shown_names())
            offered.warnings += mcp.warnings

            async def again(said: list[dict[str, Any]]) -> RunningTurn:
                def turn() -> ChatTurn:
                    return self._turn(context, body, mcp, offered, [*earlier, *items, *said])

                return await start_turn(context, turn, is_large=is_large)

            async def run_approved(response_id: str, call: dict[str, Any]) -> None:
                find = functools.partial(self._get, context)
                await self._approved_calls.run(context.caller.owner, response_id, call, mcp.run_one, find)

            approved = await in_thread_when(is_large, lambda: mcp.approved(items, earlier))
            running, compaction = await self._begin(context, body, [*earlier, *items], again)
        sealer = self._sealer(context)
        run = ResponseRun(
            context,
            body,
            model,
            running,
            offered,
            items,
            store if keeps else None,
            mcp,
            again,
            approved,
            run_approved,
            sealer,
            compaction,
        )
        conversation_id = body.conversation_id
        if conversation_id is not None:
            run.on_finished = lambda said: self._conversations.append(context, conversation_id, said)
        elif recent is not None and not (keeps and store is not None):
            run.on_finished = lambda said: recent.remember(run.id, [*earlier, *said])
        return run

    async def _begin(
        self,
        context: ServerContext,
        body: ResponsesRequest,
        said: list[dict[str, Any]],
        again: Callable[[list[dict[str, Any]]], Awaitable[RunningTurn]],
    ) -> tuple[RunningTurn, Compaction | None]:
        """The first turn of a response, and what it is for where it is a summary.

        Raises:
            RequestError: naming the field at fault.
        """
        follows = body.previous_response_id is not None or body.conversation_id is not None
        threshold = body.compact_threshold
        if said and said[-1]["type"] == "compaction_trigger":
            summary = await self._start_summary(context, body, said)
            return summary, Compaction(replaces=follows, goes_on=False)
        full: ContextLengthError | None = None
        try:
            running = await again([])
            if threshold is None or len(running.prompt.token_ids) <= threshold:
                return running, None
        except ContextLengthError as error:
            if threshold is None:
                raise
            full = error
        asked = last_question(said)
        if not any(item.get("role") not in ("system", "developer") for item in said[:asked]):  # nothing to summarize
            if full is not None:
                raise full
            return running, None
        if full is None:
            await running.outputs.aclose()
        summary = await self._start_summary(context, body, said[:asked])
        return summary, Compaction(replaces=True, goes_on=True)

    async def _start_summary(
        self, context: ServerContext, body: CompactRequest, items: list[dict[str, Any]]
    ) -> RunningTurn:
        def summarized() -> list[dict[str, Any]]:
            reader = self._reader(context, client_tools_of(getattr(body, "tools", None) or (), items))
            return reader.chat_messages(items, body.instructions, has_new=False)

        messages = await in_thread_when(True, summarized)
        return await start_summary(context, body, messages, stream=bool(body.stream))

    async def _input(self, context: ServerContext, body: CompactRequest) -> list[dict[str, Any]]:
        """The new items, those that are named by their id in full.

        Raises:
            RequestError: naming the item at fault.
        """
        items = await in_thread_when(body.is_large, body.input_items)
        for index, item in enumerate(items):
            if item["type"] == "item_reference":
                found = await self._find_item(context, name := str(item["id"]))
                if found is None:
                    raise RequestError(
                        f"there is no item {name[:100]!r} (any more); send the item itself",
                        param=f"input[{index}].id",
                        code="item_not_found",
                    )
                items[index] = found
        # To name a wrong item before it is kept.
        await in_thread_when(body.is_large, lambda: ItemReader().chat_messages(items))
        return items

    async def _find_item(self, context: ServerContext, name: str) -> dict[str, Any] | None:
        """An item of the caller's responses and conversations."""
        if self._store is None:
            return await self._conversations.find_item(context, name)
        found = await self._store.ask(lambda store: store.find_item(name, owner=context.caller.owner))
        return found or await self._conversations.find_item(context, name)

    async def _earlier(
        self, context: ServerContext, body: ResponsesRequest, recent: RecentResponse | None = None
    ) -> list[dict[str, Any]]:
        """What was said before, in the conversation or in the responses that this one follows."""
        if body.conversation_id is not None:
            return await self._conversations.items(context, body.conversation_id)
        if recent is not None and recent.id is not None and recent.id == body.previous_response_id:
            return recent.items
        return await self._conversation(context, body.previous_response_id)

    async def _conversation(self, context: ServerContext, response_id: str | None) -> list[dict[str, Any]]:
        """All items up to and with a kept response.

        Raises:
            RequestError: the response, or one that it follows, is not there.
        """
        chain: list[StoredResponse] = []
        while response_id is not None:
            stored = await self._get(context, response_id)
            if stored is None or len(chain) >= MAX_CHAIN:
                raise RequestError(
                    f"previous_response_id {response_id!r} is not kept here (any more); send the conversation as input",
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            if stored.response["status"] in ("queued", "in_progress"):
                raise RequestError(
                    f"the response {response_id!r} is still running; wait for it", param="previous_response_id"
                )
            chain.append(stored)
            response_id = stored.previous_id
        items: list[dict[str, Any]] = []
        for stored in reversed(chain):
            items += stored.input_items + stored.response["output"]
        return items

    async def _get(self, context: ServerContext, response_id: str) -> StoredResponse | None:
        if self._store is None:
            return None
        return await self._store.ask(lambda store: store.get(response_id, owner=context.caller.owner))

    def _live_of(self, context: ServerContext, request: Request) -> LiveResponse | None:
        """The caller's response of this id that runs in the background, or lately did."""
        live = self._live.get(request.path_params["id"])
        return live if live is not None and live.run.owner == context.caller.owner else None

    async def _in_background(self, run: ResponseRun, *, stream: bool) -> Response:
        queued = await run.queue()  # before it runs: what is kept later is the newer state
        live = LiveResponse(run)
        self._live[run.id] = live
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
            raise RequestError("only responses made in the background can be read as a stream", param="stream")
        return await _event_stream(live.events(whole_number(request.query_params, "starting_after", -1) + 1))

    async def delete(self, context: ServerContext, request: Request) -> Response:
        """DELETE /v1/responses/ID; one that runs is cancelled."""
        name, live, is_known = request.path_params["id"], self._live_of(context, request), False
        if live is not None:
            await live.cancel()
        if self._store is not None:
            is_known = await self._store.ask(lambda store: store.delete(name, owner=context.caller.owner))
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
            return JSONResponse(stored.response)
        await live.cancel()
        return JSONResponse(live.run.latest)

    async def input_items(self, context: ServerContext, request: Request) -> Response:
        """GET /v1/responses/ID/input_items: everything that the response answered."""
        stored = await self._stored(context, request)
        items = await self._conversation(context, stored.previous_id) + stored.input_items
        return JSONResponse(item_page(items, request.query_params))

    async def compact(self, context: ServerContext, request: Request) -> Response:
        """POST /v1/responses/compact: the conversation as one item that a later request can begin with."""
        body = await read_model(context, request, CompactRequest)
        context.resolve_model(body.model)
        with full_context_told(), naming_fields(body.field_names()):
            items = await self._conversation(context, body.previous_response_id) + await self._input(context, body)
            body.stream = False
            running = await self._start_summary(context, body, items)
        output = await unless_disconnected(request, anext(running.outputs))
        raise_failed(output)
        running.choices[0].take(output.outputs[0])
        sealer = self._sealer(context) if context.caller.owner else None
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
        with full_context_told(), naming_fields(body.field_names()):
            items = await self._earlier(context, body) + await self._input(context, body)
            tools = body.tools or ()
            offered = await in_thread_when(True, lambda: client_tools_of(tools, items))
            mcp = await MCPTools.of(tools, context.mcp_servers, offered.shown_names())
            prompt = await in_thread_when(
                True, lambda: render_turn(context, self._turn(context, body, mcp, offered, items))
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
                context, body, name, model, lambda: self._turn(context, body, mcp, offered, items)
            )

    def _turn(
        self,
        context: ServerContext,
        body: ResponsesRequest,
        mcp: MCPTools,
        offered: ClientTools,
        items: list[dict[str, Any]],
    ) -> ChatTurn:
        """What the request asks of the model after these items. Raises RequestError naming the field at fault."""
        use = responses_tool_use(
            offered,
            mcp.names_by_label(),
            mcp.chat_tools(),
            body.tool_choice,
            parallel=body.parallel_tool_calls is not False,
        )
        return ChatTurn(
            messages=self._reader(context, offered, mcp).chat_messages(items, body.instructions),
            params=context.sampling_params(body),
            tool_use=use,
            chat_template_kwargs=context.template_kwargs(body.template_kwargs()),
            include_reasoning=body.include_reasoning,
            thinking_token_budget=body.thinking_token_budget,
            options=context.request_options(body, streams=bool(body.stream or body.background)),
        )

    def _reader(self, context: ServerContext, offered: ClientTools, mcp: MCPTools | None = None) -> ItemReader:
        mcp_name = (MCPTools() if mcp is None else mcp).shown_name
        return ItemReader(offered, mcp_name=mcp_name, sealer=self._sealer(context))

    def _sealer(self, context: ServerContext) -> Sealer:
        """What encrypts the caller's thoughts and summaries, made when it is first needed."""
        owner = context.caller.owner
        if owner not in self._sealers:
            self._sealers[owner] = make_sealer(store_path(context.config), owner)
        return self._sealers[owner]

    async def _stored(self, context: ServerContext, request: Request) -> StoredResponse:
        """The caller's kept response. Raises HTTPError where it has none of this id."""
        name = request.path_params["id"]
        stored = await self._get(context, name)
        if stored is None:
            raise _unknown(name)
        if stored.response["status"] in ("queued", "in_progress") and name not in self._live:
            error = {"code": "server_error", "message": "it was not finished: its client left, or the server stopped"}
            stored = replace(stored, response={**stored.response, "status": "failed", "error": error})
        return stored


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
    told = error_body(error)["error"]
    event = {"type": "error", "code": told["code"], "message": told["message"], "param": told["param"]}
    return _sse({**event, "sequence_number": 0})
