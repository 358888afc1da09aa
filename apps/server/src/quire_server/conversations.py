"""OpenAI's conversations: /v1/conversations with their items, to which responses add what was said.

Source of the shapes: OpenAI's public API reference. Knows no engine.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire_interfaces import RequestError
from quire_server.body import read_model
from quire_server.config import ServerConfig
from quire_server.context import ServerContext
from quire_server.conversation_store import ConversationStore, keeps_conversations, make_conversation_store
from quire_server.errors import HTTPError
from quire_server.item_lists import item_page, listed_item
from quire_server.protocol import Body
from quire_server.request_fields import Objects
from quire_server.responses_items import ItemReader
from quire_server.responses_request import with_ids
from quire_server.store_access import StoreAccess

__all__ = ["ConversationRequest", "ConversationsService", "ItemsRequest", "MetadataRequest"]


class MetadataRequest(Body):
    """Body of POST /v1/conversations/ID."""

    metadata: dict[str, str] | None = None


class ConversationRequest(MetadataRequest):
    """Body of POST /v1/conversations."""

    items: Objects | None = None


class ItemsRequest(Body):
    """Body of POST /v1/conversations/ID/items."""

    items: Objects = Field(min_length=1)


class ConversationsService:
    """The routes, and what the Responses API asks of conversations."""

    def __init__(self, config: ServerConfig) -> None:
        self._access: StoreAccess[ConversationStore] | None = None
        if keeps_conversations(config):
            self._access = StoreAccess("conversations", lambda: make_conversation_store(config))

    async def items(self, context: ServerContext, conversation_id: str) -> list[dict[str, Any]]:
        """Everything that was said in a conversation of the caller.

        Raises:
            HTTPError: it is not there, or the store failed.
        """
        await self._known(context, conversation_id)
        return await self._store().ask(lambda store: store.items(conversation_id, owner=context.caller.owner))

    async def append(self, context: ServerContext, conversation_id: str, items: list[dict[str, Any]]) -> None:
        """Go on with a conversation.

        Raises:
            HTTPError: it is not there, or the store failed.
        """
        if not await self._store().ask(lambda store: store.append(conversation_id, items, owner=context.caller.owner)):
            raise _unknown(conversation_id)

    async def find_item(self, context: ServerContext, item_id: str) -> dict[str, Any] | None:
        """An item of any conversation of the caller; None where there is none, or none are kept.

        Raises:
            HTTPError: the store failed.
        """
        if self._access is None:
            return None
        return await self._access.ask(lambda store: store.find_item(item_id, owner=context.caller.owner))

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
        await self._store().ask(lambda store: store.put(conversation, owner=context.caller.owner))
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
        await self._store().ask(lambda store: store.put(conversation, owner=context.caller.owner))
        return JSONResponse(conversation)

    async def delete(self, context: ServerContext, request: Request) -> Response:
        """DELETE /v1/conversations/ID. Responses that belong to it stay."""
        name = request.path_params["id"]
        if not await self._store().ask(lambda store: store.delete(name, owner=context.caller.owner)):
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
        matches = [item for item in items if item["id"] == request.path_params["item"]]
        if not matches:
            raise _unknown_item(request.path_params["item"])
        return JSONResponse(listed_item(matches[0]))

    async def delete_item(self, context: ServerContext, request: Request) -> Response:
        """DELETE /v1/conversations/ID/items/ITEM; answers the conversation."""
        name = request.path_params["item"]
        conversation = await self._known(context, request.path_params["id"])
        place = (conversation["id"], name)
        if not await self._store().ask(lambda store: store.delete_item(*place, owner=context.caller.owner)):
            raise _unknown_item(name)
        return JSONResponse(conversation)

    def _store(self) -> StoreAccess[ConversationStore]:
        """Raises RequestError when this server keeps none."""
        if self._access is None:
            raise RequestError(
                "this server keeps no conversations (--response-store); send the whole conversation as input",
                param="conversation",
                code="unsupported",
            )
        return self._access

    async def _known(self, context: ServerContext, name: str) -> dict[str, Any]:
        conversation = await self._store().ask(lambda store: store.get(name, owner=context.caller.owner))
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
