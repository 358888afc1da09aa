// Matrices by vectors, where there are no tiles: dot products of a few outputs with a few tokens.
//
// Inputs come in pieces. What a lane sums to in a piece starts at zero and is then added to what it has from the pieces
// before; at the end the lanes are added in one order. All of this is the same for one token and for many.
#pragma once

#include <algorithm>

#include "activations.h"
#include "sums.h"
#include "vectors.h"
#include "weights.h"

namespace quire {

constexpr int kDotRows = 4;  // for one or two tokens, so that memory is read in four runs
// For more, eight rows meet some tokens while those are in the first-level cache, as many at a time as have sums that fit the
// registers.
constexpr int kBlockRows = 8;
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kManyRows = 2, kManyTokens = 5;
#else
constexpr int kManyRows = 4, kManyTokens = 4;
#endif

// How weights of type W meet tokens: `kVectors` vectors for each step of `kStep` inputs, on both sides; pieces of `kPiece`.
template <typename W>
struct FloatDot {
    using Weight = W;
    using Number = float;
    using Vector = Floats;
    using Sum = Floats;
    static constexpr int kVectors = 1, kStep = kLanes, kPiece = 512;

    static const Number* token(const Activations& x, int64_t t) { return x.row(t); }
    static Vector widened_part(const W* from, int) { return load(from); }
    static Sum add(Sum sum, Vector a, Vector b) { return accumulated(sum, a, b); }
    static Floats to_floats(Sum sum) { return sum; }
};

// The even inputs of a step, then the odd ones: what shifting and masking give, see `ActLayout::split_rows`.
struct SplitDot : FloatDot<BFloat16> {
    static constexpr int kVectors = 2, kStep = 2 * kLanes;

    static Floats widened_part(const BFloat16* from, int part) { return part ? odd_numbers(from) : even_numbers(from); }
};

// Int8 against whole numbers of 16 bits, exact within a piece.
struct WholeDot {
    using Weight = int8_t;
    using Number = int16_t;
    using Vector = Shorts;
    using Sum = Ints;
    static constexpr int kVectors = 1, kStep = 2 * kLanes, kPiece = 512;

    static const Number* token(const Activations& x, int64_t t) { return x.words(t); }
    static Vector widened_part(const int8_t* from, int) { return widened_bytes(from); }
    static Sum add(Sum sum, Vector a, Vector b) { return plus_pair_products(sum, a, b); }
    static Floats to_floats(Sum sum) { return whole_to_floats(sum); }
};

// One step of a row, the first `count` inputs of it and zeros behind.
template <typename Dot>
inline typename Dot::Vector widened_first(const typename Dot::Weight* from, int part, int count) {
    typename Dot::Weight padded[Dot::kStep] = {};
    std::memcpy(padded, from, count * sizeof *padded);
    return Dot::widened_part(padded, part);
}

// sums += one step of kRows rows times kTokens tokens, of all its inputs (`kWhole`) or the first `count`.
template <typename Dot, int kRows, int kTokens, bool kWhole>
__attribute__((always_inline)) inline void dot_step(const typename Dot::Weight* const rows[kRows],
                                                    const typename Dot::Number* const tokens[kTokens], int64_t k,
                                                    int count, typename Dot::Sum sums[kRows][kTokens]) {
    using Vector = typename Dot::Vector;
    constexpr int64_t kNumbers = sizeof(Vector) / sizeof(typename Dot::Number);
    const auto weight = [&](int i, int part) {
        return kWhole ? Dot::widened_part(rows[i] + k, part) : widened_first<Dot>(rows[i] + k, part, count);
    };
    const auto token = [&](int t, int part) {
        Vector x;
        std::memcpy(&x, tokens[t] + k + part * kNumbers, sizeof x);
        in_register(x);
        return x;
    };
#pragma GCC unroll 2
    for (int part = 0; part < Dot::kVectors; ++part) {
        if constexpr (kRows == 2 && kTokens > 2) {
            Vector w0 = weight(0, part), w1 = weight(1, part);
            in_register(w0);
            in_register(w1);
#pragma GCC unroll 8
            for (int t = 0; t < kTokens; ++t) {
                const Vector x = token(t, part);
                sums[0][t] = Dot::add(sums[0][t], w0, x);
                sums[1][t] = Dot::add(sums[1][t], w1, x);
            }
        } else {
            Vector kept[kTokens];
#pragma GCC unroll 8
            for (int t = 0; t < kTokens; ++t) kept[t] = token(t, part);
#pragma GCC unroll 8
            for (int i = 0; i < kRows; ++i) {
                const Vector w = weight(i, part);
#pragma GCC unroll 8
                for (int t = 0; t < kTokens; ++t) sums[i][t] = Dot::add(sums[i][t], w, kept[t]);
            }
        }
    }
}

// Memory to come, asked for in its order while others multiply, some lines with every product: a processor waits for the
// first of too many at once, and reads one run faster than the runs of rows that are multiplied side by side.
struct LinesAhead {
    const char* at = nullptr;
    int64_t count = 0;

