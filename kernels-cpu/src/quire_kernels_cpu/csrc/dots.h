// Matrices by vectors, where there are no tiles: dot products of four outputs with up to three tokens.
//
// Inputs come in pieces of 512. What a lane sums to in a piece starts at zero and is then added to what it has from the
// pieces before; at the end the lanes are added in one order. All of this is the same for one token and for many.
#pragma once

#include <algorithm>

#include "activations.h"
#include "vectors.h"
#include "weights.h"

namespace quire {

constexpr int kDotRows = 4;
constexpr int kDotTokens = kLanes == 16 ? 4 : 3;  // sums that fit the registers, beside their operands
constexpr int64_t kDotPiece = 512;

// How weights of type W meet tokens: `kVectors` vectors for each step of `kStep` inputs, on both sides.
template <typename W>
struct FloatDot {
    using Weight = W;
    using Number = float;
    using Vector = Floats;
    using Sum = Floats;
    static constexpr int kVectors = 1, kStep = kLanes;
    static constexpr int kTogether = kDotTokens;  // tokens whose sums fit the registers while weights are widened
    static constexpr bool kPinned = true;  // tokens stay in registers during a step

    static const Number* token(const Activations& x, int64_t t) { return x.row(t); }
    static Vector widened_part(const W* from, int) { return load(from); }
    static Sum add(Sum sum, Vector a, Vector b) { return fused(a, b, sum); }
    static Floats to_floats(Sum sum) { return sum; }
};

// The even inputs of a step, then the odd ones: what shifting and masking give, see `Form::split_rows`.
struct SplitDot : FloatDot<BFloat16> {
    static constexpr int kVectors = 2, kStep = 2 * kLanes;
    static constexpr int kTogether = kDotTokens - 1;

    static Floats widened_part(const BFloat16* from, int part) { return part ? odd_numbers(from) : even_numbers(from); }
};

// Int8 against whole numbers of 16 bits, exact within a piece.
struct WholeDot {
    using Weight = int8_t;
    using Number = int16_t;
    using Vector = Shorts;
    using Sum = Ints;
    static constexpr int kVectors = 1, kStep = 2 * kLanes, kTogether = kDotTokens;
    static constexpr bool kPinned = false;  // products need the register

    static const Number* token(const Activations& x, int64_t t) { return x.words(t); }
    static Vector widened_part(const int8_t* from, int) { return widened_bytes(from); }
    static Sum add(Sum sum, Vector a, Vector b) { return sum + pair_products(a, b); }
    static Floats to_floats(Sum sum) { return whole_to_floats(sum); }
};

// One step of a row, the first `count` inputs of it and zeros behind.
template <typename Dot>
inline typename Dot::Vector widened_first(const typename Dot::Weight* from, int part, int count) {
    typename Dot::Weight padded[Dot::kStep] = {};
    std::memcpy(padded, from, count * sizeof *padded);
    return Dot::widened_part(padded, part);
}

// Four rows from the beginning of a piece on, as they lie in memory.
template <typename Dot>
struct RawRows {
    const typename Dot::Weight* rows[kDotRows];

