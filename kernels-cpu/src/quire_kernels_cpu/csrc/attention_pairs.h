// Attention by products of pairs of bfloat16, where there are such but no tiles. Included by `attention.h`.
//
// The keys of a piece are turned over once, so that 16 of them lie side by side, and its values are interleaved two tokens
// at a time; then both products are the same one: numbers of a column, two at a time, times vectors. Every sum goes on
// in the order of the inputs or tokens. Weights are rounded to bfloat16 before they meet values.
#pragma once

#include "attention_columns.h"
#include "cache_pairs.h"
#include "dots.h"

#if defined(__AVX512BF16__)

namespace quire {

class PairAttention : public ColumnAttention<PairAttention, BFloat16> {
    using Base = ColumnAttention<PairAttention, BFloat16>;
    friend Base;

public:
    PairAttention(const Attention<BFloat16>& a, const AttentionTask& task, AttentionScratch& scratch)
        : Base(a, task, scratch), dim_(a.cache.head_dim), value_dim_(a.cache.value_dim) {
        keys_ = scratch.keys.get<uint32_t>(dim_ / 2 * kPiece);
        values_ = scratch.values.get<uint32_t>(kPiece / 2 * value_dim_);
        queries_ = scratch.queries.get<BFloat16>(all_columns_ * dim_);
    }

    static bool fits(const PagedCache& cache) {
        if (cache.format == CacheFormat::fp8_ds_mla) return false;  // scales differ within a row
        return cache.head_dim % (cache.format == CacheFormat::int4 ? 64 : 32) == 0 && cache.value_dim % 32 == 0;
    }

private:
    static constexpr int kDirect = 8;    // columns for which keys and values are turned as they are read, and not kept
    static constexpr int kTogether = 6;  // columns whose sums fit the registers, four vectors of each

    void set_queries() {
        for (int c = 0; c < columns_; ++c) std::memcpy(queries(c), query_of(c), dim_ * sizeof *queries_);
    }

    // The queries of the head at hand from column c on.
    BFloat16* queries(int c) const { return queries_ + (entered_ + c) * dim_; }

    // Columns over the tokens [begin, end) of a piece, whose keys are at `now`.
    void attend_all(Span columns, int piece, int begin, int end, const char* const* now) {
        const Span here{begin - piece, end - piece};
        take_row_scales(here, now);
        if (columns.end - columns.begin <= kDirect && is_whole(here, now)) {
            with_count<kDirect>(columns.end - columns.begin, [&](auto together) {
                with_rows(a_.cache, [&](auto rows) {
                    attend_whole<decltype(together)::value>(rows, columns.begin, piece, now);
                });
            });
            return;
        }
        with_rows(a_.cache, [&](auto rows) {
            turn_keys(rows, here, now);
            interleave_values(rows, here, now);
        });
        for (int c = columns.begin; c < columns.end;) {
            const int count = std::min(kTogether, columns.end - c);
            with_count<kTogether>(count, [&](auto together) { attend<decltype(together)::value>(c, piece, begin, end); });
            c += count;
        }
    }

    // Keys [D / 2][64 tokens] of pairs; what stands for no token may be anything.
    template <typename Rows>
    void turn_keys(const Rows& wide, Span here, const char* const* rows) {
        for (int block = here.begin / kTile * kTile; block < here.end; block += kTile) {
            const char* row[kTile];
            for (int i = 0; i < kTile; ++i) row[i] = rows[std::clamp(block + i, here.begin, here.end - 1)];
            for (int d = 0; d < dim_; d += 32) {
                ahead_.fetch(8);
                __m512i r[kTile];
#pragma GCC unroll 16
                for (int i = 0; i < kTile; ++i) r[i] = wide.load(row[i], d);
                transpose(r);
#pragma GCC unroll 16
                for (int i = 0; i < kTile; ++i) _mm512_store_si512(keys_ + (d / 2 + i) * kPiece + block, r[i]);
            }
        }
    }

    // Values [tokens / 2][D] of pairs, zeros beside a token that has no other.
    template <typename Rows>
    void interleave_values(const Rows& wide, Span here, const char* const* rows) {
        const int64_t offset = a_.cache.value_offset();
        for (int t = here.begin / 2 * 2; t < here.end; t += 2) {
            const char* row[2] = {};
            for (int i = 0; i < 2; ++i) {
                if (t + i < here.begin || t + i >= here.end) continue;
                row[i] = rows[t + i] + offset;
            }
            uint32_t* const to = values_ + t / 2 * value_dim_;
            for (int d = 0; d < value_dim_; d += 32) {
                ahead_.fetch(2);
                __m512i pairs[2];
                if (row[0] && row[1]) {
                    wide.interleave(row[0], row[1], d, pairs);
                } else {
                    const __m512i zero = _mm512_setzero_si512(), one = wide.load(row[row[0] ? 0 : 1], d);
                    interleave(row[0] ? one : zero, row[0] ? zero : one, pairs);
                }
                _mm512_store_si512(to + d, pairs[0]);
                _mm512_store_si512(to + d + 16, pairs[1]);
            }
        }
    }

