// Inputs of 8 bits in columns: each token rounded, a group of its inputs at a time, and products of bytes with weights in int8
// whose groups have scales, too.
//
// A group's products are summed in int32, which has no order; what they come to is added to the output's sum in float32, group
// after group. So a token's numbers depend neither on its lane nor on its tile. Between the least and the largest input of a
// group there are 255 steps (asymmetric quantization: Jacob et al. 2018, arXiv:1712.05877, sec. 2.1; in groups: Dai et al.
// 2021, "VS-Quant", arXiv:2102.04503): x = low + step * byte and w = scale * whole, so that
//     sum of w * x over a group = scale * step * (sum of whole * byte) + low * scale * (sum of whole).
#pragma once

#include <vector>

#include "columns.h"
#include "tiles.h"

namespace quire {

constexpr int64_t kByteGroup = 64;                // inputs of a group, the last one of a token may be shorter
constexpr int64_t kGroupQuads = kByteGroup / 4;   // words of four inputs
constexpr int64_t kByteGroupPiece = 8;            // groups of some tiles that stay in the first-level cache
constexpr int64_t kByteRows = 192;                // outputs whose weights stay in the second-level cache

inline int64_t byte_groups(int64_t features) { return (features + kByteGroup - 1) / kByteGroup; }

// The scale of each group of weights, and what its weights sum to: [rows][groups] each.
struct GroupTotals {
    std::vector<float> scales, totals;
};

// Of a matrix in int8 whose groups have kByteGroup inputs.
template <typename T>
GroupTotals group_totals(const Matrix<T>& m) {
    const int64_t groups = byte_groups(m.cols);
    GroupTotals all;
    all.scales.resize(m.rows * groups);
    all.totals.resize(m.rows * groups);
    for (int64_t row = 0; row < m.rows; ++row)
        for (int64_t group = 0; group < groups; ++group) {
            const int64_t end = std::min((group + 1) * kByteGroup, m.cols);
            int32_t sum = 0;
            for (int64_t k = group * kByteGroup; k < end; ++k) sum += static_cast<const int8_t*>(m.data)[row * m.cols + k];
            const int64_t from = (row / kTile * groups + group) * kTile + row % kTile;
            const float scale = m.wide_scale ? static_cast<const float*>(m.group_scale)[from]
                                             : to_float(static_cast<const T*>(m.group_scale)[from]);
            all.scales[row * groups + group] = scale;
            all.totals[row * groups + group] = scale * static_cast<float>(sum);
        }
    return all;
}

// Tiles of tokens in bytes: [tiles][groups], each kGroupQuads vectors of four inputs a lane, then the lanes' lows and steps.
struct ByteColumns {
    static constexpr int64_t kGroupWords = (kGroupQuads + 2) * kLanes;

    uint32_t* data = nullptr;
    int64_t features = 0;

    static int64_t words_of(int64_t features) { return byte_groups(features) * kGroupWords; }  // of a tile
    uint32_t* at(int64_t tile, int64_t group) const { return data + (tile * byte_groups(features) + group) * kGroupWords; }
};

// `count` features of a tile of columns become bytes: kByteGroup, or what is left of a token. Of a lane with something that is not
// finite low and step are NaN.
inline void round_group(const float* x, int64_t count, uint32_t* to) {
    constexpr int kParts = 4;  // which wait for each other no longer than they take
    Floats lows[kParts], highs[kParts], checks[kParts] = {};
    for (int i = 0; i < kParts; ++i) lows[i] = highs[i] = load(x);
    const auto meet = [&](int i, Floats each) {
        lows[i] = each < lows[i] ? each : lows[i];
        highs[i] = max(each, highs[i]);
        checks[i] = fused(each, Floats{}, checks[i]);
    };
    int64_t k = 0;
    for (; k + kParts <= count; k += kParts)
#pragma GCC unroll 4
        for (int i = 0; i < kParts; ++i) meet(i, load(x + (k + i) * kLanes));
    for (; k < count; ++k) meet(0, load(x + k * kLanes));
    Floats low = lows[0], high = highs[0], check = checks[0];
    for (int i = 1; i < kParts; ++i) {
        low = lows[i] < low ? lows[i] : low;
        high = max(highs[i], high);
        check += checks[i];
    }
    const Floats range = high - low + check;
    const Floats inverse = range > 1e-30f ? 255.0f / range : Floats{};
    constexpr float kRounding = 12582912.0f;  // 1.5 * 2^23: the lowest byte of the sum is the number, rounded
    const auto byte = [&](int64_t at) {
        return (Words)fused(load(x + at * kLanes) - low, inverse, splat(kRounding)) & 0xffu;
    };
    int64_t quad = 0;
    for (; quad < count / 4; ++quad) {
        const Words bytes = byte(quad * 4) | byte(quad * 4 + 1) << 8u | byte(quad * 4 + 2) << 16u | byte(quad * 4 + 3) << 24u;
        store(reinterpret_cast<float*>(to + quad * kLanes), (Floats)bytes);
    }
    for (; quad < kGroupQuads; ++quad) {
        Words bytes = {};
        for (uint32_t i = 0; i < 4 && quad * 4 + i < count; ++i) bytes |= byte(quad * 4 + i) << 8u * i;
        store(reinterpret_cast<float*>(to + quad * kLanes), (Floats)bytes);
    }
    float* const numbers = reinterpret_cast<float*>(to + kGroupQuads * kLanes);
    store(numbers, low + check);
    store(numbers + kLanes, range / 255.0f);
}

inline void round_tile(const Columns& from, int64_t tile, const ByteColumns& to, int64_t to_tile) {
    for (int64_t group = 0; group < byte_groups(from.features); ++group)
        round_group(from.at(tile, group * kByteGroup), std::min(kByteGroup, from.features - group * kByteGroup), to.at(to_tile, group));
}

// sum + four inputs, of 0 to 255, times four weights.
inline Ints add_bytes(Ints sum, Words inputs, uint32_t weights) {
#ifdef QUIRE_VNNI
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)inputs, _mm512_set1_epi32(static_cast<int32_t>(weights)));
#else
    const Shorts all = (Shorts)(Words{} + weights), even = (Shorts)(inputs & 0x00ff00ffu), odd = (Shorts)(inputs >> 8 & 0x00ff00ffu);
    return plus_pair_products(plus_pair_products(sum, even, all << 8 >> 8), odd, all >> 8);
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kByteTiles = 2;
constexpr int byte_rows(int) { return 2; }
#else
constexpr int kByteTiles = 2;
constexpr int byte_rows(int tiles) { return tiles == 1 ? 12 : 6; }
#endif

