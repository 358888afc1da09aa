// Attention by products of bytes over an int8 cache, where there are such (VNNI) but no tiles. Included by `attention.h`.
//
// The cache's rows are multiplied as they are. A query is rounded to int8 with a step of its own, as `w8a8` rounds tokens;
// the weights of a piece, times the scales of their values, to 8 bits without a sign, each column with a step of its own
// (SageAttention rounds both products so: Zhang et al. 2024, sec. 3.3). Sums of a piece are exact, so that what a column gets
// depends on nothing but its query and the rows that it sees. Softmax, and sums over pieces, are in float32.
#pragma once

#include "activations.h"
#include "attention_columns.h"

#ifdef QUIRE_VNNI

namespace quire {

// sum + products of bytes, four to a lane, of which those of `a` have no sign. gcc keeps more sums in registers this way than by
// the intrinsic, whose result it copies.
template <typename Vector>
inline Vector plus_byte_products(Vector sum, Vector a, Vector b) {
    if constexpr (sizeof(Vector) <= __BIGGEST_ALIGNMENT__) {
        asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
        return sum;
    } else {
        return _mm512_dpbusd_epi32(sum, a, b);  // where tests emulate AVX-512
    }
}

class ByteAttention : public ColumnAttention<ByteAttention, BFloat16> {
    using Base = ColumnAttention<ByteAttention, BFloat16>;
    friend Base;

public:
    ByteAttention(const Attention<BFloat16>& a, const AttentionTask& task, AttentionScratch& scratch)
        : Base(a, task, scratch), dim_(a.cache.head_dim) {
        keys_ = scratch.keys.get<uint32_t>(dim_ / 4 * kPiece);
        values_ = scratch.values.get<uint32_t>(kPiece / 4 * dim_);
        queries_ = scratch.queries.get<int8_t>(all_columns_ * dim_);
        copied_ = scratch.column.get<char>(kTile * dim_);
        query_steps_ = scratch.weights.get<float>(all_columns_);
        query_offsets_ = scratch.scores.get<int32_t>(all_columns_);
    }

    static bool fits(const PagedCache& cache) { return cache.format == CacheFormat::int8 && cache.head_dim % 32 == 0; }

private:
    static constexpr int kTogether = 6;  // columns whose sums fit the registers, four vectors of each

    void set_queries() {
        for (int c = 0; c < columns_; ++c) {
            const BFloat16* const from = query_of(c);
            int8_t* const to = queries_ + (entered_ + c) * dim_;
            const TokenStep of = step_of(from, dim_, kInt8Most, 0.0f);
            __m512i sum = _mm512_setzero_si512();
            for (int d = 0; d < dim_; d += kLanes) {
                const __m512i whole = _mm512_cvtps_epi32((__m512)(load(from + d) * of.inverse));
                _mm_storeu_si128(reinterpret_cast<__m128i*>(to + d), _mm512_cvtsepi32_epi8(whole));
                sum = _mm512_add_epi32(sum, whole);
            }
            query_steps_[entered_ + c] = of.step;
            query_offsets_[entered_ + c] = -128 * _mm512_reduce_add_epi32(sum);  // keys have 128 added
        }
    }

    // Columns over the tokens [begin, end) of a piece, whose keys are at `now`.
    void attend_all(Span columns, int piece, int begin, int end, const char* const* now) {
        const Span here{begin - piece, end - piece};
        take_row_scales(here, now);
        turn_keys(here, now);
        interleave_values(here, now);
        take_value_scales();
        for (int c = columns.begin; c < columns.end;) {
            const int count = std::min(kTogether, columns.end - c);
            with_count<kTogether>(count, [&](auto together) { attend<decltype(together)::value>(c, piece, begin, end); });
            c += count;
        }
    }

    // Values with something that is no number have a scale that is none: which ones, and 0 in its place.
    void take_value_scales() {
        uint32_t most = 0, bits[kPiece];
        std::memcpy(bits, row_scales_ + kPiece, sizeof bits);
        for (const uint32_t each : bits) most = std::max(most, each);
        no_numbers_ = 0;
        constexpr uint32_t kInfinity = 0x7f800000u;
        if (most < kInfinity) return;
        for (int t = 0; t < kPiece; ++t) {
            if (bits[t] < kInfinity) continue;
            row_scales_[kPiece + t] = 0.0f;
            no_numbers_ |= uint64_t{1} << t;
        }
    }

