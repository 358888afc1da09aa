"""The kernels that draw tokens: four looks at a row of logits, the wide ones by many programs.

`quire_ops.sampling` defines the token to the bit: weights are integers made by single float operations, and sums of
integers do not depend on their order. So these kernels are built without fused multiplication and addition, and draw
the tokens that every other backend draws.

What top_k, top_p and min_p keep are the tokens with logits above some value, the cutoff, and the first few that equal
it. To find it:

1. `look_kernel`, a program for each piece of a row: its largest logit, and a histogram of its logits, in bins of
   a quarter of a doubling of weight, below its largest.
2. `bracket_kernel`, a program for each row, adds the histograms up and estimates from them between which two logits the
   cutoff lies. A wrong estimate costs time, never another token.
3. `gather_kernel`, a program for each piece: the exact weight and number of the tokens above that range, and those
   within it, gathered as candidates in the order of ids.
4. `draw_kernel`, a program for each row: if the exact sums say that the cutoff is not among the candidates, it gathers
   those of a wider range, and at last all. The cutoff is found by bisection over the bits of floats, which as integers
   are in the order of the floats; then the piece in which the random number falls, and the token in it.

Tokens of weight 0 count as removed: they are the last in the order, and are never drawn.

Shape legend: N rows of logits, V vocabulary, P pieces of a row, B tokens of a piece.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["BINS", "bracket_kernel", "draw_kernel", "gather_kernel", "look_kernel"]

BINS = 64
"""Bins of a histogram; the last one holds everything that is further down."""
_PER_DOUBLING = tl.constexpr(4.0)
_BIN_LIMIT = tl.constexpr(2097152.0)  # 2^21
_MARGIN = tl.constexpr(0.01)  # of a bin, for what rounding does at its edges
_SPREAD = tl.constexpr(0.0500236)  # ln(2) / 4 / sqrt(12): deviation of a weight in its bin
_FARTHEST = tl.constexpr(0.0866434)  # ln(2) / 8: furthest from the middle of its bin
_SIGMAS = tl.constexpr(6.0)
_SLOTS = tl.constexpr(64)
_BELOW_ALL = tl.constexpr(-(2**31))
_MINUS_INFINITY = tl.constexpr(-2139095041)
"""What `_order` gives for it."""
_NONE = tl.constexpr(2**31 - 1)
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_LOWEST = tl.constexpr(-42.0)
_TO_WHOLE = tl.constexpr(12582912.0)
"""1.5 * 2^23: added and taken away again it rounds small float32 to the nearest even whole number, which is in the
lowest bits of the sum."""
_WHOLE_BITS = tl.constexpr(0x4B400000)
"""Its own."""


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
    """float32 -> int32 in the order of the floats; -0.0 is 0.0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    """The float32 that `_order` gave this number for."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _float_weight(log2):
    """float32 whose integer part is the weight of `quire_ops.sampling`: 2^(40 + whole) is exact, and so is what it
    multiplies."""
    log2 = tl.maximum(log2, _LOWEST)
    shifted = log2 + _TO_WHOLE
    rest = log2 - (shifted - _TO_WHOLE)
    scale = ((shifted.to(tl.int32, bitcast=True) << 23) + (167 << 23)).to(tl.float32, bitcast=True)
    power = rest * 0.00015353361959569156
    power = (power + 0.0013398873852565885) * rest
    power = (power + 0.00961843691766262) * rest
    power = (power + 0.055503323674201965) * rest
    power = (power + 0.24022647738456726) * rest
    power = (power + 0.6931471824645996) * rest
    return (power + 1.0) * scale


@triton.jit
def _integer_weight(key, max_logit, inv_temperature):
    """int64 from 0 to 2^40, of the token whose logit has this place in the order."""
    log2 = (_value(tl.maximum(key, _MINUS_INFINITY)) - max_logit) * inv_temperature
    return _float_weight(log2).to(tl.int64)


@triton.jit
def _is_drawn(do_sample, row, max_logit, num_nan):
    """Whether a row's token is drawn. What is not finite has none."""
    is_finite = (num_nan == 0) & (max_logit > float("-inf")) & (max_logit < float("inf"))
    return tl.load(do_sample + row).to(tl.int32) * is_finite.to(tl.int32) > 0


