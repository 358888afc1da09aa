"""What was said before a response: items of the request, of the responses that it follows, and of its conversation.

Knows the store of responses and the conversations; knows no turn and no route.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from quire_interfaces import RequestError
from quire_server.config import ServerConfig
from quire_server.context import ServerContext, in_thread_when
from quire_server.conversations import ConversationsService
from quire_server.response_store import ResponseStore, StoredResponse, make_response_store
from quire_server.responses_items import ItemReader
from quire_server.responses_request import CompactRequest, ResponsesRequest
from quire_server.store_access import StoreAccess

__all__ = ["RecentResponse", "ResponseHistory"]

MAX_CHAIN = 10_000
"""Responses that one conversation may have."""


@dataclass(slots=True)
class RecentResponse:
    """The last response of one connection that was not to be stored: the connection alone can go on from it."""

    id: str | None = None
    items: list[dict[str, Any]] = field(default_factory=list)
    """All that was said, up to and with it."""

    async def remember(self, response_id: str, items: list[dict[str, Any]]) -> None:
        """Take this one in place of the last."""
        self.id, self.items = response_id, items


class ResponseHistory:
    """Items that were said, by where they are kept.

    Args:
        config: Says whether responses are stored, and where.
        conversations: Of the same server.
    """

    def __init__(self, config: ServerConfig, conversations: ConversationsService) -> None:
        self.conversations = conversations
        self.store: StoreAccess[ResponseStore] | None = None
        """Keeps responses; None where the server keeps none."""
        if config.response_store != "none":
            self.store = StoreAccess("responses", lambda: make_response_store(config))

    async def new_items(self, context: ServerContext, body: CompactRequest) -> list[dict[str, Any]]:
        """The new items, those that are named by their id in full.

        Raises:
            RequestError: naming the item at fault.
        """
        items = await in_thread_when(body.is_large, body.input_items)
        for index, item in enumerate(items):
            if item["type"] == "item_reference":
                item_found = await self._find_item(context, name := str(item["id"]))
                if item_found is None:
                    raise RequestError(
                        f"there is no item {name[:100]!r} (any more); send the item itself",
                        param=f"input[{index}].id",
                        code="item_not_found",
                    )
                items[index] = item_found
        # To name a wrong item before it is kept.
        await in_thread_when(body.is_large, lambda: ItemReader(modalities=context.modalities).chat_messages(items))
        return items

    async def earlier_items(
        self, context: ServerContext, body: ResponsesRequest, recent: RecentResponse | None = None
    ) -> list[dict[str, Any]]:
        """What was said before, in the conversation or in the responses that this one follows."""
        if body.conversation_id is not None:
            return await self.conversations.items(context, body.conversation_id)
        if recent is not None and recent.id is not None and recent.id == body.previous_response_id:
            return recent.items
        return await self.conversation_items(context, body.previous_response_id)

    async def conversation_items(self, context: ServerContext, response_id: str | None) -> list[dict[str, Any]]:
        """All items up to and with a kept response.

        Raises:
            RequestError: the response, or one that it follows, is not there.
        """
        chain: list[StoredResponse] = []
        while response_id is not None:
            stored = await self.stored(context, response_id)
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

    async def stored(self, context: ServerContext, response_id: str) -> StoredResponse | None:
        """The caller's kept response; None where it has none of this id."""
        if self.store is None:
            return None
        return await self.store.ask(lambda store: store.get(response_id, owner=context.caller.owner))

    async def _find_item(self, context: ServerContext, name: str) -> dict[str, Any] | None:
        """An item of the caller's responses and conversations."""
        if self.store is None:
            return await self.conversations.find_item(context, name)
        item = await self.store.ask(lambda store: store.find_item(name, owner=context.caller.owner))
        return item or await self.conversations.find_item(context, name)
