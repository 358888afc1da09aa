// Attention by dot products of vectors in float32. Included by `attention.h`.
//
// Some columns at a time, whose queries stay in the first-level cache while keys pass; four keys meet two columns of one
// query at once, and four vectors of a value. What a column gets does not depend on whether keys and values were widened
// once for all columns or, for a few, each time they are read.
#pragma once

#include "attention_columns.h"

namespace quire {

// Where the keys of a piece's tokens are, their values `value_offset` bytes behind them.
struct PieceRows {
    const char* const* keys;
    int64_t value_offset;
};

template <typename T>
class RowAttention : public ColumnAttention<RowAttention<T>, T> {
    using Base = ColumnAttention<RowAttention<T>, T>;
    friend Base;
    using Base::a_, Base::ahead_, Base::all_columns_, Base::columns_, Base::entered_, Base::padded_, Base::value_padded_;
    using Base::column, Base::seen_by, Base::weigh, Base::query_of, Base::scale_by_row, Base::take_row_scales;

public:
    RowAttention(const Attention<T>& a, const AttentionTask& task, AttentionScratch& scratch)
        : Base(a, task, scratch),
          as_stored_(columns_ <= kFewColumns && a.cache.format != CacheFormat::int4 &&
                     a.cache.format != CacheFormat::fp8_ds_mla && padded_ == a.cache.head_dim) {
        keys_ = scratch.keys.get<float>(kPiece * padded_);
        values_ = scratch.values.get<float>(kPiece * padded_);
        queries_ = scratch.queries.get<float>(all_columns_ * padded_);
    }

private:
    void set_queries() {
        const int dim = a_.cache.head_dim;
        for (int c = 0; c < columns_; ++c) {
            const T* q = query_of(c);
            float* to = queries_ + (entered_ + c) * padded_;
            int d = 0;
            for (; d + kLanes <= dim; d += kLanes) store(to + d, load(q + d));
            for (; d < padded_; ++d) to[d] = d < dim ? to_float(q[d]) : 0.0f;
        }
    }

    // Columns over the tokens [begin, end) of a piece, whose keys are at `now`.
    void attend_all(Span columns, int piece, int begin, int end, const char* const* now) {
        take_row_scales({begin - piece, end - piece}, now);
        const char* wide[kPiece];
        for (int t = begin - piece; !as_stored_ && t < end - piece; ++t) {
            float *const key = keys_ + t * padded_, *const value = values_ + t * padded_;
            widen_row<T>(a_.cache, now[t], key, padded_);
            if (!a_.cache.latent) widen_row<T>(a_.cache, now[t] + a_.cache.value_offset(), value, padded_);
            wide[t] = reinterpret_cast<const char*>(key);
        }
        const int64_t apart = reinterpret_cast<char*>(values_) - reinterpret_cast<char*>(keys_);
        const int64_t wide_offset = a_.cache.latent ? 0 : apart;
        const int together = a_.cache.latent ? kLatentTogether : kTogether;
        for (int c = columns.begin; c < columns.end; c += together) {
            const int last = std::min(c + together, columns.end);
            if (!as_stored_) {
                attend<float>(c, last, piece, begin, end, {wide, wide_offset});
                continue;
            }
            const PieceRows stored{now, a_.cache.value_offset()};
            switch (a_.cache.format) {
                case CacheFormat::fp8_e4m3: attend<CachedFp8<CacheFormat::fp8_e4m3>>(c, last, piece, begin, end, stored); break;
                case CacheFormat::fp8_e5m2: attend<CachedFp8<CacheFormat::fp8_e5m2>>(c, last, piece, begin, end, stored); break;
                case CacheFormat::int8: attend<int8_t>(c, last, piece, begin, end, stored); break;
                default: attend<T>(c, last, piece, begin, end, stored);
            }
        }
    }

    static constexpr int kTogether = 18;   // columns
    static constexpr int kLatentTogether = 36, kLatentScored = 12;  // as many queries stay in the first-level cache
    static constexpr int kMostAtOnce = 3;  // whose sums fit the registers, beside their operands
    static constexpr int kFewColumns = 4;  // for which widening beforehand costs more than it saves
    static constexpr int kRun = 4;         // keys, and vectors of a value

    int row_lines() const { return static_cast<int>((a_.cache.row_bytes + 63) / 64); }

    // Columns from `first` on, up to three, and the tokens of a piece that all of them see.
    struct Together {
        int first, count;
        Span span;
    };

