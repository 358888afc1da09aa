"""One token per row of logits, the most likely one or a sampled one.

Every number in it is either an integer or the result of single float operations that IEEE 754 rounds in one way, so
every backend on every device gets the same token from the same logits; how sums are ordered does not matter. Knows rows
of parameters; does not know requests, penalties, masks or log probabilities.

A token of logit x in a row with the largest logit m stands at y = (x - m) * inv_temperature, the binary logarithm of
its weight: difference and product are float32. With n = y rounded to the nearest (even) integer and r = y - n, 2^r is a
polynomial in Horner's form, each product and each sum rounded to float32, cut to a multiple of 2^-24; the weight is
that times 2^(40 + n), cut to an integer. So weights below 2^-40 of the largest are 0, and a row's sum is exact.

What is kept is a prefix of the tokens in the order (larger logit, lower id): first those with y >= min_log2, of them
top_k, of these the shortest prefix whose weight reaches top_p of their weight. The kept tokens' weights are added up in
the order of token ids, and the token is the one in whose interval u * total falls, u being the row's random number.

Shape legend: R rows, N rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_ops.op import op
from quire_ops.rng import uniform

__all__ = [
    "Sample",
    "SampleMasked",
    "SampleTable",
    "integer_weights",
    "log2_weights",
    "sample",
    "sample_masked",
    "share_of",
    "target_of",
]

LOWEST = -42.0
"""Further down, weights are 0."""
_WEIGHT_BITS, _FRACTION_BITS = 40, 24
# 2^r on [-1/2, 1/2]: 1 + r q(r), q of degree 5 with the least relative error (2e-9 before rounding), r^6 first.
_POWER = tuple(
    map(
        float.fromhex,
        ("0x1.41fbbcp-13", "0x1.5f3e52p-10", "0x1.3b2d4cp-7", "0x1.c6aee8p-5", "0x1.ebfbdcp-3", "0x1.62e43p-1"),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTable:
    """What is kept of all rows [R]. Never moves: backends may hold addresses."""

    do_sample: Tensor
    """bool: whether the token is sampled; otherwise it is the most likely one, and nothing below counts."""
    seeds: Tensor
    """int64."""
    num_prompt_tokens: Tensor
    """int64: tokens from this position on are outputs, which are counted for their random numbers."""
    inv_temperature: Tensor
    """float32: log2(e) / temperature."""
    top_k: Tensor
    """int64, at least 1; V keeps all."""
    top_p: Tensor
    """float64; 1 keeps all."""
    min_log2: Tensor
    """float32: log2(min_p); -inf keeps all."""

    @classmethod
    def greedy(cls, num_rows: int, vocab_size: int, device: torch.device | str = "cpu") -> SampleTable:
        """Rows that are all greedy; values that change nothing for those that will sample."""

        def full(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((num_rows,), value, dtype=dtype, device=device)

        return cls(
            do_sample=full(0, torch.bool),
            seeds=full(0, torch.int64),
            num_prompt_tokens=full(0, torch.int64),
            inv_temperature=full(1, torch.float32),
            top_k=full(vocab_size, torch.int64),
            top_p=full(1, torch.float64),
            min_log2=full(-torch.inf, torch.float32),
        )


Sample = Callable[[Tensor, Tensor, Tensor, SampleTable], tuple[Tensor, Tensor]]
"""A backend's function of op `sample`."""
SampleMasked = Callable[[Tensor, Tensor, Tensor, SampleTable, Tensor, Tensor], tuple[Tensor, Tensor]]
"""A backend's function of op `sample_masked`."""


def log2_weights(logits: Tensor, max_logits: Tensor, inv_temperature: Tensor) -> Tensor:
    """y [N, V] float32, at most 0. logits [N, V] float32; max_logits [N], their largest; inv_temperature [N]."""
    return (logits - max_logits.unsqueeze(1)).mul_(inv_temperature.unsqueeze(1))