    typename Dot::Vector at(int row, int64_t k, int part) const { return Dot::widened_part(rows[row] + k, part); }
    typename Dot::Vector rest(int row, int64_t k, int part, int count) const {
        return widened_first<Dot>(rows[row] + k, part, count);
    }
};

// sums += one step of four rows times kTokens tokens, of all its inputs (`kWhole`) or the first `count`.
template <typename Dot, int kTokens, bool kWhole>
__attribute__((always_inline)) inline void dot_step(const RawRows<Dot>& w,
                                                    const typename Dot::Number* const tokens[kTokens],
                                                    int64_t k, int count, typename Dot::Sum sums[kDotRows][kTokens]) {
    using Vector = typename Dot::Vector;
    constexpr int64_t kNumbers = sizeof(Vector) / sizeof(typename Dot::Number);
#pragma GCC unroll 2
    for (int part = 0; part < Dot::kVectors; ++part) {
        Vector xs[kTokens];
#pragma GCC unroll 4
        for (int t = 0; t < kTokens; ++t) {
            std::memcpy(&xs[t], tokens[t] + k + part * kNumbers, sizeof(Vector));
            if constexpr (Dot::kPinned) in_register(xs[t]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < kDotRows; ++i) {
            const Vector ws = kWhole ? w.at(i, k, part) : w.rest(i, k, part, count);
#pragma GCC unroll 4
            for (int t = 0; t < kTokens; ++t) sums[i][t] = Dot::add(sums[i][t], ws, xs[t]);
        }
    }
}

// total += four rows times kTokens tokens over one piece.
template <typename Dot, int kTokens>
inline void dot_piece(const RawRows<Dot>& w, const typename Dot::Number* const tokens[kTokens], int64_t cols,
                      Floats total[kDotRows][kTokens]) {
    typename Dot::Sum sums[kDotRows][kTokens] = {};
    const int64_t whole = cols / Dot::kStep * Dot::kStep;
    for (int64_t k = 0; k < whole; k += Dot::kStep) dot_step<Dot, kTokens, true>(w, tokens, k, 0, sums);
    if (whole < cols) dot_step<Dot, kTokens, false>(w, tokens, whole, static_cast<int>(cols - whole), sums);
#pragma GCC unroll 4
    for (int i = 0; i < kDotRows; ++i)
#pragma GCC unroll 4
        for (int t = 0; t < kTokens; ++t) total[i][t] += Dot::to_floats(sums[i][t]);
}

// Of a half four rows come together that are four apart: so memory is read in four runs, each of four rows in a row and in
// pages of its own. Processors read ahead of such runs as well as of one, and badly of four rows in a row.
inline int dot_row(int group, int i) { return group + i * (kTile / kDotRows); }

// The lanes of kTokens tokens from `first` on into the sums of their tiles. sums[0] belongs to the tile of token 0.
template <int kTokens>
inline void finish_dots(const Floats total[kDotRows][kTokens], int64_t first, int half, int group, Sums* sums) {
    for (int t = 0; t < kTokens; ++t) {
        const int64_t token = first + t;
        const Floats lanes[kDotRows] = {total[0][t], total[1][t], total[2][t], total[3][t]};
        float of_rows[kDotRows];
        sum_four(lanes, of_rows);
        for (int i = 0; i < kDotRows; ++i)
            sums[token / kTile].at[half][dot_row(group, i)][token % kTile] = of_rows[i];
    }
}

// Row i of a group, from input `begin` on; what is not there is some other row.
template <typename Weight>
inline const Weight* row_of(const Half& half, int group, int i, int64_t cols, int64_t begin) {
    return reinterpret_cast<const Weight*>(half.data) + std::min(dot_row(group, i), half.count - 1) * cols + begin;
}

// One half against kTokens tokens, from token `first` on, whose sums begin at sums[0].
template <typename Dot, int kTokens>
void few_dots(const Half& half, int64_t cols, const Activations& x, int64_t first, int h, Sums* sums) {
    for (int group = 0; group < std::min(half.count, kTile / kDotRows); ++group) {
        Floats total[kDotRows][kTokens] = {};
        for (int64_t begin = 0; begin < cols; begin += kDotPiece) {
            RawRows<Dot> w;
            for (int i = 0; i < kDotRows; ++i) w.rows[i] = row_of<typename Dot::Weight>(half, group, i, cols, begin);
            const typename Dot::Number* tokens[kTokens];
            for (int t = 0; t < kTokens; ++t) tokens[t] = Dot::token(x, first + t) + begin;
            dot_piece<Dot, kTokens>(w, tokens, std::min(kDotPiece, cols - begin), total);
        }
        finish_dots<kTokens>(total, 0, h, group, sums);
    }
}

// Four rows against kTokens tokens from `token` on, over one piece. totals: [tokens][4] of the pieces before, which are
// nothing if this is the first.
template <typename Dot, int kTokens>
inline void dots_of_piece(const RawRows<Dot>& w, const Activations& x, int64_t token, int64_t begin, int64_t cols, bool first,
                          const Floats (*totals)[kDotRows], Floats total[kDotRows][kTokens]) {
    const typename Dot::Number* tokens[kTokens];
    for (int t = 0; t < kTokens; ++t) {
        tokens[t] = Dot::token(x, token + t) + begin;
        for (int i = 0; i < kDotRows; ++i) total[i][t] = first ? Floats{} : totals[t][i];
    }
    dot_piece<Dot, kTokens>(w, tokens, cols, total);
}

template <int kTokens>
inline void keep_totals(const Floats total[kDotRows][kTokens], Floats (*totals)[kDotRows]) {
    for (int t = 0; t < kTokens; ++t)
        for (int i = 0; i < kDotRows; ++i) totals[t][i] = total[i][t];
}

// run(first token, how many as a constant), up to kMost of them together.
template <int kMost, typename Run>
inline void for_tokens(int64_t count, const Run& run) {
    int64_t t = 0;
    for (; t + kMost <= count; t += kMost) run(t, std::integral_constant<int, kMost>{});
    if constexpr (kMost > 3) {
        if (count - t == 3) run(t, std::integral_constant<int, 3>{});
    }
    if constexpr (kMost > 2) {
        if (count - t == 2) run(t, std::integral_constant<int, 2>{});
    }
    if (count - t == 1) run(t, std::integral_constant<int, 1>{});
}

// A piece of a row into the second-level cache, while others multiply.
template <typename Weight>
inline void fetch_piece(const Weight* from, int64_t cols) {
    const char* const bytes = reinterpret_cast<const char*>(from);
    for (int64_t i = 0; i < cols * static_cast<int64_t>(sizeof(Weight)); i += 64) __builtin_prefetch(bytes + i, 0, 2);
}

// One half against `count` tokens from `first` on, a piece of four rows after the other; next: what comes in its place in
// the next strip. Weights are widened for a few tokens, and again for the next few: rows that were widened beforehand would
// take the first-level cache from the tokens, which costs more.
template <typename Dot>
void many_dots(const Half& half, const Half& next, int64_t cols, const Activations& x, int64_t first, int64_t count, int h,
               Buffer& buffer, Sums* sums) {
    using Weight = typename Dot::Weight;
    auto* const totals = reinterpret_cast<Floats(*)[kDotRows]>(buffer.get<Floats>(count * kDotRows));
    for (int group = 0; group < std::min(half.count, kTile / kDotRows); ++group) {
        for (int64_t begin = 0; begin < cols; begin += kDotPiece) {
            const int64_t width = std::min(kDotPiece, cols - begin);
            RawRows<Dot> w;
            for (int i = 0; i < kDotRows; ++i) {
                if (next.count) fetch_piece(row_of<Weight>(next, group, i, cols, begin), width);
                w.rows[i] = row_of<Weight>(half, group, i, cols, begin);
            }
            for_tokens<Dot::kTogether>(count, [&](int64_t t, auto tokens) {
                constexpr int kTokens = decltype(tokens)::value;
                Floats total[kDotRows][kTokens];
                dots_of_piece<Dot, kTokens>(w, x, first + t, begin, width, begin == 0, totals + t, total);
                if (begin + width == cols)
                    finish_dots<kTokens>(total, t, h, group, sums);
                else
                    keep_totals<kTokens>(total, totals + t);
            });
        }
    }
}

// A strip against the tiles [first, last) of the tokens; sums[0] belongs to tile `first`.
template <typename Dot>
void dot_strip(const Half half[2], const Half next[2], int64_t cols, const Activations& x, int64_t first, int64_t last,
               Buffer& buffer, Sums* sums) {
    const int64_t begin = first * kTile, count = std::min(x.tokens, last * kTile) - begin;
    for (int h = 0; h < 2; ++h) {
        if (count == 1) {
            few_dots<Dot, 1>(half[h], cols, x, begin, h, sums);
        } else if (count == 2) {
            few_dots<Dot, 2>(half[h], cols, x, begin, h, sums);
        } else {
            many_dots<Dot>(half[h], next[h], cols, x, begin, count, h, buffer, sums);
        }
    }
}

// Sums of whole numbers times the tokens' steps; what stands for no token is never read.
inline void scale_tokens(const float* steps, Sums& sums) {
    for (int h = 0; h < 2; ++h)
        for (int n = 0; n < kTile; ++n)
            for (int t = 0; t < kTile; t += kLanes) store(&sums.at[h][n][t], load(&sums.at[h][n][t]) * load(steps + t));
}

// A strip of weights of any coding but groups.
template <typename T>
void dots(Coding coding, const Half half[2], const Half next[2], const Activations& x, int64_t first, int64_t last,
          Buffer& buffer, Sums* sums) {
    if (x.form == Form::words) {
        dot_strip<WholeDot>(half, next, x.cols, x, first, last, buffer, sums);
        for (int64_t tile = first; tile < last; ++tile) scale_tokens(x.scales + tile * kTile, sums[tile - first]);
    } else if (coding == Coding::int8) {
        dot_strip<FloatDot<int8_t>>(half, next, x.cols, x, first, last, buffer, sums);
    } else if constexpr (std::is_same_v<T, BFloat16>) {
        dot_strip<SplitDot>(half, next, x.cols, x, first, last, buffer, sums);
    } else {
        dot_strip<FloatDot<T>>(half, next, x.cols, x, first, last, buffer, sums);
    }
}

}  // namespace quire
