"""From a request of the Responses API to a response that can run: its items, its tools, and its first turn.

Knows no route and no event. Source of the shapes: OpenAI's public API reference.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

from quire_interfaces import ContextLengthError, RequestError
from quire_server.approved_calls import ApprovedCalls
from quire_server.client_tools import ClientTools
from quire_server.compaction import naming_full_context, start_summary
from quire_server.config import ServerConfig
from quire_server.context import ServerContext, in_thread_when
from quire_server.errors import naming_fields
from quire_server.mcp_tools import MCPTools
from quire_server.response_store import store_path
from quire_server.responses_history import RecentResponse, ResponseHistory
from quire_server.responses_items import ItemReader, last_question
from quire_server.responses_request import CompactRequest, ResponsesRequest
from quire_server.responses_run import Compaction, ResponseRun
from quire_server.responses_tools import client_tools_of, responses_tool_use
from quire_server.sealing import Sealer, make_sealer
from quire_server.turn import ChatTurn, RunningTurn, start_turn

__all__ = ["ResponsePreparer"]


class ResponsePreparer:
    """Prepares responses of one server.

    Args:
        config: Of the server.
        history: What was said before.
    """

    def __init__(self, config: ServerConfig, history: ResponseHistory) -> None:
        self._history = history
        self._approved_calls = ApprovedCalls(config)
        self._sealers: dict[str, Sealer] = {}
        """By owner."""

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
        store = self._history.store
        if store is None and (body.store or body.background):
            raise RequestError(
                "this server keeps no responses (--response-store none); leave store and background out", param="store"
            )
        body.take_format()
        with naming_full_context(), naming_fields(body.field_names()):
            await in_thread_when(body.is_large, lambda: context.sampling_params(body))
            items = await self._history.new_items(context, body)
            earlier = await self._history.earlier_items(context, body, recent)
            is_large = body.is_large or bool(earlier)
            tools = body.tools or ()
            offered = await in_thread_when(is_large, lambda: client_tools_of(tools, [*earlier, *items]))
            mcp = await MCPTools.of(body.tools or (), context.mcp_servers, offered.shown_names())
            offered.warnings += mcp.warnings

            async def again(new_items: list[dict[str, Any]]) -> RunningTurn:
                def turn() -> ChatTurn:
                    return self.turn(context, body, mcp, offered, [*earlier, *items, *new_items])

                return await start_turn(context, turn, is_large=is_large)

            async def run_approved(response_id: str, call: dict[str, Any]) -> None:
                find = functools.partial(self._history.stored, context)
                await self._approved_calls.run(context.caller.owner, response_id, call, mcp.run_one, find)

            approved = await in_thread_when(is_large, lambda: mcp.approved(items, earlier))
            running, compaction = await self._begin(context, body, [*earlier, *items], again)
        sealer = self.sealer(context)
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
            run.on_finished = lambda said: self._history.conversations.append(context, conversation_id, said)
        elif recent is not None and not (keeps and store is not None):
            run.on_finished = lambda said: recent.remember(run.id, [*earlier, *said])
        return run

    async def _begin(
        self,
        context: ServerContext,
        body: ResponsesRequest,
        conversation: list[dict[str, Any]],
        again: Callable[[list[dict[str, Any]]], Awaitable[RunningTurn]],
    ) -> tuple[RunningTurn, Compaction | None]:
        """The first turn of a response, and what it is for where it is a summary.

        Raises:
            RequestError: naming the field at fault.
        """
        follows = body.previous_response_id is not None or body.conversation_id is not None
        threshold = body.compact_threshold
        if conversation and conversation[-1]["type"] == "compaction_trigger":
            summary = await self.start_summary(context, body, conversation)
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
        last = last_question(conversation)
        if not any(
            item.get("role") not in ("system", "developer") for item in conversation[:last]
        ):  # nothing to summarize
            if full is not None:
                raise full
            return running, None
        if full is None:
            await running.outputs.aclose()
        summary = await self.start_summary(context, body, conversation[:last])
        return summary, Compaction(replaces=True, goes_on=True)

    async def start_summary(
        self, context: ServerContext, body: CompactRequest, items: list[dict[str, Any]]
    ) -> RunningTurn:
        def summarized() -> list[dict[str, Any]]:
            reader = self._reader(context, client_tools_of(getattr(body, "tools", None) or (), items))
            return reader.chat_messages(items, body.instructions, has_new=False)

        messages = await in_thread_when(True, summarized)
        return await start_summary(context, body, messages, stream=bool(body.stream))

    def turn(
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
            mm_processor_kwargs=body.mm_processor_kwargs,
            include_reasoning=body.include_reasoning,
            thinking_token_budget=body.thinking_token_budget,
            options=context.request_options(body, streams=bool(body.stream or body.background)),
        )

    def _reader(self, context: ServerContext, offered: ClientTools, mcp: MCPTools | None = None) -> ItemReader:
        called = MCPTools() if mcp is None else mcp
        return ItemReader(
            offered,
            mcp_name=called.shown_name,
            interpreter_name=called.interpreter_name,
            sealer=self.sealer(context),
            modalities=context.modalities,
        )

    def sealer(self, context: ServerContext) -> Sealer:
        """What encrypts the caller's thoughts and summaries, made when it is first needed."""
        owner = context.caller.owner
        if owner not in self._sealers:
            self._sealers[owner] = make_sealer(store_path(context.config), owner)
        return self._sealers[owner]
