"""Attention over a sliding window and over compressed entries, one for every few tokens (DeepSeek-AI 2026, DeepSeek-V4,
sec. 2.3): how a window of tokens becomes an entry, which entries a token finds, and attention over both.

Window w of a sequence has the tokens from w * rate to (w + 1) * rate - 1. Its entry is written when the last of them is
computed, and read by this token and by those behind it: what is cached of a token depends on the tokens up to it alone.
An entry lies in one block, so that sequences which share a block share whole entries: it is spread over the last
`entry_span` slots of its window.

Shape legend: T tokens, N windows that end in a step, H query heads, Hi heads of the index, D numbers of an entry, W of
it in one slot, K entries attended to, E entries of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire_interfaces import ATTENTION_WORKSPACE
from quire_ops.layout import PagedLayout
from quire_ops.op import op
from quire_ops.staging import to_device
from quire_ops.table import torch_backend_for

__all__ = [
    "WindowEnds",
    "compress_windows",
    "compressed_attention",
    "compressed_topk",
    "entry_slots",
    "entry_span",
    "window_ends",
]

FEW_TOKENS = 4
"""Sequences with at most so many tokens in a step attend together in the torch backend."""


class WindowEnds(NamedTuple):
    """Tokens of a step that are the last ones of their windows."""

    sequences: Tensor
    """[N] int64: the sequence of each, as the layout numbers them."""
    windows: Tensor
    """[N] int64: the number of the window in its sequence."""


def window_ends(layout: PagedLayout, rate: int) -> WindowEnds:
    """The windows of `rate` tokens that end in this step, in the order of its tokens; worked out once per step."""
    found: WindowEnds | None = layout.derived.get(("window ends", rate))
    if found is None:
        ends = [
            range((kv_len - query_len) // rate, kv_len // rate)
            for query_len, kv_len in zip(layout.query_lens, layout.kv_lens, strict=True)
        ]
        sequences = np.repeat(np.arange(len(ends)), [len(each) for each in ends])
        windows = np.concatenate([np.asarray(each, dtype=np.int64) for each in ends])
        device = layout.block_table.device
        found = layout.derived["window ends", rate] = WindowEnds(
            to_device(sequences, device), to_device(windows, device)
        )
    return found


def entry_span(rate: int, block_size: int) -> int:
    """Slots that an entry of `rate` tokens is spread over: the most that never lie in two blocks."""
    return math.gcd(rate, block_size)


def entry_slots(layout: PagedLayout, sequences: Tensor, windows: Tensor, rate: int) -> Tensor:
    """Where the entries of windows lie; sequences and windows [...] int64 -> [..., entry_span] int64."""
    span = entry_span(rate, layout.block_size)
    last = (windows + 1) * rate - span
    block = layout.block_table[sequences, last // layout.block_size].long() * layout.block_size
    first = block + last % layout.block_size
    return first[..., None] + torch.arange(span, device=first.device)


@op
def compress_windows(values: Tensor, gates: Tensor, bias: Tensor, layout: PagedLayout, *, overlap: bool) -> Tensor:
    """What the windows that end in this step become, in the order of their last tokens: the mean of their tokens'
    values, number by number, weighed by a softmax of their gates, to which the bias of a token's place in its window is
    added (eq. 11 and 22). With `overlap` a token has two values: the second one counts in its own window, the first one
    in the next (eq. 9 to 12). The rate is the number of biases.

    values and gates [num_blocks, block_size, C * D], which may be parts of longer rows, bias [rate, C * D] float32,
    where C is 2 with `overlap` and else 1 -> [N, D], dtype of values."""
    rate, size, block_size = len(bias), bias.shape[1] // (2 if overlap else 1), layout.block_size
    rows, tables = [], layout.block_table.tolist()
    for sequence, window in zip(*(each.tolist() for each in window_ends(layout, rate)), strict=True):
        seen, scores = [], []
        for position in range(max(0, window - overlap) * rate, (window + 1) * rate):
            slot = tables[sequence][position // block_size], position % block_size
            part = slice(size, None) if overlap and position >= window * rate else slice(size)
            seen.append(values[slot][part].double())
            scores.append(gates[slot][part].double() + bias[position % rate, part].double())
        rows.append((torch.softmax(torch.stack(scores), dim=0) * torch.stack(seen)).sum(dim=0))
    return torch.stack(rows).to(values.dtype) if rows else values.new_empty(0, size)


@op
def compressed_topk(
    query: Tensor, weights: Tensor, entries: Tensor, layout: PagedLayout, *, k: int, rate: int
) -> Tensor:
    """Numbers of the k windows of its own sequence, of those that end with it or before it, that a token has the
    largest scores for: sum over h of weights[h] * relu(query[h] . entry) (eq. 16). Their order, and which of equals, is
    left open.

    query [T, Hi, D], weights [T, Hi] float32, entries [num_blocks, block_size, W] -> [T, K] int64, K = min(k, windows
    of the longest sequence); -1 behind the numbers where there are fewer."""
    out = torch.full((len(query), min(k, max(layout.kv_lens) // rate)), -1, device=query.device)
    for token, sequence, position in _tokens(layout):
        own = _entries(entries, layout, sequence, (position + 1) // rate, rate, query.shape[2])
        scores = weights[token].double() @ torch.relu(query[token].double() @ own.T)
        best = torch.sort(scores, descending=True, stable=True).indices[: out.shape[1]]
        out[token, : len(best)] = best
    return out


@op
def compressed_attention(
    query: Tensor,
    window_cache: Tensor,
    layout: PagedLayout,
    sinks: Tensor,
    entries: Tensor | None,
    entry_layout: PagedLayout | None,
    chosen: Tensor | None,
    *,
    scale: float,
    sliding_window: int,
    rate: int,
) -> Tensor:
    """Softmax attention of each token over the last `sliding_window` tokens of its sequence, itself included, and over
    entries of windows that end with it or before it: those that are chosen, or all. All heads share the keys, which are
    the values, too. Each head has a sink: a score that takes attention and gives nothing.

    query [T, H, D], window_cache [num_blocks, block_size, D], which may be parts of longer rows, sinks [H] float32,
    entries [num_blocks, block_size, W] in the slots of `entry_layout`, or None for windows alone, chosen [T, K] int64
    with -1 for none, or None for all -> [T, H, D], dtype of query."""
    out = torch.empty_like(query)
    tables, block_size, size = layout.block_table.tolist(), layout.block_size, query.shape[2]
    for token, sequence, position in _tokens(layout):
        slots = [
            (tables[sequence][seen // block_size], seen % block_size)
            for seen in range(max(0, position + 1 - sliding_window), position + 1)
        ]
        keys = torch.stack([window_cache[slot] for slot in slots]).double()
        if entries is not None and entry_layout is not None:
            own = _entries(entries, entry_layout, sequence, (position + 1) // rate, rate, size)
            keys = torch.cat((keys, own if chosen is None else own[chosen[token][chosen[token] >= 0]]))
        scores = query[token].double() @ keys.T * scale
        shares = torch.softmax(torch.cat((scores, sinks.double()[:, None]), dim=1), dim=1)[:, :-1]
        out[token] = (shares @ keys).to(query.dtype)
    return out


def _tokens(layout: PagedLayout) -> Iterator[tuple[int, int, int]]:
    """Each token of the step: its number, its sequence, and its position there."""
    token = 0
    for sequence, (query_len, kv_len) in enumerate(zip(layout.query_lens, layout.kv_lens, strict=True)):
        for position in range(kv_len - query_len, kv_len):
            yield token, sequence, position
            token += 1


def _entries(cache: Tensor, layout: PagedLayout, sequence: int, count: int, rate: int, size: int) -> Tensor:
    """[count, size] float64: the first entries of a sequence."""
    span, block_size = entry_span(rate, layout.block_size), layout.block_size
    table, rows = layout.block_table[sequence].tolist(), []
    for window in range(count):
        places = range((window + 1) * rate - span, (window + 1) * rate)
        parts = [cache[table[place // block_size], place % block_size] for place in places]
        rows.append(torch.cat(parts)[:size].double())
    return torch.stack(rows) if rows else torch.empty(0, size, dtype=torch.float64)


@torch_backend_for(compress_windows)
def _torch_compress_windows(
    values: Tensor, gates: Tensor, bias: Tensor, layout: PagedLayout, *, overlap: bool
) -> Tensor:
    rate, size, block_size = len(bias), bias.shape[1] // (2 if overlap else 1), layout.block_size
    sequences, windows = window_ends(layout, rate)
    first = windows * rate - (rate if overlap else 0)
    positions = first[:, None] + torch.arange(rate * (2 if overlap else 1), device=first.device)  # [N, C * rate]
    is_there = (positions >= 0)[..., None]
    known = positions.clamp_min(0)
    blocks = layout.block_table[sequences[:, None], known // block_size].long()
    slots = blocks, known % block_size
    seen, scores = values[slots].float(), gates[slots].float()
    if overlap:
        seen, scores = (torch.cat((each[:, :rate, :size], each[:, rate:, size:]), dim=1) for each in (seen, scores))
        bias = torch.cat((bias[:, :size], bias[:, size:]))
    shares = torch.softmax((scores + bias).masked_fill_(~is_there, -torch.inf), dim=1)
    return (shares * seen).sum(dim=1).to(values.dtype)


def _gathered(cache: Tensor, layout: PagedLayout, sequence: Tensor, windows: Tensor, rate: int, size: int) -> Tensor:
    """Entries of windows [...] -> [..., size]."""
    slots = entry_slots(layout, sequence, windows, rate)
    return cache[slots // layout.block_size, slots % layout.block_size].flatten(-2)[..., :size]


@torch_backend_for(compressed_topk)
def _torch_compressed_topk(
    query: Tensor, weights: Tensor, entries: Tensor, layout: PagedLayout, *, k: int, rate: int
) -> Tensor:
    """Sequence by sequence."""
    device = query.device
    k = min(k, max(layout.kv_lens) // rate)
    out = torch.full((len(query), k), -1, device=device)
    begin = 0
    for number, (query_len, kv_len) in enumerate(zip(layout.query_lens, layout.kv_lens, strict=True)):
        count, end = kv_len // rate, begin + query_len
        if count:
            windows = torch.arange(count, device=device)
            sequence = torch.full_like(windows, number)
            own = _gathered(entries, layout, sequence, windows, rate, query.shape[2]).float()  # [E, D]
            rows = max(1, ATTENTION_WORKSPACE // (query.shape[1] * count))
            for first in range(begin, end, rows):
                part = slice(first, min(first + rows, end))
                products = torch.relu(query[part].float() @ own.T)  # [n, Hi, E]
                scores = (weights[part, None] @ products)[:, 0]
                ended = (torch.arange(part.start, part.stop, device=device) + (kv_len - end + 1)) // rate
                scores.masked_fill_(windows >= ended[:, None], -torch.inf)
                best, found = scores.topk(min(k, count), dim=-1)
                out[part, : found.shape[1]] = found.masked_fill(best == -torch.inf, -1)
        begin = end
    return out


class _Tokens(NamedTuple):
    """Tokens of sequences that have few of them in the step."""

    numbers: Tensor
    """[n] int64: places in the step."""
    sequences: Tensor
    positions: Tensor
    longest: int
    """Tokens of the longest sequence."""


def _few_tokens(layout: PagedLayout) -> _Tokens:
    """Those of sequences with at most `FEW_TOKENS` in the step; worked out once per step."""
    found: _Tokens | None = layout.derived.get("few tokens")
    if found is None:
        few = [each for each in _tokens(layout) if layout.query_lens[each[1]] <= FEW_TOKENS]
        table = np.asarray(few, dtype=np.int64).reshape(-1, 3)
        longest = max((layout.kv_lens[sequence] for _, sequence, _ in few), default=0)
        device = layout.block_table.device
        numbers, sequences, positions = (to_device(table[:, column].copy(), device) for column in range(3))
        found = layout.derived["few tokens"] = _Tokens(numbers, sequences, positions, longest)
    return found


@torch_backend_for(compressed_attention)
def _torch_compressed_attention(
    query: Tensor,
    window_cache: Tensor,
    layout: PagedLayout,
    sinks: Tensor,
    entries: Tensor | None,
    entry_layout: PagedLayout | None,
    chosen: Tensor | None,
    *,
    scale: float,
    sliding_window: int,
    rate: int,
) -> Tensor:
    """Tokens of sequences with few of them together, each with what it sees; the others sequence by sequence, at most
    as many tokens at a time as a window has, which then read at most two windows."""
    out, device, block_size = torch.empty_like(query), query.device, layout.block_size
    _, heads, size = query.shape

    def attend(asked: Tensor, keys: Tensor, unseen: Tensor, found: Tensor, missing: Tensor) -> Tensor:
        """asked [n, H, D], keys [L, D] or [n, L, D], found [E, D] or [n, E, D], with what is not seen of both."""
        parts = [
            (asked @ each.mT).float().mul_(scale).masked_fill_(hidden[:, None], -torch.inf)
            for each, hidden in ((keys, unseen), (found, missing))
        ]
        parts.append(sinks.float().expand(len(asked), heads)[..., None])
        shares = torch.softmax(torch.cat(parts, dim=-1), dim=-1).to(query.dtype)
        of_window, of_entries, _ = shares.split((unseen.shape[1], missing.shape[1], 1), dim=-1)
        attended: Tensor = of_window @ keys + of_entries @ found
        return attended

    def entries_of(sequences: Tensor, windows: Tensor) -> Tensor:
        if entries is None or entry_layout is None:
            return query.new_empty(*windows.shape, size)
        return _gathered(entries, entry_layout, sequences, windows, rate, size)

    few = _few_tokens(layout)
    windows = torch.arange(0 if entries is None else few.longest // rate, device=device)
    width = sliding_window + (len(windows) if chosen is None else chosen.shape[1])
    for begin in range(0, len(few.numbers), rows := max(1, ATTENTION_WORKSPACE // (width * size))):
        part = slice(begin, begin + rows)
        numbers, sequences, positions = few.numbers[part], few.sequences[part, None], few.positions[part, None]
        places = positions - torch.arange(sliding_window, device=device)  # [n, L]
        known = places.clamp_min(0)
        keys = window_cache[layout.block_table[sequences, known // block_size].long(), known % block_size]
        picked = windows.expand(len(numbers), -1) if chosen is None else chosen[numbers]
        missing = (picked < 0) | (picked >= (positions + 1) // rate)
        found = entries_of(sequences.expand_as(picked), picked.masked_fill(missing, 0))
        found = found.masked_fill(missing[..., None], 0.0)  # nobody may have written it
        out[numbers] = attend(query[numbers], keys, places < 0, found, missing)

    begin = 0
    for number, (query_len, kv_len) in enumerate(zip(layout.query_lens, layout.kv_lens, strict=True)):
        end = begin + query_len
        if query_len <= FEW_TOKENS:
            begin = end
            continue
        windows = torch.arange(0 if entries is None or chosen is not None else kv_len // rate, device=device)
        own = entries_of(torch.full_like(windows, number), windows)
        of_token = heads * (2 * sliding_window + len(windows)) + (0 if chosen is None else chosen.shape[1] * size)
        rows = min(sliding_window, max(1, ATTENTION_WORKSPACE // of_token))
        for first in range(begin, end, rows):
            part = slice(first, min(first + rows, end))
            oldest = kv_len - end + first  # position of the first token
            positions = torch.arange(oldest, oldest + part.stop - first, device=device)[:, None]
            places = torch.arange(max(0, oldest + 1 - sliding_window), oldest + len(positions), device=device)
            keys = window_cache[layout.block_table[number, places // block_size].long(), places % block_size]
            unseen = (places > positions) | (places <= positions - sliding_window)
            if chosen is None:
                found, missing = own, windows >= (positions + 1) // rate
            else:
                missing = chosen[part] < 0
                found = entries_of(torch.full_like(chosen[part], number), chosen[part].clamp_min(0))
                found = found.masked_fill(missing[..., None], 0.0)
            out[part] = attend(query[part], keys, unseen, found, missing)
        begin = end
    return out
