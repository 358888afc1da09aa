"""allowed_token_ids, bad_words, min_tokens and logit_bias: lists of tokens whose logits change."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire_interfaces import SamplingParams
from quire_ops import EDIT_ALWAYS
from quire_sampling.edit_lists import TokenList
from quire_sampling.option import EditOption, EditStage, RequestContext, RowLogits, Vocabulary

__all__ = ["OPTIONS"]

_NUM_KEPT_LISTS = 8
"""Tables of long lists that are kept for further rows with the same list: the completions of one request, and requests
of one client, share long lists, and nobody changes the tables."""


class BadWords(NamedTuple):
    """Bad words of similar length."""

    prefixes: Tensor
    """[W, L] int64: all tokens of each word but the last, right-aligned, with -1 for "anything"."""
    last: Tensor
    """[W] int64: the last token of each word."""


class MinTokens(NamedTuple):
    """No token of `stop_ids` [M] int64 is sampled among the first `num_tokens` output tokens."""

    num_tokens: int
    stop_ids: Tensor


class TokenBiases(NamedTuple):
    """Values [M] float32 to add to the logits of tokens `ids` [M] int64."""

    ids: Tensor
    values: Tensor


def _compile_allowed(params: SamplingParams, context: RequestContext) -> Tensor | None:
    if params.allowed_token_ids is None:
        return None
    return _allowed_ids(context.vocabulary, params.allowed_token_ids)


@functools.lru_cache(_NUM_KEPT_LISTS)
def _allowed_ids(vocabulary: Vocabulary, ids: tuple[int, ...]) -> Tensor:
    return vocabulary.ids("allowed_token_ids", sorted(set(ids)))


def _allow_only(ids: Tensor, row: RowLogits) -> None:
    """Set all logits but those at `ids` [M] to -inf."""
    allowed = row.logits[ids]
    row.logits.fill_(-torch.inf)
    row.logits[ids] = allowed


def _compile_bad_words(params: SamplingParams, context: RequestContext) -> tuple[BadWords, ...] | None:
    if not params.bad_words_token_ids:
        return None
    return _bad_words(context.vocabulary, tuple(map(tuple, params.bad_words_token_ids)))


@functools.lru_cache(_NUM_KEPT_LISTS)
def _bad_words(vocabulary: Vocabulary, words: tuple[tuple[int, ...], ...]) -> tuple[BadWords, ...]:
    """The words by length, at most twice as long as needed in each table: one long word among thousands of short ones
    must not make all of them long."""
    words_by_width: dict[int, list[Sequence[int]]] = {}
    for word in words:
        words_by_width.setdefault(1 << (len(word) - 1).bit_length(), []).append(word)
    return tuple(_bad_words_of_width(vocabulary, width, group) for width, group in sorted(words_by_width.items()))


def _bad_words_of_width(vocabulary: Vocabulary, width: int, words: Sequence[Sequence[int]]) -> BadWords:
    lengths = np.fromiter(map(len, words), dtype=np.int64, count=len(words))
    table = np.full((len(words), width), -1, dtype=np.int64)
    # Word by word, the places of a right-aligned word are in the order in which its tokens come.
    table[np.arange(width) >= width - lengths[:, None]] = vocabulary.check(
        "bad_words_token_ids", [*itertools.chain.from_iterable(words)]
    )
    tokens = torch.from_numpy(table).to(vocabulary.device)
    return BadWords(tokens[:, :-1].contiguous(), tokens[:, -1].contiguous())


def _block_bad_words(groups: tuple[BadWords, ...], row: RowLogits) -> None:
    """Set the last token of each bad word to -inf where the sequence (prompt and output) ends in the word's rest."""
    for words in groups:
        width = words.prefixes.shape[1]
        places = row.position + torch.arange(1 - width, 1, device=row.logits.device)
        window = row.history[places.clamp(min=0)].to(torch.int64).masked_fill(places < 0, -2)
        matches = ((words.prefixes == window) | (words.prefixes == -1)).all(-1)
        # Several words may end in the same token: amin lets one match decide.
        limits = torch.where(matches, -torch.inf, torch.inf).to(row.logits.dtype)
        row.logits.scatter_reduce_(0, words.last, limits, "amin", include_self=True)


def _compile_min_tokens(params: SamplingParams, context: RequestContext) -> MinTokens | None:
    vocabulary = context.vocabulary
    stop_ids = sorted(i for i in set(context.stop_token_ids) if 0 <= i < vocabulary.size)
    if params.min_tokens == 0 or not stop_ids:
        return None
    return MinTokens(params.min_tokens, vocabulary.ids("stop_token_ids", stop_ids))


def _block_stop_ids(min_tokens: MinTokens, row: RowLogits) -> None:
    """Set the stop tokens to -inf while fewer than `min_tokens.num_tokens` tokens are out."""
    stop_logits = row.logits[min_tokens.stop_ids]
    is_early = row.position + 1 - row.num_prompt_tokens < min_tokens.num_tokens
    row.logits[min_tokens.stop_ids] = torch.where(is_early, -torch.inf, stop_logits)


def _compile_logit_bias(params: SamplingParams, context: RequestContext) -> TokenBiases | None:
    if not params.logit_bias:
        return None
    biases = np.fromiter(params.logit_bias.values(), dtype=np.float32, count=len(params.logit_bias))
    ids = context.vocabulary.ids("logit_bias", list(params.logit_bias))
    return TokenBiases(ids, torch.from_numpy(biases).to(context.vocabulary.device))


def _add_biases(biases: TokenBiases, row: RowLogits) -> None:
    row.logits.index_add_(0, biases.ids, biases.values)


def _bad_word_lists(groups: tuple[BadWords, ...]) -> list[TokenList]:
    return [TokenList(ids=each.last, prefixes=each.prefixes if each.prefixes.shape[1] else None) for each in groups]


OPTIONS = (
    EditOption(
        name="allowed_token_ids", stage=EditStage.EXCLUDE, compile=_compile_allowed, apply=_allow_only,
        as_lists=lambda ids: [TokenList(ids=ids, allows=True)],
    ),
    EditOption(
        name="bad_words", stage=EditStage.EXCLUDE, compile=_compile_bad_words, apply=_block_bad_words,
        as_lists=_bad_word_lists,
    ),
    EditOption(
        name="min_tokens", stage=EditStage.EXCLUDE, compile=_compile_min_tokens, apply=_block_stop_ids,
        as_lists=lambda rule: [TokenList(ids=rule.stop_ids, until=min(rule.num_tokens, EDIT_ALWAYS))],
    ),
    EditOption(
        name="logit_bias", stage=EditStage.BIAS, compile=_compile_logit_bias, apply=_add_biases,
        as_lists=lambda biases: [TokenList(ids=biases.ids, values=biases.values)],
    ),
)  # fmt: skip
