"""The most likely token of a row of logits, or one sampled from those that min_p, top_k and top_p keep. No sort.

`quire_ops.sampling` defines the token to the bit: weights are integers made by single float operations, and sums of
integers do not depend on their order. So these kernels are built without fused multiplication and addition, and sample
the tokens that every other backend samples.

The kept tokens are those with logits above some value, and the first few that equal it. That value is found by
bisection over the bits of floats, which as integers are in the order of the floats: each look at the row tells for
three candidates how many tokens, or how much weight, is at or above them.

Shape legend: N rows of logits, V vocabulary, R rows of the table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels_cuda.builds import Calls, NetworkShape
from quire_kernels_cuda.platform import Platform
from quire_ops import SampleTable, implements, ops

__all__ = ["calls", "sample", "sample_kernel", "sample_masked"]

_BELOW_ALL = tl.constexpr(-(2**31))
_NONE = tl.constexpr(2**31 - 1)
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_LOWEST = tl.constexpr(-42.0)
_TO_WHOLE = tl.constexpr(12582912.0)
"""1.5 * 2^23: added and taken away again it rounds small float32 to the nearest even whole number."""


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, position):
    """float64 in [0, 1) for int64 [1] each: two rounds of SplitMix64 (Steele, Lea, Flood 2014, figure 14)."""
    start = _mix(seed.to(tl.uint64, bitcast=True) + _GAMMA)
    bits = _mix(start + (position + 1).to(tl.uint64, bitcast=True) * _GAMMA)
    return (bits >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16  # 2 ** -53


@triton.jit
def _order(x):
    """float32 -> int64 in the order of the floats; -0.0 is 0.0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value(key):
    """The float32 that `_order` gave this number for."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _integer_weight(log2):
    """int64 from 0 to 2^40; see `quire_ops.sampling`."""
    log2 = tl.maximum(log2, _LOWEST)
    whole = (log2 + _TO_WHOLE) - _TO_WHOLE
    rest = log2 - whole
    power = rest * 0.00015353361959569156
    power = (power + 0.0013398873852565885) * rest
    power = (power + 0.00961843691766262) * rest
    power = (power + 0.055503323674201965) * rest
    power = (power + 0.24022647738456726) * rest
    power = (power + 0.6931471824645996) * rest
    fraction = ((power + 1.0) * 16777216.0).to(tl.int32)  # 2^24
    return (fraction.to(tl.int64) << 16) >> (0.0 - whole).to(tl.int32).to(tl.int64)


@triton.jit
def _load(logits, begin, vocab_size, max_logit, inv_temperature, min_log2, BLOCK: tl.constexpr):
    """Of a piece of the row: ids, places in the order of logits, weights, and whether min_p keeps the token."""
    token = begin + tl.arange(0, BLOCK)
    value = tl.load(logits + token, mask=token < vocab_size, other=float("-inf"))
    log2 = (value - max_logit) * inv_temperature
    passes = (token < vocab_size) & (log2 >= min_log2)
    return token, _order(value), tl.where(passes, _integer_weight(log2), 0), passes


@triton.jit
def _at_or_above(
    logits,
    vocab_size,
    max_logit,
    inv_temperature,
    min_log2,
    low,
    middle,
    high,
    WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """For three values in the order of `_order`: number, or weight, of the tokens at or above them that min_p keeps."""
    first, second, third = tl.zeros([], tl.int64), tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    for begin in range(0, vocab_size, BLOCK):
        _, key, weight, passes = _load(logits, begin, vocab_size, max_logit, inv_temperature, min_log2, BLOCK)
        if not WEIGHTS:
            weight = passes.to(tl.int64)
        first += tl.sum(tl.where(key >= low, weight, 0), axis=0)
        second += tl.sum(tl.where(key >= middle, weight, 0), axis=0)
        third += tl.sum(tl.where(key >= high, weight, 0), axis=0)
    return first, second, third


@triton.jit
def _find(
    logits,
    vocab_size,
    max_logit,
    inv_temperature,
    min_log2,
    low,
    high,
    wanted,
    WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest value in [low, high) with at least `wanted` at or above it, low if there is none; and what is above
    it."""
    while high - low > 1:
        quarter = tl.maximum((high - low) // 4, 1)
        middle = (low + high) // 2
        upper = tl.maximum(middle, high - quarter)
        below, at, above = _at_or_above(
            logits, vocab_size, max_logit, inv_temperature, min_log2, low + quarter, middle, upper, WEIGHTS, BLOCK
        )
        if above >= wanted:
            low = upper
        elif at >= wanted:
            low, high = middle, upper
        elif below >= wanted:
            low, high = low + quarter, middle
        else:
            high = low + quarter
    above, _, _ = _at_or_above(
        logits, vocab_size, max_logit, inv_temperature, min_log2, low + 1, low + 1, low + 1, WEIGHTS, BLOCK
    )
    return low, above


@triton.jit
def _kept(
    logits, begin, vocab_size, max_logit, inv_temperature, min_log2, cutoff, num_equal, seen_equal, BLOCK: tl.constexpr
):
    """Of a piece of the row: ids, weights (0 for what is removed), and how many equal the cutoff up to its end."""
    token, key, weight, passes = _load(logits, begin, vocab_size, max_logit, inv_temperature, min_log2, BLOCK)
    is_equal = ((key == cutoff) & passes).to(tl.int64)
    before = seen_equal + tl.cumsum(is_equal, 0) - is_equal
    kept = (key > cutoff) | ((is_equal > 0) & (before < num_equal))
    return token, tl.where(kept, weight, 0), seen_equal + tl.sum(is_equal, axis=0)


@triton.jit
def _kept_weight(logits, vocab_size, max_logit, inv_temperature, min_log2, cutoff, num_equal, BLOCK: tl.constexpr):
    total, seen_equal = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    for begin in range(0, vocab_size, BLOCK):
        _, weight, seen_equal = _kept(
            logits, begin, vocab_size, max_logit, inv_temperature, min_log2, cutoff, num_equal, seen_equal, BLOCK
        )
        total += tl.sum(weight, axis=0)
    return total


@triton.jit
def _pick(logits, vocab_size, max_logit, inv_temperature, min_log2, cutoff, num_equal, target, BLOCK: tl.constexpr):
    """The first token, in the order of ids, whose cumulative weight exceeds the target."""
    chosen = tl.full([], _NONE, tl.int32)
    reached, seen_equal = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    begin = tl.zeros([], tl.int32)
    while (begin < vocab_size) & (chosen == _NONE):
        token, weight, seen_equal = _kept(
            logits, begin, vocab_size, max_logit, inv_temperature, min_log2, cutoff, num_equal, seen_equal, BLOCK
        )
        after = reached + tl.sum(weight, axis=0)
        if after > target:
            cumulative = reached + tl.cumsum(weight, 0)
            chosen = tl.min(tl.where(cumulative > target, token, _NONE), axis=0)
        reached = after
        begin += BLOCK
    return chosen


@triton.jit
def _sample(
    logits, vocab_size, max_logit, inv_temperature, min_log2, top_k, top_p, seed, position, BLOCK: tl.constexpr
):
    """A token among those that are kept: all above `cutoff`, and the first `num_equal` that equal it."""
    ceiling = _order(max_logit) + 1
    cutoff = tl.full([], _BELOW_ALL, tl.int64)
    num_equal = tl.full([], _NONE, tl.int64)
    if top_k < vocab_size:
        passing, _, _ = _at_or_above(
            logits, vocab_size, max_logit, inv_temperature, min_log2, cutoff, ceiling, ceiling, False, BLOCK
        )
        wanted = tl.minimum(top_k, passing)
        cutoff, above = _find(
            logits, vocab_size, max_logit, inv_temperature, min_log2, cutoff, ceiling, wanted, False, BLOCK
        )
        num_equal = wanted - above
    if top_p < 1.0:
        total = _kept_weight(logits, vocab_size, max_logit, inv_temperature, min_log2, cutoff, num_equal, BLOCK)
        share = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
        found, above = _find(
            logits, vocab_size, max_logit, inv_temperature, min_log2, cutoff, ceiling, share, True, BLOCK
        )
        each = tl.maximum(_integer_weight((_value(found) - max_logit) * inv_temperature), 1)
        fitting = tl.maximum((share - above + each - 1) // each, 1)
        num_equal = tl.where(found == cutoff, tl.minimum(num_equal, fitting), fitting)
        cutoff = found
    total = _kept_weight(logits, vocab_size, max_logit, inv_temperature, min_log2, cutoff, num_equal, BLOCK)
    one = tl.arange(0, 1)
    share = tl.sum(_uniform(tl.load(seed + one), position + one), axis=0) * total.to(tl.float64)
    target = tl.minimum(share.to(tl.int64), total - 1)
    return _pick(logits, vocab_size, max_logit, inv_temperature, min_log2, cutoff, num_equal, target, BLOCK)


@triton.jit(do_not_specialize=["mask_row"])
def sample_kernel(
    logits, rows, positions, do_sample, seeds, num_prompt_tokens, inv_temperature, top_k, top_p, min_log2, mask_of,
    bitmask, ids, max_logits, vocab_size, logits_row, mask_row, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ids [N] and max_logits [N]. A program has a row. MASKED: logits that its mask leaves out become -inf first."""
    program = tl.program_id(0).to(tl.int64)
    logits = logits + program * logits_row
    row = tl.load(rows + program)
    mask = tl.full([], -1, tl.int64)
    if MASKED:
        mask = tl.load(mask_of + program)
    max_logit = tl.full([], float("-inf"), tl.float32)
    best = tl.full([], _NONE, tl.int32)
    num_nan = tl.zeros([], tl.int32)
    for begin in range(0, vocab_size, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        value = tl.load(logits + token, mask=token < vocab_size, other=float("-inf"))
        if MASKED:
            if mask >= 0:
                word = tl.load(bitmask + mask * mask_row + token // 32, mask=token < vocab_size, other=0)
                value = tl.where(((word >> (token % 32)) & 1) > 0, value, float("-inf"))
                tl.store(logits + token, value, mask=token < vocab_size)
        is_nan = value != value
        num_nan += tl.sum(is_nan.to(tl.int32), axis=0)
        value = tl.where(is_nan, float("-inf"), value)
        largest = tl.max(value, axis=0)
        if largest > max_logit:
            max_logit = largest
            best = tl.min(tl.where(value == largest, token, _NONE), axis=0)
    if MASKED:
        tl.debug_barrier()  # other threads read what was stored
    is_finite = (num_nan == 0) & (max_logit > float("-inf")) & (max_logit < float("inf"))
    if tl.load(do_sample + row).to(tl.int32) * is_finite.to(tl.int32) > 0:
        position = tl.load(positions + program) + 1 - tl.load(num_prompt_tokens + row)
        best = _sample(
            logits, vocab_size, max_logit, tl.load(inv_temperature + row), tl.load(min_log2 + row),
            tl.load(top_k + row), tl.load(top_p + row), seeds + row, position, BLOCK,
        )  # fmt: skip
    tl.store(ids + program, tl.minimum(best, vocab_size - 1).to(tl.int64))
    tl.store(max_logits + program, tl.where(num_nan > 0, float("nan"), max_logit))


@implements(ops.sample)
def sample(logits: Tensor, rows: Tensor, positions: Tensor, table: SampleTable) -> tuple[Tensor, Tensor]:
    return _sample_rows(logits, rows, positions, table, None, None)


@implements(ops.sample_masked)
def sample_masked(
    logits: Tensor, rows: Tensor, positions: Tensor, table: SampleTable, mask_of: Tensor, bitmask: Tensor
) -> tuple[Tensor, Tensor]:
    """Op `sample_masked`: -inf is written over the logits of tokens that are left out."""
    return _sample_rows(logits, rows, positions, table, mask_of, bitmask)


def _sample_rows(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    table: SampleTable,
    mask_of: Tensor | None,
    bitmask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    num_rows, vocab_size = logits.shape
    ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    max_logits = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        block = min(4096, max(64, triton.next_power_of_2(vocab_size)))
        sample_kernel[(num_rows,)](
            logits, rows, positions, table.do_sample, table.seeds, table.num_prompt_tokens, table.inv_temperature,
            table.top_k, table.top_p, table.min_log2, rows if mask_of is None else mask_of,
            rows if bitmask is None else bitmask, ids, max_logits,
            vocab_size, logits.stride(0), 0 if bitmask is None else bitmask.stride(0),
            MASKED=bitmask is not None, BLOCK=block, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return ids, max_logits


def calls(shape: NetworkShape, platform: Platform) -> Calls:
    """Sampling for each row, and one with masks."""
    logits = torch.empty(16, shape.vocab_size, dtype=torch.float32, device="meta")
    rows = torch.empty(16, dtype=torch.int64, device="meta")
    table = SampleTable.greedy(256, shape.vocab_size, "meta")
    yield f"v{shape.vocab_size}", lambda: sample(logits, rows, rows, table)
    masks = torch.empty(8, -(-shape.vocab_size // 32), dtype=torch.int32, device="meta")
    yield f"v{shape.vocab_size} masked", lambda: sample_masked(logits, rows, rows, table, rows, masks)