    // kColumns columns from `first` on over the tokens [begin, end) of the piece at hand.
    template <int kColumns>
    void attend(int first, int piece, int begin, int end) {
        alignas(64) float weights[kColumns][kPiece];
        alignas(64) uint32_t rounded[kColumns][kPiece / 2];
        Span seen[kColumns];
        const Span some = seen_by_all<kColumns>(first, begin, end, seen);
        if (some.begin >= some.end) return;
        const auto* numbers = reinterpret_cast<const uint32_t*>(queries(first));
        multiply<kColumns, 4, true>(numbers, dim_ / 2, keys_, kPiece, {0, dim_ / 2}, nullptr, weights[0], kPiece, ahead_);
        float shrink[kColumns];
        weigh_all<kColumns>(first, piece, seen, weights, rounded, shrink);
        const Span pairs{(some.begin - piece) / 2, (some.end - piece + 1) / 2};
        for (int d = 0; d < value_dim_; d += 4 * kLanes) {
            const auto add = value_dim_ - d >= 4 * kLanes ? multiply<kColumns, 4, false> : multiply<kColumns, 2, false>;
            add(rounded[0], kPiece / 2, values_ + d, value_dim_, pairs, shrink, column(0, first).out + d, value_dim_, ahead_);
        }
    }

    // The tokens of [begin, end) that each column sees; returns those from the first to the last of any.
    template <int kColumns>
    Span seen_by_all(int first, int begin, int end, Span seen[kColumns]) const {
        Span some{end, begin};
        for (int c = 0; c < kColumns; ++c) {
            seen[c] = seen_by(first + c, begin, end);
            if (seen[c].begin >= seen[c].end) continue;
            some = {std::min(some.begin, seen[c].begin), std::max(some.end, seen[c].end)};
        }
        return some;
    }

    // Products of columns become weights, in `rounded` as bfloat16; shrink: see `weigh`.
    template <int kColumns>
    void weigh_all(int first, int piece, const Span seen[kColumns], float (*weights)[kPiece], uint32_t (*rounded)[kPiece / 2],
                   float shrink[kColumns]) {
        for (int c = 0; c < kColumns; ++c) {
            scale_by_row(0, weights[c]);
            shrink[c] = weigh(first + c, piece, seen[c], weights[c]);
            if (seen[c].begin >= seen[c].end) std::fill_n(weights[c], kPiece, 0.0f);
            scale_by_row(1, weights[c]);
            for (int t = 0; t < kPiece; t += 32) {
                const __m512 low = _mm512_load_ps(weights[c] + t), high = _mm512_load_ps(weights[c] + t + kLanes);
                _mm512_store_si512(rounded[c] + t / 2, (__m512i)_mm512_cvtne2ps_pbh(high, low));
            }
        }
    }

    // Whether a piece is all there, 16 tokens at a time in a row.
    bool is_whole(Span here, const char* const* rows) const {
        if (here.begin > 0 || here.end < kPiece) return false;
        for (int t = 1; t < kPiece; ++t)
            if (t % kTile != 0 && rows[t] - rows[t - 1] != a_.cache.row_bytes) return false;
        return true;
    }