// acc + what a group adds: `sum` is that of its weights times bytes.
inline Floats plus_group(Floats acc, Ints sum, Floats low, Floats step, const float* scale, const float* total) {
    return fused(whole_to_floats(sum) * step, splat(*scale), fused(low, splat(*total), acc));
}

// Of kRows rows of weights [rows, cols] and kTiles tiles from `x` on, groups [begin, end) are added to columns that are
// to_stride numbers apart; from group 0 on they are there anew.
template <int kRows, int kTiles>
__attribute__((noinline)) void add_byte_groups(const int8_t* weights, int64_t cols, const float* scales, const float* totals,
                                               const ByteColumns& x, int64_t tile, int64_t begin, int64_t end, float* to,
                                               int64_t to_stride) {
    const int64_t groups = byte_groups(cols);
    Floats acc[kRows][kTiles];
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < kTiles; ++v) acc[i][v] = begin ? load(to + v * to_stride + i * kLanes) : Floats{};
    for (int64_t group = begin; group < end; ++group) {
        const uint32_t* in[kTiles];
        for (int v = 0; v < kTiles; ++v) in[v] = x.at(tile + v, group);
        const int8_t* const from = weights + group * kByteGroup;
        // What comes next is fetched meanwhile where one tile alone meets it, which takes no longer than memory otherwise.
        if constexpr (kTiles == 1)
            for (int i = 0; i < kRows; ++i) __builtin_prefetch(from + (kRows + i) * cols, 0, 2);
        Ints sums[kRows][kTiles] = {};
        const auto add = [&](int64_t quad, int64_t count) {
            Words bytes[kTiles];
#pragma GCC unroll 4
            for (int v = 0; v < kTiles; ++v) {
                bytes[v] = (Words)load(reinterpret_cast<const float*>(in[v] + quad * kLanes));
                in_register(bytes[v]);
            }
#pragma GCC unroll 12
            for (int i = 0; i < kRows; ++i) {
                uint32_t w = 0;
                std::memcpy(&w, from + i * cols + quad * 4, count);
#pragma GCC unroll 4
                for (int v = 0; v < kTiles; ++v) sums[i][v] = add_bytes(sums[i][v], bytes[v], w);
            }
        };
        const int64_t count = std::min(kByteGroup, cols - group * kByteGroup);
        for (int64_t quad = 0; quad < count / 4; ++quad) add(quad, 4);
        if (count % 4) add(count / 4, count % 4);
#pragma GCC unroll 4
        for (int v = 0; v < kTiles; ++v) {
            const float* const numbers = reinterpret_cast<const float*>(in[v] + kGroupQuads * kLanes);
            const Floats low = load(numbers), step = load(numbers + kLanes);
#pragma GCC unroll 12
            for (int i = 0; i < kRows; ++i) {
                const int64_t at = i * groups + group;
                acc[i][v] = plus_group(acc[i][v], sums[i][v], low, step, scales + at, totals + at);
            }
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < kTiles; ++v) store(to + v * to_stride + i * kLanes, acc[i][v]);
}

