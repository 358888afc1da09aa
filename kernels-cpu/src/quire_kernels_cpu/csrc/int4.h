// Sums over int4 weights, see `groups.h`. 16 outputs lie side by side, so that a vector has a number of each: of a piece
// of 128 inputs step s keeps, for each output, four bytes, byte j with input 4 s + j in its lower half and input
// 64 + 4 s + j in its upper half, each with 8 added.
//
// With VNNI and AMX tokens are fixed-point numbers of 15 bits in two rows of int8 (`ActLayout::bytes`). What a group sums to is
// then exact in int32, by vectors or by tiles, for few tokens or for many: a token's bits are the same in each way. Without
// tiles many tokens are words of 16 bits, and so are weights then (`lane_sums.h`): the same sums with less to do for a group.
#pragma once

#include <algorithm>
#include <type_traits>

#include "activations.h"
#include "group_scales.h"
#include "sums.h"
#include "tiles.h"
#include "vectors.h"
#include "weights.h"

namespace quire {

constexpr int kInt4Middle = 8;
constexpr int kPieceSteps = 16;

// kVectors times kLanes outputs from `begin` on against kTokens tokens, in float32; kWhole: all of them are there.
template <typename T, int kTokens, int kVectors, bool kWhole>
inline void dot_int4(const Half& half, int begin, const GroupScales& scales, int64_t cols, int64_t group,
                     const float* const tokens[kTokens], Floats total[kVectors][kTokens]) {
    const int lanes = std::min(kLanes, half.count - begin);
    for (int64_t k = 0, g = 0; k < cols; k += group, ++g) {
        Floats middle[kVectors], acc[kVectors][kTokens] = {};
        for (int v = 0; v < kVectors; ++v)
            middle[v] = scales.zeros_of(g, begin + v * kLanes) + static_cast<float>(kInt4Middle);
        // Behind the last input tokens are zeros.
        for (int64_t i = k, end = std::min(k + group, cols); i < end; i += 4) {
            const int64_t step = i / kGroupPiece * kPieceSteps + i % 64 / 4;
            const char* const at = half.data + (step * half.count + begin) * 4;
            Words word[kVectors] = {};
            for (int v = 0; v < kVectors; ++v) {
                std::memcpy(&word[v], at + v * sizeof *word, kWhole ? sizeof *word : lanes * 4);
                word[v] >>= i % kGroupPiece < 64 ? 0 : 4;
            }
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j)
                for (int v = 0; v < kVectors; ++v) {
                    const Floats w = whole_to_floats((Ints)(word[v] >> 8 * j & 15)) - middle[v];
                    for (int t = 0; t < kTokens; ++t) acc[v][t] = fused(w, splat(tokens[t][i + j]), acc[v][t]);
                }
        }
        for (int v = 0; v < kVectors; ++v) {
            const Floats scale = scales.scales_of<T>(g, begin + v * kLanes);
            for (int t = 0; t < kTokens; ++t) total[v][t] = fused(scale, acc[v][t], total[v][t]);
        }
    }
}

// A half against up to kTokens tokens from `first` on.
template <typename T, int kTokens>
void dot_int4_rows(const Half& half, const GroupScales& scales, int64_t group, const Activations& x, int64_t first,
                   float sums[kTile][kTile]) {
    const float* tokens[kTokens];
    for (int t = 0; t < kTokens; ++t) tokens[t] = x.row(std::min(first + t, x.tokens - 1));
    const auto run = [&](int begin, auto vectors, auto whole) {
        constexpr int kVectors = decltype(vectors)::value;
        Floats total[kVectors][kTokens] = {};
        dot_int4<T, kTokens, kVectors, decltype(whole)::value>(half, begin, scales, x.cols, group, tokens, total);
        for (int v = 0; v < kVectors; ++v)
            for (int t = 0; t < kTokens; ++t) store(sums[first % kTile + t] + begin + v * kLanes, total[v][t]);
    };
    // One token has too few sums to wait for each other.
    constexpr int kVectors = kTokens == 1 ? kTile / kLanes : 1;
    int n = 0;
    for (; n + kVectors * kLanes <= half.count; n += kVectors * kLanes)
        run(n, std::integral_constant<int, kVectors>{}, std::true_type{});
    for (; n < half.count; n += kLanes) run(n, std::integral_constant<int, 1>{}, std::false_type{});
}