    LinesAhead() = default;
    LinesAhead(const Half& half, int64_t row_bytes) : at(half.data), count(half.count * row_bytes / 64) {}
    LinesAhead of_part(int64_t part, int64_t parts) const { return between(part, part + 1, parts); }
    // Those that belong to parts [begin, end) of `parts`.
    LinesAhead between(int64_t begin, int64_t end, int64_t parts) const {
        LinesAhead lines;
        lines.at = at + count * begin / parts * 64;
        lines.count = count * end / parts - count * begin / parts;
        return lines;
    }
};

// take(row, token, lanes) for each of kRows rows times kTokens tokens over one piece.
template <typename Dot, int kRows, int kTokens, typename Take>
__attribute__((always_inline)) inline void dot_piece(const typename Dot::Weight* const rows[kRows],
                                                     const typename Dot::Number* const tokens[kTokens], int64_t cols,
                                                     const LinesAhead& ahead, const Take& take) {
    typename Dot::Sum sums[kRows][kTokens] = {};
    const int64_t steps = cols / Dot::kStep, whole = steps * Dot::kStep;
    int64_t k = 0;
    if (ahead.count) {
        // So many lines after every few steps.
        const int64_t between = std::max<int64_t>(1, steps / ahead.count) * Dot::kStep;
        const int64_t together = (ahead.count * between + whole - 1) / std::max<int64_t>(whole, 1);
        const char* const stop = ahead.at + ahead.count * 64;
        for (const char* line = ahead.at; line < stop;) {
            for (const char* end = std::min(line + together * 64, stop); line < end; line += 64)
                __builtin_prefetch(line, 0, 2);
            for (const int64_t end = std::min(k + between, whole); k < end; k += Dot::kStep)
                dot_step<Dot, kRows, kTokens, true>(rows, tokens, k, 0, sums);
        }
    }
    for (; k < whole; k += Dot::kStep) dot_step<Dot, kRows, kTokens, true>(rows, tokens, k, 0, sums);
    if (whole < cols)
        dot_step<Dot, kRows, kTokens, false>(rows, tokens, whole, static_cast<int>(cols - whole), sums);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
        for (int t = 0; t < kTokens; ++t) take(i, t, Dot::to_floats(sums[i][t]));
}

// Of a half four rows come together that are four apart: so memory is read in four runs, each of four rows in a row and in
// pages of its own. Processors read ahead of such runs as well as of one, and badly of four rows in a row.
inline int dot_row(int i) { return i / kDotRows + i % kDotRows * (kTile / kDotRows); }

// Row i of a half in that order, from input `begin` on; what is not there is some other row.
template <typename Weight>
inline const Weight* row_of(const Half& half, int i, int64_t cols, int64_t begin) {
    return reinterpret_cast<const Weight*>(half.data) + std::min(dot_row(i), half.count - 1) * cols + begin;
}

// One half against kTokens tokens, from token `first` on, whose sums begin at sums[0]; next: what will be read then.
template <typename Dot, int kTokens>
void few_dots(const Half& half, const Half& next, int64_t cols, const Activations& x, int64_t first, int h, Sums* sums) {
    const LinesAhead lines(next, cols * sizeof(typename Dot::Weight));
    const int64_t pieces = (cols + Dot::kPiece - 1) / Dot::kPiece, parts = kTile / kDotRows * pieces;
    for (int row = 0; row < std::min(kDotRows * half.count, kTile); row += kDotRows) {
        Floats total[kDotRows][kTokens] = {};
        for (int64_t begin = 0; begin < cols; begin += Dot::kPiece) {
            const LinesAhead ahead = lines.of_part(row / kDotRows * pieces + begin / Dot::kPiece, parts);
            const typename Dot::Weight* rows[kDotRows];
            for (int i = 0; i < kDotRows; ++i) rows[i] = row_of<typename Dot::Weight>(half, row + i, cols, begin);
            const typename Dot::Number* tokens[kTokens];
            for (int t = 0; t < kTokens; ++t) tokens[t] = Dot::token(x, first + t) + begin;
            dot_piece<Dot, kDotRows, kTokens>(rows, tokens, std::min<int64_t>(Dot::kPiece, cols - begin), ahead,
                                              [&](int i, int t, Floats lanes) { total[i][t] += lanes; });
        }
        for (int t = 0; t < kTokens; ++t) {
            const Floats lanes[kDotRows] = {total[0][t], total[1][t], total[2][t], total[3][t]};
            float of_rows[kDotRows];
            sum_four(lanes, of_rows);
            for (int i = 0; i < kDotRows; ++i) sums->at[h][t][dot_row(row + i)] = of_rows[i];
        }
    }
}

// run(first token, how many as a constant): as few parts as there can be of at most kMost tokens, nearly alike.
template <int kMost, typename Run>
inline void for_tokens(int64_t count, const Run& run) {
    const int64_t parts = (count + kMost - 1) / kMost;
    for (int64_t i = 0, t = 0; i < parts; ++i) {
        const int64_t end = count * (i + 1) / parts;
        with_count<kMost>(end - t, [&](auto together) { run(t, together); });
        t = end;
    }
}

// A piece of a row into the second-level cache, while others multiply.
template <typename Weight>
inline void fetch_piece(const Weight* from, int64_t cols) {
    const char* const bytes = reinterpret_cast<const char*>(from);
    for (int64_t i = 0; i < cols * static_cast<int64_t>(sizeof(Weight)); i += 64) __builtin_prefetch(bytes + i, 0, 2);
}

// One half against `count` tokens from `first` on, whose sums begin at sums[0]; next: what comes in its place in the next
// strip. A piece of kBlockRows rows stays in the first-level cache while all tokens meet it, some at a time. Weights are
// widened for those, and again for the next ones: rows that were widened beforehand would take the cache from the tokens.
template <typename Dot>
void many_dots(const Half& half, const Half& next, int64_t cols, const Activations& x, int64_t first, int64_t count, int h,
               Buffer& buffer, Sums* sums) {
    using Weight = typename Dot::Weight;
    const int64_t stride = (count + 3) / 4 * 4;
    Floats* const totals = buffer.get<Floats>(stride * kBlockRows);  // [kBlockRows][stride]
    const LinesAhead lines(next, cols * sizeof(Weight));
    const int64_t pieces = (cols + Dot::kPiece - 1) / Dot::kPiece, parts = kTile / kBlockRows * pieces;
    for (int block = 0; block < std::min(kDotRows * half.count, kTile); block += kBlockRows) {
        for (int64_t begin = 0; begin < cols; begin += Dot::kPiece) {
            const int64_t width = std::min<int64_t>(Dot::kPiece, cols - begin);
            const LinesAhead of_piece = lines.of_part(block / kBlockRows * pieces + begin / Dot::kPiece, parts);
            const Weight* rows[kBlockRows];
            for (int i = 0; i < kBlockRows; ++i) rows[i] = row_of<Weight>(half, block + i, cols, begin);
            for_tokens<kManyTokens>(count, [&](int64_t token, auto together) {
                constexpr int kTokens = decltype(together)::value;
                const typename Dot::Number* tokens[kTokens];
                for (int t = 0; t < kTokens; ++t) tokens[t] = Dot::token(x, first + token + t) + begin;
                for (int row = 0; row < kBlockRows; row += kManyRows) {
                    // Each of the groups of tokens fetches its share, about as much with each row.
                    const int64_t at = token * kBlockRows + row * kTokens, part = kManyRows * kTokens;
                    const LinesAhead ahead = of_piece.between(at, at + part, count * kBlockRows);
                    dot_piece<Dot, kManyRows, kTokens>(rows + row, tokens, width, ahead, [&](int i, int t, Floats lanes) {
                        Floats& total = totals[(row + i) * stride + token + t];
                        total = (begin == 0 ? Floats{} : total) + lanes;
                    });
                }
            });
        }
        for (int i = 0; i < kBlockRows; ++i)
            for (int64_t t = 0; t < count; t += 4)
                sum_four(totals + i * stride + t, &sums[t / kTile].at[h][dot_row(block + i)][t % kTile]);
    }
}

// The lines of a half to come, fetched evenly over `steps` calls.
class SpreadFetch {
public:
    SpreadFetch(const Half& half, int64_t row_bytes, int64_t steps)
        : at_(half.data), lines_(half.count * row_bytes / 64), steps_(steps) {}

