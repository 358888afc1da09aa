"""OpenAI's conversations: /v1/conversations with their items, to which responses add what was said.

Source of the shapes: OpenAI's public API reference. Knows no engine.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire_interfaces import RequestError
from quire_server.body import read_model
from quire_server.context import ServerContext
from quire_server.conversation_store import ConversationStore, make_conversation_store
from quire_server.errors import HTTPError
from quire_server.item_lists import item_page, listed_item
from quire_server.protocol import Body
from quire_server.responses_items import ItemReader
from quire_server.responses_request import with_ids

__all__ = ["ConversationRequest", "ConversationsService", "ItemsRequest", "MetadataRequest"]


class MetadataRequest(Body):
    """Body of POST /v1/conversations/ID."""

    metadata: dict[str, str] | None = None


class ConversationRequest(MetadataRequest):
    """Body of POST /v1/conversations."""

    items: list[dict[str, Any]] | None = None


class ItemsRequest(Body):
    """Body of POST /v1/conversations/ID/items."""

    items: list[dict[str, Any]] = Field(min_length=1)


class ConversationsService:
    """The routes, and what the Responses API asks of conversations."""

    def __init__(self) -> None:
        self._store: ConversationStore | None = None
        self._is_open = False

    def store(self, context: ServerContext) -> ConversationStore:
        """Opened when it is first needed.

        Raises:
            RequestError: this server keeps none.
        """
        if not self._is_open:
            self._store = make_conversation_store(context.config)
            self._is_open = True
        if self._store is None:
            raise RequestError(
                "this server keeps no conversations (--response-store); send the whole conversation as input",
                param="conversation",
                code="unsupported",
            )
        return self._store

    async def items(self, context: ServerContext, conversation_id: str) -> list[dict[str, Any]]:
        """Everything that was said in a conversation.

        Raises:
            HTTPError: it is not there.
        """
        await self._known(context, conversation_id)
        return await asyncio.to_thread(self.store(context).items, conversation_id)

    async def append(self, context: ServerContext, conversation_id: str, items: list[dict[str, Any]]) -> None:
        """Go on with a conversation."""
        await asyncio.to_thread(self.store(context).append, conversation_id, items)

    async def find_item(self, context: ServerContext, item_id: str) -> dict[str, Any] | None:
        """An item of any conversation; None where there is none, or none are kept."""
        try:
            store = self.store(context)
        except RequestError:
            return None
        return await asyncio.to_thread(store.find_item, item_id)

    async def create(self, context: ServerContext, request: Request) -> Response:
        """POST /v1/conversations."""
        body = await read_model(context, request, ConversationRequest)
        items = _checked(body.items or [])
        conversation = {
            "id": f"conv_{secrets.token_hex(16)}",
            "object": "conversation",
            "created_at": int(time.time()),
            "metadata": body.metadata or {},
        }
        await asyncio.to_thread(self.store(context).put, conversation)
        await self.append(context, str(conversation["id"]), items)
        return JSONResponse(conversation)

    async def retrieve(self, context: ServerContext, request: Request) -> Response:
        """GET /v1/conversations/ID."""
        return JSONResponse(await self._known(context, request.path_params["id"]))

    async def update(self, context: ServerContext, request: Request) -> Response:
        """POST /v1/conversations/ID: other metadata."""
        body = await read_model(context, request, MetadataRequest)
        conversation = {
            **await self._known(context, request.path_params["id"]),
            "metadata": body.metadata or {},
        }
        await asyncio.to_thread(self.store(context).put, conversation)
        return JSONResponse(conversation)

    async def delete(self, context: ServerContext, request: Request) -> Response:
        """DELETE /v1/conversations/ID. Responses that belong to it stay."""
        name = request.path_params["id"]
        if not await asyncio.to_thread(self.store(context).delete, name):
            raise _unknown(name)
        return JSONResponse({"id": name, "object": "conversation.deleted", "deleted": True})

    async def add_items(self, context: ServerContext, request: Request) -> Response:
        """POST /v1/conversations/ID/items."""
        body = await read_model(context, request, ItemsRequest)
        name = request.path_params["id"]
        await self._known(context, name)
        items = _checked(body.items)
        await self.append(context, name, items)
        ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"], "has_more": False}
        return JSONResponse({"object": "list", "data": [listed_item(item) for item in items], **ends})

    async def list_items(self, context: ServerContext, request: Request) -> Response:
        """GET /v1/conversations/ID/items."""
        items = await self.items(context, request.path_params["id"])
        return JSONResponse(item_page(items, request.query_params))

    async def item(self, context: ServerContext, request: Request) -> Response:
        """GET /v1/conversations/ID/items/ITEM."""
        items = await self.items(context, request.path_params["id"])
        found = [item for item in items if item["id"] == request.path_params["item"]]
        if not found:
            raise _unknown_item(request.path_params["item"])
        return JSONResponse(listed_item(found[0]))

    async def delete_item(self, context: ServerContext, request: Request) -> Response:
        """DELETE /v1/conversations/ID/items/ITEM; answers the conversation."""
        conversation = await self._known(context, request.path_params["id"])
        name = request.path_params["item"]
        if not await asyncio.to_thread(self.store(context).delete_item, conversation["id"], name):
            raise _unknown_item(name)
        return JSONResponse(conversation)

    async def _known(self, context: ServerContext, name: str) -> dict[str, Any]:
        conversation = await asyncio.to_thread(self.store(context).get, name)
        if conversation is None:
            raise _unknown(name)
        return conversation


def _checked(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With types and ids. Raises RequestError naming the item at fault."""
    items = with_ids(items)
    ItemReader().chat_messages(items, at="items", has_new=False)
    return items


def _unknown(name: str) -> HTTPError:
    return HTTPError(
        404, f"there is no conversation {name!r} (any more)", code="conversation_not_found", param="conversation"
    )


def _unknown_item(name: str) -> HTTPError:
    return HTTPError(404, f"there is no item {name!r} in this conversation", code="item_not_found", param="item_id")