@triton.jit(do_not_specialize=["mask_row"])
def look_kernel(
    logits, rows, do_sample, inv_temperature, top_k, top_p, mask_of, bitmask, largest, best, num_nan, first_bin,
    histograms, far_weight, vocab_size, logits_row, mask_row, num_pieces, MASKED: tl.constexpr, BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):  # fmt: skip
    """Of each piece [N, P]: largest logit, how many are NaN, and for rows that are not drawn the lowest id of the
    largest; where the row filters, the bin of the largest, a histogram of the distances to it [N, P, BINS], and the
    weight of what is in its last bin in units of the largest's weight. MASKED: logits that the row's mask leaves out
    become -inf first."""
    piece, program = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tl.load(rows + program)
    token = piece * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    value = tl.load(logits + program * logits_row + token, mask=inside, other=float("-inf"))
    if MASKED:
        mask = tl.load(mask_of + program)
        if mask >= 0:
            word = tl.load(bitmask + mask * mask_row + token // 32, mask=inside, other=0)
            value = tl.where(((word >> (token % 32)) & 1) > 0, value, float("-inf"))
            tl.store(logits + program * logits_row + token, value, mask=inside)
    is_nan = value != value
    value = tl.where(is_nan, float("-inf"), value)
    max_logit = tl.max(value, axis=0)
    place = program * num_pieces + piece
    tl.store(largest + place, max_logit)
    is_sampled = tl.load(do_sample + row).to(tl.int32)
    if is_sampled == 0:
        tl.store(best + place, tl.min(tl.where(value == max_logit, token, _NONE), axis=0))
    tl.store(num_nan + place, tl.sum(is_nan.to(tl.int32), axis=0))
    is_filtered = (tl.load(top_k + row) < vocab_size) | (tl.load(top_p + row) < 1.0)
    if is_sampled * is_filtered.to(tl.int32) > 0:
        temperature = tl.load(inv_temperature + row)
        scaled = value * (temperature * _PER_DOUBLING)
        scaled = tl.minimum(tl.maximum(scaled, -_BIN_LIMIT), _BIN_LIMIT) + _TO_WHOLE
        bins = scaled.to(tl.int32, bitcast=True) - _WHOLE_BITS
        top = tl.max(bins, axis=0)
        distance = tl.minimum(top - bins, BINS - 1)
        counts = tl.histogram(distance, BINS)
        far = (distance == BINS - 1) & (value > float("-inf"))
        tl.store(far_weight + place, tl.sum(tl.where(far, tl.exp2((value - max_logit) * temperature), 0.0), axis=0))
        tl.store(first_bin + place, top)
        tl.store(histograms + place * BINS + tl.arange(0, BINS), counts)


@triton.jit
def _merged_histogram(histograms, first_bin, num_pieces, PIECES: tl.constexpr, BINS: tl.constexpr, WIDTH: tl.constexpr):
    """Of a row: the bin of its largest logit, and how many tokens are so many bins below it [WIDTH]."""
    piece, distance = tl.arange(0, PIECES), tl.arange(0, WIDTH)
    there = piece < num_pieces
    tops = tl.load(first_bin + piece, mask=there, other=-2097152)
    top = tl.max(tops, axis=0)
    source = distance[None, :] - (top - tops)[:, None]
    known = there[:, None] & (source >= 0) & (source < BINS - 1)
    counts = tl.sum(tl.load(histograms + piece[:, None] * BINS + source, mask=known, other=0), axis=0)
    return top, counts


@triton.jit
def _at(values, places, place):
    """What stands at a place."""
    return tl.sum(tl.where(places == place, values, 0.0), axis=0)


@triton.jit
def _bracket(
    top, counts, rest, max_logit, scale, min_log2, top_k, top_p, has_k, has_p, WIDTH: tl.constexpr
):  # fmt: skip
    """Where the cutoff is expected, in bins below the upper edge of the first one: between the first and the second
    number; and whether the second is known."""
    distance = tl.arange(0, WIDTH)
    log2 = tl.minimum(((top - distance).to(tl.float32) - max_logit * scale) / _PER_DOUBLING, 0.0)
    counts = tl.where(log2 + 0.5 / _PER_DOUBLING + _MARGIN < min_log2, 0, counts)
    k = tl.minimum(top_k, _NONE).to(tl.int32)
    reached = tl.cumsum(counts, 0)
    is_removed = (tl.sum(counts, axis=0) >= k) | (min_log2 > -15.0)
    rest = tl.where(is_removed, 0.0, rest)
    # Of the bin that holds the k-th token, as many as are among the first k. The largest token's weight is known.
    kept = tl.minimum(tl.maximum(k - (reached - counts), 0), counts)
    unknown = (kept - (distance == 0).to(tl.int32)).to(tl.float32)
    each = tl.exp2(log2)
    weight = unknown * each
    below = tl.cumsum(weight, 0, reverse=True)
    error = tl.minimum(tl.sqrt(tl.cumsum(weight * each, 0, reverse=True)) * (_SIGMAS * _SPREAD), below * _FARTHEST)
    total, off = 1.0 + rest + tl.sum(weight, axis=0), _at(error, distance, 0)
    below = tl.maximum(below - weight, 0.0) + rest
    error += 1e-6 * total + 0.005 * below + 0.01 * rest
    weight += tl.where(distance == 0, 1.0, 0.0)
    # Within a bin of many tokens, the place is taken in proportion, and may be off by what chance and slope can do.
    slack = 4.0 / tl.sqrt(tl.maximum(counts.to(tl.float32), 1.0)) + 0.05
    # The cutoff is in the first bin below which there is no more than what top_p removes.
    removed = (1.0 - top_p).to(tl.float32)
    least, most = removed * (total - off), removed * (total + off)
    first = tl.sum((below - error > most).to(tl.int32), axis=0)
    last = tl.sum((below + error > least).to(tl.int32), axis=0)
    share = (below - error + weight - most) / weight
    begin = first.to(tl.float32) + tl.maximum(_at(tl.where(weight > 0.0, share, 0.0) - slack, distance, first), 0.0)
    share = (below + error + weight - least) / weight
    end = last.to(tl.float32) + tl.minimum(_at(tl.where(weight > 0.0, share, 1.0) + slack, distance, last), 1.0)
    if has_k:
        of_k = tl.sum((reached < k).to(tl.int32), axis=0)
        share = kept.to(tl.float32) / tl.maximum(counts, 1).to(tl.float32)
        to_k = of_k.to(tl.float32) + tl.maximum(_at(share - slack, distance, of_k), 0.0)
        begin = tl.where(has_p, tl.minimum(begin, to_k), to_k)
        end = of_k.to(tl.float32) + tl.minimum(_at(share + slack, distance, of_k), 1.0)
        last = of_k
    return tl.minimum(begin, end), end, last < WIDTH - 1


@triton.jit
def bracket_kernel(
    rows, do_sample, inv_temperature, top_k, top_p, min_log2, largest, best, num_nan, first_bin, histograms,
    far_weight, ids, max_logits, brackets, vocab_size, num_pieces,
    PIECES: tl.constexpr, BINS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """ids and max_logits [N] of whole rows; brackets [N, 2, 2], a narrow and a wide one: candidates are at or above
    the first and below the second."""
    program = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + program)
    piece = tl.arange(0, PIECES)
    there = piece < num_pieces
    begin = program * num_pieces
    piece_max = tl.load(largest + begin + piece, mask=there, other=float("-inf"))
    max_logit = tl.max(piece_max, axis=0)
    nans = tl.sum(tl.load(num_nan + begin + piece, mask=there, other=0), axis=0)
    token = tl.full([], _NONE, tl.int32)
    if tl.load(do_sample + row).to(tl.int32) == 0:
        piece_best = tl.load(best + begin + piece, mask=there, other=_NONE)
        token = tl.min(tl.where(piece_max == max_logit, piece_best, _NONE), axis=0)
    tl.store(ids + program, tl.minimum(token, vocab_size - 1).to(tl.int64))
    tl.store(max_logits + program, tl.where(nans > 0, float("nan"), max_logit))
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    has_k, has_p = k < vocab_size, p < 1.0
    edge = tl.arange(0, 4)  # low and high of the narrow one, low and high of the wide one
    value = tl.full([4], float("-inf"), tl.float32)
    is_drawn = _is_drawn(do_sample, row, max_logit, nans)
    if is_drawn.to(tl.int32) * (has_k | has_p).to(tl.int32) > 0:
        top, counts = _merged_histogram(histograms + begin * BINS, first_bin + begin, num_pieces, PIECES, BINS, WIDTH)
        temperature = tl.load(inv_temperature + row)
        scale = temperature * _PER_DOUBLING
        far = tl.load(far_weight + begin + piece, mask=there, other=0.0)
        far = tl.where(far > 0.0, far * tl.exp2((piece_max - max_logit) * temperature), 0.0)
        start, end, is_known = _bracket(
            top, counts, tl.sum(far, axis=0), max_logit, scale, tl.load(min_log2 + row), k, p, has_k, has_p, WIDTH
        )
        below = tl.where(edge == 1, start - _MARGIN, tl.where(edge == 3, tl.floor(start) - _MARGIN, 0.0))
        below = tl.where(edge == 0, end + _MARGIN, tl.where(edge == 2, tl.ceil(end) + 1.0, below))
        value = ((top.to(tl.float32) + 0.5) - below) / scale
        is_low = (edge % 2) == 0
        value = tl.where(is_low & (is_known == 0), float("-inf"), value)
        value = tl.where(is_low | (below > 0.0), value, float("inf"))
    tl.store(brackets + program * 4 + edge, value)


@triton.jit
def _gather(
    logits, values, sums, counts, place, piece, vocab_size, max_logit, inv_temperature, min_log2, low, high, has_k,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Of a piece: sums [2] int64 and counts [3] int32 as `gather_kernel` has them, and the candidates' logits."""
    token = piece * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + token, mask=token < vocab_size, other=float("-inf"))
    log2 = (value - max_logit) * inv_temperature
    weight = tl.where(log2 >= min_log2, _float_weight(log2), 0.0)
    is_above = value >= high
    is_candidate = (weight >= 1.0) & (value >= low) & (value < high)
    whole = weight.to(tl.int64)
    tl.store(sums + place * 2, tl.sum(whole, axis=0))
    tl.store(sums + place * 2 + 1, tl.sum(tl.where(is_above, whole, 0), axis=0))
    if has_k:
        tl.store(counts + place * 3, tl.sum((weight >= 1.0).to(tl.int32), axis=0))
        tl.store(counts + place * 3 + 1, tl.sum(((weight >= 1.0) & is_above).to(tl.int32), axis=0))
    num_candidates = tl.sum(is_candidate.to(tl.int32), axis=0)
    tl.store(counts + place * 3 + 2, num_candidates)
    if num_candidates > 0:
        slot = tl.cumsum(is_candidate.to(tl.int32), 0) - 1
        tl.store(values + place * BLOCK + slot, value, mask=is_candidate)


@triton.jit
def gather_kernel(
    logits, rows, do_sample, inv_temperature, top_k, min_log2, max_logits, brackets, values, sums, counts, vocab_size,
    logits_row, num_pieces, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of each piece: sums [N, P, 2] of the weights of all tokens and of those above the bracket; counts [N, P, 3] of
    tokens that have a weight, of those among them that are above, both where the row has a top_k, and of the
    candidates; the candidates' logits [N, P, BLOCK]."""
    piece, program = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tl.load(rows + program)
    max_logit = tl.load(max_logits + program)
    if _is_drawn(do_sample, row, max_logit, 0):
        _gather(
            logits + program * logits_row, values, sums, counts, program * num_pieces + piece, piece, vocab_size,
            max_logit, tl.load(inv_temperature + row), tl.load(min_log2 + row), tl.load(brackets + program * 4),
            tl.load(brackets + program * 4 + 1), tl.load(top_k + row) < vocab_size, BLOCK,
        )  # fmt: skip


@triton.jit
def _candidates(values, num_candidates, begin, max_logit, inv_temperature, PIECES: tl.constexpr, BLOCK: tl.constexpr):
    """Of some slots of all pieces [PIECES, slots]: keys, weights, and whether there is a candidate."""
    slot = begin + tl.arange(0, _SLOTS)
    there = slot[None, :] < num_candidates[:, None]
    at = values + tl.arange(0, PIECES)[:, None] * BLOCK + slot[None, :]
    value = tl.load(at, mask=there, other=float("-inf"))
    weight = _float_weight((value - max_logit) * inv_temperature)
    return _order(value), tl.where(there, weight, 0.0).to(tl.int64), there


@triton.jit
def _at_or_above(
    values, num_candidates, longest, max_logit, inv_temperature, low, middle, high, by_weight,
    PIECES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For three values in the order of `_order`: number, or weight, of the candidates at or above them; and their
    weight at or above the last one."""
    first, second, third = tl.zeros([], tl.int64), tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    weight_above = tl.zeros([], tl.int64)
    for begin in range(0, longest, _SLOTS):
        key, weight, there = _candidates(values, num_candidates, begin, max_logit, inv_temperature, PIECES, BLOCK)
        amount = tl.where(by_weight, weight, there.to(tl.int64))
        first += tl.sum(tl.sum(tl.where(key >= low, amount, 0), axis=1), axis=0)
        second += tl.sum(tl.sum(tl.where(key >= middle, amount, 0), axis=1), axis=0)
        third += tl.sum(tl.sum(tl.where(key >= high, amount, 0), axis=1), axis=0)
        weight_above += tl.sum(tl.sum(tl.where(key >= high, weight, 0), axis=1), axis=0)
    return first, second, third, weight_above


@triton.jit
def _find(
    values, num_candidates, longest, max_logit, inv_temperature, low, high, wanted, by_weight,
    PIECES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest value in [low, high) with at least `wanted` of the candidates at or above it, low if there is none;
    what is at or above it, what is above it, and the weight of that."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    at, above, weight_above = tl.zeros([], tl.int64), tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    is_found = tl.zeros([], tl.int32)
    while is_found == 0:
        is_found = (high - low <= 1).to(tl.int32)
        quarter = tl.maximum((high - low) // 4, 1)
        middle = (low + high) // 2
        upper = tl.maximum(middle, high - quarter)
        lower = low + quarter
        if is_found > 0:  # what is to be told of it
            lower, middle, upper = low, low + 1, low + 1
        below, at, above, weight_above = _at_or_above(
            values, num_candidates, longest, max_logit, inv_temperature, lower.to(tl.int32), middle.to(tl.int32),
            upper.to(tl.int32), by_weight, PIECES, BLOCK,
        )  # fmt: skip
        if is_found > 0:
            at = below
        elif above >= wanted:
            low = upper
        elif at >= wanted:
            low, high = middle, upper
        elif below >= wanted:
            low, high = lower, middle
        else:
            high = lower
    return low.to(tl.int32), at, above, weight_above


@triton.jit
def draw_kernel(
    logits, rows, positions, do_sample, seeds, num_prompt_tokens, inv_temperature, top_k, top_p, min_log2, max_logits,
    brackets, values, sums, counts, ids, vocab_size, logits_row, num_pieces, PIECES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ids [N] of the rows whose tokens are drawn."""
    program = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + program)
    max_logit = tl.load(max_logits + program)
    if _is_drawn(do_sample, row, max_logit, 0):
        logits += program * logits_row
        values += program * num_pieces * BLOCK
        sums += program * num_pieces * 2
        counts += program * num_pieces * 3
        temperature, minimum = tl.load(inv_temperature + row), tl.load(min_log2 + row)
        k, p = tl.load(top_k + row), tl.load(top_p + row)
        piece = tl.arange(0, PIECES)
        there = piece < num_pieces
        kept = tl.zeros([PIECES], tl.int64)
        num_candidates = tl.zeros([PIECES], tl.int32)
        longest = tl.zeros([], tl.int32)
        cutoff = tl.full([], _BELOW_ALL, tl.int32)
        num_equal = tl.full([], _NONE, tl.int64)
        tries = tl.zeros([], tl.int32)
        while tries < 3:
            low, high = tl.full([], float("-inf"), tl.float32), tl.full([], float("inf"), tl.float32)
            if tries < 2:
                low = tl.load(brackets + program * 4 + tries * 2)
                high = tl.load(brackets + program * 4 + tries * 2 + 1)
            if tries > 0:  # the cutoff was not in the range before
                tl.debug_barrier()  # other threads read what is written anew
                for each_piece in range(0, num_pieces):
                    _gather(
                        logits, values, sums, counts, each_piece, each_piece, vocab_size, max_logit, temperature,
                        minimum, low, high, k < vocab_size, BLOCK,
                    )  # fmt: skip
                tl.debug_barrier()
            num_candidates = tl.load(counts + piece * 3 + 2, mask=there, other=0)
            longest = tl.max(num_candidates, axis=0)
            kept = tl.load(sums + piece * 2 + 1, mask=there, other=0)
            total = tl.sum(tl.load(sums + piece * 2, mask=there, other=0), axis=0)
            passing = tl.sum(tl.load(counts + piece * 3, mask=there, other=0), axis=0)
            num_above = tl.sum(tl.load(counts + piece * 3 + 1, mask=there, other=0), axis=0)
            weight_above = tl.sum(kept, axis=0)
            cutoff, num_equal = tl.full([], _BELOW_ALL, tl.int32), tl.full([], _NONE, tl.int64)
            is_missed = tl.zeros([], tl.int32)
            for by_weight in range(0, 2):  # top_k, then top_p of what it keeps
                is_active = (k < vocab_size).to(tl.int32)
                wanted = tl.minimum(k, passing.to(tl.int64)) - num_above
                if by_weight > 0:
                    is_active = (p < 1.0).to(tl.int32)
                    wanted = tl.ceil(p * total.to(tl.float64)).to(tl.int64) - weight_above
                if is_active > 0:
                    found, at, above, more = _find(
                        values, num_candidates, longest, max_logit, temperature, _order(low),
                        tl.minimum(_order(high), _order(max_logit) + 1), wanted, by_weight > 0,
                        PIECES, BLOCK,
                    )  # fmt: skip
                    is_missed = is_missed | ((wanted <= 0) | (at < wanted)).to(tl.int32)
                    each = _integer_weight(found, max_logit, temperature)
                    if by_weight > 0:
                        each = tl.maximum(each, 1)
                        fitting = tl.maximum((wanted - above + each - 1) // each, 1)
                        num_equal = tl.where(found == cutoff, tl.minimum(num_equal, fitting), fitting)
                    else:
                        num_equal = wanted - above
                        total = weight_above + more + num_equal * each
                    cutoff = found
            tries = tl.where(is_missed > 0, tries + 1, 3)
        # Kept are the tokens above the cutoff, and the first `num_equal` that equal it.
        equal = tl.zeros([PIECES], tl.int32)
        for begin in range(0, longest, _SLOTS):
            key, weight, is_candidate = _candidates(
                values, num_candidates, begin, max_logit, temperature, PIECES, BLOCK
            )
            kept += tl.sum(tl.where(key > cutoff, weight, 0), axis=1)
            equal += tl.sum((is_candidate & (key == cutoff)).to(tl.int32), axis=1)
        equal_before = (tl.cumsum(equal, 0) - equal).to(tl.int64)
        of_cutoff = _integer_weight(cutoff, max_logit, temperature)
        kept += tl.minimum(tl.maximum(num_equal - equal_before, 0), equal.to(tl.int64)) * of_cutoff
        total = tl.sum(kept, axis=0)
        one = tl.arange(0, 1)
        position = tl.load(positions + program) + 1 - tl.load(num_prompt_tokens + row)
        u = tl.sum(_uniform(tl.load(seeds + row + one), position + one), axis=0)
        target = tl.minimum((u * total.to(tl.float64)).to(tl.int64), total - 1)
        # The first token, in the order of ids, whose cumulative weight exceeds the target: first its piece.
        cumulative = tl.cumsum(kept, 0)
        chosen_piece = tl.sum((cumulative <= target).to(tl.int32), axis=0)
        is_chosen = piece == chosen_piece
        reached = tl.sum(tl.where(is_chosen, cumulative - kept, 0), axis=0)
        seen_equal = tl.sum(tl.where(is_chosen, equal_before, 0), axis=0)
        token = chosen_piece * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(logits + token, mask=token < vocab_size, other=float("-inf"))
        key, log2 = _order(value), (value - max_logit) * temperature
        weight = tl.where(log2 >= minimum, _float_weight(log2), 0.0).to(tl.int64)
        is_equal = ((key == cutoff) & (weight > 0)).to(tl.int64)
        is_kept = (key > cutoff) | ((is_equal > 0) & (seen_equal + tl.cumsum(is_equal, 0) - is_equal < num_equal))
        cumulative = reached + tl.cumsum(tl.where(is_kept, weight, 0), 0)
        tl.store(ids + program, tl.min(tl.where(cumulative > target, token, _NONE), axis=0).to(tl.int64))
