// The sums of `groups.h` by AMX, int4 aside: a piece of a strip becomes tiles, which meet all tokens while they are near.
#pragma once

#include "byte_pairs.h"
#include "groups.h"

#ifdef QUIRE_AMX

namespace quire {

// 128 inputs of 16 outputs: up to four tiles of 16 x 64 bytes, their scales and zeros.
struct alignas(64) HalfPiece {
    char tile[4][kTile * 64];
    float scale[4][kTile];
    float zero[4][kTile];
};

// One row of 64 bytes; of two groups in it each gets a tile in which the other's elements are zeros.
template <bool kTwoGroups>
inline void put_row(HalfPiece& to, int row, int tile, __m512i bytes) {
    if constexpr (kTwoGroups) {
        const __mmask16 lower = 0x00ff;
        _mm512_store_si512(to.tile[2 * tile] + row * 64, _mm512_maskz_mov_epi32(lower, bytes));
        _mm512_store_si512(to.tile[2 * tile + 1] + row * 64, _mm512_maskz_mov_epi32(_knot_mask16(lower), bytes));
    } else {
        _mm512_store_si512(to.tile[tile] + row * 64, bytes);
    }
}

template <bool kTwoGroups>
inline void spread_int8(const char* from, int64_t row_bytes, int count, int64_t tiles, HalfPiece& to) {
    for (int n = 0; n < count; ++n, from += row_bytes)
        for (int t = 0; t < tiles; ++t) put_row<kTwoGroups>(to, n, t, _mm512_loadu_si512(from + t * 64));
}

inline void spread_float8(const char* from, int64_t row_bytes, int count, int64_t tiles, HalfPiece& to) {
    for (int n = 0; n < count; ++n, from += row_bytes)
        for (int t = 0; t < tiles; ++t) {
            const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + t * 32));
            _mm512_store_si512(to.tile[t] + n * 64, widen_in_order(Float8Codes(kFloat8Weights), codes));
        }
}

// Inputs [k, k + 128) of a half; fetches what comes next meanwhile.
inline void spread(WeightFormat format, const Half& half, int64_t row_bytes, int64_t k, int64_t cols, int64_t group,
                   HalfPiece& to, Ahead& ahead, int h) {
    const bool two_groups = group == 32;
    const int64_t left = std::min(kGroupPiece, cols - k);
    ahead.fetch(h);
    if (format == WeightFormat::group_int8) {
        const auto spread_rows = two_groups ? spread_int8<true> : spread_int8<false>;
        spread_rows(half.data + k, row_bytes, half.count, left / 64, to);
    } else {
        spread_float8(half.data + k, row_bytes, half.count, left / 32, to);
    }
}

template <typename T>
inline void spread_scales(const GroupScales& from, int64_t group, int64_t count, HalfPiece& to) {
    for (int64_t i = 0; i < count; ++i) {
        const int64_t at = (group + i) * kTile;
        const Floats scale = from.wide ? load(static_cast<const float*>(from.scale) + at)
                                       : load(static_cast<const T*>(from.scale) + at);
        store(to.scale[i], scale);
        if (!from.zero) continue;
        const __m256i zero = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from.zero + at));
        store(to.zero[i], (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(zero)));
    }
}

// to[2][16 outputs][16 columns] = tiles a0 and a1 of both halves times `steps` tiles of tokens.
template <bool kInt8>
inline void multiply_group(const char* a0, const char* a1, const uint32_t* x, int64_t steps, Sums& to) {
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t s = 0; s < steps; ++s) {
        _tile_loadd(4, a0 + s * 1024, 64);
        _tile_loadd(6, x + s * 256, 64);
        _tile_loadd(5, a1 + s * 1024, 64);
        if constexpr (kInt8) {
            _tile_dpbssd(0, 4, 6);
            _tile_dpbssd(1, 5, 6);
        } else {
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 5, 6);
        }
    }
    _tile_stored(0, to.at[0], 64);
    _tile_stored(1, to.at[1], 64);
}

// sums += scale * (products - zero * what the tokens' inputs of the group sum to)
template <bool kInt8>
inline void add_group(Sums& sums, int h, const Sums& products, const float* scale, const float* zero, __m512 x_sum) {
    for (int n = 0; n < kTile; ++n) {
        __m512 product = _mm512_load_ps(products.at[h][n]);
        if constexpr (kInt8) product = _mm512_cvtepi32_ps((__m512i)product);
        if (zero) product = _mm512_fnmadd_ps(_mm512_set1_ps(zero[n]), x_sum, product);
        const __m512 before = _mm512_load_ps(sums.at[h][n]);
        _mm512_store_ps(sums.at[h][n], _mm512_fmadd_ps(product, _mm512_set1_ps(scale[n]), before));
    }
}