#ifdef QUIRE_VNNI

// Up to so many tokens weights are multiplied as they are read, without being unpacked.
inline const int kFewTokens = tiles_granted ? 2 : 7;
// Tiles of tokens that meet a piece of the strip while their sums are in the first-level cache.
constexpr int64_t kNearTiles = 2;

inline __m512i load_step(const char* from, __mmask16 outputs) { return _mm512_maskz_loadu_epi32(outputs, from); }
inline __m512i lower_half(__m512i both) { return _mm512_and_si512(both, _mm512_set1_epi8(15)); }
inline __m512i upper_half(__m512i both) { return lower_half(_mm512_srli_epi16(both, 4)); }

inline __m512i load_zeros(const GroupScales& scales, int64_t group) {
    if (!scales.zero) return _mm512_setzero_si512();
    return _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales.zero + group * kTile)));
}

// total += scale * (sum - (kMiddle + zero) * what the token's inputs of the group sum to), all but the last step exact.
// high, low: sums of the tokens' parts; eight_sums: 8 times the sum of the inputs.
template <int kMiddle, bool kZero>
inline __m512 add_parts(__m512 total, __m512i high, __m512i low, const int32_t* eight_sums, __m512i zero, __m512 scale) {
    __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high, 7), low);
    sum = _mm512_sub_epi32(sum, _mm512_set1_epi32(*eight_sums * (kMiddle / 8)));
    if (kZero) sum = _mm512_sub_epi32(sum, _mm512_mullo_epi32(zero, _mm512_set1_epi32(*eight_sums / 8)));
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, total);
}

// One half against kTokens tokens, the first ones there are.
template <typename T, int kTokens, bool kWhole>
void few_int4(const Half& half, const GroupScales& scales, int64_t group, const Activations& x, const Ahead& ahead, int h,
              float sums[kTile][kTile]) {
    constexpr int kTogether = kTokens <= 4 ? 2 : 1;  // halves of the bytes whose sums fit the registers
    const __mmask16 outputs = static_cast<__mmask16>((1u << half.count) - 1);
    const int64_t step_bytes = kWhole ? 64 : half.count * 4, run = std::min<int64_t>(group / 4, kPieceSteps);
    const bool two_groups = group < kGroupPiece;  // in a byte
    // As many lines as this half has; where nothing comes next, its own.
    const char *at = half.data, *next = ahead.at[h] ? ahead.at[h] : at;
    __m512 total[kTokens] = {};
    for (int64_t k = 0, first_group = 0; k < x.cols; k += kGroupPiece, first_group += kGroupPiece / group) {
        for (int64_t begin = 0; begin < kPieceSteps; begin += run, at += run * step_bytes) {
            __m512i high[kTogether][kTokens] = {}, low[kTogether][kTokens] = {};
            const auto add_group = [&](int i, int place) {
                if (k + place * 64 + begin * 4 >= x.cols) return;
                const int64_t g = first_group + (begin ? 1 : 0) + place * (group == 32 ? 2 : 1);
                const __m512 scale = (__m512)scales.scales_of<T>(g, 0);
                const __m512i zero = load_zeros(scales, g);
#pragma GCC unroll 8
                for (int t = 0; t < kTokens; ++t) {
                    const int32_t* eight_sums = x.eight_sums(t, group) + g;
                    const auto add = scales.zero ? add_parts<kInt4Middle, true> : add_parts<kInt4Middle, false>;
                    total[t] = add(total[t], high[i][t], low[i][t], eight_sums, zero, scale);
                    high[i][t] = low[i][t] = _mm512_setzero_si512();
                }
            };
#pragma GCC unroll 2
            for (int first = 0; first < 2; first += kTogether) {
                const char* from = at;
#pragma GCC unroll 8
                for (int64_t s = begin; s < begin + run; ++s, from += step_bytes) {
                    if (first == 0) _mm_prefetch(next, _MM_HINT_T1), next += 64;
                    const __m512i both = kWhole ? _mm512_loadu_si512(from) : load_step(from, outputs);
#pragma GCC unroll 2
                    for (int i = 0; i < kTogether; ++i) {
                        const __m512i w = first + i ? upper_half(both) : lower_half(both);
#pragma GCC unroll 8
                        for (int t = 0; t < kTokens; ++t) {
                            const char* part = x.parts(t, k + (first + i) * 64) + s * 4;
                            high[i][t] = _mm512_dpbusd_epi32(high[i][t], w, pair_everywhere(part));
                            low[i][t] = _mm512_dpbusd_epi32(low[i][t], w, pair_everywhere(part + 64));
                        }
                    }
                }
                if (two_groups)
#pragma GCC unroll 2
                    for (int i = 0; i < kTogether; ++i) add_group(i, first + i);
            }
            if (two_groups) continue;
#pragma GCC unroll 8
            for (int t = 0; kTogether == 2 && t < kTokens; ++t) {
                high[0][t] = _mm512_add_epi32(high[0][t], high[kTogether - 1][t]);
                low[0][t] = _mm512_add_epi32(low[0][t], low[kTogether - 1][t]);
            }
            add_group(0, 0);
        }
    }
    for (int t = 0; t < kTokens; ++t) _mm512_store_ps(sums[t], total[t] * x.scales[t]);
}

