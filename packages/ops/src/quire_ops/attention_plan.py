"""What a step's paged attention has to do, worked out once per step from where the tokens are.

Knows layouts and sizes; computes no attention. Slots that no query may see are never part of a plan: padding repeats a
slot of the sequence itself, so that nothing uninitialised, and nobody else's data, is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_ops.layout import PagedLayout
from quire_ops.staging import to_device

__all__ = ["AttentionPlan", "DecodeGroup", "PrefillSequence", "make_plan"]

GROUP_BYTES = 1 << 20
"""Keys and values that a decode group may gather: they should stay in a processor core's cache."""
CALL_BYTES = 1 << 18
"""Padding worth a call: about what is copied in the time that a gather and an attention call take to start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSequence:
    """One sequence and all its queries of the step."""

    query_begin: int
    query_len: int
    kv_len: int
    """Tokens that any query of the step may see; the queries are the last of them."""
    slots: Tensor
    """[kv_len] int64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeGroup:
    """Sequences with one query each that share a call."""

    num_sequences: int
    kv_len: int
    """Tokens of the longest."""
    slots: Tensor
    """[num_sequences * kv_len] int64."""
    mask: Tensor | None
    """[num_sequences, 1, 1, kv_len] of the compute dtype, 0 or -inf; None when nothing is padded."""


@dataclass(slots=True, kw_only=True)
class AttentionPlan:
    """All sequences of a step."""

    layout: PagedLayout
    sliding_window: int | None
    prefills: list[PrefillSequence]
    decodes: list[DecodeGroup]
    decode_order: Tensor | None
    """[sequences that decode] int64: the query row of each in the order of the groups; None when it is 0, 1, 2, ... and
    the whole step decodes."""

    def all_sequences(self) -> Iterator[PrefillSequence]:
        """Every sequence on its own, decoding ones included."""
        begin = 0
        for row, query_len in enumerate(self.layout.query_lens):
            if _is_tree(self.layout, begin):
                yield from _paths(self.layout, row, begin, self.sliding_window)
            else:
                yield _sequence(self.layout, row, begin, self.sliding_window)
            begin += query_len


def make_plan(layout: PagedLayout, token_bytes: int, dtype: torch.dtype, sliding_window: int | None) -> AttentionPlan:
    """The plan of a step.

    Args:
        token_bytes: Bytes of a token in a layer's cache.
        dtype: Compute dtype.
    """
    prefills: list[PrefillSequence] = []
    decoding: list[tuple[int, int, int]] = []  # (kv tokens seen, row, query row)
    begin = 0
    for row, (query_len, kv_len) in enumerate(zip(layout.query_lens, layout.kv_lens, strict=True)):
        if not kv_len:  # of decode context parallel ranks, one that has none of the tokens
            pass
        elif _is_tree(layout, begin):
            prefills += _paths(layout, row, begin, sliding_window)
        elif query_len == 1:
            decoding.append((kv_len if sliding_window is None else min(kv_len, sliding_window), row, begin))
        elif query_len > 1:
            prefills.append(_sequence(layout, row, begin, sliding_window))
        begin += query_len
    groups = _grouped(decoding, token_bytes)
    decodes = [_decode_group(layout, group, dtype, sliding_window) for group in groups]
    order = [query_row for group in groups for _, _, query_row in group]
    in_order = not prefills and order == list(range(len(order)))
    return AttentionPlan(
        layout=layout,
        sliding_window=sliding_window,
        prefills=prefills,
        decodes=decodes,
        decode_order=None if in_order else to_device(order, layout.block_table.device),
    )


def _grouped(decoding: list[tuple[int, int, int]], token_bytes: int) -> list[list[tuple[int, int, int]]]:
    """Sequences of about the same length together, as long as padding costs less than a call of their own."""
    groups: list[list[tuple[int, int, int]]] = []
    for entry in sorted(decoding, key=lambda item: -item[0]):
        if groups:
            longest = groups[-1][0][0]
            padding = (longest - entry[0]) * token_bytes
            total = longest * (len(groups[-1]) + 1) * token_bytes
            if padding <= CALL_BYTES and total <= GROUP_BYTES:
                groups[-1].append(entry)
                continue
        groups.append([entry])
    if all(len(group) == 1 for group in groups):
        groups.sort(key=lambda group: group[0][2])
    return groups


def _decode_group(
    layout: PagedLayout,
    group: list[tuple[int, int, int]],
    dtype: torch.dtype,
    sliding_window: int | None,
) -> DecodeGroup:
    longest = max(seen for seen, _, _ in group)
    if len(group) == 1:
        _, row, query_row = group[0]
        seq = _sequence(layout, row, query_row, sliding_window)
        return DecodeGroup(num_sequences=1, kv_len=seq.kv_len, slots=seq.slots, mask=None)
    device = layout.block_table.device
    rows = to_device([row for _, row, _ in group], device)
    seen = to_device([tokens for tokens, _, _ in group], device)[:, None]
    ends = to_device([layout.kv_lens[row] for _, row, _ in group], device)[:, None]
    steps = torch.arange(longest, device=device)
    positions = ends - seen + torch.minimum(steps, seen - 1)  # [n, longest], the last token repeated as padding
    blocks = layout.block_table[rows].long().gather(1, positions // layout.block_size)
    slots = blocks * layout.block_size + positions % layout.block_size
    mask = None
    if any(tokens != longest for tokens, _, _ in group):
        mask = torch.zeros(len(group), longest, dtype=dtype, device=device)
        mask = mask.masked_fill_(steps >= seen, float("-inf"))[:, None, None]
    return DecodeGroup(num_sequences=len(group), kv_len=longest, slots=slots.flatten(), mask=mask)


def _is_tree(layout: PagedLayout, query_begin: int) -> bool:
    return layout.paths is not None and int(layout.paths[query_begin, 0]) >= 0


def _paths(layout: PagedLayout, row: int, query_begin: int, sliding_window: int | None) -> Iterator[PrefillSequence]:
    """The tokens of a tree, each as if its path were all there is."""
    assert layout.paths is not None
    block_size, blocks = layout.block_size, layout.block_table[row].long()
    for token in range(query_begin, query_begin + layout.query_lens[row]):
        position, root = layout.paths[token, :2].tolist()
        places = torch.arange(position + 1, device=blocks.device)
        places[root:] = layout.paths[token, 2 : 3 + position - root]
        if sliding_window is not None:
            places = places[-sliding_window:]
        slots = blocks[places // block_size] * block_size + places % block_size
        yield PrefillSequence(query_begin=token, query_len=1, kv_len=len(slots), slots=slots)


def _sequence(layout: PagedLayout, row: int, query_begin: int, sliding_window: int | None) -> PrefillSequence:
    """One sequence: the slots that its queries may see."""
    query_len, end = layout.query_lens[row], layout.kv_lens[row]
    begin = 0 if sliding_window is None else max(0, end - query_len + 1 - sliding_window)
    block_size = layout.block_size
    first_block = begin // block_size
    blocks = layout.block_table[row, first_block : -(-end // block_size)].long()
    offset, length = begin - first_block * block_size, end - begin
    within = torch.arange(block_size, device=blocks.device)
    slots = (blocks[:, None] * block_size + within).flatten()[offset : offset + length]
    return PrefillSequence(query_begin=query_begin, query_len=query_len, kv_len=length, slots=slots)
