// Weights in groups (`groups.h`) against many tokens, where there are no tiles: a piece of 128 inputs of a half is widened
// once, its zero points taken off, and stays in the first-level cache while all tokens of a block meet it.
//
// A sum takes the same steps in the same order as in `groups.h` and `int4.h`: a token's bits are the same either way.
#pragma once

#include <algorithm>

#include "activations.h"
#include "dots.h"
#include "group_scales.h"
#include "int4.h"
#include "sums.h"
#include "vectors.h"
#include "weights.h"

namespace quire {

constexpr int kPanelVectors = kTile / kLanes;
constexpr int kPanelTokens = 12 / kPanelVectors;  // sums that fit the registers, beside their operands
constexpr int kByteTokens = kLanes == 16 ? 4 : 3;  // likewise, of four outputs

// Int4: [128 inputs][16 outputs].
inline void widen_int4(const Half& half, const GroupScales& scales, int64_t group, int64_t k, int64_t cols,
                       float (*to)[kTile]) {
    const int64_t groups = (std::min(kGroupPiece, cols - k) + group - 1) / group;
    for (int begin = 0; begin < kTile; begin += kLanes) {
        const int lanes = std::clamp(half.count - begin, 0, kLanes);
        Floats middle[kGroupPiece / 32] = {};
        for (int64_t g = 0; g < groups; ++g)
            middle[g] = scales.zeros_of(k / group + g, begin) + static_cast<float>(kInt4Middle);
        for (int s = 0; s < kPieceSteps; ++s) {
            const char* const at = half.data + ((k / kGroupPiece * kPieceSteps + s) * half.count + begin) * 4;
            Words word = {};
            if (lanes == kLanes) {
                std::memcpy(&word, at, sizeof word);
            } else {
                std::memcpy(&word, at, lanes * 4);
            }
            for (int upper = 0; upper < 2; ++upper) {
                const int64_t input = 64 * upper + 4 * s;
                const Floats zero = middle[input / group];
#pragma GCC unroll 4
                for (int j = 0; j < 4; ++j)
                    store(to[input + j] + begin, whole_to_floats((Ints)(word >> (8 * j + 4 * upper) & 15)) - zero);
            }
        }
    }
}

// totals [tokens][16 outputs] += a piece of int4 times kTokens tokens.
template <typename T, int kTokens>
inline void multiply_panel(const float (*panel)[kTile], const GroupScales& scales, int64_t group, int64_t k, int64_t cols,
                           const float* const tokens[kTokens], float (*totals)[kTile]) {
    const int64_t stop = std::min(k + kGroupPiece, cols);
    for (int64_t begin = k; begin < stop; begin += group) {
        Floats acc[kTokens][kPanelVectors] = {};
        // Behind the last input tokens are zeros.
        const int64_t end = (std::min(begin + group, stop) + 3) / 4 * 4;
        for (int64_t i = begin; i < end; ++i) {
            Floats w[kPanelVectors];
#pragma GCC unroll 4
            for (int v = 0; v < kPanelVectors; ++v) w[v] = load(panel[i - k] + v * kLanes);
#pragma GCC unroll 12
            for (int t = 0; t < kTokens; ++t) {
                const Floats x = splat(tokens[t][i]);
#pragma GCC unroll 4
                for (int v = 0; v < kPanelVectors; ++v) acc[t][v] = accumulated(acc[t][v], w[v], x);
            }
        }
#pragma GCC unroll 4
        for (int v = 0; v < kPanelVectors; ++v) {
            const Floats scale = scales.scales_of<T>(begin / group, v * kLanes);
#pragma GCC unroll 12
            for (int t = 0; t < kTokens; ++t)
                store(totals[t] + v * kLanes, fused(scale, acc[t][v], load(totals[t] + v * kLanes)));
        }
    }
}

// One half of int4 against `count` tokens from `begin` on, whose sums begin at sums[0].
template <typename T>
void many_int4_rows(const Half& half, const Half& next, const GroupScales& scales, int64_t group, const Activations& x,
                    int64_t begin, int64_t count, int h, Buffer& buffer, Sums* sums) {
    auto* const panel = reinterpret_cast<float(*)[kTile]>(buffer.get<float>((kGroupPiece + count) * kTile));
    float(*const totals)[kTile] = panel + kGroupPiece;
    std::memset(totals, 0, count * sizeof *totals);
    constexpr int64_t kPieceBytes = kPieceSteps * 4;  // of an output
    for (int64_t k = 0; k < x.cols; k += kGroupPiece) {
        if (next.count) fetch_piece(next.data + k / kGroupPiece * kPieceBytes * next.count, kPieceBytes * next.count);
        widen_int4(half, scales, group, k, x.cols, panel);
        for_tokens<kPanelTokens>(count, [&](int64_t t, auto together) {
            constexpr int kTokens = decltype(together)::value;
            const float* tokens[kTokens];
            for (int i = 0; i < kTokens; ++i) tokens[i] = x.row(begin + t + i);
            multiply_panel<T, kTokens>(panel, scales, group, k, x.cols, tokens, totals + t);
        });
    }
    for (int64_t t = 0; t < count; ++t) std::memcpy(sums[t / kTile].at[h][t % kTile], totals[t], sizeof totals[t]);
}

// Elements of one byte: [16 outputs][128 inputs].
template <typename W>
inline void widen_bytes(const Half& half, const GroupScales& scales, int64_t group, int64_t k, int64_t cols,
                        float (*to)[kGroupPiece]) {
    const int64_t width = std::min(kGroupPiece, cols - k);
    for (int n = 0; n < half.count; ++n) {
        const W* const from = reinterpret_cast<const W*>(half.data + n * cols) + k;
        for (int64_t begin = 0; begin < width; begin += group) {
            const float zero = scales.zero_of((k + begin) / group, n);
            const int64_t end = std::min(begin + group, width);
            for (int64_t i = begin; i < end; i += kLanes) store(to[n] + i, load_some(from + i, end - i) - splat(zero));
        }
    }
}

// totals [tokens][16 outputs] of lanes += four outputs of a piece from `n` on times kTokens tokens.
template <typename T, typename W, int kTokens>
inline void multiply_rows(const float (*wide)[kGroupPiece], const GroupScales& scales, int64_t group, int64_t k,
                          int64_t cols, int n, const float* const tokens[kTokens], Floats (*totals)[kTile]) {
    const int64_t stop = std::min(k + kGroupPiece, cols);
    for (int64_t begin = k; begin < stop; begin += group) {
        Floats acc[kDotRows][kTokens] = {};
        const int64_t end = std::min(begin + group, stop);
        for (int64_t i = begin; i < end; i += kLanes) {
            Floats xs[kTokens];
#pragma GCC unroll 6
            for (int t = 0; t < kTokens; ++t) {
                xs[t] = load(tokens[t] + i);
                in_register(xs[t]);
            }
#pragma GCC unroll 4
            for (int r = 0; r < kDotRows; ++r) {
                const Floats w = load(wide[n + r] + i - k);
#pragma GCC unroll 6
                for (int t = 0; t < kTokens; ++t) acc[r][t] = accumulated(acc[r][t], w, xs[t]);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < kDotRows; ++r) {
            const Floats scale = splat(scales.scale_of<T>(begin / group, n + r));
#pragma GCC unroll 6
            for (int t = 0; t < kTokens; ++t) totals[t][n + r] = fused(scale, acc[r][t], totals[t][n + r]);
        }
    }
}

template <typename T, typename W>
void many_byte_rows(const Half& half, const Half& next, const GroupScales& scales, int64_t group, const Activations& x,
                    int64_t begin, int64_t count, int h, Buffer& buffer, Sums* sums) {
    constexpr int64_t kWideFloats = kTile * kGroupPiece;
    float* const room = buffer.get<float>(kWideFloats + count * kTile * kLanes);
    auto* const wide = reinterpret_cast<float(*)[kGroupPiece]>(room);
    auto* const totals = reinterpret_cast<Floats(*)[kTile]>(room + kWideFloats);
    std::memset(room, 0, (kWideFloats + count * kTile * kLanes) * sizeof *room);
    for (int64_t k = 0; k < x.cols; k += kGroupPiece) {
        for (int n = 0; n < next.count; ++n) fetch_piece(next.data + n * x.cols + k, std::min(kGroupPiece, x.cols - k));
        widen_bytes<W>(half, scales, group, k, x.cols, wide);
        for_tokens<kByteTokens>(count, [&](int64_t t, auto together) {
            constexpr int kTokens = decltype(together)::value;
            const float* tokens[kTokens];
            for (int i = 0; i < kTokens; ++i) tokens[i] = x.row(begin + t + i);
            for (int n = 0; n < half.count; n += kDotRows)
                multiply_rows<T, W, kTokens>(wide, scales, group, k, x.cols, n, tokens, totals + t);
        });
    }
    for (int64_t t = 0; t < count; ++t)
        for (int n = 0; n < half.count; ++n) sums[t / kTile].at[h][t % kTile][n] = sum(totals[t][n]);
}

// A strip against the tiles [first, last) of tokens in rows; sums[0] belongs to tile `first`. next: the strip behind it.
template <typename T>
void many_groups(const Strips<T>& strips, int matrix, int64_t row, const Half half[2], const Half next[2],
                 const Activations& x, int64_t first, int64_t last, Buffer& buffer, Sums* sums) {
    const int64_t begin = first * kTile, count = std::min(x.tokens, last * kTile) - begin;
    for (int64_t tile = first; tile < last; ++tile) sums[tile - first].by_token = true;
    for (int h = 0; h < 2; ++h) {
        if (half[h].count == 0) continue;
        const Matrix<T>& m = strips.matrix_of(matrix, h);
        const GroupScales scales = scales_of(m, strips.row_of(row, h));
        const auto run = m.format == WeightFormat::group_int4   ? many_int4_rows<T>
                         : m.format == WeightFormat::group_int8 ? many_byte_rows<T, int8_t>
                                                          : many_byte_rows<T, Float8>;
        run(half[h], next[h], scales, m.group, x, begin, count, h, buffer, sums);
    }
}

}  // namespace quire
