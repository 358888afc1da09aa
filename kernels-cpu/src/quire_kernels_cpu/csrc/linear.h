// y = x W^T for weights as a checkpoint has them: row-major [outputs, inputs], mapped, never repacked (int4 is, when it is loaded).
//
// Work is cut into strips of two times 16 outputs. A strip against 16 tokens gives two blocks of sums, [16 outputs][16
// tokens] in float32, which go to an epilogue that knows what becomes of them. Each sum runs over the inputs in one
// order that depends neither on the number of tokens nor on the place of a token among them.
//
// With AMX the weight, in bfloat16 or int8, is the first operand, whose rows are read where they are; the tokens, which
// are few, are the second, which has to be interleaved. Otherwise sums are dot products by vectors (`dots.h`).
#pragma once

#include <algorithm>
#include <type_traits>

#include "activations.h"
#include "block_dots.h"
#include "dots.h"
#include "group_panels.h"
#include "group_tiles.h"
#include "groups.h"
#include "lane_sums.h"
#include "sums.h"
#include "team.h"
#include "tiles.h"
#include "vectors.h"
#include "weights.h"

namespace quire {

// Tiles of tokens whose sums wait while a strip's weights are in the core's cache.
constexpr int64_t kBlockTiles = 32;
constexpr int64_t kFewGroupTokens = 4;  // for which weights in groups are widened as they are read
constexpr int64_t kRowsRoom = 1 << 17;  // where vectors multiply, as numbers of 16 bits

// What a thread needs beside the stack.
struct LinearScratch {
    Buffer sums, parts, gathered, padding[2], decoded[2];
};

#ifdef QUIRE_AMX

// A strip's weights for the tile registers: two times 16 rows of 64 bytes, for each 32 inputs.
struct TileRows {
    const char* rows[2];
    int64_t stride, step_bytes;
};

#define QUIRE_MULTIPLY(to, a, b)    \
    if constexpr (kInt8) {           \
        _tile_dpbssd(to, a, b);      \
    } else {                         \
        _tile_dpbf16ps(to, a, b);    \
    }

// sums (+)= strip x tokens over `steps` steps, for one or two tiles of columns: 32 inputs a step in bfloat16, 64 in
// int8, whose sums are int32.
template <bool kInt8, bool kTwo, bool kFetch>
inline void multiply_tiles(Sums* sums, bool first, const TileRows& w, const uint32_t* x0, const uint32_t* x1,
                           int64_t steps, Ahead& ahead) {
    const char *w0 = w.rows[0], *w1 = w.rows[1], *ahead0 = ahead.at[0], *ahead1 = ahead.at[1];
    const int64_t stride = w.stride, step_bytes = w.step_bytes, ahead_bytes = ahead.lines * 64;
    if (first) {
        _tile_zero(0);
        _tile_zero(1);
        if (kTwo) {
            _tile_zero(2);
            _tile_zero(3);
        }
    } else {
        _tile_loadd(0, sums[0].at[0], 64);
        _tile_loadd(1, sums[0].at[1], 64);
        if (kTwo) {
            _tile_loadd(2, sums[1].at[0], 64);
            _tile_loadd(3, sums[1].at[1], 64);
        }
    }
    for (int64_t k = 0; k < steps; ++k) {
        if (kFetch) {
            const char *stop0 = std::min(ahead0 + ahead_bytes, ahead.end[0]);
            const char *stop1 = std::min(ahead1 + ahead_bytes, ahead.end[1]);
            for (; ahead0 < stop0; ahead0 += 64) _mm_prefetch(ahead0, _MM_HINT_T1);
            for (; ahead1 < stop1; ahead1 += 64) _mm_prefetch(ahead1, _MM_HINT_T1);
        }
        _tile_loadd(4, w0, stride);
        _tile_loadd(6, x0, 64);
        QUIRE_MULTIPLY(0, 4, 6);
        _tile_loadd(5, w1, stride);
        QUIRE_MULTIPLY(1, 5, 6);
        if (kTwo) {
            _tile_loadd(7, x1, 64);
            QUIRE_MULTIPLY(2, 4, 7);
            QUIRE_MULTIPLY(3, 5, 7);
            x1 += 256;
        }
        x0 += 256;
        w0 += step_bytes;
        w1 += step_bytes;
    }
    if (kFetch) {
        ahead.at[0] = ahead0;
        ahead.at[1] = ahead1;
    }
    _tile_stored(0, sums[0].at[0], 64);
    _tile_stored(1, sums[0].at[1], 64);
    if (kTwo) {
        _tile_stored(2, sums[1].at[0], 64);
        _tile_stored(3, sums[1].at[1], 64);
    }
}

#undef QUIRE_MULTIPLY

// Bytes [begin, begin + width) of a strip's rows, side by side as the tile registers take them: rows far apart in memory
// would push each other out of the first-level cache.
inline TileRows gather_rows(const char* const rows[2], int64_t row_bytes, int64_t begin, int64_t width, char* to) {
    for (int h = 0; h < 2; ++h)
        for (int i = 0; i < kTile; ++i) {
            const char* from = rows[h] + i * row_bytes + begin;
            for (int64_t c = 0; c < width; c += 64)
                _mm512_store_si512(to + c * 32 + h * 1024 + i * 64, _mm512_loadu_si512(from + c));
        }
    return {{to, to + 1024}, 64, 2048};
}

constexpr int64_t kGatheredBytes = 512;

// Tiles [first, last) of the tokens against one strip, both in bfloat16 or in int8; sums[0] belongs to tile `first`.
template <bool kInt8>
inline void pairs_strip(const char* const rows[2], int64_t row_bytes, const Activations& x, int64_t first, int64_t last,
                        Sums* sums, char* gathered, Ahead& ahead) {
    // With many tokens, a piece of the strip that fits the first-level cache meets all of them before the next piece.
    const bool many = last - first > 2;
    const int64_t piece = many ? kGatheredBytes : row_bytes;
    const auto tokens = [&](int64_t tile, int64_t begin) {
        return static_cast<const uint32_t*>(x.data) + (tile * row_bytes + begin) * 4;  // 16 tokens for each 4 bytes of a row
    };
    for (int64_t begin = 0; begin < row_bytes; begin += piece) {
        const int64_t width = std::min(piece, row_bytes - begin);
        TileRows w{{rows[0] + begin, rows[1] + begin}, row_bytes, 64};
        if (many) w = gather_rows(rows, row_bytes, begin, width, gathered);
        for (int64_t tile = first; tile < last; tile += 2) {
            const uint32_t* x0 = tokens(tile, begin);
            const uint32_t* x1 = tile + 1 < last ? tokens(tile + 1, begin) : nullptr;
            const auto multiply = x1 ? (ahead.done() ? multiply_tiles<kInt8, true, false> : multiply_tiles<kInt8, true, true>)
                                     : (ahead.done() ? multiply_tiles<kInt8, false, false> : multiply_tiles<kInt8, false, true>);
            multiply(sums + (tile - first), begin == 0, w, x0, x1, width / 64, ahead);
        }
    }
    for (int64_t tile = first; kInt8 && tile < last; ++tile) {
        const __m512 scale = _mm512_loadu_ps(x.scales + tile * kTile);
        for (int h = 0; h < 2; ++h)
            for (int n = 0; n < kTile; ++n) {
                float* to = sums[tile - first].at[h][n];
                _mm512_store_ps(to, _mm512_cvtepi32_ps(_mm512_load_si512(to)) * scale);
            }
    }
}

// Int8 against tokens of 15 bits: a tile of tokens is two tiles of columns, whose sums of high and low parts are put together.
inline void quads_strip(const char* const rows[2], const Activations& x, int64_t first, int64_t last, Sums* sums,
                        Ahead& ahead) {
    const TileRows w{{rows[0], rows[1]}, x.cols, 64};
    const __m512i high = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i low = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    for (int64_t tile = first; tile < last; ++tile) {
        Sums whole[2];
        const bool two = x.tokens - tile * kTile > kTile / 2;
        const uint32_t* x0 = x.quads(tile);
        const uint32_t* x1 = x0 + x.cols / 4 * kTile;
        const auto multiply = two ? (ahead.done() ? multiply_tiles<true, true, false> : multiply_tiles<true, true, true>)
                                  : (ahead.done() ? multiply_tiles<true, false, false> : multiply_tiles<true, false, true>);
        multiply(whole, true, w, x0, x1, x.cols / 64, ahead);
        const __m512 scale = _mm512_loadu_ps(x.scales + tile * kTile);
        for (int h = 0; h < 2; ++h)
            for (int n = 0; n < kTile; ++n) {
                const __m512i a = _mm512_load_si512(whole[0].at[h][n]);
                const __m512i b = two ? _mm512_load_si512(whole[1].at[h][n]) : a;
                const __m512 upper = _mm512_cvtepi32_ps(_mm512_permutex2var_epi32(a, high, b));
                const __m512 lower = _mm512_cvtepi32_ps(_mm512_permutex2var_epi32(a, low, b));
                _mm512_store_ps(sums[tile - first].at[h][n], (upper * 128.0f + lower) * scale);
            }
    }
}

// A strip of weights of any format but int4 against the tiles [first, last) of the tokens; sums[0] belongs to tile `first`.
template <typename T>
void tile_strip(const Strips<T>& strips, int matrix, int64_t row, const Half half[2], const Activations& x, int64_t first,
                int64_t last, LinearScratch& scratch, Sums* sums, Ahead& ahead) {
    const bool quads = x.layout == ActLayout::quads;
    if (strips.format() >= WeightFormat::group_int4) {
        Sums* const parts = quads ? scratch.parts.get<Sums>(2 * (last - first)) : nullptr;
        const auto multiply = quads ? group_strip<T, true> : group_strip<T, false>;
        multiply(strips, matrix, row, half, x, first, last, sums, parts, ahead);
        return;
    }
    const int64_t row_bytes = strips.row_bytes();
    const char* const rows[2] = {whole_rows(half[0], row_bytes, scratch.padding[0]),
                                 whole_rows(half[1], row_bytes, scratch.padding[1])};
    if (quads) {
        quads_strip(rows, x, first, last, sums, ahead);
        return;
    }
    const auto multiply = x.int8 ? pairs_strip<true> : pairs_strip<false>;
    multiply(rows, row_bytes, x, first, last, sums, scratch.gathered.get<char>(kGatheredBytes * 2 * kTile), ahead);
}

#endif

// All strips against all tokens; the team shares the strips. Epilogue: (matrix, first output, tile, sums).
// following: the strips that are multiplied after these, read ahead at the end; or none.
// The caller's threads hold tiles unless the activations are rows. A barrier must follow before results are read.
// Work: a `QueueWorker`, or what else says which strips this thread takes.
template <typename T, typename Work, typename Epilogue>
void linear(const Strips<T>& strips, const Activations& x, LinearScratch& scratch, Work& worker,
            Epilogue&& epilogue, const Strips<T>* following = nullptr) {
    const bool int4 = strips.format() == WeightFormat::group_int4;
    const bool lanes = in_lanes<T>(x.cols, strips.format()) && !(int4 && x.layout == ActLayout::bytes) &&
                       (x.layout == ActLayout::bf16_rows || x.layout == ActLayout::bytes || x.layout == ActLayout::word_pairs ||
                        ((x.layout == ActLayout::pairs || x.layout == ActLayout::columns) && !tiles_granted));
    const int64_t num_tiles = x.tiles(), num_strips = strips.count();
    // Tokens whose layout for tiles stays in the second-level cache, with int4 beside a strip that is unpacked there. Pieces
    // of int4 that are unpacked for vectors have to meet more.
    const int64_t room = x.layout == ActLayout::bytes || (lanes && !int4) ? 1 << 19 : x.tiled() ? 1 << 20 : kRowsRoom;
    const int64_t block = std::clamp<int64_t>(room / (x.cols * 2 * kTile) / 2 * 2, 2, kBlockTiles);
    const int64_t count = (num_tiles + block - 1) / block * num_strips;
    Sums* sums = scratch.sums.get<Sums>(std::min(num_tiles, block));
    const int64_t num_following = following ? following->count() : 0, after_all = worker.first_of(num_following);
    int64_t next = worker.first(count);
    while (next < count) {
        const int64_t item = next;
        next = worker.next();
        const int64_t first = item / num_strips * block, last = std::min(first + block, num_tiles);
        int matrix;
        int64_t row;
        Half half[2];
        strips.locate(item % num_strips, matrix, row);
        strips.halves(matrix, row, half);
#ifdef QUIRE_VNNI
        if (x.layout == ActLayout::block_parts) {
            block_strip(strips, matrix, half, x, first, last, sums);
            for (int64_t tile = first; tile < last; ++tile) epilogue(matrix, row, tile, sums[tile - first]);
            continue;
        }
#endif
        strips.decode(matrix, half, scratch.decoded);
        for (int64_t tile = first; tile < last; ++tile) sums[tile - first].by_token = false;  // unless a kernel has them so
#ifdef QUIRE_VNNI
        if (x.tiled() && !lanes) {
            const bool quads = x.layout == ActLayout::quads, grouped = strips.format() >= WeightFormat::group_int4;
            const int64_t steps = grouped ? (x.cols + kGroupPiece - 1) / kGroupPiece
                                  : quads ? x.cols / 64 * (last - first)
                                          : strips.row_bytes() / 64 * ((last - first + 1) / 2);
            Ahead ahead;
            if (next < count) {
                ahead = strips.ahead(next % num_strips, steps);
            } else if (after_all < num_following) {
                ahead = following->ahead(after_all, steps);
            }
            if (x.layout == ActLayout::bytes) {
                if constexpr (std::is_same_v<T, BFloat16>)
                    int4_strip(strips, matrix, row, half, x, first, last, scratch.parts, sums, ahead);
            }
#ifdef QUIRE_AMX
            if (x.layout != ActLayout::bytes) tile_strip(strips, matrix, row, half, x, first, last, scratch, sums, ahead);
#endif
            for (int64_t tile = first; tile < last; ++tile) epilogue(matrix, row, tile, sums[tile - first]);
            continue;
        }
#endif
        Half after[2] = {};
        if (next < count) {
            strips.plain_halves(next % num_strips, after);
        } else if (after_all < num_following) {
            following->plain_halves(after_all, after);
        }
        if (lanes) {
#ifdef QUIRE_VNNI
            if constexpr (std::is_same_v<T, BFloat16>)
                lane_strip(strips, matrix, row, half, after, x, first, last, scratch.padding, scratch.parts, sums);
#endif
        } else if (strips.format() < WeightFormat::group_int4) {
            dots<T>(strips.format(), half, after, x, first, last, scratch.parts, sums);
        } else if (x.tokens <= kFewGroupTokens) {
            dot_groups(strips, matrix, row, half, x, first, sums[0]);
        } else {
            many_groups(strips, matrix, row, half, after, x, first, last, scratch.parts, sums);
        }
        for (int64_t tile = first; tile < last; ++tile) epilogue(matrix, row, tile, sums[tile - first]);
    }
}

#if defined(__AVX512BF16__)
// A whole strip, its 32 outputs side by side: pairs are transposed, half as many numbers.
template <typename W>
inline void store_strip(const Sums& sums, const Matrix<W>& m, int64_t row, BFloat16* to, int64_t stride, int num_tokens) {
    __m512i r[kTile];
    const float* const at = sums.at[0][0];
    const auto finished_row = [&](int i) {
        return (__m512)finished(m, load(at + i * kTile), [&](const W* from) { return splat(to_float(from[row + i])); });
    };
    for (int i = 0; i < kTile; ++i) r[i] = pair_up(finished_row(2 * i), finished_row(2 * i + 1));
    transpose(r);
    for (int t = 0; t < num_tokens; ++t) _mm512_storeu_si512(to + t * stride, r[t]);
}
#endif

// Epilogue: sums times scale plus bias into rows of a tensor.
template <typename W, typename T>
struct ToRows {
    const Matrix<W>* matrices;
    T* const* to;  // per matrix: where token 0's outputs begin
    int64_t stride;  // from one token to the next
    int64_t tokens;
    int64_t width = 0;  // outputs [heads][tokens][width] instead, for matrices of heads of this width (a multiple of 32)