    // Columns [first, last) over the tokens [begin, end) of a piece.
    template <typename Number>
    void attend(int first, int last, int piece, int begin, int end, const PieceRows& rows) {
        alignas(64) float weights[kLatentTogether][kPiece];
        float shrink[kLatentTogether];
        Together all[kLatentTogether];
        int count = 0;
        for (int c = first; c < last;) {
            const Span seen = seen_by(c, begin, end);
            const auto sees_the_same = [&](int other) {
                const Span others = seen_by(other, begin, end);
                return others.begin == seen.begin && others.end == seen.end;
            };
            int stop = c + 1;
            while (stop < last && sees_the_same(stop)) ++stop;
            for (int parts = (stop - c + kMostAtOnce - 1) / kMostAtOnce; parts > 0; --parts) {
                const int n = (stop - c + parts - 1) / parts;
                all[count++] = {c, n, seen};
                c += n;
            }
        }
        const int scored = a_.cache.latent ? kLatentScored / kMostAtOnce : count;
        for (int some = 0; some < count; some += scored) {
            const Together* const stop = all + std::min(some + scored, count);
            for (int t = begin; t < end; t += kRun) {
                ahead_.fetch(kRun * row_lines());
                for (const Together* at = all + some; at < stop; ++at) {
                    if (t + kRun <= at->span.begin || t >= at->span.end) continue;
                    const auto multiply = at->count == 3   ? score<3, Number>
                                          : at->count == 2 ? score<2, Number>
                                                           : score<1, Number>;
                    multiply(queries_ + (entered_ + at->first) * padded_, rows, padded_, t - piece, end - piece,
                             weights + (at->first - first));
                }
            }
        }
        for (const Together* at = all; at < all + count; ++at)
            for (int c = at->first; c < at->first + at->count; ++c) {
                scale_by_row(0, weights[c - first]);
                shrink[c - first] = weigh(c, piece, at->span, weights[c - first]);
                scale_by_row(1, weights[c - first]);
            }
        for (int d = 0; d < value_padded_; d += kRun * kLanes) {
            const int vectors = std::min(kRun, (value_padded_ - d) / kLanes);
            for (const Together* at = all; at < all + count; ++at) {
                if (at->span.begin >= at->span.end) continue;
                const auto add = at->count == 3   ? &RowAttention::add_values<3, Number>
                                 : at->count == 2 ? &RowAttention::add_values<2, Number>
                                                  : &RowAttention::add_values<1, Number>;
                const int c = at->first - first;
                (this->*add)({at->span.begin - piece, at->span.end - piece}, weights + c, shrink + c, rows, d, value_padded_,
                             vectors, column(0, at->first).out + d);
            }
        }
    }

    // Products of kColumns queries with the keys from t on, four of them or those before `end`.
    template <int kColumns, typename Number>
    static void score(const float* queries, const PieceRows& rows, int padded, int t, int end, float (*to)[kPiece]) {
        const Number* key[kRun];
        for (int i = 0; i < kRun; ++i) key[i] = reinterpret_cast<const Number*>(rows.keys[std::min(t + i, end - 1)]);
        Floats sums[kColumns][kRun] = {};
        for (int d = 0; d < padded; d += kLanes) {
            Floats q[kColumns];
#pragma GCC unroll 4
            for (int c = 0; c < kColumns; ++c) {
                q[c] = load(queries + c * padded + d);
                in_register(q[c]);
            }
#pragma GCC unroll 4
            for (int i = 0; i < kRun; ++i) {
                Floats k = load(key[i] + d);
                in_register(k);
#pragma GCC unroll 4
                for (int c = 0; c < kColumns; ++c) sums[c][i] = accumulated(sums[c][i], q[c], k);
            }
        }
#pragma GCC unroll 4
        for (int c = 0; c < kColumns; ++c) {
            const Floats lanes[kRun] = {sums[c][0], sums[c][1], sums[c][2], sums[c][3]};
            if (t + kRun <= end) {
                sum_four(lanes, to[c] + t);
            } else {
                float four[kRun];
                sum_four(lanes, four);
                std::copy(four, four + (end - t), to[c] + t);
            }
        }
    }

    // out = out * shrink + weighted values, of kColumns columns and `vectors` vectors from element d on.
    template <int kColumns, typename Number>
    void add_values(Span seen, const float (*weights)[kPiece], const float* shrink, const PieceRows& rows, int d, int padded,
                    int vectors, float* out) {
        if (vectors < kRun) {
            for (int v = 0; v < vectors * kLanes; v += kLanes)
                add_run<kColumns, 1, Number>(seen, weights, shrink, rows, d + v, padded, out + v);
        } else {
            add_run<kColumns, kRun, Number>(seen, weights, shrink, rows, d, padded, out);
        }
    }
    template <int kColumns, int kVectors, typename Number>
    void add_run(Span seen, const float (*weights)[kPiece], const float* shrink, const PieceRows& rows, int d, int padded,
                 float* out) {
        Floats sums[kColumns][kVectors];
#pragma GCC unroll 4
        for (int c = 0; c < kColumns; ++c)
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) sums[c][v] = load(out + c * padded + v * kLanes) * shrink[c];
        for (int t = seen.begin; t < seen.end; ++t) {
            Floats weight[kColumns];
#pragma GCC unroll 4
            for (int c = 0; c < kColumns; ++c) weight[c] = splat(weights[c][t]);
            const int64_t at = rows.value_offset + d * sizeof(Number);
            const Number* const values = reinterpret_cast<const Number*>(rows.keys[t] + at);
            ahead_.fetch(std::max<int>(1, kVectors * kLanes * sizeof(Number) / 64));
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) {
                Floats value = load(values + v * kLanes);
                in_register(value);
#pragma GCC unroll 4
                for (int c = 0; c < kColumns; ++c) sums[c][v] = accumulated(sums[c][v], weight[c], value);
            }
        }
#pragma GCC unroll 4
        for (int c = 0; c < kColumns; ++c)
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) store(out + c * padded + v * kLanes, sums[c][v]);
    }

    const bool as_stored_;
    float *keys_, *values_, *queries_;
};

}  // namespace quire
