"""One response of the Responses API while it is made: the model's turns, calls of MCP tools between them, the events.

A response runs in one way only, as a stream of events (`ResponseRun.events`): streaming writes them, whole answers take
the last one, background responses are a task that collects them (`LiveResponse`). Knows no routes. Source of the
shapes: OpenAI's public API reference.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from quire_engine import CompletionOutput, RequestOutput
from quire_interfaces import ContextLengthError, FinishReason, QuireError, SamplingParams
from quire_server.client_tools import ClientTools
from quire_server.compaction import naming_full_context, summary_of
from quire_server.context import ServerContext
from quire_server.errors import HTTPError, error_body, naming_fields
from quire_server.logprobs import chat_logprobs
from quire_server.mcp_tools import MAX_CALLS, MCPTools, longest_result, shorten_results, tell_item
from quire_server.request_warnings import not_stored, warnings_field
from quire_server.response_store import ResponseStore, StoredResponse
from quire_server.responses_output import OutputItems, is_clients_turn
from quire_server.responses_request import ResponsesRequest
from quire_server.sealing import Sealer, Summary, pack_summary
from quire_server.store_access import StoreAccess, StoreFailedError
from quire_server.turn import RunningTurn, raise_failed

__all__ = ["Compaction", "Event", "LiveResponse", "ResponseRun", "usage_of"]

Event = dict[str, Any]

_SHORTEST_RESULT_CHARS = 200
"""Results of tools are not shortened below this."""


class Compaction(NamedTuple):
    """What the first turn of a response is, where it summarizes the conversation."""

    replaces: bool
    """Whether the summary stands in place of the conversation that is kept here (`sealing.Summary`)."""
    goes_on: bool
    """Whether an answer follows."""


# Many attributes: what one response was asked for, and what has become of it so far.
class ResponseRun:
    """One response: what was asked, and what came of it so far."""

    def __init__(
        self,
        context: ServerContext,
        body: ResponsesRequest,
        model: str,
        running: RunningTurn,
        offered: ClientTools,
        items: list[dict[str, Any]],
        store: StoreAccess[ResponseStore] | None,
        mcp: MCPTools,
        again: Callable[[list[dict[str, Any]]], Awaitable[RunningTurn]],
        approved: list[dict[str, Any]],
        run_approved: Callable[[str, dict[str, Any]], Awaitable[None]],
        sealer: Sealer,
        compaction: Compaction | None,
    ) -> None:
        # Never the request's own choice: whoever knows an id can read, go on from and replace what is kept under it.
        self.id = f"resp_{secrets.token_hex(16)}"
        self.owner = context.caller.owner
        self._context = context
        self._body = body
        self._running = running
        self._items = items
        self._store = store
        self._mcp = mcp
        self._again = again
        self._approved = approved
        self._run_approved = functools.partial(run_approved, self.id)
        self._compaction = compaction
        self._sealer = sealer
        self._calls_left = MAX_CALLS if body.max_tool_calls is None else body.max_tool_calls
        self._output = OutputItems(
            running.choices[0].call_id,
            mcp.get,
            client_tool=offered.get,
            seal=sealer.seal if body.seals_thoughts else None,
        )
        self._usage: dict[str, Any] = {}
        self.on_finished: Callable[[list[dict[str, Any]]], Awaitable[None]] | None = None
        """Hears what was said, asked and answered, once it is all there."""
        self._sequence = 0
        self._warnings = list(offered.warnings)
        self._fixed = _fixed_fields(self.id, body, model, running.turn.params)
        self.latest = self.response("in_progress")

    def response(self, status: str, **changes: Any) -> dict[str, Any]:
        """The response object as it stands."""
        output = [dict(item) for item in self._output.items]
        fields = {**self._fixed, **warnings_field(self._warnings)}
        return {**fields, "status": status, "output": output, **changes}

    def snapshot(self) -> dict[str, Any]:
        """The response object at this moment."""
        has_begun = self.latest["status"] == "queued" and self._sequence > 0
        return self.response("in_progress") if has_begun else self.latest

    async def queue(self) -> dict[str, Any]:
        """The response object before it runs, written to the store.

        Raises:
            StoreFailedError: it is not written, and the run is ended.
        """
        self.latest = self.response("queued")
        try:
            await self._write()
        except StoreFailedError:
            await self._running.outputs.aclose()
            raise
        return self.latest

    async def keep(self, status: str, **changes: Any) -> dict[str, Any]:
        """The response object, written to the store. What was generated is answered also where the store fails: then it
        says that it is not stored."""
        self.latest = self.response(status, **changes)
        try:
            await self._write()
        except StoreFailedError:
            self._store = None
            self._fixed["store"] = False
            self._warnings.append(not_stored("store", "the response is not stored: the store failed"))
            self.latest = self.response(status, **changes)
        return self.latest

    async def _write(self) -> None:
        if self._store is not None:
            stored = StoredResponse(response=self.latest, input_items=self._items, owner=self.owner)
            await self._store.ask(lambda store: store.put(stored))

    async def whole(self) -> dict[str, Any]:
        """Run to the end; the response object. What fails raises."""
        with naming_full_context(), naming_fields(self._body.field_names()):
            async for _ in self._named_events():
                pass
        return self.latest

    async def events(self) -> AsyncGenerator[list[Event], None]:
        """Run to the end; events as they come, the last of which holds the whole response."""
        try:
            with naming_full_context(), naming_fields(self._body.field_names()):
                async with contextlib.aclosing(self._named_events()) as batches:
                    async for events in batches:
                        yield self._numbered(events)
        except QuireError as error:
            if self._sequence == 0:
                raise
            failed = await self.keep("failed", error=_failure(error))
            yield self._numbered([{"type": "response.failed", "response": failed}])

    async def _named_events(self) -> AsyncGenerator[list[Event], None]:
        with naming_fields(self._body.field_names()):
            async with contextlib.aclosing(self._events_by_turn()) as batches:
                async for events in batches:
                    yield events

    async def _events_by_turn(self) -> AsyncGenerator[list[Event], None]:
        """What happens, turn after turn: the model calls MCP tools, and goes on with what they gave."""
        is_first, last = True, None
        if self._approved:
            is_first = False
            yield self._opening() + self._output.begin_calls(self._approved)
            await asyncio.gather(*map(self._run_approved, self._approved))
            await self.keep("in_progress")  # whatever becomes of the answer, what the calls gave is there
            await self._running.outputs.aclose()
            goes_on = await self._go_on(self._approved)
            yield self._output.end_calls(self._approved)
            if not goes_on:
                response = await self._keep_finished(None, is_full=True)
                yield [{"type": "response.incomplete", "response": response}]
                return
        if self._compaction is not None:
            is_first = False
            async for new_events in self._compacted(self._compaction):
                yield new_events
            if not self._compaction.goes_on:
                response = await self._keep_finished(None)
                yield [{"type": "response.completed", "response": response}]
                return
            await self._go_on()
        while True:
            async with contextlib.aclosing(self._running.outputs) as outputs:
                async for output in outputs:
                    raise_failed(output)
                    new_events = self._opening() if is_first else []
                    is_first = False
                    new_events += self._take(output.outputs[0])
                    if output.finished:
                        new_events += self._finish(output)
                        last = output
                    if new_events:
                        yield new_events
            if last is None:
                raise HTTPError(500, "the engine ended the request without an answer", code="generation_failed")
            self._usage = _added(self._usage, usage_of(self._context, self._running, last))
            calls = self._output.take_calls()
            goes_on = bool(calls) and await self._run_calls(calls)
            is_full = goes_on and not await self._go_on(calls)
            yield self._output.end_calls(calls)
            if is_full or not goes_on:
                break
            last = None
        response = await self._keep_finished(last, is_full=is_full)
        yield [{"type": f"response.{response['status']}", "response": response}]

    async def _compacted(self, compaction: Compaction) -> AsyncGenerator[list[Event], None]:
        """The running turn as an item that holds its summary."""
        yield self._opening() + self._output.begin_compaction()
        last = None
        async with contextlib.aclosing(self._running.outputs) as outputs:
            async for output in outputs:
                raise_failed(output)
                self._running.choices[0].take(output.outputs[0])
                last = output
        if last is None:
            raise HTTPError(500, "the engine ended the request without an answer", code="generation_failed")
        self._usage = _added(self._usage, usage_of(self._context, self._running, last))
        summary = Summary(summary_of(self._running), compaction.replaces)
        yield self._output.end_compaction(pack_summary(summary, self._sealer if self.owner else None))

    async def _go_on(self, calls: Sequence[dict[str, Any]] = ()) -> bool:
        """Start the next turn, which sees the output so far.

        Args:
            calls: Calls that ran before it. They are not run again: where their results do not fit into the context,
                the results are shortened.

        Returns:
            Whether it fits.

        Raises:
            ContextLengthError: it does not fit without results, either.
        """
        num_chars = longest_result(calls)
        while True:
            try:
                self._running = await self._again(self._output.items)
            except ContextLengthError:
                if not calls:
                    raise
                num_chars //= 2
                if num_chars < _SHORTEST_RESULT_CHARS:
                    return False
                shorten_results(calls, num_chars)
            else:
                self._output.call_id = self._running.choices[0].call_id
                return True

    async def _run_calls(self, calls: list[dict[str, Any]]) -> bool:
        """Whether the model goes on: not where a call is left that is the client's, or waits for approval, or too many
        were made."""
        if len(calls) > self._calls_left:
            for call in calls:
                call["error"] = {"type": "mcp_protocol_error", "code": 0, "message": "no tool calls are left"}
                call["status"] = "failed"
                tell_item(call)
            return False
        self._calls_left -= len(calls)
        await self._mcp.run(calls)
        return not any(is_clients_turn(item) for item in self._output.items)

    def _opening(self) -> list[Event]:
        response = self.response("in_progress")
        opening = [{"type": f"response.{what}", "response": response} for what in ("created", "in_progress")]
        return opening + self._output.add_tool_lists(self._mcp.told_lists)

    def _numbered(self, events: list[Event]) -> list[Event]:
        for event in events:
            event["sequence_number"] = self._sequence
            self._sequence += 1
        return events

    def _take(self, completion: CompletionOutput) -> list[Event]:
        choice = self._running.choices[0]
        events = choice.take(completion)
        if completion.logprobs is None:
            return self._output.take(events)
        logprobs = chat_logprobs(replace(completion, logprobs=choice.take_text_logprobs(completion)))
        return self._output.take(events, msgspec.to_builtins(logprobs.content) if logprobs is not None else ())

    def _finish(self, output: RequestOutput) -> list[Event]:
        return self._output.finish("incomplete" if _is_cut(output.outputs[0]) else "completed")

    async def _keep_finished(self, output: RequestOutput | None, *, is_full: bool = False) -> dict[str, Any]:
        """The response as it ends with this output; None after a summary alone, which is never cut. is_full: the
        context has no room for the model to go on."""
        if self.on_finished is not None:
            try:
                await self.on_finished([*self._items, *self._output.items])
            except HTTPError as error:
                why = "the store failed" if isinstance(error, StoreFailedError) else str(error)
                self._warnings.append(not_stored("conversation", f"nothing was added to the conversation: {why}"))
        changes: dict[str, Any] = {"usage": self._usage}
        if output is not None and output.outputs[0].finish_reason is FinishReason.ABORT:
            # There is no reason among OpenAI's for an answer that the server ended.
            failure = {"code": "server_error", "message": "the server ended the request before the answer was complete"}
            return await self.keep("incomplete", incomplete_details={"reason": None}, error=failure, **changes)
        if is_full or (output is not None and _is_cut(output.outputs[0])):
            return await self.keep("incomplete", incomplete_details={"reason": "max_output_tokens"}, **changes)
        return await self.keep("completed", completed_at=int(time.time()), **changes)


class LiveResponse:
    """A response that runs in the background: its events are collected for whoever wants to read them."""

    def __init__(self, run: ResponseRun) -> None:
        self.run = run
        self._events: list[Event] = []
        self._change = asyncio.Event()
        self.task = asyncio.ensure_future(self._collect())

    async def _collect(self) -> None:
        try:
            async for events in self.run.events():
                self._events += events
                self._notify()
        except asyncio.CancelledError:
            await self.run.keep("cancelled")
            raise
        except Exception as error:
            failed = await self.run.keep("failed", error=_failure(error))
            event = {"type": "response.failed", "response": failed, "sequence_number": len(self._events)}
            self._events.append(event)
        finally:
            self._notify()

    def _notify(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def events(self, start: int) -> AsyncGenerator[list[Event], None]:
        """Events from number `start` on, until the response has ended."""
        while True:
            change = self._change
            if start < len(self._events):
                batches, start = self._events[start:], len(self._events)
                yield batches
            elif self.task.done():
                return
            else:
                waiting = asyncio.ensure_future(change.wait())
                await asyncio.wait((waiting, self.task), return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()

    async def cancel(self) -> None:
        """End it, unless it has ended."""
        self.task.cancel()
        await asyncio.wait((self.task,))


def _fixed_fields(name: str, body: ResponsesRequest, model: str, params: SamplingParams) -> dict[str, Any]:
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
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": reasoning,
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "temperature": params.temperature,
        "text": {"format": form},
        "tool_choice": body.tool_choice or "auto",
        "tools": [_shown_tool(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


def _shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"parameters": None, "strict": None, **tool} if tool.get("type") == "function" else tool


def usage_of(context: ServerContext, running: RunningTurn, output: RequestOutput) -> dict[str, Any]:
    num_prompt, num_output = len(running.prompt.token_ids), output.num_generation_tokens
    cached = max(0, output.num_cached_tokens)
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": running.num_reasoning_tokens()},
        "total_tokens": num_prompt + num_output,
    }


def _added(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Usage of two turns."""
    return {
        name: _added(one.get(name, {}), value) if isinstance(value, dict) else one.get(name, 0) + value
        for name, value in other.items()
    }


def _failure(error: BaseException) -> dict[str, Any]:
    """The error of a response. Clients know a full context by its code."""
    fields = error_body(error)["error"]
    code = fields["code"] if isinstance(error, ContextLengthError) else "server_error"
    return {"code": code, "message": fields["message"]}


def _is_cut(completion: CompletionOutput) -> bool:
    """Whether the answer is not whole: too long, or ended by the server."""
    return completion.finish_reason in (FinishReason.LENGTH, FinishReason.ABORT)
