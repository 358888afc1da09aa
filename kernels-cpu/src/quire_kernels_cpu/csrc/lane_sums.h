// Matrices by vectors without sums across lanes, where there are products of several inputs a lane and no tiles: of bytes
// (VNNI) for int8, of pairs of bfloat16 for bfloat16 and fp8. (For int4 and few tokens, see `int4.h`.)
//
// Of few tokens each number is in all lanes, and a vector has some inputs of 16 outputs. Many tokens lie side by side, and
// meet eight rows, whose bytes are widened first. A group of inputs is summed from zero, exactly of int8 and else in the order
// of its pairs; groups are scaled and added in order: a token's bits are the same either way. Of a pair of bfloat16 both
// products are added to what the lane has (on Intel processors the second one first), each rounded to nearest even; numbers
// below the normal ones count as zeros, as in AMX.
#pragma once

#include <algorithm>
#include <type_traits>

#include "activations.h"
#include "byte_pairs.h"
#include "dots.h"
#include "group_scales.h"
#include "int4.h"
#include "sums.h"
#include "tiles.h"
#include "vectors.h"
#include "weights.h"

#ifdef QUIRE_VNNI
namespace quire {

constexpr int kLaneRows = 8;  // that many tokens meet together
constexpr int kBlockTokens = 8;  // from which on bfloat16 is turned over in blocks: products are most of the time then

// The groups of inputs of one half.
struct LaneGroups {
    GroupScales scales;  // no `scale`: all are 1
    int64_t size;        // inputs; a multiple of 32

    __m512 scales_of(int64_t g) const {
        return scales.scale ? (__m512)scales.scales_of<BFloat16>(g, 0) : _mm512_set1_ps(1.0f);
    }
    __m512 scale_of(int64_t g, int row) const {
        return _mm512_set1_ps(scales.scale ? scales.scale_of<BFloat16>(g, row) : 1.0f);
    }
};

// A way of multiplying has weights of kBytes bytes. Few tokens, kMostFew of them together: 32 bytes of 16 rows are turned over
// to eight vectors (`widen`), which meet a token's numbers at `token`. Many: kInLane inputs of a row, prepared or as they are,
// meet those of 16 tokens; the sums of kTogether times 16 stay in registers.

// Int8 and fixed-point numbers of 15 bits. Few tokens come in two parts, which weights meet with 128 added; many in words.
template <bool kZeros>
struct WholeWeights {
    static constexpr bool kInt4 = false, kHasZeros = kZeros, kPrepares = true;
    static constexpr int kBytes = 1, kMostFew = 8;
    static constexpr int kMiddle = 128;
    static int64_t row_bytes(int64_t cols) { return cols; }
    static float step(const Activations& x, int64_t t) { return x.scales[t]; }

    static __m512i widen(__m512i fours) { return _mm512_xor_si512(fours, _mm512_set1_epi8(-128)); }
    // Of a multiple of eight.
    static const char* token(const Activations& x, int64_t t, int64_t k) { return x.parts(t, k / 64 * 64) + k % 64; }
    static int64_t token_bytes(const Activations&) { return 128; }
    struct Few {
        __m512i high = _mm512_setzero_si512(), low = _mm512_setzero_si512();

        void add(__m512i weights, const char* token, int four) {
            high = _mm512_dpbusd_epi32(high, weights, pair_everywhere(token + 4 * four));
            low = _mm512_dpbusd_epi32(low, weights, pair_everywhere(token + 64 + 4 * four));
        }
        __m512 added_to(__m512 total, const LaneGroups& groups, int64_t g, __m512 scale, const Activations& x,
                        int64_t t) const {
            return add_parts<kMiddle, kZeros>(total, high, low, x.eight_sums(t, groups.size) + g,
                                              load_zeros(groups.scales, g), scale);
        }
    };