// A piece of a half as tiles: 16 rows of four inputs of 16 outputs. Of groups of 32 inputs each has a tile of its own, in
// which the other's inputs are zeros.
template <bool kTwoGroups>
inline void unpack_int4(const Half& half, int64_t piece, char* to) {
    const __mmask16 outputs = static_cast<__mmask16>((1u << half.count) - 1);
    const char* at = half.data + piece * kPieceSteps * half.count * 4;
    constexpr int64_t kNextHalf = kTwoGroups ? 2048 : 1024;
    for (int s = 0; s < kPieceSteps; ++s, at += half.count * 4) {
        const __m512i both = load_step(at, outputs);
        const __m512i w[2] = {lower_half(both), upper_half(both)};
        for (int i = 0; i < 2; ++i) {
            char* row = to + i * kNextHalf + s * 64;
            if (!kTwoGroups) {
                _mm512_store_si512(row, w[i]);
            } else {
                _mm512_store_si512(row + (s < 8 ? 0 : 1024), w[i]);
                _mm512_store_si512(row + (s < 8 ? 1024 : 0), _mm512_setzero_si512());
            }
        }
    }
}

// Sums [part][half][8 tokens: high, low][16 outputs] of one group.
struct alignas(64) Int4Products {
    int32_t at[2][2][kTile][kTile];
};

// One part (8 tokens, of which `rows` rows are there) against `count` tiles of both halves, by vectors.
inline void multiply_int4_rows(const char* x, const char* const w[2], int count, int rows, int32_t (*const to)[kTile][kTile]) {
    constexpr int kRows = 8;
    for (int first = 0; first < rows; first += kRows) {
        __m512i sums[2][kRows] = {};
        for (int i = 0; i < count; ++i) {
            for (int s = 0; s < kTile; ++s) {
                const __m512i weights[2] = {_mm512_load_si512(w[0] + i * 1024 + s * 64),
                                            _mm512_load_si512(w[1] + i * 1024 + s * 64)};
#pragma GCC unroll 8
                for (int r = 0; r < kRows; ++r) {
                    int32_t inputs;
                    std::memcpy(&inputs, x + i * 1024 + (first + r) * 64 + s * 4, 4);
                    for (int h = 0; h < 2; ++h)
                        sums[h][r] = _mm512_dpbusd_epi32(sums[h][r], weights[h], _mm512_set1_epi32(inputs));
                }
            }
        }
        for (int h = 0; h < 2; ++h)
            for (int r = 0; r < kRows; ++r) _mm512_store_si512(to[h][first + r], sums[h][r]);
    }
}