// Rows [begin, end) of a matrix times tiles [first, last).
template <typename T>
void multiply_byte_rows(const Matrix<T>& m, const ColumnOutput& out, const ByteColumns& x, int64_t begin, int64_t end, int64_t first,
                        int64_t last) {
    const int64_t groups = byte_groups(m.cols);
    const auto some_rows = [&](auto rows, auto tiles, int64_t row, int64_t tile, int64_t group, int64_t last_group) {
        constexpr int kRows = decltype(rows)::value, kTiles = decltype(tiles)::value;
        add_byte_groups<kRows, kTiles>(
            static_cast<const int8_t*>(m.data) + row * m.cols, m.cols, m.totals->scales.data() + row * groups,
            m.totals->totals.data() + row * groups, x, tile, group, last_group,
            out.to.at(tile, out.feature + row), out.to.features * kLanes);
    };
    for (int64_t from = begin; from < end; from += kByteRows) {
        const int64_t to = std::min(from + kByteRows, end);
        for (int64_t tile = first; tile < last; tile += kByteTiles)
            with_count<kByteTiles>(std::min<int64_t>(kByteTiles, last - tile), [&](auto tiles) {
                constexpr int kTiles = decltype(tiles)::value, kRows = byte_rows(kTiles);
                // Of one tile all inputs stay in a cache, and weights are read as they lie; of several a piece stays.
                const int64_t piece = kTiles == 1 ? groups : kByteGroupPiece;
                for (int64_t group = 0; group < groups; group += piece) {
                    const int64_t behind = std::min(group + piece, groups);
                    int64_t row = from;
                    for (; row + kRows <= to; row += kRows) some_rows(std::integral_constant<int, kRows>{}, tiles, row, tile, group, behind);
                    for (; row < to; ++row) some_rows(std::integral_constant<int, 1>{}, tiles, row, tile, group, behind);
                }
                finish_columns(m, out, from, to, tile, tile + kTiles);
            });
    }
}

#ifdef QUIRE_AMX
// The same of whole tiles of 16 outputs, where groups have all of their inputs: the same numbers by other instructions.
template <typename T>
void multiply_byte_tiles(const Matrix<T>& m, const ColumnOutput& out, const ByteColumns& x, int64_t begin, int64_t end, int64_t first,
                         int64_t last) {
    const int64_t groups = byte_groups(m.cols);
    alignas(64) int32_t sums[2][kTile * kTile];
    for (int64_t row = begin; row < end; row += kTile) {
        const int8_t* const weights = static_cast<const int8_t*>(m.data) + row * m.cols;
        const float *const totals = m.totals->totals.data() + row * groups, *const scales = m.totals->scales.data() + row * groups;
        for (int64_t tile = first; tile < last; ++tile) {
            Floats acc[kTile] = {};
            for (int64_t group = 0; group < groups; ++group) {
                const uint32_t* const in = x.at(tile, group);
                // In turn, so that the next product does not wait for this one to be stored.
                if (group % 2) {
                    _tile_zero(1);
                    _tile_loadd(2, in, 64);
                    _tile_loadd(3, weights + group * kByteGroup, m.cols);
                    _tile_dpbsud(1, 3, 2);
                    _tile_stored(1, sums[1], 64);
                } else {
                    _tile_zero(0);
                    _tile_loadd(4, in, 64);
                    _tile_loadd(5, weights + group * kByteGroup, m.cols);
                    _tile_dpbsud(0, 5, 4);
                    _tile_stored(0, sums[0], 64);
                }
                const float* const numbers = reinterpret_cast<const float*>(in + kGroupQuads * kLanes);
                const Floats low = load(numbers), step = load(numbers + kLanes);
                const float* const from = reinterpret_cast<const float*>(sums[group % 2]);
#pragma GCC unroll 16
                for (int i = 0; i < kTile; ++i) {
                    const int64_t at = i * groups + group;
                    acc[i] = plus_group(acc[i], (Ints)load(from + i * kTile), low, step, scales + at, totals + at);
                }
            }
            for (int i = 0; i < kTile; ++i) store(out.to.at(tile, out.feature + row + i), acc[i]);
        }
    }
    finish_columns(m, out, begin, end, first, last);
}
#endif

template <typename T>
void multiply_by_bytes(const Matrix<T>& m, const ColumnOutput& out, const ByteColumns& x, int64_t begin, int64_t end, int64_t first,
                    int64_t last) {
#ifdef QUIRE_AMX
    if (tiles_granted && m.cols % kByteGroup == 0) {
        const int64_t tiled = begin + (end - begin) / kTile * kTile;
        if (tiled > begin) multiply_byte_tiles(m, out, x, begin, tiled, first, last);
        begin = tiled;
    }
#endif
    multiply_byte_rows(m, out, x, begin, end, first, last);
}

}  // namespace quire
