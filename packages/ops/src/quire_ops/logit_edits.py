"""Edits of logits that a request brings as lists of tokens: biases, tokens that may be sampled at all, tokens that may
not be sampled yet, or not behind certain others.

Everything that they depend on is in tables on the device or in the rows' history, so that a captured step does them
without the host.

Shape legend: R rows, L token slots of a row, N rows of logits, V vocabulary, W = ceil(V / 32) words, K entries of a
row, P tokens before one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_ops.op import op

__all__ = ["EDIT_ALWAYS", "EditLogits", "LogitEditTable", "edit_logits"]

EDIT_ALWAYS = 2**31 - 1
"""In `LogitEditTable.until`: an entry that acts however many tokens are out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitEditTable:
    """What is kept of all rows. Never moves: captured steps hold addresses."""

    is_restricted: Tensor
    """[R] int32: whether `allowed` is in use."""
    allowed: Tensor
    """[R, W] int32; bit i % 32 of word i // 32 is 1 where token i may be sampled."""
    num_entries: Tensor
    """[R] int32."""
    ids: Tensor
    """[R, K] int32: the token that an entry changes. Those with a finite value are different ones."""
    values: Tensor
    """[R, K] float32: what is added to its logit; -inf takes the token out."""
    until: Tensor
    """[R, K] int32: the entry acts while fewer tokens than that are out."""
    prefixes: Tensor
    """[R, K, P] int32: and behind these tokens, of prompt and output; -1 for any."""
    num_prompt_tokens: Tensor
    """[R] int64."""

    @classmethod
    def empty(cls, num_prompt_tokens: Tensor, vocab_size: int, num_entries: int, prefix_len: int) -> LogitEditTable:
        """A table of rows that change nothing, on the device of `num_prompt_tokens` [R], which it keeps."""
        device, num_rows = num_prompt_tokens.device, len(num_prompt_tokens)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(num_rows, *shape, dtype=dtype, device=device)

        return cls(
            is_restricted=zeros(),
            allowed=zeros(-(-vocab_size // 32)),
            num_entries=zeros(),
            ids=zeros(num_entries),
            values=zeros(num_entries, dtype=torch.float32),
            until=zeros(num_entries),
            prefixes=zeros(num_entries, prefix_len),
            num_prompt_tokens=num_prompt_tokens,
        )


EditLogits = Callable[[Tensor, Tensor, Tensor, Tensor, LogitEditTable], None]
"""A backend's function of op `edit_logits`."""


@op
def edit_logits(logits: Tensor, rows: Tensor, positions: Tensor, token_ids: Tensor, table: LogitEditTable) -> None:
    """Add biases to logits and take tokens out, in place, as lists of each row say.

    Optional: where no backend has it, quire_sampling does the same with torch, row by row.

    Args:
        logits: [N, V] float32, contiguous; changed in place.
        rows: [N] int64, the row of `table` and of `token_ids` of each.
        positions: [N] int64, position of the last known token; later places of the history count for nothing.
        token_ids: [R, L] int32.
        table: The lists.
    """
    num_before = table.prefixes.shape[2]
    tokens = torch.arange(logits.shape[1], device=logits.device)
    for i, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
        history = [-2] * num_before + token_ids[row, : position + 1].tolist()
        window = torch.tensor(history[len(history) - num_before :], dtype=torch.int32, device=logits.device)
        entries = slice(0, int(table.num_entries[row]))
        prefixes = table.prefixes[row, entries]
        acts = ((prefixes == window) | (prefixes == -1)).all(-1)
        acts &= position + 1 - table.num_prompt_tokens[row] < table.until[row, entries]
        ids, values = table.ids[row, entries][acts].long(), table.values[row, entries][acts]
        excluded = values == -torch.inf
        logits[i, ids[~excluded]] += values[~excluded]
        logits[i, ids[excluded]] = -torch.inf
        if table.is_restricted[row]:
            bits = table.allowed[row, tokens // 32] >> (tokens % 32).to(torch.int32)
            logits[i, bits & 1 == 0] = -torch.inf
