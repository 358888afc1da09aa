"""The seam of encoder outputs that stay: embeddings of images, videos and sounds in a tier outside of memory.

The runner asks it before a tower reads an item, and gives it what towers have made. What prepares items asks it for
descriptions, so that an item whose embeddings are there is not even prepared. Both may live in different processes, on
different machines.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["EncoderCacheConnector"]


class EncoderCacheConnector(Protocol):
    """Encoder outputs by the keys of their items (`MediaItem.key`). Thread-safe; no method raises: what cannot be read
    is not there, and what cannot be written is not kept."""

    dtype: str
    """Of the embeddings, a name of torch: "float32", "bfloat16" or "float16"."""
    width: int
    """Numbers of one embedding."""

    @property
    def is_stopped(self) -> bool:
        """Whether it was switched off by a failure, or closed: it has nothing and keeps nothing any more."""

    def load_embeds(self, key: str, num_embeds: int) -> bytearray | None:
        """The embeddings of an item, [num_embeds, width], row by row; None where they are not there, whole."""

    def save_embeds(self, key: str, embeds: memoryview) -> None:
        """Keep the embeddings of an item (bytes, one-dimensional). Returns at once; nobody may change them afterwards,
        and they are in memory until they are written."""

    def load_item(self, key: str) -> bytes | None:
        """The description of an item, as whoever prepared it has written it; None where there is none."""

    def save_item(self, key: str, description: bytes) -> None:
        """Keep the description of an item; it is there when this returns."""

    def flush(self) -> None:
        """Wait until the embeddings given so far are there."""

    def close(self) -> None:
        """Write what was given, within a bounded time. Idempotent."""