    void step() {
        for (owed_ += lines_; owed_ >= steps_; owed_ -= steps_, at_ += 64) __builtin_prefetch(at_, 0, 2);
    }

private:
    const char* at_;
    const int64_t lines_, steps_;
    int64_t owed_ = 0;
};

// A strip against the tiles [first, last) of the tokens; sums[0] belongs to tile `first`.
template <typename Dot>
void dot_strip(const Half half[2], const Half next[2], int64_t cols, const Activations& x, int64_t first, int64_t last,
               Buffer& buffer, Sums* sums) {
    const int64_t begin = first * kTile, count = std::min(x.tokens, last * kTile) - begin;
    sums->by_token = count <= 2;
    for (int h = 0; h < 2; ++h) {
        const Half& then = h == 0 && half[1].count ? half[1] : next[0];
        if (count == 1) {
            few_dots<Dot, 1>(half[h], then, cols, x, begin, h, sums);
        } else if (count == 2) {
            few_dots<Dot, 2>(half[h], then, cols, x, begin, h, sums);
        } else {
            many_dots<Dot>(half[h], then, cols, x, begin, count, h, buffer, sums);
        }
    }
}

// Sums of whole numbers times the tokens' steps.
inline void scale_tokens(const float* steps, Sums& sums) {
    for (int h = 0; h < 2; ++h)
        for (int i = 0; i < kTile; ++i)
            for (int j = 0; j < kTile; j += kLanes) {
                float* const some = &sums.at[h][i][j];
                store(some, load(some) * (sums.by_token ? splat(steps[i]) : load(steps + j)));
            }
}

// A strip of weights of any format but groups.
template <typename T>
void dots(WeightFormat format, const Half half[2], const Half next[2], const Activations& x, int64_t first, int64_t last,
          Buffer& buffer, Sums* sums) {
    if (x.layout == ActLayout::words) {
        dot_strip<WholeDot>(half, next, x.cols, x, first, last, buffer, sums);
        for (int64_t tile = first; tile < last; ++tile) scale_tokens(x.scales + tile * kTile, sums[tile - first]);
    } else if (format == WeightFormat::int8) {
        dot_strip<FloatDot<int8_t>>(half, next, x.cols, x, first, last, buffer, sums);
    } else if constexpr (std::is_same_v<T, BFloat16>) {
        dot_strip<SplitDot>(half, next, x.cols, x, first, last, buffer, sums);
    } else {
        dot_strip<FloatDot<T>>(half, next, x.cols, x, first, last, buffer, sums);
    }
}

}  // namespace quire