    // kColumns columns from `first` on over a whole piece: as `attend` does it, but keys and values go straight from where
    // they are into products, with as much fetched of the next piece.
    template <int kColumns, typename Rows>
    void attend_whole(const Rows& rows, int first, int piece, const char* const* now) {
        alignas(64) float weights[kColumns][kPiece];
        alignas(64) uint32_t rounded[kColumns][kPiece / 2];
        Span seen[kColumns];
        const Span some = seen_by_all<kColumns>(first, piece, piece + kPiece, seen);
        if (some.begin >= some.end) return;
        const BFloat16* const query = queries(first);
        constexpr int kPairs = Rows::kNumbers / 16;     // of a row in 32 bits
        constexpr int kTiles = kColumns <= 4 ? 2 : 1;  // by turns, since each sum waits for its last addition
        for (int t = 0; t < kPiece; t += kTiles * kTile) {
            __m512 sums[kTiles][kColumns] = {};
            for (int d = 0; d < dim_; d += Rows::kNumbers) {
                __m512i lanes[kTiles][8];
#pragma GCC unroll 2
                for (int tile = 0; tile < kTiles; ++tile)
                    turn_rows(rows.at(now[t + tile * kTile], d), a_.cache.row_bytes, lanes[tile]);
#pragma GCC unroll 8
                for (int j = 0; j < 8; ++j) {
                    ahead_.fetch(kTiles);
                    __m512i pairs[kTiles][kPairs];
#pragma GCC unroll 2
                    for (int tile = 0; tile < kTiles; ++tile) rows.widen(lanes[tile][j], d, pairs[tile]);
#pragma GCC unroll 2
                    for (int p = 0; p < kPairs; ++p)
#pragma GCC unroll 8
                        for (int c = 0; c < kColumns; ++c) {
                            const __m512i numbers = pair_everywhere(query + c * dim_ + d + 2 * (kPairs * j + p));
#pragma GCC unroll 2
                            for (int tile = 0; tile < kTiles; ++tile)
                                sums[tile][c] = plus_pairs(sums[tile][c], numbers, pairs[tile][p]);
                        }
                }
            }
#pragma GCC unroll 2
            for (int tile = 0; tile < kTiles; ++tile)
#pragma GCC unroll 8
                for (int c = 0; c < kColumns; ++c) _mm512_store_ps(weights[c] + t + tile * kTile, sums[tile][c]);
        }
        float shrink[kColumns];
        weigh_all<kColumns>(first, piece, seen, weights, rounded, shrink);
        const Span pairs{(some.begin - piece) / 2, (some.end - piece + 1) / 2};
        constexpr int kAtOnce = kColumns <= 4 ? 2 : 1;  // times 32 numbers of a value
        int d = 0;
        for (; d + kAtOnce * 32 <= value_dim_; d += kAtOnce * 32)
            add_values<kColumns, kAtOnce>(rows, first, pairs, rounded, shrink, d, now);
        if (d < value_dim_) add_values<kColumns, 1>(rows, first, pairs, rounded, shrink, d, now);
    }

    // out = out * shrink + weights times values, the numbers [d, d + 32 kParts) of each.
    template <int kColumns, int kParts, typename Rows>
    void add_values(const Rows& rows, int first, Span pairs, const uint32_t (*weights)[kPiece / 2],
                    const float shrink[kColumns], int d, const char* const* now) {
        const int64_t offset = a_.cache.value_offset();
        __m512 sums[kColumns][2 * kParts];
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c)
#pragma GCC unroll 4
            for (int v = 0; v < 2 * kParts; ++v)
                sums[c][v] = _mm512_loadu_ps(column(0, first + c).out + d + v * kLanes) * shrink[c];
        for (int t = pairs.begin; t < pairs.end; ++t) {
            const char *even = now[2 * t] + offset, *odd = now[2 * t + 1] + offset;
            ahead_.fetch(kParts * 32 / Rows::kNumbers);
#pragma GCC unroll 2
            for (int part = 0; part < kParts; ++part) {
                __m512i halves[2];
                rows.interleave(even, odd, d + 32 * part, halves);
#pragma GCC unroll 8
                for (int c = 0; c < kColumns; ++c) {
                    const __m512i weight = _mm512_set1_epi32(static_cast<int>(weights[c][t]));
                    sums[c][2 * part] = plus_pairs(sums[c][2 * part], weight, halves[0]);
                    sums[c][2 * part + 1] = plus_pairs(sums[c][2 * part + 1], weight, halves[1]);
                }
            }
        }
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c)
#pragma GCC unroll 4
            for (int v = 0; v < 2 * kParts; ++v)
                _mm512_storeu_ps(column(0, first + c).out + d + v * kLanes, sums[c][v]);
    }

    // to [kColumns][kVectors vectors] = products of `numbers`, a row of pairs for each column, with `vectors` over some steps;
    // added to what is there times `shrink`, unless `kFirst`.
    template <int kColumns, int kVectors, bool kFirst>
    static void multiply(const uint32_t* numbers, int64_t stride, const uint32_t* vectors, int64_t vector_stride, Span steps,
                         const float* shrink, float* to, int64_t to_stride, ReadAhead& ahead) {
        __m512 sums[kColumns][kVectors];
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c)
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v)
                sums[c][v] = kFirst ? _mm512_setzero_ps() : _mm512_loadu_ps(to + c * to_stride + v * kLanes) * shrink[c];
        for (int k = steps.begin; k < steps.end; ++k) {
            ahead.fetch(2);
            __m512i vector[kVectors];
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) vector[v] = _mm512_load_si512(vectors + k * vector_stride + v * kLanes);
#pragma GCC unroll 8
            for (int c = 0; c < kColumns; ++c) {
                const __m512i pair = _mm512_set1_epi32(static_cast<int>(numbers[c * stride + k]));
#pragma GCC unroll 4
                for (int v = 0; v < kVectors; ++v)
                    sums[c][v] = _mm512_dpbf16_ps(sums[c][v], (__m512bh)pair, (__m512bh)vector[v]);
            }
        }
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c)
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) _mm512_storeu_ps(to + c * to_stride + v * kLanes, sums[c][v]);
    }

    const int dim_, value_dim_;
    uint32_t *keys_, *values_;
    BFloat16* queries_;
};

}  // namespace quire

#endif