def integer_weights(log2: Tensor) -> Tensor:
    """Weights [N, V] int64, from 0 to 2^40, of y [N, V]. What is NaN becomes any number."""
    log2 = log2.clamp(min=LOWEST)
    whole = log2.round()
    rest = log2.sub_(whole)
    power = rest * _POWER[0]
    for coefficient in _POWER[1:]:
        power.add_(coefficient).mul_(rest)
    fraction = power.add_(1).mul_(2.0**_FRACTION_BITS).to(torch.int64)
    return fraction.bitwise_left_shift_(_WEIGHT_BITS - _FRACTION_BITS).bitwise_right_shift_(
        whole.neg_().to(torch.int64)
    )


def share_of(top_p: Tensor, total: Tensor) -> Tensor:
    """The weight that top_p asks for. top_p float64, total int64 -> int64, of their shape."""
    return torch.where(top_p < 1, (top_p * total.to(torch.float64)).ceil().to(torch.int64), total)


def target_of(u: Tensor, total: Tensor) -> Tensor:
    """Where the random number u falls, from 0 to total - 1. u float64 in [0, 1), total int64 -> int64."""
    return (u * total.to(torch.float64)).to(torch.int64).minimum(total - 1)


@op
def sample(logits: Tensor, rows: Tensor, positions: Tensor, table: SampleTable) -> tuple[Tensor, Tensor]:
    """Choose one token per row of logits. Optional: where no backend has it, quire_sampling samples with torch, the
    same tokens.

    Args:
        logits: [N, V] float32, contiguous.
        rows: [N] int64, the row of `table` of each.
        positions: [N] int64, position of the last token that the logits have seen.
        table: Parameters.

    Returns:
        Tokens [N] int64, and per row of logits the largest [N] float32, NaN where there is one. Where it is not
        finite, the token is any of the vocabulary.
    """
    max_logits = logits.amax(-1)
    tokens = logits.max(dim=-1).indices  # the first of equals
    sampled = (table.do_sample[rows] & max_logits.isfinite()).nonzero().squeeze(1).tolist()
    for i in sampled:
        row = rows[i]
        log2 = log2_weights(logits[i : i + 1], max_logits[i : i + 1], table.inv_temperature[row].view(1))
        weights = integer_weights(log2)[0]
        order = logits[i].sort(descending=True, stable=True).indices
        order = order[log2[0, order] >= table.min_log2[row]][: int(table.top_k[row])]
        in_order = weights[order]
        before = in_order.cumsum(0) - in_order
        kept = order[before < share_of(table.top_p[row], in_order.sum())].sort().values
        cumulative = weights[kept].cumsum(0)
        u = uniform(table.seeds[row], positions[i] + 1 - table.num_prompt_tokens[row])
        tokens[i] = kept[cumulative > target_of(u, cumulative[-1])][0]
    return tokens, max_logits


@op
def sample_masked(
    logits: Tensor, rows: Tensor, positions: Tensor, table: SampleTable, mask_of: Tensor, bitmask: Tensor
) -> tuple[Tensor, Tensor]:
    """Op `sample` of logits that are -inf where the row's mask does not allow a token. Optional: one look at the logits
    serves both.

    Args:
        logits: [N, V] float32, contiguous; of rows with a mask, what is there afterwards means nothing.
        rows: [N] int64.
        positions: [N] int64.
        table: Parameters.
        mask_of: [N] int64, the mask of each row of logits, -1 for none.
        bitmask: [M, ceil(V / 32)] int32, contiguous; bit i % 32 of word i // 32 is 1 where token i may be chosen.

    Returns:
        Tokens [N] int64, and the largest of the changed logits [N] float32.
    """
    bits = bitmask.unsqueeze(-1).bitwise_right_shift(torch.arange(32, dtype=torch.int32)) & 1
    allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
    excluded = ~allowed[mask_of] & (mask_of >= 0).unsqueeze(1)
    return sample(logits.masked_fill(excluded, -torch.inf), rows, positions, table)
