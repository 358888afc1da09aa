"""Tokenizing a growing conversation at the price of its new part.

A prompt is cut before its added tokens (segments.py); each part's ids are kept in a bounded LRU. Turn N+1 of a
conversation finds all of turn N's parts there and tokenizes the rest. Because a part is known by its text alone, a
system prompt is shared by all conversations, and an edited or dropped message costs that message only.

Knows text and ids; knows no templates.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from quire_interfaces import Tokenizer
from quire_renderers.segments import SupportsSegments

__all__ = ["CachingEncoder", "Encoded", "SegmentCacheStats"]

# An OrderedDict slot, its link and the tuple object, about this much per entry on CPython.
_ENTRY_OVERHEAD_BYTES = 250


class Encoded(NamedTuple):
    """Token ids and how many leading ones were known before."""

    token_ids: list[int]
    num_reused_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentCacheStats:
    """A snapshot."""

    num_entries: int
    used_bytes: int
    num_hits: int
    num_misses: int


class CachingEncoder:
    """Encodes texts with a memory of their parts. Thread-safe: the lock is never held while tokenizing.

    Args:
        tokenizer: If its texts cannot be cut safely, every text is tokenized whole.
        max_bytes: Bound on the memory of the kept parts; 0 keeps nothing.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_bytes: int) -> None:
        self._mark = ""
        self._encode_literal: Callable[[str], list[int]] | None = None
        self._tokenizer = tokenizer
        cut = isinstance(tokenizer, SupportsSegments) and tokenizer.borders.exist and max_bytes > 0
        self._cut: SupportsSegments | None = tokenizer if cut else None  # type: ignore[assignment]
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._ids: dict[int, int] = {}
        self._used_bytes = 0
        self._num_hits = 0
        self._num_misses = 0

    def read_marks(self, mark: str, encode_literal: Callable[[str], list[int]]) -> None:
        """From now on, parts of texts with the mark are encoded by `encode_literal` (`SupportsLiteralText`)."""
        self._mark, self._encode_literal = mark, encode_literal

    @property
    def stats(self) -> SegmentCacheStats:
        """Entries, bytes, hits and misses so far."""
        with self._lock:
            return SegmentCacheStats(
                num_entries=len(self._entries),
                used_bytes=self._used_bytes,
                num_hits=self._num_hits,
                num_misses=self._num_misses,
            )

    def encode(self, text: str, *, add_special_tokens: bool) -> Encoded:
        """The same ids as `tokenizer.encode(text, add_special_tokens=...)`."""
        if self._cut is None and self._is_literal(text):
            return Encoded(self._encode_whole(text, add_special_tokens), 0)
        if self._cut is None:
            return Encoded(self._tokenizer.encode(text, add_special_tokens=add_special_tokens), 0)
        segments = self._cut.borders.split(text)
        found = self._look_up(segments)
        missing: dict[str, tuple[int, ...]] = {}
        for segment, ids in zip(segments, found, strict=True):
            if ids is None and segment not in missing:
                missing[segment] = self._shared(self._encode_segment(self._cut, segment))
        self._store(missing)
        token_ids: list[int] = []
        num_reused_tokens, unbroken = 0, True
        for segment, ids in zip(segments, found, strict=True):
            if ids is None:
                unbroken = False
                token_ids.extend(missing[segment])
                continue
            token_ids.extend(ids)
            if unbroken:
                num_reused_tokens = len(token_ids)
        if not add_special_tokens:
            return Encoded(token_ids, num_reused_tokens)
        wrapped = self._cut.wrap_special_tokens(token_ids)
        return Encoded(wrapped, num_reused_tokens)

    def _is_literal(self, text: str) -> bool:
        return self._encode_literal is not None and self._mark in text

    def _encode_segment(self, tokenizer: SupportsSegments, segment: str) -> list[int]:
        if self._encode_literal is not None and self._mark in segment:
            return self._encode_literal(segment)
        return tokenizer.encode_segment(segment)

    def _encode_whole(self, text: str, add_special_tokens: bool) -> list[int]:
        assert isinstance(self._tokenizer, SupportsSegments)
        token_ids = self._encode_segment(self._tokenizer, text)
        return self._tokenizer.wrap_special_tokens(token_ids) if add_special_tokens else token_ids

    def _shared(self, token_ids: list[int]) -> tuple[int, ...]:
        """The ids with one int object per value, so that a kept token takes a pointer and is joined without a copy."""
        shared = self._ids.setdefault
        return tuple([shared(token_id, token_id) for token_id in token_ids])

    def _look_up(self, segments: list[str]) -> list[tuple[int, ...] | None]:
        entries = self._entries
        with self._lock:
            found = [entries.get(segment) for segment in segments]
            # Latest first out last: the head of a conversation must not be evicted before its tail.
            for segment, ids in zip(reversed(segments), reversed(found), strict=True):
                if ids is not None:
                    entries.move_to_end(segment)
            num_missing = found.count(None)
            self._num_misses += num_missing
            self._num_hits += len(found) - num_missing
        return found

    def _store(self, missing: dict[str, tuple[int, ...]]) -> None:
        with self._lock:
            for segment, ids in missing.items():
                size = _entry_bytes(segment, ids)
                if size > self._max_bytes or segment in self._entries:
                    continue
                self._entries[segment] = ids
                self._used_bytes += size
            while self._used_bytes > self._max_bytes:
                segment, ids = self._entries.popitem(last=False)
                self._used_bytes -= _entry_bytes(segment, ids)


def _entry_bytes(segment: str, ids: tuple[int, ...]) -> int:
    return sys.getsizeof(segment) + 8 * len(ids) + _ENTRY_OVERHEAD_BYTES
