"""Contents of messages that may hold media: a text, or texts with parts of media between them.

Each protocol makes them of its own blocks; the renderer reads them as the chat API's. Knows no protocol and no engine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from quire_renderers import joined_text

__all__ = ["Content", "content_of", "joined_contents"]

Content = str | list[dict[str, Any]]


def content_of(texts: Sequence[str], lines: Collection[int], media: Mapping[int, dict[str, Any]]) -> Content:
    """Texts one after the other, with media in their places.

    Args:
        texts: In order; "" where a medium stands.
        lines: Places of those that have lines of their own.
        media: Place -> part (`quire.media.media_part`), ascending.
    """
    if not media:
        return joined_text(texts, lines)
    parts: list[dict[str, Any]] = []
    begin = 0
    for place in (*media, len(texts)):
        text = joined_text(texts[begin:place], [line - begin for line in lines if begin <= line < place])
        if text:
            parts.append({"type": "text", "text": text})
        if place in media:
            parts.append(media[place])
        begin = place + 1
    return parts


def joined_contents(contents: Sequence[Content], separator: str) -> Content:
    """Contents one after the other, with a text between them."""
    if all(isinstance(content, str) for content in contents):
        return separator.join(map(str, contents))
    parts: list[dict[str, Any]] = []
    for content in contents:
        if parts:
            parts.append({"type": "text", "text": separator})
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts
