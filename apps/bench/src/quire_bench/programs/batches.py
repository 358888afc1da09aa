"""Texts in padded batches, as libraries that embed make them: sorted by length, the longest first."""

from __future__ import annotations

from collections.abc import Iterator

MAX_TEXTS = 32
MAX_TOKENS = 4096
"""Of a batch, padding included: more would leave the caches."""


def padded_batches(prompts: list[list[int]]) -> Iterator[tuple[list[list[int]], list[list[int]]]]:
    """Token ids of each batch, padded by zeros, and which of them are tokens (1) and which padding (0)."""
    batch: list[list[int]] = []
    for prompt in sorted(prompts, key=len, reverse=True):
        if batch and (len(batch) == MAX_TEXTS or (len(batch) + 1) * len(batch[0]) > MAX_TOKENS):
            yield _padded(batch)
            batch = []
        batch.append(prompt)
    if batch:
        yield _padded(batch)


def _padded(batch: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    longest = len(batch[0])
    ids = [prompt + [0] * (longest - len(prompt)) for prompt in batch]
    return ids, [[1] * len(prompt) + [0] * (longest - len(prompt)) for prompt in batch]
