// Attention without tiles: one column at a time, dot products of vectors in float32. Included by `attention.h`.
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
            for (int c = 0; c < columns_; ++c) attend(c, piece, begin, end);
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
            for (int d = 0; d < padded_; ++d) to[d] = d < dim ? to_float(q[d]) : 0.0f;
        }
    }

    void attend(int c, int piece, int begin, int end) {
        const int position = a_.context(task_.sequence) + task_.first + c / group_;
        const int from = a_.window > 0 ? std::max(begin, position + 1 - a_.window) : begin;
        const int to = std::min(end, position + 1);
        if (from >= to) return;
        const Column of = column(0, c);
        const float scale = a_.scale * a_.cache.head_scale(0, head_);
        const float slope = a_.slopes ? a_.slopes[head_ * group_ + c % group_] : 0.0f;
        alignas(64) float scores[kPiece];
        std::fill(scores, scores + kPiece, -INFINITY);
        const float* q = queries_ + c * padded_;
        float highest = *of.top;
        for (int t = from; t < to; ++t) {
            const float* k = keys_ + (t - piece) * padded_;
            Floats acc{};
            for (int d = 0; d < padded_; d += kLanes) acc += load(q + d) * load(k + d);
            float score = sum(acc) * scale;
            if (a_.soft_cap > 0) score = a_.soft_cap * std::tanh(score / a_.soft_cap);
            score -= slope * static_cast<float>(position - t);
            scores[t - piece] = score;
            highest = score > highest || score != score ? score : highest;
        }
        // Nothing seen yet, or a score that is not a number: the result says so by itself.
        const float shrink = *of.top == -INFINITY ? 0.0f : exp(splat(*of.top - highest))[0];
        Floats sums{};
        for (int t = 0; t < kPiece; t += kLanes) {
            const Floats weight = exp(load(scores + t) - highest);
            store(scores + t, weight);
            sums += weight;
        }
        *of.total = *of.total * shrink + sum(sums);
        *of.top = highest;
        for (int d = 0; d < padded_; d += kLanes) {
            Floats acc = load(of.out + d) * shrink;
            for (int t = from; t < to; ++t) acc += scores[t - piece] * load(values_ + (t - piece) * padded_ + d);
            store(of.out + d, acc);
        }
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