// `tokens` tokens in one or two parts (8 tokens each) against `count` tiles of both halves. x: a part's inputs, 64 of them 1024
// bytes.
template <bool kTwoParts>
inline void multiply_int4(const char* const x[2], const char* const w[2], int count, int tokens, Int4Products& to) {
#ifdef QUIRE_AMX
    if (!tiles_granted) {
#endif
        multiply_int4_rows(x[0], w, count, 2 * std::min(tokens, 8), to.at[0]);
        if (kTwoParts) multiply_int4_rows(x[1], w, count, 2 * (tokens - 8), to.at[1]);
#ifdef QUIRE_AMX
        return;
    }
    _tile_zero(0);
    _tile_zero(1);
    if (kTwoParts) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int i = 0; i < count; ++i) {
        const int64_t at = i * 1024;
        _tile_loadd(4, x[0] + at, 64);
        _tile_loadd(6, w[0] + i * 1024, 64);
        _tile_dpbsud(0, 4, 6);
        _tile_loadd(7, w[1] + i * 1024, 64);
        _tile_dpbsud(1, 4, 7);
        if (kTwoParts) {
            _tile_loadd(5, x[1] + at, 64);
            _tile_dpbsud(2, 5, 6);
            _tile_dpbsud(3, 5, 7);
        }
    }
    _tile_stored(0, to.at[0][0], 64);
    _tile_stored(1, to.at[0][1], 64);
    if (kTwoParts) {
        _tile_stored(2, to.at[1][0], 64);
        _tile_stored(3, to.at[1][1], 64);
    }
#endif
}

// Of a tile group of tokens, [token][half][16 outputs].
struct alignas(64) Int4Totals {
    float at[kNearTiles * kTile][2][kTile];
};

// Adds one group's products of a part and a half for `count` tokens. stride: from a token's sum to the next one's.
template <bool kZero>
inline void add_int4_part(const int32_t from[kTile][kTile], int count, const int32_t* eight_sums, int64_t stride, __m512i zero,
                          __m512 scale, float (*to)[2][kTile]) {
    for (int t = 0; t < count; ++t) {
        const __m512i high = _mm512_load_si512(from[2 * t]), low = _mm512_load_si512(from[2 * t + 1]);
        const __m512 before = _mm512_load_ps(to[t][0]);
        _mm512_store_ps(to[t][0], add_parts<kInt4Middle, kZero>(before, high, low, eight_sums + t * stride, zero, scale));
    }
}

// The same for both halves of one or two parts, tokens [begin, end) of the group's.
template <typename T>
inline void add_int4_products(const Int4Products& from, int begin, int end, const GroupScales scales[2], int64_t g,
                              const int32_t* eight_sums, int64_t stride, Int4Totals& to) {
    for (int h = 0; h < 2; ++h) {
        const __m512 scale = (__m512)scales[h].scales_of<T>(g, 0);
        const __m512i zero = load_zeros(scales[h], g);
        for (int t = begin, part = 0; t < end; t += 8, ++part) {
            const int32_t* sums = eight_sums + t * stride + g;
            float(*total)[2][kTile] = reinterpret_cast<float(*)[2][kTile]>(to.at[t][h]);
            const int count = std::min(8, end - t);
            if (scales[h].zero) {
                add_int4_part<true>(from.at[part][h], count, sums, stride, zero, scale, total);
            } else if (count == 8) {
                add_int4_part<false>(from.at[part][h], 8, sums, stride, zero, scale, total);
            } else {
                add_int4_part<false>(from.at[part][h], count, sums, stride, zero, scale, total);
            }
        }
    }
}

// The totals of one tile of tokens, times the tokens' scales.
inline void finish_int4(const Int4Totals& from, int first, int num_tokens, const float* token_scales, Sums& to) {
    for (int h = 0; h < 2; ++h)
        for (int t = 0; t < std::min(kTile, num_tokens - first); ++t)
            _mm512_store_ps(to.at[h][t], _mm512_load_ps(from.at[first + t][h]) * token_scales[t]);
}