// Two tiles of columns, 8 tokens each with its high and low parts, become 16 tokens.
inline void join_parts(const Sums parts[2], bool two, const float* token_scales, Sums& to) {
    const __m512i high = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i low = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    const __m512 scale = _mm512_loadu_ps(token_scales);
    for (int h = 0; h < 2; ++h)
        for (int n = 0; n < kTile; ++n) {
            const __m512 a = _mm512_load_ps(parts[0].at[h][n]), b = two ? _mm512_load_ps(parts[1].at[h][n]) : a;
            const __m512 upper = _mm512_permutex2var_ps(a, high, b), lower = _mm512_permutex2var_ps(a, low, b);
            _mm512_store_ps(to.at[h][n], _mm512_fmadd_ps(upper, _mm512_set1_ps(128.0f), lower) * scale);
        }
}

// Of one piece against one tile of columns.
struct PieceShape {
    int64_t groups;      // in the piece
    int64_t group_tiles; // tiles of weights a group has
    int64_t tiles;       // tiles of tokens the piece has
    bool two_groups;     // in each tile of tokens
};

template <bool kInt8>
inline void multiply_piece(const HalfPiece piece[2], const bool zeros[2], const PieceShape& shape, const uint32_t* x,
                           const float* x_sums, int64_t group, Sums& sums) {
    Sums products;
    for (int64_t g = 0; g < shape.groups; ++g) {
        const int64_t first = g * shape.group_tiles;
        const int64_t x_first = shape.two_groups ? first / 2 : first;
        const int64_t steps = std::min(shape.group_tiles, shape.tiles - x_first);
        multiply_group<kInt8>(piece[0].tile[first], piece[1].tile[first], x + x_first * 256, steps, products);
        __m512 x_sum = _mm512_setzero_ps();
        if (zeros[0] || zeros[1])
            for (int64_t i = 0; i * 32 < group && (x_first * 2 + i) < shape.tiles * 2; ++i)
                x_sum = _mm512_add_ps(x_sum, _mm512_loadu_ps(x_sums + (g * group / 32 + i) * kTile));
        for (int h = 0; h < 2; ++h)
            add_group<kInt8>(sums, h, products, piece[h].scale[g], zeros[h] ? piece[h].zero[g] : nullptr, x_sum);
    }
}

// Tiles [first, last) of the tokens against one strip; sums[0] belongs to tile `first`. parts: room for two sums each.
template <typename T, bool kInt8>
void group_strip(const Strips<T>& strips, int matrix, int64_t row, const Half half[2], const Activations& x, int64_t first,
                 int64_t last, Sums* sums, Sums* parts, Ahead& ahead) {
    const Matrix<T>* m[2];
    GroupScales scales[2];
    bool zeros[2];
    for (int h = 0; h < 2; ++h) {
        m[h] = &strips.matrix_of(matrix, h);
        scales[h] = scales_of(*m[h], half[h].count ? strips.row_of(row, h) : 0);
        zeros[h] = scales[h].zero != nullptr;
    }
    const WeightFormat format = m[0]->format;
    const int64_t group = m[0]->group, tile_cols = kInt8 ? 64 : 32, parts_per_tile = kInt8 ? 2 : 1;
    Sums* to = kInt8 ? parts : sums;
    std::memset(to, 0, (last - first) * parts_per_tile * sizeof(Sums));
    static thread_local HalfPiece piece[2];
    for (int64_t k = 0; k < x.cols; k += kGroupPiece) {
        const int64_t left = std::min(kGroupPiece, x.cols - k);
        const PieceShape shape{(left + group - 1) / group, std::max<int64_t>(1, group / tile_cols), left / tile_cols,
                               group < tile_cols};
        for (int h = 0; h < 2; ++h) {
            spread(format, half[h], m[h]->row_bytes(), k, x.cols, group, piece[h], ahead, h);
            spread_scales<T>(scales[h], k / group, shape.groups, piece[h]);
        }
        for (int64_t tile = first; tile < last; ++tile) {
            for (int64_t part = 0; part < parts_per_tile; ++part) {
                if (kInt8 && part * (kTile / 2) >= x.tokens - tile * kTile) break;
                const uint32_t* columns = kInt8 ? x.quads(tile) + part * (x.cols / 4) * kTile + k * 4 : x.pairs(tile) + k * 8;
                const float* x_sums = kInt8 ? x.sums_of(tile, static_cast<int>(part), k / 32) : nullptr;
                multiply_piece<kInt8>(piece, zeros, shape, columns, x_sums, group, to[(tile - first) * parts_per_tile + part]);
            }
        }
    }
    if constexpr (kInt8)
        for (int64_t tile = first; tile < last; ++tile)
            join_parts(parts + (tile - first) * 2, x.tokens - tile * kTile > kTile / 2, x.scales + tile * kTile,
                       sums[tile - first]);
}

}  // namespace quire

#endif
