"""Attention in which the tokens of an image see all of the image (Gemma 3, Gemma team 2025, sec. 2.1), in all layers
or in those with a sliding window alone (Gemma 4); or those of a prompt all of the prompt (PaliGemma).

Backends know trees of tokens (`PagedLayout.paths`): which tokens each one sees, by name. An image is such a tree,
in which every token follows all the others. Worked out on the host, in steps with media alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.media_spec import MediaSpec
from quire_ops import PagedLayout

__all__ = ["with_whole_spans"]

Ints = NDArray[np.int64]


def with_whole_spans(batch: ForwardBatch, windows: Sequence[int | None], media: MediaSpec) -> ForwardBatch:
    """The batch with metadata for each kind of layer in which neighbouring tokens of media see one another.

    Args:
        batch: Its media stand whole in the step: spans are not cut, nor what it lacks of a prompt that is a prefix.
        windows: Sliding window of each layer in tokens; None for none.
        media: Which tokens and layers do so.
    """
    tokens = _seeing_tokens(batch, media)
    if tokens is None or not len(tokens):
        return batch
    first = batch.attention[0]
    spans = visible_spans(tokens.tolist(), first.query_lens, first.kv_lens, are_prefixes=media.is_prefix_lm)
    longest = max(first.kv_lens)
    kinds: dict[tuple[int, _Reach], int] = {}
    kind_of_layer = []
    for group, window in zip(batch.group_of_layer, windows, strict=True):
        reaches = window is None or window >= longest
        is_causal = window is None and media.has_causal_global_layers
        reach = _Reach(None if reaches else window, is_causal)
        kind_of_layer.append(kinds.setdefault((group, reach), len(kinds)))
    tables = {
        reach: torch.from_numpy(path_table(spans, reach.window)).to(batch.input_ids.device)
        for reach in {reach for _, reach in kinds if not reach.is_causal}
    }
    attention = tuple(
        batch.attention[group] if reach.is_causal else _with_paths(batch.attention[group], tables[reach])
        for group, reach in kinds
    )
    return dataclasses.replace(batch, attention=attention, group_of_layer=tuple(kind_of_layer))


def _seeing_tokens(batch: ForwardBatch, media: MediaSpec) -> Tensor | None:
    """[N] int64: the step's tokens that see some behind them; None for none."""
    if media.is_prefix_lm:
        return batch.prefix_index
    if batch.media is None:
        return None
    tokens = batch.media.token_index
    if not media.causal_token_ids:
        return tokens
    ids = torch.tensor(media.causal_token_ids, device=tokens.device)
    return tokens[torch.isin(batch.input_ids[tokens], ids, invert=True)]


class _Reach(NamedTuple):
    """What the tokens of a kind of layer see."""

    window: int | None
    """Tokens before itself, itself included; None for all."""
    is_causal: bool
    """No tokens behind itself, not even of its image."""


def _with_paths(metadata: PagedLayout, paths: Tensor) -> PagedLayout:
    return dataclasses.replace(metadata, paths=paths, paths_have_windows=True, derived={})


class VisibleSpans(NamedTuple):
    """What each token of a step sees beyond those before it, [T] each, in places of its sequence."""

    contexts: Ints
    """Tokens of the sequence before the step."""
    places: Ints
    """Its own place."""
    begins: Ints
    """First token of its span, or itself."""
    ends: Ints
    """One behind its span, or itself."""


def visible_spans(
    token_index: list[int], query_lens: list[int], kv_lens: list[int], *, are_prefixes: bool = False
) -> VisibleSpans:
    """The spans of a step.

    Args:
        token_index: Tokens among the step's that see some behind them; those that are neighbours are one span.
        are_prefixes: The spans begin with the sequence, maybe before the step.
    """
    starts = np.cumsum([0, *query_lens])
    contexts = np.repeat(np.subtract(kv_lens, query_lens), query_lens)
    places = np.arange(starts[-1]) - np.repeat(starts[:-1], query_lens) + contexts
    begins, ends = places.copy(), places + 1
    tokens = np.array(sorted(token_index))
    cuts = np.flatnonzero((np.diff(tokens) != 1) | np.isin(tokens[1:], starts)) + 1
    for span in np.split(tokens, cuts):
        begins[span], ends[span] = 0 if are_prefixes else places[span[0]], places[span[-1]] + 1
    return VisibleSpans(contexts, places, begins, ends)


def path_table(spans: VisibleSpans, window: int | None) -> NDArray[np.int32]:
    """[T, 2 + most places named for a token] int32, as `quire_ops.PagedLayout.paths`. Without a window what stands
    before the step is seen by all, and not named.

    Args:
        window: Tokens that one sees before itself, itself included, beside those of its span; None for all.
    """
    if window is None:
        first = root = spans.contexts
    else:
        first = np.minimum(spans.begins, np.maximum(spans.places + 1 - window, 0))
        root = np.zeros_like(first)
    counts = spans.ends - first
    steps = np.arange(counts.max())
    table = np.where(steps < counts[:, None], first[:, None] + steps, -1)
    heads = np.stack((root + counts - 1, root), axis=1)
    return np.ascontiguousarray(np.concatenate((heads, table), axis=1), dtype=np.int32)
