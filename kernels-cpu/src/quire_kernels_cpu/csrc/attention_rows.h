// Attention without tiles: dot products of vectors in float32. Included by `attention.h`.
//
// Some columns at a time, whose queries stay in the first-level cache while keys pass; four keys meet two columns of one
// query at once, and four vectors of a value. What a column gets does not depend on how it was grouped.
#pragma once

#include "attention.h"

namespace quire {

// Columns [query, head of the group] of one key-value head.
template <typename T>
class RowAttention {
public:
    RowAttention(const Attention<T>& a, const AttentionTask& task, AttentionScratch& scratch)
        : a_(a), task_(task), group_(a.group()), padded_((a.cache.head_dim + kLanes - 1) / kLanes * kLanes),
          columns_((task.last - task.first) * group_) {
        keys_ = scratch.keys.get<float>(kPiece * padded_);
        values_ = scratch.values.get<float>(kPiece * padded_);
        queries_ = scratch.queries.get<float>(columns_ * padded_);
        outputs_ = scratch.outputs.get<float>(2 * columns_ * padded_);
        state_ = scratch.state.get<float>(4 * columns_);
    }

    // The task's head number `head`, whose columns begin at `offset` of the task's.
    void run(int head, const Partials& partials, int64_t index) {
        head_ = head;
        set_queries();
        clear(0);
        bool merged = false;
        CacheRows rows(a_.cache, a_.table(task_.sequence), head);
        const Span span = task_.tokens(a_);
        for (int piece = span.begin / kPiece * kPiece; piece < span.end; piece += kPiece) {
            if (piece % kSegment == 0 && piece > span.begin) {
                keep(merged);
                merged = true;
            }
            const int begin = std::max(piece, span.begin), end = std::min(piece + kPiece, span.end);
            for (int t = begin; t < end; ++t) {
                const char* key = rows.at(t);
                widen_row<T>(a_.cache, key, keys_ + (t - piece) * padded_, padded_);
                widen_row<T>(a_.cache, key + a_.cache.value_offset(), values_ + (t - piece) * padded_, padded_);
            }
            for (int c = 0; c < columns_; c += kTogether) attend(c, std::min(c + kTogether, columns_), piece, begin, end);
        }
        if (merged) keep(true);
        for (int c = 0; c < columns_; ++c) {
            const Column result = column(merged, c);
            const int within = (head - task_.kv_head) * columns_ + c;
            if (task_.segment < 0) {
                write_column(a_, task_, task_.first + c / group_, head * group_ + c % group_, result);
            } else {
                const Column to = partials.column(index, within);
                *to.top = *result.top;
                *to.total = *result.total;
                std::memcpy(to.out, result.out, padded_ * sizeof(float));
            }
        }
    }

private:
    // which: 0 for the segment at hand, 1 for the segments before it.
    Column column(int which, int c) const {
        float* state = state_ + which * 2 * columns_;
        return {state + c, state + columns_ + c, outputs_ + (which * columns_ + c) * padded_, kLanes};
    }

    void clear(int which) {
        for (int c = 0; c < columns_; ++c) {
            const Column of = column(which, c);
            *of.top = -INFINITY;
            *of.total = 0.0f;
            std::fill(of.out, of.out + padded_, 0.0f);
        }
    }

    // Puts the segment at hand behind those before it.
    void keep(bool there_are_some) {
        if (!there_are_some) clear(1);
        for (int c = 0; c < columns_; ++c) merge(column(1, c), column(0, c), padded_ / kLanes);
        clear(0);
    }

    void set_queries() {
        const int dim = a_.cache.head_dim, begin = a_.query_start_loc[task_.sequence] + task_.first;
        for (int c = 0; c < columns_; ++c) {
            const T* q = a_.query + (begin + c / group_) * a_.query_stride +
                         static_cast<int64_t>(head_ * group_ + c % group_) * a_.head_stride;
            float* to = queries_ + c * padded_;
            int d = 0;
            for (; d + kLanes <= dim; d += kLanes) store(to + d, load(q + d));
            for (; d < padded_; ++d) to[d] = d < dim ? to_float(q[d]) : 0.0f;
        }
    }

    static constexpr int kTogether = 16;  // columns
    static constexpr int kRun = 4;        // keys, and vectors of a value

    // The tokens of [begin, end) that a column sees.
    Span seen_by(int c, int begin, int end) const {
        const int position = position_of(c);
        return {a_.window > 0 ? std::max(begin, position + 1 - a_.window) : begin, std::min(end, position + 1)};
    }
    int position_of(int c) const { return a_.context(task_.sequence) + task_.first + c / group_; }
    // Columns of one query from c on, two of them if there are.
    int pair_at(int c, int last) const { return c + 1 < last && (c + 1) / group_ == c / group_ ? 2 : 1; }

    // Columns [first, last) over the tokens [begin, end) of a piece.
    void attend(int first, int last, int piece, int begin, int end) {
        alignas(64) float weights[kTogether][kPiece];
        float shrink[kTogether];
        for (int t = begin; t < end; t += kRun)
            for (int c = first, n; c < last; c += n) {
                n = pair_at(c, last);
                const Span span = seen_by(c, begin, end);
                if (t + kRun <= span.begin || t >= span.end) continue;
                const auto multiply = n == 2 ? score<2> : score<1>;
                multiply(queries_ + c * padded_, keys_, padded_, t - piece, end - piece, weights + (c - first));
            }
        for (int c = first; c < last; ++c) shrink[c - first] = weigh(c, piece, seen_by(c, begin, end), weights[c - first]);
        for (int d = 0; d < padded_; d += kRun * kLanes)
            for (int c = first, n; c < last; c += n) {
                n = pair_at(c, last);
                const Span span = seen_by(c, begin, end);
                if (span.begin >= span.end) continue;
                const int vectors = std::min(kRun, (padded_ - d) / kLanes);
                const auto add = n == 2 ? add_values<2> : add_values<1>;
                add({span.begin - piece, span.end - piece}, weights + (c - first), shrink + (c - first), values_ + d, padded_,
                    vectors, column(0, c).out + d);
            }
    }

