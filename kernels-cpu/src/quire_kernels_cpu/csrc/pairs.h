// Matrices in bfloat16 by vectors, where there are products of its pairs and no tiles.
//
// Of every 32-bit lane two inputs are multiplied and added to what the lane has (on Intel processors the second one
// first), each rounded to nearest even; numbers below the normal ones count as zeros, as in AMX. Pieces of the inputs are
// summed from zero and added.
// Nothing is added across lanes, so a sum has one order whether its lanes are tokens, with which many tokens are multiplied,
// or outputs, with which few are.
#pragma once

#include <algorithm>

#include "activations.h"
#include "dots.h"
#include "tiles.h"
#include "vectors.h"
#include "weights.h"

#if defined(__AVX512BF16__)
namespace quire {

constexpr int64_t kPairPiece = 128;  // pairs of inputs; three tiles of tokens then stay in the first-level cache

// sums[tile].at[h][row + i] (+)= rows [row, row + kRows) of a half times kTiles tiles of tokens, over `steps` pairs.
template <int kTiles, int kRows>
inline void add_rows(const char* rows, int64_t stride, const uint32_t* x, int64_t tile_stride, int64_t steps, bool first,
                     SpreadFetch& fetch, Sums* sums, int h, int row) {
    __m512 acc[kRows][kTiles] = {};
    for (int64_t begin = 0; begin < steps; begin += kTile) {
        fetch.step();
        for (int64_t k = begin; k < begin + kTile; ++k) {
            __m512i tokens[kTiles];
#pragma GCC unroll 4
            for (int v = 0; v < kTiles; ++v) {
                __m512i of_tile = _mm512_loadu_si512(x + v * tile_stride + k * kTile);
                in_register(of_tile);  // by itself: an array's element would be written to the stack
                tokens[v] = of_tile;
            }
#pragma GCC unroll 8
            for (int i = 0; i < kRows; ++i) {
                const __m512i weight = pair_everywhere(rows + i * stride + k * 4);
#pragma GCC unroll 4
                for (int v = 0; v < kTiles; ++v) acc[i][v] = plus_pairs(acc[i][v], weight, tokens[v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < kTiles; ++v) {
            float* const sum = sums[v].at[h][row + i];
            _mm512_store_ps(sum, first ? acc[i][v] : _mm512_load_ps(sum) + acc[i][v]);
        }
}

// One half against tiles [first, last) of the tokens.
inline void many_pairs(const char* rows, const Half& next, const Activations& x, int64_t first, int64_t last, int h,
                       Sums* sums) {
    constexpr int kTogether = 3, kRows = 8;  // 24 sums in registers
    const int64_t stride = x.cols * 2, tile_stride = x.cols / 2 * kTile;
    const int64_t groups = (last - first + kTogether - 1) / kTogether;
    SpreadFetch fetch(next, stride, x.cols / 32 * (kTile / kRows) * groups);
    for (int64_t k = 0; k < x.cols / 2; k += kPairPiece) {
        const int64_t steps = std::min(kPairPiece, x.cols / 2 - k);
        for (int64_t tile = first; tile < last; tile += kTogether)
            for (int row = 0; row < kTile; row += kRows)
                with_count<kTogether>(std::min<int64_t>(kTogether, last - tile), [&](auto tiles) {
                    add_rows<decltype(tiles)::value, kRows>(rows + row * stride + k * 4, stride, x.pairs(tile) + k * kTile,
                                                            tile_stride, steps, k == 0, fetch, sums + (tile - first), h, row);
                });
    }
}

// One half against the kTokens tokens that there are.
template <int kTokens>
inline void few_pairs(const char* rows, const Half& next, const Activations& x, int h, Sums* sums) {
    const int64_t stride = x.cols * 2;
    const char* ahead = next.count ? next.data : rows;  // as much of it as is multiplied meanwhile
    const BFloat16* tokens = x.bf16_row(0);
    const int64_t token_stride = x.token_stride();
    __m512 totals[kTokens] = {};
    for (int64_t piece = 0; piece < stride; piece += kPairPiece * 4) {
        __m512 acc[kTokens] = {};
        for (int64_t begin = piece; begin < std::min(stride, piece + kPairPiece * 4); begin += 32) {
            __m512i weights[8];
            turn_rows(rows + begin, stride, weights);
#pragma GCC unroll 8
            for (int j = 0; j < 8; ++j, tokens += 2, ahead += 64) {
                __builtin_prefetch(ahead, 0, 2);
#pragma GCC unroll 12
                for (int t = 0; t < kTokens; ++t) {
                    __m512i token = pair_everywhere(tokens + t * token_stride);
                    in_register(token);
                    acc[t] = plus_pairs(acc[t], weights[j], token);
                }
            }
        }
#pragma GCC unroll 12
        for (int t = 0; t < kTokens; ++t) totals[t] += acc[t];
    }
    __m512i of_outputs[kTile] = {};
#pragma GCC unroll 12
    for (int t = 0; t < kTokens; ++t) of_outputs[t] = (__m512i)totals[t];
    transpose(of_outputs);
    for (int n = 0; n < kTile; ++n) _mm512_store_si512(sums->at[h][n], of_outputs[n]);
}

// A strip against the tiles [first, last) of the tokens; sums[0] belongs to tile `first`. next: the strip behind it.
inline void pair_strip(const Half half[2], const Half next[2], const Activations& x, int64_t first, int64_t last,
                       Buffer padding[2], Sums* sums) {
    const int64_t row_bytes = x.cols * 2;
    const char* const rows[2] = {whole_rows(half[0], row_bytes, padding[0]), whole_rows(half[1], row_bytes, padding[1])};
    for (int h = 0; h < 2; ++h) {
        const Half& then = h == 0 ? half[1] : next[0];
        if (x.form == Form::pairs) {
            many_pairs(rows[h], then, x, first, last, h, sums);
        } else {
            with_count<kFewPairTokens>(x.tokens, [&](auto tokens) {
                few_pairs<decltype(tokens)::value>(rows[h], then, x, h, sums);
            });
        }
    }
}

}  // namespace quire
#endif
