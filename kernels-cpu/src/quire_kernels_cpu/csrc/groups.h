// Sums over weights whose inputs come in groups of 32, 64 or 128, each with a scale and perhaps a zero point per output:
// value = scale * (element - zero). Elements are int8 or fp8 (e4m3) in rows, or int4 (`int4.h`), as `quire_ops` packs them.
//
// A sum of one group is exact in int32 (with AMX: tokens are quads of int8) or in float32; groups are then added in
// order. A row's result depends neither on the number of tokens nor on the place of a token among them.
#pragma once

#include <algorithm>

#include "activations.h"
#include "dots.h"
#include "group_scales.h"
#include "int4.h"
#include "sums.h"
#include "tiles.h"
#include "vectors.h"
#include "weights.h"

namespace quire {

// kRows outputs against kTokens tokens. `rows`: the outputs' weights, of one byte each.
template <typename T, typename W, int kRows, int kTokens>
inline void dot_bytes(const char* const rows[kRows], const int at[kRows], const GroupScales& scales, int64_t cols,
                      int64_t group, const float* const tokens[kTokens], Floats total[kRows][kTokens]) {
    for (int64_t begin = 0, g = 0; begin < cols; begin += group, ++g) {
        const int64_t end = std::min(begin + group, cols);
        Floats acc[kRows][kTokens] = {};
        float zero[kRows];
#pragma GCC unroll 4
        for (int i = 0; i < kRows; ++i) zero[i] = scales.zero_of(g, at[i]);
        const auto step = [&](int64_t k, auto read) __attribute__((always_inline)) {
            Floats x[kTokens];
#pragma GCC unroll 4
            for (int t = 0; t < kTokens; ++t) x[t] = load(tokens[t] + k);
#pragma GCC unroll 4
            for (int i = 0; i < kRows; ++i) {
                const Floats w = read(reinterpret_cast<const W*>(rows[i]) + k) - splat(zero[i]);
#pragma GCC unroll 4
                for (int t = 0; t < kTokens; ++t) acc[i][t] = accumulated(acc[i][t], w, x[t]);
            }
        };
        int64_t k = begin;
        for (; k + kLanes <= end; k += kLanes) step(k, [](const W* from) { return load(from); });
        // Behind the last input there are zeros, see `Activations::row_stride`.
        if (k < end) step(k, [&](const W* from) { return load_first(from, static_cast<int>(end - k)); });
#pragma GCC unroll 4
        for (int i = 0; i < kRows; ++i) {
            const Floats scale = splat(scales.scale_of<T>(g, at[i]));
#pragma GCC unroll 4
            for (int t = 0; t < kTokens; ++t) total[i][t] = fused(scale, acc[i][t], total[i][t]);
        }
    }
}

template <typename T, int kTokens>
void dot_group_rows(WeightFormat format, const Half& half, const GroupScales& scales, int64_t row_bytes, int64_t group,
                    const Activations& x, int64_t first, float sums[kTile][kTile]) {
    constexpr int kRows = kLanes == 16 ? 4 : 2;  // whose sums fit the registers
    const float* tokens[kTokens];
    for (int t = 0; t < kTokens; ++t) tokens[t] = x.row(std::min(first + t, x.tokens - 1));
    for (int n = 0; n < std::min(kDotRows * half.count, kTile); n += kRows) {
        const char* rows[kRows];
        int at[kRows];
        for (int i = 0; i < kRows; ++i) {
            at[i] = std::min(dot_row(n + i), half.count - 1);
            rows[i] = half.data + at[i] * row_bytes;
        }
        Floats total[kRows][kTokens] = {};
        if (format == WeightFormat::group_int8) {
            dot_bytes<T, int8_t, kRows, kTokens>(rows, at, scales, x.cols, group, tokens, total);
        } else {
            dot_bytes<T, Float8, kRows, kTokens>(rows, at, scales, x.cols, group, tokens, total);
        }
        for (int i = 0; i < kRows; ++i)
            for (int t = 0; t < kTokens; ++t) sums[first % kTile + t][at[i]] = sum(total[i][t]);
    }
}

// A strip against a tile of tokens in rows, of which there are few; more go through `group_panels.h`.
template <typename T>
void dot_groups(const Strips<T>& strips, int matrix, int64_t row, const Half half[2], const Activations& x, int64_t tile,
                Sums& sums) {
    constexpr int kTokens = 4;
    const int64_t end = std::min(x.tokens, (tile + 1) * kTile);
    sums.by_token = true;
    for (int h = 0; h < 2; ++h) {
        if (half[h].count == 0) continue;
        const Matrix<T>& m = strips.matrix_of(matrix, h);
        const GroupScales scales = scales_of(m, strips.row_of(row, h));
        for (int64_t t = tile * kTile; t < end; t += kTokens) {
            if (m.format == WeightFormat::group_int4) {
                const auto dot = end - t > 1 ? dot_int4_rows<T, kTokens> : dot_int4_rows<T, 1>;
                dot(half[h], scales, m.group, x, t, sums.at[h]);
                continue;
            }
            const auto dot = end - t > 1 ? dot_group_rows<T, kTokens> : dot_group_rows<T, 1>;
            dot(m.format, half[h], scales, m.row_bytes(), m.group, x, t, sums.at[h]);
        }
    }
}

}  // namespace quire