    // Products of kColumns queries with the keys from t on, four of them or those before `end`.
    template <int kColumns>
    static void score(const float* queries, const float* keys, int padded, int t, int end, float (*to)[kPiece]) {
        const float* key[kRun];
        for (int i = 0; i < kRun; ++i) key[i] = keys + std::min(t + i, end - 1) * padded;
        Floats sums[kColumns][kRun] = {};
        for (int d = 0; d < padded; d += kLanes) {
            Floats q[kColumns];
            for (int c = 0; c < kColumns; ++c) q[c] = load(queries + c * padded + d);
            for (int i = 0; i < kRun; ++i) {
                Floats k = load(key[i] + d);
                in_register(k);
                for (int c = 0; c < kColumns; ++c) sums[c][i] = fused(q[c], k, sums[c][i]);
            }
        }
        for (int c = 0; c < kColumns; ++c) {
            float four[kRun];
            sum_four(sums[c], four);
            std::memcpy(to[c] + t, four, t + kRun <= end ? sizeof four : (end - t) * sizeof *four);
        }
    }

    // Products become weights, 0 where nothing is seen; what the column has so far is to be multiplied by the result.
    float weigh(int c, int piece, Span seen, float* weights) {
        if (seen.begin >= seen.end) return 1.0f;
        const Column of = column(0, c);
        const int position = position_of(c), from = seen.begin - piece, to = seen.end - piece;
        const float scale = a_.scale * a_.cache.head_scale(0, head_);
        const float slope = a_.slopes ? a_.slopes[head_ * group_ + c % group_] : 0.0f;
        for (int t = from; a_.soft_cap > 0 && t < to; ++t)
            weights[t] = a_.soft_cap * std::tanh(weights[t] * scale / a_.soft_cap);
        const float factor = a_.soft_cap > 0 ? 1.0f : scale;
        for (int t = 0; t < kPiece; t += kLanes) store(weights + t, load(weights + t) * factor);
        for (int t = from; slope != 0.0f && t < to; ++t) weights[t] -= slope * static_cast<float>(position - piece - t);
        std::fill(weights, weights + from, -INFINITY);
        std::fill(weights + to, weights + kPiece, -INFINITY);
        Floats most = splat(*of.top);
        for (int t = 0; t < kPiece; t += kLanes) {
            const Floats score = load(weights + t);
            most = (score > most) | (score != score) ? score : most;
        }
        float highest = *of.top;
        for (int i = 0; i < kLanes; ++i) highest = most[i] > highest || most[i] != most[i] ? most[i] : highest;
        // Nothing seen yet, or a score that is not a number: the result says so by itself.
        const float shrink = *of.top == -INFINITY ? 0.0f : exp(splat(*of.top - highest))[0];
        Floats sums{};
        for (int t = 0; t < kPiece; t += kLanes) {
            const Floats weight = exp(load(weights + t) - highest);
            store(weights + t, weight);
            sums += weight;
        }
        *of.total = *of.total * shrink + sum(sums);
        *of.top = highest;
        return shrink;
    }

    // out = out * shrink + weighted values, of kColumns columns and `vectors` vectors.
    template <int kColumns>
    static void add_values(Span seen, const float (*weights)[kPiece], const float* shrink, const float* values, int padded,
                           int vectors, float* out) {
        if (vectors < kRun) {
            for (int v = 0; v < vectors * kLanes; v += kLanes)
                add_run<kColumns, 1>(seen, weights, shrink, values + v, padded, out + v);
        } else {
            add_run<kColumns, kRun>(seen, weights, shrink, values, padded, out);
        }
    }
    template <int kColumns, int kVectors>
    static void add_run(Span seen, const float (*weights)[kPiece], const float* shrink, const float* values, int padded,
                        float* out) {
        Floats sums[kColumns][kVectors];
        for (int c = 0; c < kColumns; ++c)
            for (int v = 0; v < kVectors; ++v) sums[c][v] = load(out + c * padded + v * kLanes) * shrink[c];
        for (int t = seen.begin; t < seen.end; ++t) {
            Floats weight[kColumns];
            for (int c = 0; c < kColumns; ++c) weight[c] = splat(weights[c][t]);
            for (int v = 0; v < kVectors; ++v) {
                Floats value = load(values + t * padded + v * kLanes);
                in_register(value);
                for (int c = 0; c < kColumns; ++c) sums[c][v] = fused(weight[c], value, sums[c][v]);
            }
        }
        for (int c = 0; c < kColumns; ++c)
            for (int v = 0; v < kVectors; ++v) store(out + c * padded + v * kLanes, sums[c][v]);
    }

    const Attention<T>& a_;
    const AttentionTask& task_;
    const int group_, padded_, columns_;
    int head_ = 0;
    float *keys_, *values_, *queries_, *outputs_, *state_;
};

template <typename T>
void attend_rows(const Attention<T>& a, const AttentionTask& task, AttentionScratch& scratch, const Partials& partials,
                 int64_t index) {
    RowAttention<T> rows(a, task, scratch);
    for (int head = task.kv_head; head < task.kv_head + task.num_kv_heads; ++head) rows.run(head, partials, index);
}

}  // namespace quire