    // Where the tile's outputs from `row` on begin.
    T* at(int matrix, int64_t tile, int64_t row) const {
        if (width == 0) return to[matrix] + tile * kTile * stride + row;
        return to[matrix] + (row / width * tokens + tile * kTile) * width + row % width;
    }

    void operator()(int matrix, int64_t row, int64_t tile, const Sums& sums) const {
        const Matrix<W>& m = matrices[matrix];
        const int num_tokens = static_cast<int>(std::min<int64_t>(kTile, tokens - tile * kTile));
#if defined(__AVX512BF16__)
        if constexpr (std::is_same_v<T, BFloat16>) {
            if (!sums.by_token && row + 2 * kTile <= m.rows) {
                store_strip(sums, m, row, at(matrix, tile, row), stride, num_tokens);
                return;
            }
        }
#endif
        Sums room;
        const Sums& of_tokens = ordered(sums, true, room);
        for (int h = 0; h < 2; ++h) {
            const int64_t begin = row + h * kTile;
            const int count = static_cast<int>(std::min<int64_t>(kTile, m.rows - begin));
            if (count <= 0) return;
            T* const out = at(matrix, tile, begin);
            for (int t = 0; t < num_tokens; ++t)
                for_outputs(m, begin, of_tokens.at[h][t], count,
                            [&](int n, int left, Floats values) { store_some(out + t * stride + n, values, left); });
        }
    }
};

// y [tokens, matrix.rows] by a team of its own.
template <typename T, typename Out>
void linear_op(const T* x, const Matrix<T>& matrix, Out* y, int64_t tokens) {
    static thread_local ActivationBuffers buffers;
    const Activations packed = make_activations<T>(tokens, matrix.cols, matrix.format, buffers, matrix.input_scale);
    WorkQueue queue;
#pragma omp parallel
    {
        static thread_local LinearScratch scratch;
        const HeldTiles tiles(packed.tiled());
        QueueWorker worker(queue);
        set_all(packed, x, matrix.cols);
        barrier();
        linear(Strips<T>{&matrix, 1, false}, packed, scratch, worker, ToRows<T, Out>{&matrix, &y, matrix.rows, tokens});
    }
}

}  // namespace quire
