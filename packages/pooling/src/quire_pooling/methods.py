"""Pooling methods: the vectors of a text's tokens -> one vector.

Shape legend: T tokens of all texts, one behind the other; N texts; H width. Sums are float32 and go through a text in
one order, whatever stands beside it and however it is cut into chunks: blocks of `BLOCK` tokens from the text's first
pooled token on, each summed token by token, then the sums of the blocks one after the other. `embedding_bag` adds rows
in the order of their indices, on every device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_pooling.spec import PoolingMethod

__all__ = ["BLOCK", "TextPooling", "pool_texts"]

BLOCK = 64
"""Tokens that are summed before their sum is added to that of the tokens before them."""
_SUMS = ("MEAN", "SUM", "WEIGHTEDMEAN", "MEAN_SQRT_LEN")


def pool_texts(
    hidden: Tensor, lens: Sequence[int], method: PoolingMethod, skips: Sequence[int] | None = None
) -> Tensor:
    """One vector for each text of a batch.

    Args:
        hidden: [T, H], any floating dtype; texts one behind the other.
        lens: Tokens of each text, at least 1.
        method: How a text's vectors become one.
        skips: Tokens at the start of each text that are left out; None for none. LAST takes the last token anyway.

    Returns:
        [N, H] float32; zeros for a text of which nothing is left.
    """
    if skips is not None and any(skips) and method != "LAST":
        texts = zip(hidden.split(list(lens)), skips, strict=True)
        return torch.stack([_pool_alone(text, method, skip) for text, skip in texts])
    if method in ("CLS", "LAST"):
        ends = torch.tensor(list(accumulate(lens)), device=hidden.device)
        return hidden[ends - (torch.tensor(lens, device=hidden.device) if method == "CLS" else 1)].float()
    hidden = hidden.float()
    if method == "MAX":
        return _reduce(hidden, list(lens), "max")
    weights = None
    if method == "WEIGHTEDMEAN":
        weights = torch.cat([_positions(0, length, hidden) for length in lens])
    blocks = [min(BLOCK, length - start) for length in lens for start in range(0, length, BLOCK)]
    sums = _reduce(hidden, blocks, "sum", weights)
    if len(blocks) > len(lens):
        sums = _reduce(sums, [math.ceil(length / BLOCK) for length in lens], "sum")
    divisors = [_divisor(method, 0, length) for length in lens]
    return sums / torch.tensor(divisors, device=hidden.device).unsqueeze(1)


class TextPooling:
    """The vector of one text whose tokens come in chunks, by one method; the same bits as `pool_texts`."""

    __slots__ = ("_length", "_method", "_skip", "_tail", "_value")

    def __init__(self, method: PoolingMethod, skip: int = 0) -> None:
        """Args:
        method: How the text's vectors become one.
        skip: Tokens at the start that are left out; LAST takes the last token anyway.
        """
        self._method = method
        self._skip = 0 if method == "LAST" else skip
        self._length = 0
        self._value: Tensor | None = None
        """[H] float32: of CLS and LAST the vector, of MAX the largest numbers, else the sum of all full blocks."""
        self._tail: Tensor | None = None
        """[fewer than BLOCK, H] float32: tokens behind the last full block, for sums."""

    def add(self, hidden: Tensor) -> None:
        """Take the next tokens' vectors, [n, H]; what is needed of them is copied."""
        start, self._length = self._length, self._length + len(hidden)
        hidden = hidden[max(self._skip - start, 0) :]
        if not len(hidden):
            return
        if self._method == "LAST" or (self._method == "CLS" and self._value is None):
            self._value = hidden[-1 if self._method == "LAST" else 0].float().clone()
        elif self._method == "MAX":
            value = _reduce(hidden.float(), [len(hidden)], "max")[0]
            self._value = value if self._value is None else torch.maximum(self._value, value)
        elif self._method in _SUMS:
            self._add_to_sums(hidden.float(), max(start, self._skip))

    def _add_to_sums(self, hidden: Tensor, start: int) -> None:
        if self._tail is not None:
            hidden, start = torch.cat([self._tail, hidden]), start - len(self._tail)
        num_full = len(hidden) // BLOCK
        full, tail = hidden[: num_full * BLOCK], hidden[num_full * BLOCK :]
        if num_full:
            for block in _reduce(full, [BLOCK] * num_full, "sum", self._weights(start, len(full), hidden)):
                self._value = block if self._value is None else self._value + block
        self._tail = tail.clone() if len(tail) else None

    def _weights(self, start: int, length: int, like: Tensor) -> Tensor | None:
        return _positions(start, length, like) if self._method == "WEIGHTEDMEAN" else None

    def result(self, width: int, device: torch.device) -> Tensor:
        """The vector [width] float32 on `device` of all tokens that were added; zeros where none was pooled."""
        value = self._value
        if self._tail is not None:
            start = self._length - len(self._tail)
            weights = self._weights(start, len(self._tail), self._tail)
            block = _reduce(self._tail, [len(self._tail)], "sum", weights)[0]
            value = block if value is None else value + block
        if value is None:
            return torch.zeros(width, device=device)
        if self._method not in _SUMS:
            return value
        # One number as a tensor: a division by a Python float may become a product with its inverse.
        return value / torch.tensor(_divisor(self._method, self._skip, self._length), device=value.device)


def _pool_alone(hidden: Tensor, method: PoolingMethod, skip: int) -> Tensor:
    text = TextPooling(method, skip)
    text.add(hidden)
    return text.result(hidden.shape[1], hidden.device)


def _reduce(rows: Tensor, lens: list[int], mode: str, weights: Tensor | None = None) -> Tensor:
    """The sum or the largest numbers of each run of rows; rows [R, H] float32, runs of `lens` rows -> [runs, H]."""
    indices = torch.arange(len(rows), device=rows.device)
    offsets = torch.tensor([0, *accumulate(lens[:-1])], device=rows.device)
    return F.embedding_bag(indices, rows, offsets, mode=mode, per_sample_weights=weights)


def _positions(start: int, length: int, like: Tensor) -> Tensor:
    """Weights start + 1 to start + length, float32."""
    return torch.arange(start + 1, start + length + 1, dtype=torch.float32, device=like.device)


def _divisor(method: PoolingMethod, start: int, end: int) -> float:
    """What the sum of the tokens from `start` to `end` is divided by."""
    if method == "WEIGHTEDMEAN":
        return float(end * (end + 1) // 2 - start * (start + 1) // 2)
    if method == "MEAN_SQRT_LEN":
        return math.sqrt(end - start)
    return float(end - start) if method == "MEAN" else 1.0