    static constexpr int kInLane = 2, kTogether = 3;
    using Many = Ints;
    static __m512i prepared(const char* from, int16_t zero) {
        const __m512i words = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
        return kZeros ? _mm512_sub_epi16(words, _mm512_set1_epi16(zero)) : words;
    }
    static Many add(Many sum, __m512i w, __m512i x) { return plus_pair_products(sum, (Shorts)w, (Shorts)x); }
    static __m512 finished(Many sum, const Activations&, int64_t, int64_t) { return (__m512)whole_to_floats(sum); }
};

// Int4 and words of 15 bits; of few tokens `int4.h` makes the same sums.
struct Int4Weights : WholeWeights<false> {
    static constexpr bool kInt4 = true;
    static int64_t row_bytes(int64_t cols) { return (cols + kGroupPiece - 1) / kGroupPiece * (kGroupPiece / 2); }
};

// Int8 and tokens that are rounded to int8, four of each in a lane; weights have 128 added.
struct RoundedWeights {
    static constexpr bool kInt4 = false, kHasZeros = false, kPrepares = true;
    static constexpr int kBytes = 1, kMostFew = 8;
    static int64_t row_bytes(int64_t cols) { return cols; }
    static float step(const Activations& x, int64_t t) { return x.scales[t]; }

    static __m512i widen(__m512i fours) { return _mm512_xor_si512(fours, _mm512_set1_epi8(-128)); }
    static const char* token(const Activations& x, int64_t t, int64_t k) {
        return reinterpret_cast<const char*>(x.columns(0) + k / 4 * kTile + t);
    }
    static int64_t token_bytes(const Activations&) { return 4; }
    struct Few {
        __m512i sum = _mm512_setzero_si512();

        void add(__m512i weights, const char* token, int four) {
            sum = _mm512_dpbusd_epi32(sum, weights, pair_everywhere(token + four * kTile * 4));
        }
        __m512 added_to(__m512 total, const LaneGroups&, int64_t g, __m512, const Activations& x, int64_t t) const {
            return _mm512_cvtepi32_ps(_mm512_add_epi32(sum, _mm512_set1_epi32(x.offsets(0, g)[t]))) + total;
        }
    };

    static constexpr int kInLane = 4, kTogether = 2;  // tiles: gcc keeps no more sums in registers
    using Many = __m512i;
    static __m512i prepared(const char* from, int16_t) { return widen(_mm512_loadu_si512(from)); }
    static Many add(Many sum, __m512i w, __m512i x) { return _mm512_dpbusd_epi32(sum, w, x); }
    static __m512 finished(Many sum, const Activations& x, int64_t tile, int64_t g) {
        return _mm512_cvtepi32_ps(_mm512_add_epi32(sum, _mm512_loadu_si512(x.offsets(tile, g))));
    }
};

#if defined(__AVX512BF16__)
// Pairs of bfloat16, whatever the weights were.
struct PairWeights {
    static constexpr bool kInt4 = false, kHasZeros = false;
    static float step(const Activations&, int64_t) { return 1.0f; }
    static const char* token(const Activations& x, int64_t t, int64_t k) {
        return reinterpret_cast<const char*>(x.bf16_row(t) + k);
    }
    static int64_t token_bytes(const Activations& x) { return x.token_stride() * 2; }

    static constexpr int kInLane = 2, kTogether = 3;
    using Many = __m512;
    static Many add(Many sum, __m512i w, __m512i x) { return plus_pairs(sum, w, x); }
    static __m512 finished(Many sum, const Activations&, int64_t, int64_t) { return sum; }
};

struct BFloat16Weights : PairWeights {
    static constexpr bool kPrepares = false;
    static constexpr int kBytes = 2, kMostFew = 12;
    static int64_t row_bytes(int64_t cols) { return 2 * cols; }
    static __m512i widen(__m512i pairs) { return pairs; }
    struct Few {
        __m512 sum = _mm512_setzero_ps();