    // Keys [D / 4][64 tokens] of four bytes, with 128 added; what stands for no token may be anything.
    void turn_keys(Span here, const char* const* rows) {
        const __m512i middle = _mm512_set1_epi8(-128);
        for (int block = here.begin / kTile * kTile; block < here.end; block += kTile) {
            const char* row[kTile];
            bool together = true;
            for (int i = 0; i < kTile; ++i) {
                row[i] = rows[std::clamp(block + i, here.begin, here.end - 1)];
                together &= row[i] - row[0] == i * a_.cache.row_bytes;
            }
            for (int i = 0; !together && i < kTile; ++i) std::memcpy(copied_ + i * dim_, row[i], dim_);
            const char* const first = together ? row[0] : copied_;
            const int64_t apart = together ? a_.cache.row_bytes : dim_;
            for (int d = 0; d < dim_; d += 16) {
                ahead_.fetch(4);
                __m512i fours[4];
                turn_blocks(first + d, apart, fours);
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i)
                    _mm512_store_si512(keys_ + (d / 4 + i) * kPiece + block, _mm512_xor_si512(fours[i], middle));
            }
        }
    }

    // Values [tokens / 4][D] of four bytes; what stands for no token may be anything, since its weight is 0.
    void interleave_values(Span here, const char* const* rows) {
        const int64_t offset = a_.cache.value_offset();
        // Unpacking brings the numbers 16 v + 4 l + i of four rows to where 16 l + 4 v + i were.
        const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        for (int t = here.begin / 4 * 4; t < here.end; t += 4) {
            const char* row[4];
            for (int i = 0; i < 4; ++i) row[i] = rows[std::clamp(t + i, here.begin, here.end - 1)] + offset;
            uint32_t* const to = values_ + t / 4 * dim_;
            for (int d = 0; d < dim_; d += 64) {
                ahead_.fetch(5);
                const __mmask16 some = static_cast<__mmask16>(dim_ - d < 64 ? 0xff : 0xffff);
                __m512i r[4];
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i) {
                    const __m512i from = _mm512_maskz_loadu_epi32(some, row[i] + d);
                    r[i] = _mm512_permutex2var_epi32(from, order, from);
                }
                const __m512i low = _mm512_unpacklo_epi8(r[0], r[1]), high = _mm512_unpackhi_epi8(r[0], r[1]);
                const __m512i other_low = _mm512_unpacklo_epi8(r[2], r[3]), other_high = _mm512_unpackhi_epi8(r[2], r[3]);
                _mm512_store_si512(to + d, _mm512_unpacklo_epi16(low, other_low));
                _mm512_store_si512(to + d + 16, _mm512_unpackhi_epi16(low, other_low));
                if (dim_ - d < 64) break;
                _mm512_store_si512(to + d + 32, _mm512_unpacklo_epi16(high, other_high));
                _mm512_store_si512(to + d + 48, _mm512_unpackhi_epi16(high, other_high));
            }
        }
    }

    // kColumns columns from `first` on over the tokens [begin, end) of the piece at hand.
    template <int kColumns>
    void attend(int first, int piece, int begin, int end) {
        alignas(64) float weights[kColumns][kPiece];
        alignas(64) uint8_t codes[kColumns][kPiece];
        Span seen[kColumns], some{end, begin};
        for (int c = 0; c < kColumns; ++c) {
            seen[c] = seen_by(first + c, begin, end);
            if (seen[c].begin >= seen[c].end) continue;
            some = {std::min(some.begin, seen[c].begin), std::max(some.end, seen[c].end)};
        }
        if (some.begin >= some.end) return;
        score<kColumns>(first, weights);
        float shrink[kColumns], steps[kColumns];
        for (int c = 0; c < kColumns; ++c) {
            shrink[c] = weigh(first + c, piece, seen[c], weights[c]);
            if (seen[c].begin >= seen[c].end) std::fill_n(weights[c], kPiece, 0.0f);
            steps[c] = round_weights(weights[c], codes[c]);
        }
        const Span fours{(some.begin - piece) / 4, (some.end - piece + 3) / 4};
        for (int d = 0; d < dim_; d += 4 * kLanes) {
            if (dim_ - d >= 4 * kLanes) {
                add_values<kColumns, 4>(first, fours, codes, steps, shrink, d);
            } else {
                add_values<kColumns, 2>(first, fours, codes, steps, shrink, d);
            }
        }
    }

    // Products of queries and keys, in float32.
    template <int kColumns>
    void score(int first, float (*weights)[kPiece]) {
        constexpr int kVectors = kPiece / kLanes;
        const int8_t* const numbers = queries_ + (entered_ + first) * dim_;
        __m512i sums[kColumns][kVectors];
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c)
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) sums[c][v] = _mm512_set1_epi32(query_offsets_[entered_ + first + c]);
        for (int k = 0; k < dim_ / 4; ++k) {
            __m512i keys[kVectors];
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) keys[v] = _mm512_load_si512(keys_ + k * kPiece + v * kLanes);
#pragma GCC unroll 8
            for (int c = 0; c < kColumns; ++c) {
                const __m512i four = pair_everywhere(numbers + c * dim_ + 4 * k);
#pragma GCC unroll 4
                for (int v = 0; v < kVectors; ++v) sums[c][v] = plus_byte_products(sums[c][v], keys[v], four);
            }
        }
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c) {
            const float step = query_steps_[entered_ + first + c];
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) {
                const Floats sum = (Floats)_mm512_cvtepi32_ps(sums[c][v]);
                store(weights[c] + v * kLanes, sum * step * load(row_scales_ + v * kLanes));
            }
        }
    }

    // A column's weights times the scales of their values as whole numbers up to 255; returns their step.
    float round_weights(const float* weights, uint8_t* codes) const {
        constexpr int kVectors = kPiece / kLanes;
        Floats scaled[kVectors], most = {};
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            scaled[v] = load(weights + v * kLanes) * load(row_scales_ + kPiece + v * kLanes);
            most = max(scaled[v], most);
        }
        const float highest = highest_lane(most);
        float inverse = 255.0f / highest;
        if (!(inverse < INFINITY)) inverse = 0.0f;  // zeros, or hardly more
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)(scaled[v] * inverse)));
            _mm_store_si128(reinterpret_cast<__m128i*>(codes + v * kLanes), bytes);
        }
        for (uint64_t rest = no_numbers_; rest; rest &= rest - 1)
            if (weights[__builtin_ctzll(rest)] != 0.0f) return NAN;
        return highest / 255.0f;
    }

    // out = out * shrink + weights times values, the numbers [d, d + 16 kVectors) of each, of the tokens [4 * fours.begin,
    // 4 * fours.end) of the piece at hand.
    template <int kColumns, int kVectors>
    void add_values(int first, Span fours, const uint8_t (*codes)[kPiece], const float* steps, const float* shrink, int d) {
        __m512i sums[kColumns][kVectors];
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c)
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) sums[c][v] = _mm512_setzero_si512();
        for (int t = fours.begin; t < fours.end; ++t) {
            __m512i values[kVectors];
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) values[v] = _mm512_load_si512(values_ + t * dim_ + d + v * kLanes);
#pragma GCC unroll 8
            for (int c = 0; c < kColumns; ++c) {
                const __m512i four = pair_everywhere(codes[c] + 4 * t);
#pragma GCC unroll 4
                for (int v = 0; v < kVectors; ++v) sums[c][v] = plus_byte_products(sums[c][v], four, values[v]);
            }
        }
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c) {
            float* const out = column(0, first + c).out + d;
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v)
                store(out + v * kLanes, fused((Floats)_mm512_cvtepi32_ps(sums[c][v]), splat(steps[c]),
                                              load(out + v * kLanes) * shrink[c]));
        }
    }

    const int dim_;
    uint32_t *keys_, *values_;
    int8_t* queries_;
    char* copied_;
    float* query_steps_;
    int32_t* query_offsets_;
    uint64_t no_numbers_ = 0;  // tokens of the piece at hand whose values are no numbers
};

}  // namespace quire

#endif
