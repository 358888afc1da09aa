"""`EditLists`: which edits of logits are in tables on the device, where op `edit_logits` finds them.

Knows lists of tokens; does not know options or parameters of requests.

Shapes: V vocabulary, n tokens of a list, L tokens before one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire_interfaces import EDIT_ENTRIES, EDIT_PREFIX
from quire_ops import EDIT_ALWAYS, LogitEditTable

__all__ = ["EditLists", "TokenList"]


class TokenList(NamedTuple):
    """What an `EditOption` does, as data."""

    ids: Tensor
    """[n] int64."""
    values: Tensor | None = None
    """[n] float32 to add to the logits of `ids`; None takes the tokens out."""
    until: int = EDIT_ALWAYS
    """The list counts while fewer tokens than that are out."""
    prefixes: Tensor | None = None
    """[n, L] int64, -1 for any: what each token of the list must stand behind; None for nothing."""
    allows: bool = False
    """`ids` are the tokens that may be sampled; all others are taken out."""

    @property
    def is_mask(self) -> bool:
        """Whether it takes tokens out always, and everywhere."""
        is_conditional = self.until != EDIT_ALWAYS or self.prefixes is not None
        return self.allows or (self.values is None and not is_conditional)


class EditLists:
    """The lists of all rows.

    Args:
        num_prompt_tokens: [R] int64 by row, on the device; it is kept.
        vocab_size: V.
    """

    def __init__(self, num_prompt_tokens: Tensor, vocab_size: int) -> None:
        self.table = LogitEditTable.empty(num_prompt_tokens, vocab_size, EDIT_ENTRIES, EDIT_PREFIX)
        self.rows: set[int] = set()
        """Rows all of whose edits are in the table."""
        self._vocab_size = vocab_size

    def set_row(self, row: int, lists: Sequence[TokenList]) -> None:
        """Put lists into the table, for a row that has none; it is not in `rows` then if they have no room."""
        listed = [each for each in lists if not each.is_mask]
        count = sum(len(each.ids) for each in listed)
        if count > EDIT_ENTRIES or any(
            each.prefixes.shape[1] > EDIT_PREFIX for each in listed if each.prefixes is not None
        ):
            return
        table, place = self.table, 0
        for each in listed:
            entries = slice(place, place + len(each.ids))
            table.ids[row, entries] = each.ids.to(torch.int32)
            table.values[row, entries] = -torch.inf if each.values is None else each.values
            table.until[row, entries] = each.until
            table.prefixes[row, entries] = -1
            if each.prefixes is not None:
                table.prefixes[row, entries, EDIT_PREFIX - each.prefixes.shape[1] :] = each.prefixes.to(torch.int32)
            place = entries.stop
        table.num_entries[row] = count
        if masks := [each for each in lists if each.is_mask]:
            table.allowed[row] = self._bits(masks)
            table.is_restricted[row] = 1
        self.rows.add(row)

    def clear_row(self, row: int) -> None:
        """Take the lists of a row out of the table."""
        if row in self.rows:
            self.rows.remove(row)
            self.table.num_entries[row] = 0
            self.table.is_restricted[row] = 0

    def _bits(self, masks: Sequence[TokenList]) -> Tensor:
        """[W] int32: the tokens that all of them allow."""
        device, num_words = self.table.allowed.device, self.table.allowed.shape[1]
        allowed = torch.ones(num_words * 32, dtype=torch.bool, device=device)
        for each in masks:
            named = torch.zeros_like(allowed).index_fill_(0, each.ids, True)
            allowed &= named if each.allows else ~named
        bits = allowed.view(num_words, 32).to(torch.int64) << torch.arange(32, device=device)
        words = bits.sum(1)
        return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
