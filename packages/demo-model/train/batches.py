"""An endless, seeded stream of training batches, made in a process of its own.

Knows how conversations are gathered into micro-batches of one size. Knows nothing about the network.
Conversations of about the same length share a micro-batch, so almost no place is padding and no attention mask
is needed; a step joins micro-batches of different lengths, so each step sees every skill.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import numpy as np
from chat import Chat
from corpus.mix import Conversation, conversation
from corpus.words import Source


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """Rows of equal length, flat.

    Attributes:
        ids: [N] int64: ``rows * row_len`` tokens, then filler.
        rows: the number of rows.
        row_len: tokens in a row.
        chosen: [A] int64, places whose next token is a target.
        labels: [A] int64, those next tokens.
        is_new: [A] bool, which of them are of a conversation that is new to the model (`Conversation.is_new`).
    """

    ids: np.ndarray
    rows: int
    row_len: int
    chosen: np.ndarray
    labels: np.ndarray
    is_new: np.ndarray


class Row(NamedTuple):
    """A tokenized conversation."""

    ids: list[int]
    is_target: list[bool]
    """For each token."""
    is_new: bool = False


def padded_len(rows: list[Row]) -> int:
    """The longest row's length, rounded up: few distinct lengths mean few kernels to generate."""
    longest = max(len(row.ids) for row in rows)
    multiple = 16 if longest <= 128 else 32
    return -(-longest // multiple) * multiple


def pack(rows: list[Row], num_tokens: int, pad_id: int) -> MicroBatch:
    """A micro-batch of ``num_tokens`` places."""
    row_len = padded_len(rows)
    grid = np.full((len(rows), row_len), pad_id, dtype=np.int64)
    target = np.zeros((len(rows), row_len), dtype=bool)
    for index, row in enumerate(rows):
        grid[index, : len(row.ids)] = row.ids
        target[index, : len(row.ids) - 1] = row.is_target[1:]
    flat = np.full(num_tokens, pad_id, dtype=np.int64)
    flat[: grid.size] = grid.ravel()
    chosen = np.flatnonzero(target.ravel())
    is_new = np.array([row.is_new for row in rows])[chosen // row_len]
    return MicroBatch(ids=flat, rows=len(rows), row_len=row_len, chosen=chosen, labels=flat[chosen + 1], is_new=is_new)


def steps(
    seed: int,
    num_tokens: int,
    micro_batches: int,
    pool: int = 12,
    draw: Callable[[Source], Conversation] = conversation,
) -> Iterator[list[MicroBatch]]:
    """Steps of ``micro_batches`` micro-batches of ``num_tokens`` places, drawn ``pool`` steps at a time."""
    chat, rng = Chat(), Random(seed)
    source = Source(rng)
    while True:
        drawn: list[Row] = []
        total = 0
        while total < pool * micro_batches * num_tokens:
            c = draw(source)
            ids = chat.encode(chat.render(c.messages, tools=c.tools, enable_thinking=c.enable_thinking))
            if len(ids) <= 1024:
                drawn.append(Row(ids, chat.targets(ids, c.learn_from), c.is_new))
                total += len(ids)
        drawn.sort(key=lambda row: len(row.ids))
        packed: list[MicroBatch] = []
        while drawn:
            count = min(len(drawn), num_tokens // padded_len(drawn[-1:]))
            packed.append(pack(drawn[-count:], num_tokens, chat.pad_id))
            del drawn[-count:]
        num_steps = len(packed) // micro_batches
        strides = [packed[i : num_steps * micro_batches : num_steps] for i in range(num_steps)]
        rng.shuffle(strides)
        yield from strides


def _produce(
    queue: multiprocessing.Queue[list[MicroBatch]],
    seed: int,
    num_tokens: int,
    micro_batches: int,
    draw: Callable[[Source], Conversation],
) -> None:
    os.nice(5)
    for step in steps(seed, num_tokens, micro_batches, draw=draw):
        queue.put(step)


def stream(
    seed: int, num_tokens: int, micro_batches: int, draw: Callable[[Source], Conversation] = conversation
) -> Iterator[list[MicroBatch]]:
    """``steps`` from a background process that works ahead; it ends with this process."""
    context = multiprocessing.get_context("spawn")
    queue: multiprocessing.Queue[list[MicroBatch]] = context.Queue(maxsize=24)
    producer = context.Process(target=_produce, args=(queue, seed, num_tokens, micro_batches, draw), daemon=True)
    producer.start()
    while True:
        yield queue.get(timeout=120)