// Tiles [first, last) of the tokens against one strip by tiles; sums[0] belongs to tile `first`. unpacked: room for the
// strip's elements as bytes (twice of them in groups of 32), or for one piece where few tokens are.
template <typename T, bool kTwoGroups>
void many_int4(const Half half[2], const GroupScales scales[2], int64_t group, const Activations& x, int64_t first,
               int64_t last, char* unpacked, Sums* sums, Ahead& ahead) {
    constexpr int64_t kPieceBytes = kTwoGroups ? 4096 : 2048;
    const bool once = last - first <= kNearTiles;
    const int count = group == kGroupPiece ? 2 : 1;
    for (int64_t tile = first; tile < last; tile += kNearTiles) {
        const int num_tokens = static_cast<int>(std::min(kNearTiles * kTile, x.tokens - tile * kTile));
        Int4Totals totals;
        std::memset(&totals, 0, num_tokens * sizeof totals.at[0]);
        // The sums of one group are added up while the tiles of the next one multiply.
        Int4Products products[2];
        int turn = 0, begin = -1;
        int64_t g = 0;
        const int32_t* eight_sums = x.eight_sums(tile * kTile, group);
        const auto add_before = [&] {
            const int end = std::min(begin + kTile, num_tokens);
            if (begin >= 0)
                add_int4_products<T>(products[1 - turn], begin, end, scales, g, eight_sums, x.sums_stride(), totals);
        };
        for (int64_t k = 0; k < x.cols; k += kGroupPiece) {
            char* w = unpacked + (once ? 0 : k / kGroupPiece) * 2 * kPieceBytes;
            for (int h = 0; tile == first && h < 2; ++h) {
                ahead.fetch(h);
                unpack_int4<kTwoGroups>(half[h], k / kGroupPiece, w + h * kPieceBytes);
            }
            for (int64_t n = 0; n < kGroupPiece / group; ++n) {
                const int64_t i = kTwoGroups ? n % 2 * 2 + n / 2 : n;  // the order in which `few_int4` comes to them
                if (i * group >= x.cols - k) continue;
                const int64_t block = kTwoGroups ? i / 2 : i;
                for (int first_of_parts = 0; first_of_parts < num_tokens; first_of_parts += kTile) {
                    const int64_t token = tile * kTile + first_of_parts;
                    const int together = std::min(num_tokens - first_of_parts, kTile);
                    const bool two = together > 8;
                    const char* tokens[2] = {x.parts(token, k + block * 64), two ? x.parts(token + 8, k + block * 64) : nullptr};
                    const char* tiles[2] = {w + i * 1024, w + kPieceBytes + i * 1024};
                    (two ? multiply_int4<true> : multiply_int4<false>)(tokens, tiles, count, together, products[turn]);
                    add_before();
                    begin = first_of_parts;
                    g = k / group + i;
                    turn = 1 - turn;
                }
            }
        }
        add_before();
        for (int64_t i = 0; tile + i < std::min(last, tile + kNearTiles); ++i)
            finish_int4(totals, static_cast<int>(i * kTile), num_tokens, x.scales + (tile + i) * kTile, sums[tile + i - first]);
    }
}

// Tiles [first, last) of the tokens against one strip.
template <typename T>
void int4_strip(const Strips<T>& strips, int matrix, int64_t row, const Half half[2], const Activations& x, int64_t first,
                int64_t last, Buffer& unpacked, Sums* sums, Ahead& ahead) {
    GroupScales scales[2];
    for (int h = 0; h < 2; ++h)
        scales[h] = scales_of(strips.matrix_of(matrix, h), half[h].count ? strips.row_of(row, h) : 0);
    const int64_t group = strips.matrix_of(matrix, 0).group;
    for (int64_t tile = first; tile < last; ++tile) sums[tile - first].by_token = true;
    if (x.tokens <= kFewTokens) {
        for (int h = 0; h < 2; ++h) {
            const bool whole = half[h].count == kTile;
            with_count<7>(x.tokens, [&](auto tokens) {
                constexpr int kTokens = decltype(tokens)::value;
                const auto multiply = whole ? few_int4<T, kTokens, true> : few_int4<T, kTokens, false>;
                multiply(half[h], scales[h], group, x, ahead, h, sums[0].at[h]);
            });
        }
        return;
    }
    const int64_t pieces = last - first <= kNearTiles ? 1 : (x.cols + kGroupPiece - 1) / kGroupPiece;
    const bool two_groups = group == 32;
    char* room = unpacked.get<char>(pieces * 2 * (two_groups ? 4096 : 2048));
    (two_groups ? many_int4<T, true> : many_int4<T, false>)(half, scales, group, x, first, last, room, sums, ahead);
}

#endif

}  // namespace quire
