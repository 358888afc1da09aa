"""OpenAI's Responses API: /v1/responses and what belongs to it, over the same turns as chat completions.

A response runs in one way only, as a stream of events (`_Run.events`): streaming writes them, whole answers take the
last one, background responses are a task that collects them. Source of the shapes: OpenAI's public API reference.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire_engine import CompletionOutput, RequestOutput
from quire_interfaces import FinishReason, QuireError, RequestError
from quire_server.body import read_model
from quire_server.context import ServerContext, unless_disconnected
from quire_server.conversations import ConversationsService
from quire_server.errors import HTTPError, error_body, naming_fields
from quire_server.item_lists import item_page, whole_number
from quire_server.logprobs import chat_logprobs
from quire_server.mcp_tools import MAX_CALLS, MCPTools
from quire_server.response_store import ResponseStore, StoredResponse, make_response_store
from quire_server.responses_output import OutputItems
from quire_server.responses_request import (
    CompactRequest,
    ResponsesRequest,
    chat_messages,
    pack_summary,
)
from quire_server.streaming import EventStream
from quire_server.turn import ChatTurn, RunningTurn, raise_failed, render_turn, start_turn

__all__ = ["ResponsesService"]

Event = dict[str, Any]

MAX_CHAIN = 10_000
"""Responses that one conversation may have."""
MAX_LIVE_KEPT = 256
"""Finished background responses whose events can still be read as a stream."""
SUMMARIZE = (
    "Summarize the conversation so far for yourself, so that you can go on from the summary alone. "
    "Keep names, numbers, decisions, results of tools and what is still to be done."
)


class ResponsesService:
    """The routes, and what they share: the store and the responses that run in the background."""

    def __init__(self, conversations: ConversationsService) -> None:
        self._conversations = conversations
        self._store: ResponseStore | None = None
        self._is_open = False
        self._live: dict[str, _Live] = {}

    def store(self, context: ServerContext) -> ResponseStore | None:
        """The configured store, opened when it is first needed."""
        if not self._is_open:
            self._store = make_response_store(context.config)
            self._is_open = True
        return self._store

    async def create(self, context: ServerContext, request: Request) -> Response:
        """POST /v1/responses."""
        body = await read_model(context, request, ResponsesRequest)
        run = await self.prepare(context, body)
        if body.background:
            return await self._in_background(run, stream=bool(body.stream))
        if body.stream:
            return await _event_stream(run.events())
        return JSONResponse(await unless_disconnected(request, run.whole()))

    async def prepare(self, context: ServerContext, body: ResponsesRequest) -> _Run:
        """A response that was checked and can run.

        Raises:
            RequestError: naming the field at fault.
        """
        model = context.resolve_model(body.model)
        keeps = body.store is not False
        store = self.store(context)
        if store is None and (body.store or body.background):
            raise RequestError(
                "this server keeps no responses (--response-store none); leave store and background out", param="store"
            )
        body.take_format()
        with naming_fields(body.field_names()):
            context.sampling_params(body)
            items = await self._input(context, body)
            mcp = await MCPTools.of(body.tools or (), context.mcp_servers, body.function_names())
            earlier = await self._earlier(context, body)

            async def again(said: list[dict[str, Any]]) -> RunningTurn:
                return await start_turn(context, _turn(context, body, mcp, earlier + items + said))

            approved = mcp.approved(items, earlier)
            running = await again([])
        run = _Run(context, body, model, running, items, store if keeps else None, mcp, again, approved)
        conversation_id = body.conversation_id
        if conversation_id is not None:
            run.on_finished = lambda said: self._conversations.append(context, conversation_id, said)
        return run

    async def _input(self, context: ServerContext, body: CompactRequest) -> list[dict[str, Any]]:
        """The new items, those that are named by their id in full.

        Raises:
            RequestError: naming the item at fault.
        """
        items = body.input_items()
        for index, item in enumerate(items):
            if item["type"] == "item_reference":
                store, name = self.store(context), str(item["id"])
                found = None if store is None else await asyncio.to_thread(store.find_item, name)
                found = found or await self._conversations.find_item(context, name)
                if found is None:
                    raise RequestError(
                        f"there is no item {name[:100]!r} (any more); send the item itself",
                        param=f"input[{index}].id",
                        code="item_not_found",
                    )
                items[index] = found
        chat_messages(items)  # to name a wrong item before it is kept
        return items

    async def _earlier(self, context: ServerContext, body: ResponsesRequest) -> list[dict[str, Any]]:
        """What was said before, in the conversation or in the responses that this one follows."""
        if body.conversation_id is not None:
            return await self._conversations.items(context, body.conversation_id)
        return await self.conversation(context, body.previous_response_id)

    async def conversation(self, context: ServerContext, response_id: str | None) -> list[dict[str, Any]]:
        """All items up to and with a kept response.

        Raises:
            RequestError: the response, or one that it follows, is not there.
        """
        chain: list[StoredResponse] = []
        store = self.store(context) if response_id is not None else None
        while response_id is not None:
            stored = await asyncio.to_thread(store.get, response_id) if store is not None else None
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

    async def _in_background(self, run: _Run, *, stream: bool) -> Response:
        queued = await run.keep("queued")  # before it runs: what is kept later is the newer state
        live = _Live(run)
        self._live[run.id] = live
        finished = [name for name, each in self._live.items() if each.task.done()]
        for name in finished[: max(0, len(finished) - MAX_LIVE_KEPT)]:
            del self._live[name]
        if stream:
            return await _event_stream(live.events(0))
        return JSONResponse(queued)

    async def retrieve(self, context: ServerContext, request: Request) -> Response:
        """GET /v1/responses/ID, also as the stream of a response that runs in the background."""
        live = self._live.get(request.path_params["id"])
        if request.query_params.get("stream", "").lower() in ("true", "1"):
            if live is None:
                raise RequestError("only responses made in the background can be read as a stream", param="stream")
            return await _event_stream(live.events(whole_number(request.query_params, "starting_after", -1) + 1))
        if live is not None:
            return JSONResponse(live.run.snapshot())
        return JSONResponse((await self._stored(context, request)).response)

    async def delete(self, context: ServerContext, request: Request) -> Response:
        """DELETE /v1/responses/ID; one that runs is cancelled."""
        name = request.path_params["id"]
        live = self._live.pop(name, None)
        if live is not None:
            await live.cancel()
        store = self.store(context)
        if store is None or not await asyncio.to_thread(store.delete, name):
            raise _unknown(name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def cancel(self, context: ServerContext, request: Request) -> Response:
        """POST /v1/responses/ID/cancel, for responses made in the background."""
        live = self._live.get(request.path_params["id"])
        if live is None:
            stored = await self._stored(context, request)
            if not stored.response.get("background"):
                raise RequestError("only responses made with background=true can be cancelled", param="id")
            return JSONResponse(stored.response)
        await live.cancel()
        return JSONResponse(live.run.latest)

    async def input_items(self, context: ServerContext, request: Request) -> Response:
        """GET /v1/responses/ID/input_items: everything that the response answered."""
        stored = await self._stored(context, request)
        items = await self.conversation(context, stored.previous_id) + stored.input_items
        return JSONResponse(item_page(items, request.query_params))

    async def compact(self, context: ServerContext, request: Request) -> Response:
        """POST /v1/responses/compact: the conversation as one item that a later request can begin with."""
        body = await read_model(context, request, CompactRequest)
        context.resolve_model(body.model)
        with naming_fields(body.field_names()):
            items = await self.conversation(context, body.previous_response_id) + await self._input(context, body)
            asked = [*chat_messages(items, body.instructions), {"role": "user", "content": SUMMARIZE}]
            turn = ChatTurn(
                messages=asked,
                params=context.sampling_params(body),
                priority=body.priority,
                cache_salt=body.cache_salt,
                adapter=context.adapter_of(body.model),
            )
            running = await start_turn(context, turn)
        output = await unless_disconnected(request, anext(running.outputs))
        raise_failed(output)
        running.choices[0].take(output.outputs[0])
        summary = pack_summary(running.choices[0].message().text)
        item = {"id": f"cmp_{secrets.token_hex(12)}", "type": "compaction", "encrypted_content": summary}
        return JSONResponse(
            {
                "id": f"resp_{secrets.token_hex(16)}",
                "object": "response.compaction",
                "created_at": int(time.time()),
                "output": [item],
                "usage": _usage(context, running, output),
            }
        )

    async def input_tokens(self, context: ServerContext, request: Request) -> Response:
        """POST /v1/responses/input_tokens: how many tokens the prompt would have."""
        body = await read_model(context, request, ResponsesRequest)
        context.resolve_model(body.model)
        body.take_format()
        with naming_fields(body.field_names()):
            items = await self._earlier(context, body) + await self._input(context, body)
            mcp = await MCPTools.of(body.tools or (), context.mcp_servers, body.function_names())
            prompt = await render_turn(context, _turn(context, body, mcp, items))
        return JSONResponse({"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)})

    async def _stored(self, context: ServerContext, request: Request) -> StoredResponse:
        name, store = request.path_params["id"], self.store(context)
        stored = await asyncio.to_thread(store.get, name) if store is not None else None
        if stored is None:
            raise _unknown(name)
        if stored.response["status"] in ("queued", "in_progress") and name not in self._live:
            error = {"code": "server_error", "message": "the server stopped while this response was made"}
            stored = replace(stored, response={**stored.response, "status": "failed", "error": error})
        return stored


def _turn(context: ServerContext, body: ResponsesRequest, mcp: MCPTools, items: list[dict[str, Any]]) -> ChatTurn:
    """What the request asks of the model after these items. Raises RequestError naming the field at fault."""
    return ChatTurn(
        messages=chat_messages(items, body.instructions),
        params=context.sampling_params(body),
        tool_use=body.tool_use(mcp.chat_tools()),
        chat_template_kwargs=context.template_kwargs(body.template_kwargs()),
        include_reasoning=body.include_reasoning,
        thinking_token_budget=body.thinking_token_budget,
        priority=body.priority,
        cache_salt=body.cache_salt,
        adapter=context.adapter_of(body.model),
        stream=bool(body.stream or body.background),
    )


class _Run:
    """One response: what was asked, and what came of it so far."""

    def __init__(
        self,
        context: ServerContext,
        body: ResponsesRequest,
        model: str,
        running: RunningTurn,
        items: list[dict[str, Any]],
        store: ResponseStore | None,
        mcp: MCPTools,
        again: Callable[[list[dict[str, Any]]], Awaitable[RunningTurn]],
        approved: list[dict[str, Any]],
    ) -> None:
        # Never the request's own choice: whoever knows an id can read, go on from and replace what is kept under it.
        self.id = f"resp_{secrets.token_hex(16)}"
        self._context = context
        self._body = body
        self._running = running
        self._items = items
        self._store = store
        self._mcp = mcp
        self._again = again
        self._approved = approved
        self._calls_left = MAX_CALLS if body.max_tool_calls is None else body.max_tool_calls
        self._output = OutputItems(running.choices[0].call_id, mcp.label_of, mcp.asks_before)
        self._usage: dict[str, Any] = {}
        self.on_finished: Callable[[list[dict[str, Any]]], Awaitable[None]] | None = None
        """Hears what was said, asked and answered, once it is all there."""
        self._sequence = 0
        self._fixed = _fixed_fields(self.id, body, model, running.turn)
        self.latest = self.response("in_progress")

    def response(self, status: str, **changes: Any) -> dict[str, Any]:
        """The response object as it stands."""
        output = [dict(item) for item in self._output.items]
        return {**self._fixed, "status": status, "output": output, **changes}

    def snapshot(self) -> dict[str, Any]:
        """The response object at this moment."""
        has_begun = self.latest["status"] == "queued" and self._sequence > 0
        return self.response("in_progress") if has_begun else self.latest

    async def keep(self, status: str, **changes: Any) -> dict[str, Any]:
        """The response object, written to the store."""
        self.latest = self.response(status, **changes)
        if self._store is not None:
            stored = StoredResponse(response=self.latest, input_items=self._items)
            await asyncio.to_thread(self._store.put, stored)
        return self.latest

    async def whole(self) -> dict[str, Any]:
        """Run to the end; the response object. What fails raises."""
        async for _ in self._told():
            pass
        return self.latest

    async def events(self) -> AsyncGenerator[list[Event], None]:
        """Run to the end; events as they come, the last of which holds the whole response."""
        try:
            async with contextlib.aclosing(self._told()) as told:
                async for events in told:
                    yield self._numbered(events)
        except QuireError as error:
            if self._sequence == 0:
                raise
            message = error_body(error)["error"]["message"]
            failed = await self.keep("failed", error={"code": "server_error", "message": message})
            yield self._numbered([{"type": "response.failed", "response": failed}])

    async def _told(self) -> AsyncGenerator[list[Event], None]:
        """What happens, turn after turn: the model calls MCP tools, and goes on with what they gave."""
        is_first, last = True, None
        if self._approved:
            is_first = False
            yield self._opening() + self._output.begin_calls(self._approved)
            await self._mcp.run(self._approved)
            yield self._output.end_calls(self._approved)
            await self._running.outputs.aclose()  # type: ignore[attr-defined]
            await self._go_on()
        while True:
            async with contextlib.aclosing(self._running.outputs) as outputs:  # type: ignore[type-var]
                async for output in outputs:
                    raise_failed(output)
                    told = self._opening() if is_first else []
                    is_first = False
                    told += self._take(output.outputs[0])
                    if output.finished:
                        told += self._finish(output)
                        last = output
                    if told:
                        yield told
            if last is None:
                raise HTTPError(500, "the engine ended the request without an answer", code="generation_failed")
            self._usage = _added(self._usage, _usage(self._context, self._running, last))
            calls = self._output.take_calls()
            if not calls or not await self._run_calls(calls):
                yield self._output.end_calls(calls)
                break
            yield self._output.end_calls(calls)
            await self._go_on()
            last = None
        response = await self._keep_finished(last)
        yield [{"type": f"response.{response['status']}", "response": response}]

    async def _go_on(self) -> None:
        """The next turn, which sees the output so far."""
        self._running = await self._again(self._output.items)
        self._output.call_id = self._running.choices[0].call_id

    async def _run_calls(self, calls: list[dict[str, Any]]) -> bool:
        """Whether the model goes on: not where a call is left that is the client's, or waits for approval, or too many
        were made."""
        if len(calls) > self._calls_left:
            for call in calls:
                call["error"] = {"type": "mcp_protocol_error", "code": 0, "message": "no tool calls are left"}
                call["status"] = "failed"
            return False
        self._calls_left -= len(calls)
        await self._mcp.run(calls)
        return not any(item["type"] in ("function_call", "mcp_approval_request") for item in self._output.items)

    def _opening(self) -> list[Event]:
        response = self.response("in_progress")
        told = [{"type": f"response.{what}", "response": response} for what in ("created", "in_progress")]
        return told + self._output.add_tool_lists(self._mcp.lists)

    def _numbered(self, events: list[Event]) -> list[Event]:
        for event in events:
            event["sequence_number"] = self._sequence
            self._sequence += 1
        return events

    def _take(self, completion: CompletionOutput) -> list[Event]:
        choice = self._running.choices[0]
        logprobs = chat_logprobs(completion)
        listed: Sequence[Any] = msgspec.to_builtins(logprobs.content) if logprobs is not None else ()
        return self._output.take(choice.take(completion), listed)

    def _finish(self, output: RequestOutput) -> list[Event]:
        return self._output.finish("incomplete" if _is_cut(output.outputs[0]) else "completed")

    async def _keep_finished(self, output: RequestOutput) -> dict[str, Any]:
        if self.on_finished is not None:
            await self.on_finished([*self._items, *self._output.items])
        completion = output.outputs[0]
        changes: dict[str, Any] = {"usage": self._usage}
        if _is_cut(completion):
            return await self.keep("incomplete", incomplete_details={"reason": "max_output_tokens"}, **changes)
        return await self.keep("completed", completed_at=int(time.time()), **changes)


class _Live:
    """A response that runs in the background: its events are collected for whoever wants to read them."""

    def __init__(self, run: _Run) -> None:
        self.run = run
        self._events: list[Event] = []
        self._news = asyncio.Event()
        self.task = asyncio.ensure_future(self._collect())

    async def _collect(self) -> None:
        try:
            async for events in self.run.events():
                self._events += events
                self._tell()
        except asyncio.CancelledError:
            await self.run.keep("cancelled")
            raise
        except Exception as error:
            message = error_body(error)["error"]["message"]
            failed = await self.run.keep("failed", error={"code": "server_error", "message": message})
            event = {"type": "response.failed", "response": failed, "sequence_number": len(self._events)}
            self._events.append(event)
        finally:
            self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def events(self, start: int) -> AsyncGenerator[list[Event], None]:
        """Events from number `start` on, until the response has ended."""
        while True:
            news = self._news
            if start < len(self._events):
                told, start = self._events[start:], len(self._events)
                yield told
            elif self.task.done():
                return
            else:
                waiting = asyncio.ensure_future(news.wait())
                await asyncio.wait((waiting, self.task), return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()

    async def cancel(self) -> None:
        """End it, unless it has ended."""
        self.task.cancel()
        await asyncio.wait((self.task,))


def _fixed_fields(name: str, body: ResponsesRequest, model: str, turn: ChatTurn) -> dict[str, Any]:
    """What does not change while a response is made."""
    form = (body.text or {}).get("format") or {"type": "text"}
    reasoning = {"effort": None, "summary": None, **(body.reasoning or {})}
    return {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "background": bool(body.background),
        **({} if body.conversation_id is None else {"conversation": {"id": body.conversation_id}}),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": model,
        "parallel_tool_calls": turn.tool_use.parallel,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": reasoning,
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "temperature": turn.params.temperature,
        "text": {"format": form},
        "tool_choice": body.tool_choice or "auto",
        "tools": [_shown_tool(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": turn.params.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


def _shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    return tool if tool.get("type") == "mcp" else {"parameters": None, "strict": None, **tool}


def _usage(context: ServerContext, running: RunningTurn, output: RequestOutput) -> dict[str, Any]:
    num_prompt, num_output = len(running.prompt.token_ids), output.num_generation_tokens
    cached = max(0, output.num_cached_tokens)
    reasoning = running.num_reasoning_tokens(context.llm.tokenizer) or 0
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": num_prompt + num_output,
    }


def _added(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Usage of two turns."""
    return {
        name: _added(one.get(name, {}), value) if isinstance(value, dict) else one.get(name, 0) + value
        for name, value in other.items()
    }


def _is_cut(completion: CompletionOutput) -> bool:
    return completion.finish_reason is FinishReason.LENGTH


def _unknown(name: str) -> HTTPError:
    return HTTPError(404, f"there is no response {name!r} (any more)", code="response_not_found", param="id")


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
