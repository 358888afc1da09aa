"""Lists of items as OpenAI's APIs page through them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire_interfaces import RequestError

__all__ = ["item_page", "listed_item", "whole_number"]


def item_page(items: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """One page, as `order`, `after` and `limit` of the query ask; the newest item first unless asked otherwise.

    Raises:
        RequestError: naming the parameter.
    """
    if query.get("order", "desc") == "desc":
        items = items[::-1]
    after = query.get("after")
    if after is not None:
        places = [index for index, item in enumerate(items) if item["id"] == after]
        if not places:
            raise RequestError(f"there is no item {after!r} in this list", param="after")
        items = items[places[0] + 1 :]
    limit = whole_number(query, "limit", 20)
    if not 1 <= limit <= 100:
        raise RequestError(f"limit must be from 1 to 100, got {limit}", param="limit")
    page = [listed_item(item) for item in items[:limit]]
    ends = {"first_id": page[0]["id"] if page else "", "last_id": page[-1]["id"] if page else ""}
    return {"object": "list", "data": page, **ends, "has_more": len(items) > limit}


def listed_item(item: dict[str, Any]) -> dict[str, Any]:
    """An item as lists show it: text of a message in parts."""
    if item["type"] == "message" and isinstance(item.get("content"), str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        part: dict[str, Any] = {"type": kind, "text": item["content"]}
        if kind == "output_text":
            part |= {"annotations": [], "logprobs": []}
        return {**item, "content": [part], "status": item.get("status", "completed")}
    return item


def whole_number(query: Mapping[str, str], name: str, default: int) -> int:
    """A whole number of a query. Raises RequestError naming it."""
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.removeprefix("-").isdigit() and len(text) < 10):
        raise RequestError(f"{name} must be a whole number, got {text[:100]!r}", param=name)
    return int(text)
