"""Encoder outputs in dictionaries: a second, plain implementation of `quire_interfaces.EncoderCacheConnector`."""

from __future__ import annotations

__all__ = ["MemoryEncoderCache"]


class MemoryEncoderCache:
    """Keeps everything until it is closed.

    Args:
        dtype: Of the embeddings, a name of torch.
        width: Numbers of one embedding.
    """

    def __init__(self, *, dtype: str, width: int) -> None:
        self.dtype = dtype
        self.width = width
        self.embeds: dict[str, bytes] = {}
        self.items: dict[str, bytes] = {}
        self.is_stopped = False

    def load_embeds(self, key: str, num_embeds: int) -> bytearray | None:
        """A copy of the embeddings of an item."""
        embeds = self.embeds.get(key)
        return None if embeds is None else bytearray(embeds)

    def save_embeds(self, key: str, embeds: memoryview) -> None:
        """Keep a copy."""
        if not self.is_stopped:
            self.embeds[key] = bytes(embeds)

    def load_item(self, key: str) -> bytes | None:
        """The description of an item."""
        return self.items.get(key)

    def save_item(self, key: str, description: bytes) -> None:
        """Keep it."""
        if not self.is_stopped:
            self.items[key] = description

    def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Keep nothing any more."""
        self.is_stopped = True
