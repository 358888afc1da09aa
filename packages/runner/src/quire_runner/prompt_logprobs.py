"""Log probabilities of prompt tokens, for rows that asked, a bounded number of positions at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire_interfaces.step import TokenLogprobs
from quire_runner.inputs import HostPlan
from quire_runner.rows import Rows
from quire_sampling import prompt_logprobs

__all__ = ["step_prompt_logprobs"]


def step_prompt_logprobs(
    plan: HostPlan, rows: Rows, hidden: Tensor, compute_logits: Callable[[int, Tensor], Tensor], chunk_tokens: int
) -> dict[int, list[TokenLogprobs]]:
    """Log probabilities of the prompt tokens that follow this step's tokens.

    The hidden state at position p tells of the token at p + 1, so a step that computes positions [a, b) finishes
    prompt positions a + 1 .. b; the first prompt token has none.

    Args:
        plan: The step.
        rows: Token history, and which rows asked.
        hidden: [T, hidden_size] of the step.
        compute_logits: (row, hidden states) -> logits.
        chunk_tokens: Most positions whose logits are alive at once.

    Returns:
        Row -> one per prompt position finished in this step, in order; rows without any are left out.
    """
    found: dict[int, list[TokenLogprobs]] = {}
    for entry, row in enumerate(plan.rows.tolist()):
        num_logprobs = rows.prompt_logprobs.get(row)
        if num_logprobs is None:
            continue
        start = int(plan.start[entry])
        count = min(int(plan.ends[entry]), int(rows.num_prompt_tokens[row]) - 1) - start
        if count < 1:
            continue
        first = int(plan.query_start_loc[entry])
        next_ids = rows.token_ids[row, start + 1 : start + 1 + count].to(torch.int64)
        collected: list[TokenLogprobs] = []
        for begin in range(0, count, chunk_tokens):
            end = min(begin + chunk_tokens, count)
            logits = compute_logits(row, hidden[first + begin : first + end])
            collected.extend(prompt_logprobs(logits, next_ids[begin:end], num_logprobs))
        found[row] = collected
    return found
