// Activations with tokens in the lanes of vectors, and products of matrices with them: W x^T as it comes out.
//
// A tile is as many tokens as a vector has lanes; [tiles][features][kLanes] in float32. Products broadcast weights, which
// are read where they are, so that outputs lie as inputs do and nothing is turned over between the layers of an encoder;
// norms and softmax are sums over features, lane by lane. Every sum has one order, whatever else is multiplied with it: a
// token's numbers depend neither on its lane nor on its tile.
#pragma once

#include <algorithm>

#include "elementwise.h"
#include "team.h"
#include "vectors.h"
#include "weights.h"

namespace quire {

struct Columns {
    float* data;
    int64_t features;

    float* at(int64_t tile, int64_t feature) const { return data + (tile * features + feature) * kLanes; }
};

// The threads that compute a part together: all of a parallel region, or one alone.
struct Team {
    int64_t rank = 0, size = 1;

    void wait() const {
        if (size > 1) barrier();
    }
    Range share(int64_t count) const { return {count * rank / size, count * (rank + 1) / size}; }
};

// kLanes vectors, turned over.
inline void turn_lanes(Floats v[kLanes]) {
#if defined(__AVX512F__)
    __m512i r[kLanes];
    for (int i = 0; i < kLanes; ++i) r[i] = (__m512i)v[i];
    transpose(r);
    for (int i = 0; i < kLanes; ++i) v[i] = (Floats)r[i];
#elif defined(__AVX2__)
    transpose(v);
#else
    for (int i = 0; i < kLanes; ++i)
        for (int j = 0; j < i; ++j) {
            const float kept = v[i][j];
            v[i][j] = v[j][i];
            v[j][i] = kept;
        }
#endif
}

// Rows of T [count, size], `stride` apart -> a tile of columns, zeros in the lanes behind them.
template <typename T>
inline void rows_to_tile(const T* from, int64_t stride, int64_t count, int64_t size, float* to) {
    for (int64_t begin = 0; begin < size; begin += kLanes) {
        Floats v[kLanes];
        for (int i = 0; i < kLanes; ++i) v[i] = i < count ? load_some(from + i * stride + begin, size - begin) : Floats{};
        turn_lanes(v);
        for (int64_t i = 0; i < std::min<int64_t>(kLanes, size - begin); ++i) store(to + (begin + i) * kLanes, v[i]);
    }
}

template <typename T>
inline void tile_to_rows(const float* from, int64_t count, int64_t size, T* to, int64_t stride) {
    for (int64_t begin = 0; begin < size; begin += kLanes) {
        Floats v[kLanes];
        for (int64_t i = 0; i < kLanes; ++i) v[i] = begin + i < size ? load(from + (begin + i) * kLanes) : Floats{};
        turn_lanes(v);
        for (int64_t i = 0; i < std::min<int64_t>(kLanes, count); ++i) store_some(to + i * stride + begin, v[i], size - begin);
    }
}

// One feature of `count` tokens from `token` on, which need not begin a tile; zeros behind them.
inline Floats load_tokens(const Columns& x, int64_t feature, int64_t token, int64_t count) {
    const int64_t tile = token / kLanes, lane = token % kLanes;
    if (lane == 0 && count >= kLanes) return load(x.at(tile, feature));
#if defined(__AVX512F__)
    const uint32_t wanted = count >= kLanes ? 0xffffu : (1u << std::max<int64_t>(count, 0)) - 1;
    const auto some = [](uint32_t lanes, const float* from) {
        return (Words)_mm512_maskz_loadu_epi32(static_cast<__mmask16>(lanes), from);
    };
    Words v = some(wanted & 0xffffu >> lane, x.at(tile, feature) + lane);
    if (lane + count > kLanes) v |= some(wanted & 0xffffu << (kLanes - lane), x.at(tile + 1, feature) - (kLanes - lane));
    return (Floats)v;
#else
    float lanes[kLanes] = {};
    const int64_t here = std::clamp<int64_t>(count, 0, kLanes - lane), behind = std::clamp<int64_t>(count - here, 0, lane);
    std::memcpy(lanes, x.at(tile, feature) + lane, here * sizeof(float));
    if (behind > 0) std::memcpy(lanes + here, x.at(tile + 1, feature), behind * sizeof(float));
    return load(lanes);
#endif
}

inline void store_tokens(const Columns& x, int64_t feature, int64_t token, int64_t count, Floats v) {
    const int64_t tile = token / kLanes, lane = token % kLanes;
#if defined(__AVX512F__)
    const uint32_t wanted = count >= kLanes ? 0xffffu : (1u << count) - 1;
    _mm512_mask_storeu_ps(x.at(tile, feature) + lane, static_cast<__mmask16>(wanted & 0xffffu >> lane), (__m512)v);
    if (lane + count > kLanes)
        _mm512_mask_storeu_ps(x.at(tile + 1, feature) - (kLanes - lane), static_cast<__mmask16>(wanted & 0xffffu << (kLanes - lane)),
                              (__m512)v);
#else
    float lanes[kLanes];
    store(lanes, v);
    const int64_t here = std::min<int64_t>(count, kLanes - lane), behind = std::min<int64_t>(count, kLanes) - here;
    std::memcpy(x.at(tile, feature) + lane, lanes, here * sizeof(float));
    if (behind > 0) std::memcpy(x.at(tile + 1, feature), lanes + here, behind * sizeof(float));
#endif
}

// A number that need not be aligned: weights are where their file has them.
inline float load_one(const float* from) {
    float x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

// As many tiles as meet some rows while their sums are in registers, and how many rows.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kColumnTiles = 2;
constexpr int column_rows(int tiles) { return tiles == 1 ? 10 : 6; }
#else
constexpr int kColumnTiles = 4;
constexpr int column_rows(int tiles) { return tiles <= 2 ? 12 : tiles == 3 ? 8 : 6; }
#endif
constexpr int64_t kColumnPiece = 128;  // inputs whose sums are added at once: as much of kColumnTiles tiles as the first-level cache holds

// sums[tile][row] = or += kRows rows of weights times kTiles tiles over `width` inputs. Strides in numbers. next: the weights that
// come after these, as far apart; fetched meanwhile where one tile alone meets them, which takes no longer than memory otherwise.
template <int kRows, int kTiles>
__attribute__((noinline)) void add_columns(const float* weights, const float* next, int64_t row_stride, const float* x,
                                           int64_t tile_stride, int64_t width, float* sums, int64_t sums_stride, bool begins) {
    constexpr int64_t kLine = 64 / sizeof(float);
    Floats acc[kRows][kTiles] = {};
    for (int64_t k = 0; k < width; ++k) {
        if constexpr (kTiles == 1)
            if (const int64_t row = k % kLine; row < kRows) __builtin_prefetch(next + row * row_stride + k - row, 0, 2);
        Floats in[kTiles];
#pragma GCC unroll 4
        for (int v = 0; v < kTiles; ++v) {
            in[v] = load(x + v * tile_stride + k * kLanes);
            in_register(in[v]);
        }
#pragma GCC unroll 12
        for (int i = 0; i < kRows; ++i) {
            const Floats w = splat(load_one(weights + i * row_stride + k));
#pragma GCC unroll 4
            for (int v = 0; v < kTiles; ++v) acc[i][v] = accumulated(acc[i][v], w, in[v]);
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < kTiles; ++v) {
            float* const to = sums + v * sums_stride + i * kLanes;
            store(to, begins ? acc[i][v] : load(to) + acc[i][v]);
        }
}

// All of `rows` rows of weights [rows, width] against kTiles tiles, a piece of the inputs after the other. adds: to what `sums`
// holds.
template <int kTiles>
inline void multiply_columns(const float* weights, int64_t row_stride, int64_t rows, const float* x, int64_t tile_stride,
                             int64_t width, float* sums, int64_t sums_stride, bool adds = false) {
    constexpr int kRows = column_rows(kTiles);
    // Of one tile all inputs stay in a cache, and weights are read as they lie; of several a piece stays.
    const int64_t part = kTiles == 1 ? kRows : rows;
    for (int64_t first = 0; first < rows; first += part)
        for (int64_t k = 0; k < width; k += kColumnPiece) {
            const int64_t piece = std::min(kColumnPiece, width - k), last = std::min(first + part, rows);
            const bool begins = k == 0 && !adds;
            const float* const at = weights + k;
            const float* const next = k + piece < width ? at + piece : weights + kRows * row_stride;
            int64_t row = first;
            for (; row + kRows <= last; row += kRows)
                add_columns<kRows, kTiles>(at + row * row_stride, next + row * row_stride, row_stride, x + k * kLanes, tile_stride, piece,
                                           sums + row * kLanes, sums_stride, begins);
            for (; row < last; ++row)
                add_columns<1, kTiles>(at + row * row_stride, next + row * row_stride, row_stride, x + k * kLanes, tile_stride, piece,
                                       sums + row * kLanes, sums_stride, begins);
        }
}

// What becomes of the sums of a matrix: times scale, plus bias, through a function.
struct ColumnOutput {
    Columns to;
    int64_t feature = 0;      // of `to`, that the matrix's first output becomes
    int activation = -1;      // an `Activation`; -1 for none
};

// Outputs [begin, end) of tiles [first, last).
template <typename T>
inline void finish_columns(const Matrix<T>& m, const ColumnOutput& out, int64_t begin, int64_t end, int64_t first, int64_t last) {
    if (!m.scale && !m.bias && out.activation < 0) return;
    const auto all = [&](const auto& function) {
        for (int64_t tile = first; tile < last; ++tile) {
            float* at = out.to.at(tile, out.feature + begin);
            for (int64_t row = begin; row < end; ++row, at += kLanes)
                store(at, function(finished(m, load(at), [&](const T* from) { return splat(to_float(from[row])); })));
        }
    };
    if (out.activation < 0) {
        all([](Floats x) { return x; });
    } else {
        with_function(static_cast<Activation>(out.activation), all);
    }
}

}  // namespace quire
