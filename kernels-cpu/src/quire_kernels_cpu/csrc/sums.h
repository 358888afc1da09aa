// What a strip of weights and a tile of tokens sum to, and how sums become outputs.
#pragma once

#include <cstdint>

#include "tiles.h"
#include "vectors.h"
#include "weights.h"

namespace quire {

// Of both halves [16 outputs][16 tokens], or [16 tokens][16 outputs] where a way of multiplying has them so. What stands
// for no output or no token may be anything.
struct alignas(64) Sums {
    float at[2][kTile][kTile];
    bool by_token;
};

// The same sums the other way.
inline void turn_over(const Sums& from, Sums& to) {
    to.by_token = !from.by_token;
    for (int h = 0; h < 2; ++h) {
#if defined(__AVX512F__)
        __m512i r[kTile];
        for (int i = 0; i < kTile; ++i) r[i] = _mm512_load_si512(from.at[h][i]);
        transpose(r);
        for (int i = 0; i < kTile; ++i) _mm512_store_si512(to.at[h][i], r[i]);
#elif defined(__AVX2__)
        for (int row = 0; row < kTile; row += kLanes)
            for (int col = 0; col < kTile; col += kLanes) {
                Floats r[kLanes];
                for (int i = 0; i < kLanes; ++i) r[i] = load(from.at[h][row + i] + col);
                transpose(r);
                for (int i = 0; i < kLanes; ++i) store(to.at[h][col + i] + row, r[i]);
            }
#else
        for (int i = 0; i < kTile; ++i)
            for (int j = 0; j < kTile; ++j) to.at[h][j][i] = from.at[h][i][j];
#endif
    }
}

// The sums by token, or else by output, in `room` unless they are so already.
inline const Sums& ordered(const Sums& sums, bool by_token, Sums& room) {
    if (sums.by_token == by_token) return sums;
    turn_over(sums, room);
    return room;
}

// Sums times their outputs' scales plus biases, which `of` reads: of(m.scale), of(m.bias). Wherever a number stands, it is
// computed by the same instructions.
template <typename T, typename Of>
inline Floats finished(const Matrix<T>& m, Floats sum, const Of& of) {
    if (m.scale && m.bias) return fused(sum, of(m.scale), of(m.bias));
    if (m.scale) return sum * of(m.scale);
    return m.bias ? sum + of(m.bias) : sum;
}

// Of one token, run(n, lanes, values): its outputs from row + n on, so many of them. count: outputs of the half.
template <typename T, typename Run>
inline void for_outputs(const Matrix<T>& m, int64_t row, const float* sums, int count, const Run& run) {
    for (int n = 0; n < count; n += kLanes)
        run(n, count - n, finished(m, load(sums + n), [&](const T* from) { return load_some(from + row + n, count - n); }));
}

}  // namespace quire