        void add(__m512i weights, const char* token, int pair) {
            __m512i numbers = pair_everywhere(token + 4 * pair);
            in_register(numbers);
            sum = plus_pairs(sum, weights, numbers);
        }
        __m512 added_to(__m512 total, const LaneGroups&, int64_t, __m512, const Activations&, int64_t) const {
            return total + sum;
        }
    };
};

struct Float8Weights : PairWeights {
    static constexpr bool kPrepares = true;
    static constexpr int kBytes = 1, kMostFew = 8;
    static int64_t row_bytes(int64_t cols) { return cols; }
    struct Wide {
        __m512i pairs[2];
    };
    static Wide widen(__m512i fours) {
        Wide wide;
        widen_fours(Float8Codes(kFloat8Weights), fours, wide.pairs);
        return wide;
    }
    struct Few {
        __m512 sum = _mm512_setzero_ps();

        void add(const Wide& weights, const char* token, int four) {
            sum = plus_pairs(sum, weights.pairs[0], pair_everywhere(token + 8 * four));
            sum = plus_pairs(sum, weights.pairs[1], pair_everywhere(token + 8 * four + 4));
        }
        __m512 added_to(__m512 total, const LaneGroups&, int64_t, __m512 scale, const Activations&, int64_t) const {
            return _mm512_fmadd_ps(sum, scale, total);
        }
    };
    static __m512i prepared(const char* from, int16_t) {
        return widen_in_order(Float8Codes(kFloat8Weights), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    }
};
#endif

// sums[first + t][output]: 16 rows against kTokens tokens from `first` on. ahead: as much that comes next, fetched meanwhile.
template <typename Weights, int kTokens, typename Turner>
inline void few_in_lanes(const char* rows, const char* ahead, const LaneGroups& groups, const Activations& x, int64_t first,
                         float sums[kTile][kTile]) {
    const int64_t token_bytes = Weights::token_bytes(x);
    const int64_t row_bytes = x.cols * Weights::kBytes;
    Turner turner{rows, row_bytes};
    __m512 totals[kTokens] = {};
    for (int64_t begin = 0, g = 0; begin < x.cols; begin += groups.size, ++g) {
        typename Weights::Few acc[kTokens];
        for (int64_t k = begin; k < std::min(begin + groups.size, x.cols); k += 32 / Weights::kBytes) {
            const char* const tokens = Weights::token(x, first, k);
            __m512i turned[8];
            turner.turn_at(k * Weights::kBytes, turned);
            // The page that comes after as much again is looked up by now.
            if (reinterpret_cast<uintptr_t>(ahead) % 4096 < 512) __builtin_prefetch(ahead + kTile * row_bytes, 0, 2);
#pragma GCC unroll 8
            for (int j = 0; j < 8; ++j, ahead += 64) {
                __builtin_prefetch(ahead, 0, 2);
                const auto weights = Weights::widen(turned[j]);
#pragma GCC unroll 12
                for (int t = 0; t < kTokens; ++t) acc[t].add(weights, tokens + t * token_bytes, j);
            }
        }
        const __m512 scale = groups.scales_of(g);
#pragma GCC unroll 12
        for (int t = 0; t < kTokens; ++t) totals[t] = acc[t].added_to(totals[t], groups, g, scale, x, first + t);
    }
    for (int t = 0; t < kTokens; ++t) _mm512_store_ps(sums[first + t], totals[t] * Weights::step(x, first + t));
}

// kLaneRows rows as many tokens meet them. Of int4 a lane is kTile lanes from the next one of its row.
struct LaneRows {
    const char* data;
    int64_t stride;
};

// Of a half's rows from `row` on the inputs [k, k + width).
template <typename Weights>
inline LaneRows lane_rows(const char* rows, int64_t row_bytes, int row, int64_t k, int64_t width, const LaneGroups& groups,
                          Buffer& buffer) {
    const char* const from = rows + row * row_bytes + k * Weights::kBytes;
    if constexpr (Weights::kPrepares) {
        constexpr int64_t kInVector = kTile * Weights::kInLane, kStride = kBytePiece * 2;
        char* const prepared = buffer.get<char>(kLaneRows * kStride);
        for (int i = 0; i < kLaneRows; ++i)
            for (int64_t begin = 0; begin < width; begin += kInVector) {
                int16_t zero = 0;
                if constexpr (Weights::kHasZeros) zero = groups.scales.zero[(k + begin) / groups.size * kTile + row + i];
                _mm512_store_si512(prepared + i * kStride + begin / Weights::kInLane * 4,
                                   Weights::prepared(from + i * row_bytes + begin, zero));
            }
        return {prepared, kStride};
    }
    return {from, row_bytes};
}

// A piece of 128 inputs of int4 from `k` on as words, zero points taken off: [64 pairs of inputs][16 outputs].
inline void prepare_int4(const Half& half, const LaneGroups& groups, int64_t k, int64_t cols, char* to) {
    const __mmask16 outputs = static_cast<__mmask16>((1u << half.count) - 1);
    const __m512i first_words = _mm512_broadcast_i32x4(_mm_setr_epi8(0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1));
    const __m512i last_words = _mm512_broadcast_i32x4(_mm_setr_epi8(2, -1, 3, -1, 6, -1, 7, -1, 10, -1, 11, -1, 14, -1, 15, -1));
    __m512i middle[4];  // of 32 inputs each
    for (int64_t i = 0; i < 4; ++i) {
        middle[i] = _mm512_set1_epi16(kInt4Middle);
        if (!groups.scales.zero || k + 32 * i >= cols) continue;
        const __m512i zero = load_zeros(groups.scales, (k + 32 * i) / groups.size);
        const __m512i whole = _mm512_add_epi32(zero, _mm512_set1_epi32(kInt4Middle));
        middle[i] = _mm512_or_si512(_mm512_slli_epi32(whole, 16), _mm512_and_si512(whole, _mm512_set1_epi32(0xffff)));
    }
    const char* at = half.data + k / kGroupPiece * kPieceSteps * half.count * 4;
    for (int s = 0; s < kPieceSteps; ++s, at += half.count * 4, to += 128) {
        const __m512i both = load_step(at, outputs);
        for (int upper = 0; upper < 2; ++upper) {
            const __m512i fours = upper ? upper_half(both) : lower_half(both), zero = middle[2 * upper + s / 8];
            char* const pairs = to + upper * 2048;
            _mm512_store_si512(pairs, _mm512_sub_epi16(_mm512_shuffle_epi8(fours, first_words), zero));
            _mm512_store_si512(pairs + 64, _mm512_sub_epi16(_mm512_shuffle_epi8(fours, last_words), zero));
        }
    }
}

// sums[tile].at[h][row + i] (+)= group g of kLaneRows rows, `steps` lanes, times kTiles tiles of tokens from `tile` on.
// tokens_of_group: where it begins in the first of them.
template <typename Weights, int kTiles>
inline void add_in_lanes(const LaneRows& rows, int64_t steps, const Activations& x, int64_t tile,
                         const uint32_t* tokens_of_group, const LaneGroups& groups, int64_t g, SpreadFetch& fetch, Sums* sums,
                         int h, int row) {
    const int64_t tile_stride = x.cols / Weights::kInLane * kTile;
    constexpr int64_t kLaneBytes = Weights::kInt4 ? kTile * 4 : 4;  // from a lane of a row to the next
    const int64_t stride = Weights::kInt4 ? 4 : rows.stride;
    typename Weights::Many acc[kLaneRows][kTiles] = {};
    for (int64_t some = 0; some < steps; some += kTile) {
        fetch.step();
        for (int64_t k = some; k < some + kTile; ++k) {
            __m512i tokens[kTiles];
#pragma GCC unroll 4
            for (int v = 0; v < kTiles; ++v) {
                __m512i of_tile = _mm512_loadu_si512(tokens_of_group + v * tile_stride + k * kTile);
                in_register(of_tile);
                tokens[v] = of_tile;
            }
#pragma GCC unroll 8
            for (int i = 0; i < kLaneRows; ++i) {
                const __m512i weight = pair_everywhere(rows.data + i * stride + kLaneBytes * k);
#pragma GCC unroll 4
                for (int v = 0; v < kTiles; ++v) acc[i][v] = Weights::add(acc[i][v], weight, tokens[v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kLaneRows; ++i) {
        const __m512 scale = groups.scale_of(g, row + i);
#pragma GCC unroll 4
        for (int v = 0; v < kTiles; ++v) {
            float* const sum = sums[v].at[h][row + i];
            const __m512 before = g == 0 ? _mm512_setzero_ps() : _mm512_load_ps(sum);
            _mm512_store_ps(sum, _mm512_fmadd_ps(Weights::finished(acc[i][v], x, tile + v, g), scale, before));
        }
    }
}

// Of the groups of a piece the one that is added n-th, see `few_int4`.
template <typename Weights>
inline int64_t group_in_turn(int64_t n, int64_t size) {
    return Weights::kInt4 && size == 32 ? n / 4 * 4 + n % 2 * 2 + n % 4 / 2 : n;
}

// One half against tiles [first, last) of the tokens.
template <typename Weights>
void many_in_lanes(const Half& half, const Half& next, const LaneGroups& groups, const Activations& x, int64_t first,
                   int64_t last, int h, Buffer& buffer, Sums* sums) {
    constexpr int kTogether = Weights::kTogether;
    constexpr int64_t kLaneBytes = Weights::kInt4 ? kTile * 4 : 4;
    const int64_t row_bytes = Weights::row_bytes(x.cols), parts = (last - first + kTogether - 1) / kTogether;
    SpreadFetch fetch(next, row_bytes, x.cols / (kTile * Weights::kInLane) * (kTile / kLaneRows) * parts);
    for (int64_t k = 0; k < x.cols; k += kBytePiece) {
        const int64_t width = std::min(kBytePiece, x.cols - k);
        const int64_t pieces = (width + kGroupPiece - 1) / kGroupPiece;
        const int64_t num_groups = Weights::kInt4 ? pieces * kGroupPiece / groups.size : (width + groups.size - 1) / groups.size;
        char* const prepared = Weights::kInt4 ? buffer.get<char>(kBytePiece * kTile * 2) : nullptr;
        for (int64_t i = 0; Weights::kInt4 && i < pieces; ++i)
            prepare_int4(half, groups, k + i * kGroupPiece, x.cols, prepared + i * kGroupPiece * kTile * 2);
        for (int row = 0; row < kTile; row += kLaneRows) {
            LaneRows some = {prepared + row * 4, 4};
            if constexpr (!Weights::kInt4) some = lane_rows<Weights>(half.data, row_bytes, row, k, width, groups, buffer);
            for (int64_t tile = first; tile < last; tile += kTogether)
                with_count<kTogether>(std::min<int64_t>(kTogether, last - tile), [&](auto tiles) {
                    for (int64_t n = 0; n < num_groups; ++n) {
                        const int64_t begin = group_in_turn<Weights>(n, groups.size) * groups.size;
                        if (begin >= width) continue;
                        const int64_t lane = (tile * x.cols + k + begin) / Weights::kInLane;
                        const uint32_t* const tokens = static_cast<const uint32_t*>(x.data) + lane * kTile;
                        add_in_lanes<Weights, decltype(tiles)::value>(
                            {some.data + begin / Weights::kInLane * kLaneBytes, some.stride},
                            std::min(groups.size, width - begin) / Weights::kInLane, x, tile, tokens, groups,
                            (k + begin) / groups.size, fetch, sums + (tile - first), h, row);
                    }
                });
        }
    }
}

// Both halves of a strip against the tiles [first, last) of the tokens.
template <typename Weights>
void many_in_lanes(const Half half[2], const LaneGroups groups[2], const Half& following, const Half& next, const Activations& x,
                   int64_t first, int64_t last, Buffer& buffer, Sums* sums) {
    for (int h = 0; h < 2; ++h)
        many_in_lanes<Weights>(half[h], h == 0 ? following : next, groups[h], x, first, last, h, buffer, sums);
    for (int64_t tile = first; x.scales && tile < last; ++tile) scale_tokens(x.scales + tile * kTile, sums[tile - first]);
}

// A strip against the tiles [first, last) of the tokens; sums[0] belongs to tile `first`. next: the strip behind it.
template <typename Weights>
void multiply_in_lanes(const char* const rows[2], const LaneGroups groups[2], const Half half[2], const Half next[2],
                       const Activations& x, int64_t first, int64_t last, Buffer& buffer, Sums* sums) {
    if (x.tokens > kFewLaneTokens) {
        const Half whole[2] = {{rows[0], kTile}, {rows[1], kTile}};
        many_in_lanes<Weights>(whole, groups, half[1], next[0], x, first, last, buffer, sums);
        return;
    }
    // Where nothing comes next, what was is fetched.
    const char* const ahead[2] = {rows[1], next[0].count ? next[0].data : rows[0]};
    constexpr int kMost = Weights::kMostFew;
    const bool by_lines = LineTurner::fits(x.cols * Weights::kBytes);
    sums->by_token = true;
    for (int64_t token = 0; token < x.tokens; token += kMost)
        with_count<kMost>(std::min<int64_t>(kMost, x.tokens - token), [&](auto together) {
            constexpr int kTokens = decltype(together)::value;
            using Turner = std::conditional_t<(!Weights::kPrepares && kTokens >= kBlockTokens), BlockTurner, RowTurner>;
            const auto few = by_lines ? few_in_lanes<Weights, kTokens, LineTurner> : few_in_lanes<Weights, kTokens, Turner>;
            for (int h = 0; h < 2; ++h) few(rows[h], ahead[h], groups[h], x, token, sums->at[h]);
        });
}

// A strip against the tiles [first, last) of the tokens.
inline void lane_strip(const Strips<BFloat16>& strips, int matrix, int64_t row, const Half half[2], const Half next[2],
                       const Activations& x, int64_t first, int64_t last, Buffer padding[2], Buffer& buffer, Sums* sums) {
    LaneGroups groups[2];
    for (int h = 0; h < 2; ++h) {
        const Matrix<BFloat16>& m = strips.matrix_of(matrix, h);
        groups[h] = {{nullptr, nullptr, false}, kBytePiece};
        if (m.grouped()) groups[h] = {scales_of(m, half[h].count ? strips.row_of(row, h) : 0), m.group};
    }
    if (strips.format() == WeightFormat::group_int4)
        return many_in_lanes<Int4Weights>(half, groups, half[1], next[0], x, first, last, buffer, sums);
    const int64_t row_bytes = strips.row_bytes();
    const char* const rows[2] = {whole_rows(half[0], row_bytes, padding[0]), whole_rows(half[1], row_bytes, padding[1])};
    const auto multiply = [&](auto weights) {
        multiply_in_lanes<decltype(weights)>(rows, groups, half, next, x, first, last, buffer, sums);
    };
#if defined(__AVX512BF16__)
    if (strips.format() == WeightFormat::plain) return multiply(BFloat16Weights{});
    if (strips.format() == WeightFormat::group_fp8) return multiply(Float8Weights{});
#endif
    if (strips.format() == WeightFormat::w8a8) return multiply(RoundedWeights{});
    groups[0].scales.zero ? multiply(WholeWeights<true>{}) : multiply(WholeWeights<false>{});
}

}  // namespace quire
#endif
