// Sums over weights whose inputs come in groups of 32, 64 or 128, each with a scale and perhaps a zero point per output:
// value = scale * (element - zero). Elements are int4, int8 or fp8 (e4m3), in rows as `quire_ops` packs them: of int4
// byte j of each 64 holds input j of a piece of 128 in its lower half and input 64 + j in its upper half.
//
// A sum of one group is exact in int32 (with AMX: tokens are quads of int8) or in float32; groups are then added in
// order. A row's result depends neither on the number of tokens nor on the place of a token among them.
#pragma once

#include <algorithm>

#include "activations.h"
#include "tiles.h"
#include "vectors.h"
#include "weights.h"

namespace quire {

// Scales and zeros of one half of a strip.
struct GroupScales {
    const void* scale;    // [groups][16]
    const int16_t* zero;  // [groups][16] or none
    bool wide;

    template <typename T>
    float scale_of(int64_t group, int row) const {
        const int64_t i = group * kTile + row;
        return wide ? static_cast<const float*>(scale)[i] : to_float(static_cast<const T*>(scale)[i]);
    }
    float zero_of(int64_t group, int row) const { return zero ? zero[group * kTile + row] : 0.0f; }
};

template <typename T>
GroupScales scales_of(const Matrix<T>& m, int64_t row) {
    const int64_t at = row / kTile * m.num_groups() * kTile;
    const char* scale = static_cast<const char*>(m.group_scale) + at * (m.wide_scale ? 4 : sizeof(T));
    return {scale, m.group_zero ? m.group_zero + at : nullptr, m.wide_scale};
}

// The int4 of `kLanes` bytes, those in the lower halves and those in the upper halves.
struct TwoFloats {
    Floats low, high;
};
inline TwoFloats load_int4(const char* from) {
    int8_t bytes __attribute__((vector_size(kLanes)));
    std::memcpy(&bytes, from, sizeof bytes);
    const Ints wide = __builtin_convertvector(bytes, Ints);
    return {__builtin_convertvector((wide << 28) >> 28, Floats), __builtin_convertvector(wide >> 4, Floats)};
}

// kRows outputs from `n` on against kTokens tokens, in float32. `rows`: the outputs' weights.
template <typename T, int kRows, int kTokens>
inline void dot_int4(const char* const rows[kRows], const int at[kRows], const GroupScales& scales, int64_t cols,
                     int64_t group, const float* const tokens[kTokens], Floats total[kRows][kTokens]) {
    const int64_t half = kGroupPiece / 2, run = std::min(group, half), last = (cols + group - 1) / group - 1;
    for (int64_t k = 0; k < cols; k += kGroupPiece) {
        for (int64_t begin = 0; begin < half; begin += run) {
            Floats low[kRows][kTokens] = {}, high[kRows][kTokens] = {};
            // Groups beyond the last one have no elements but zeros.
            const int64_t first = std::min((k + begin) / group, last), second = std::min((k + half + begin) / group, last);
            Floats low_zero[kRows], high_zero[kRows];
            for (int i = 0; i < kRows; ++i) {
                low_zero[i] = splat(scales.zero_of(first, at[i]));
                high_zero[i] = splat(scales.zero_of(second, at[i]));
            }
            for (int64_t j = begin; j < begin + run; j += kLanes) {
                Floats xs[kTokens], ys[kTokens];
                for (int t = 0; t < kTokens; ++t) {
                    xs[t] = load(tokens[t] + k + j);
                    ys[t] = load(tokens[t] + k + half + j);
                }
                for (int i = 0; i < kRows; ++i) {
                    TwoFloats w = load_int4(rows[i] + k / 2 + j);
                    if (scales.zero) {
                        w.low -= low_zero[i];
                        w.high -= high_zero[i];
                    }
                    for (int t = 0; t < kTokens; ++t) {
                        low[i][t] += w.low * xs[t];
                        high[i][t] += w.high * ys[t];
                    }
                }
            }
            for (int i = 0; i < kRows; ++i) {
                const Floats a = splat(scales.scale_of<T>(first, at[i])), b = splat(scales.scale_of<T>(second, at[i]));
                for (int t = 0; t < kTokens; ++t) {
                    total[i][t] += a * low[i][t];  // one by one: fused in the same way for any number of tokens
                    total[i][t] += b * high[i][t];
                }
            }
        }
    }
}

// The same for elements of one byte each.
template <typename T, typename W, int kRows, int kTokens>
inline void dot_bytes(const char* const rows[kRows], const int at[kRows], const GroupScales& scales, int64_t cols,
                      int64_t group, const float* const tokens[kTokens], Floats total[kRows][kTokens]) {
    for (int64_t begin = 0, g = 0; begin < cols; begin += group, ++g) {
        const int64_t end = std::min(begin + group, cols);
        Floats acc[kRows][kTokens] = {}, zero[kRows];
        for (int i = 0; i < kRows; ++i) zero[i] = splat(scales.zero_of(g, at[i]));
        for (int64_t k = begin; k < end; k += kLanes) {
            const int rest = static_cast<int>(std::min<int64_t>(kLanes, end - k));
            for (int i = 0; i < kRows; ++i) {
                const W* from = reinterpret_cast<const W*>(rows[i]) + k;
                const Floats w = (rest == kLanes ? load(from) : load_first(from, rest)) - zero[i];
                // Behind the last input there are zeros, see `Activations::row_stride`.
                for (int t = 0; t < kTokens; ++t) acc[i][t] += w * load(tokens[t] + k);
            }
        }
        for (int i = 0; i < kRows; ++i) {
            const Floats scale = splat(scales.scale_of<T>(g, at[i]));
            for (int t = 0; t < kTokens; ++t) total[i][t] += scale * acc[i][t];
        }
    }
}

template <typename T, int kTokens>
void dot_group_rows(Coding coding, const Half& half, const GroupScales& scales, int64_t row_bytes, int64_t group,
                    const Activations& x, int64_t first, float sums[kTile][kTile]) {
    constexpr int kRows = 2;
    const float* tokens[kTokens];
    for (int t = 0; t < kTokens; ++t) tokens[t] = x.row(std::min(first + t, x.tokens - 1));
    for (int n = 0; n < half.count; n += kRows) {
        const char* rows[kRows];
        int at[kRows];
        for (int i = 0; i < kRows; ++i) {
            at[i] = std::min(n + i, half.count - 1);
            rows[i] = half.data + at[i] * row_bytes;
        }
        Floats total[kRows][kTokens] = {};
        if (coding == Coding::group_int4) {
            dot_int4<T, kRows, kTokens>(rows, at, scales, x.cols, group, tokens, total);
        } else if (coding == Coding::group_int8) {
            dot_bytes<T, int8_t, kRows, kTokens>(rows, at, scales, x.cols, group, tokens, total);
        } else {
            dot_bytes<T, Float8, kRows, kTokens>(rows, at, scales, x.cols, group, tokens, total);
        }
        for (int i = 0; i < kRows; ++i)
            for (int t = 0; t < kTokens; ++t) sums[at[i]][first % kTile + t] = sum(total[i][t]);
    }
}

// A strip against a tile of tokens in rows.
template <typename T>
void dot_groups(const Strips<T>& strips, int matrix, int64_t row, const Half half[2], const Activations& x, int64_t tile,
                Sums& sums) {
    constexpr int kTokens = 4;
    const int64_t end = std::min(x.tokens, (tile + 1) * kTile);
    for (int h = 0; h < 2; ++h) {
        if (half[h].count == 0) continue;
        const Matrix<T>& m = strips.matrix_of(matrix, h);
        const GroupScales scales = scales_of(m, strips.row_of(row, h));
        for (int64_t t = tile * kTile; t < end; t += kTokens) {
            const auto dot = end - t > 1 ? dot_group_rows<T, kTokens> : dot_group_rows<T, 1>;
            dot(m.coding, half[h], scales, m.row_bytes(), m.group, x, t, sums.at[h]);
        }
    }
}

}  // namespace quire
