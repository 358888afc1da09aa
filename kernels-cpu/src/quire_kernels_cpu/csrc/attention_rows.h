// Attention without tiles: dot products of vectors in float32. Included by `attention.h`.
//
// Some columns at a time, whose queries stay in the first-level cache while keys pass; four keys meet two columns of one
// query at once, and four vectors of a value. What a column gets does not depend on how it was grouped, nor on whether
// keys and values were widened once for all columns or, for a few, each time they are read.
#pragma once

#include "attention.h"

namespace quire {

// Where the keys of a piece's tokens are, their values `value_offset` bytes behind them, and where those of the next piece
// are, which is fetched meanwhile, a row for a row, or null. Where there is none, it is a row that has been fetched.
struct PieceRows {
    const char* const* keys;
    const char* const* ahead;
    int64_t value_offset;
};

inline void fetch(const char* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 3);
}

// Columns [query, head of the group] of one key-value head.
template <typename T>
class RowAttention {
public:
    RowAttention(const Attention<T>& a, const AttentionTask& task, AttentionScratch& scratch)
        : a_(a), task_(task), group_(a.group()), padded_((a.cache.head_dim + kLanes - 1) / kLanes * kLanes),
          columns_((task.last - task.first) * group_), is_tree_(a.is_tree(task.sequence)) {
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
        const bool as_stored = columns_ <= kFewColumns && a_.cache.format == CacheFormat::network && padded_ == a_.cache.head_dim;
        const char* stored[2][kPiece] = {};
        int first = span.begin / kPiece * kPiece, which = 0;
        locate(rows, first, span, stored[which]);
        for (int piece = first; piece < span.end; piece += kPiece, which ^= 1) {
            if (piece % kSegment == 0 && piece > span.begin) {
                keep(merged);
                merged = true;
            }
            const int begin = std::max(piece, span.begin), end = std::min(piece + kPiece, span.end);
            if (is_tree_ && piece + kPiece > a_.path(task_.sequence, 0)[1]) {
                attend_paths(rows, piece, begin, end, as_stored);
            } else {
                std::copy_n(stored[which], kPiece, stored[which ^ 1]);
                locate(rows, piece + kPiece, span, stored[which ^ 1]);
                attend_all({0, columns_}, piece, begin, end, stored[which], stored[which ^ 1], as_stored);
            }
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

    // Where the keys of a piece's tokens within the span are.
    static void locate(CacheRows& rows, int piece, Span span, const char** to) {
        for (int t = std::max(piece, span.begin), end = std::min(piece + kPiece, span.end); t < end;) {
            const char* key = rows.at(t);
            for (const int stop = std::min(end, rows.block_end(t)); t < stop; ++t, key += rows.row_bytes()) to[t - piece] = key;
        }
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

    // Columns over the tokens [begin, end) of a piece, whose keys are at `now`; `ahead`: those of the next one.
    void attend_all(Span columns, int piece, int begin, int end, const char* const* now, const char* const* ahead,
                    bool as_stored) {
        const char* wide[kPiece];
        for (int t = begin - piece; !as_stored && t < end - piece; ++t) {
            float *const key = keys_ + t * padded_, *const value = values_ + t * padded_;
            widen_row<T>(a_.cache, now[t], key, padded_);
            widen_row<T>(a_.cache, now[t] + a_.cache.value_offset(), value, padded_);
            wide[t] = reinterpret_cast<const char*>(key);
        }
        const int64_t wide_offset = reinterpret_cast<char*>(values_) - reinterpret_cast<char*>(keys_);
        for (int c = columns.begin; c < columns.end; c += kTogether) {
            const int last = std::min(c + kTogether, columns.end);
            if (as_stored) {
                attend<T>(c, last, piece, begin, end, {now, ahead, a_.cache.value_offset()});
            } else {
                attend<float>(c, last, piece, begin, end, {wide, nullptr, wide_offset});
            }
        }
    }

    // A piece in which each query has tokens of its own: one query after another, its tokens in their order, so that each
    // result is what it would be if its path were all there is.
    void attend_paths(CacheRows& rows, int piece, int begin, int end, bool as_stored) {
        const char* own[kPiece];
        for (int query = task_.first; query < task_.last; ++query) {
            const int32_t* path = a_.path(task_.sequence, query);
            const int c = (query - task_.first) * group_;
            const Span seen = seen_by(c, begin, end);
            if (seen.begin >= seen.end) continue;
            for (int t = seen.begin; t < seen.end; ++t) own[t - piece] = rows.at(t < path[1] ? t : path[2 + t - path[1]]);
            attend_all({c, c + group_}, piece, seen.begin, seen.end, own, own, as_stored);
        }
    }

    static constexpr int kTogether = 18;   // columns
    static constexpr int kMostAtOnce = 3;  // whose sums fit the registers, beside their operands
    static constexpr int kFewColumns = 4;  // for which widening beforehand costs more than it saves
    static constexpr int kRun = 4;        // keys, and vectors of a value

    // The tokens of [begin, end) that a column sees.
    Span seen_by(int c, int begin, int end) const {
        const int position = position_of(c);
        return {a_.window > 0 ? std::max(begin, position + 1 - a_.window) : begin, std::min(end, position + 1)};
    }
    int position_of(int c) const { return a_.position(task_.sequence, task_.first + c / group_); }
    // Columns from `first` on, up to three, and the tokens of a piece that all of them see.
    struct Together {
        int first, count;
        Span span;
    };

    // Columns [first, last) over the tokens [begin, end) of a piece.
    template <typename Number>
    void attend(int first, int last, int piece, int begin, int end, const PieceRows& rows) {
        alignas(64) float weights[kTogether][kPiece];
        float shrink[kTogether];
        Together all[kTogether];
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
        for (int t = begin; t < end; t += kRun) {
            for (int i = t - piece; rows.ahead && i < std::min(t + kRun, end) - piece; ++i)
                fetch(rows.ahead[i], padded_ * sizeof(Number));
            for (const Together* at = all; at < all + count; ++at) {
                if (t + kRun <= at->span.begin || t >= at->span.end) continue;
                const auto multiply = at->count == 3   ? score<3, Number>
                                      : at->count == 2 ? score<2, Number>
                                                       : score<1, Number>;
                multiply(queries_ + at->first * padded_, rows, padded_, t - piece, end - piece, weights + (at->first - first));
            }
        }
        for (const Together* at = all; at < all + count; ++at)
            for (int c = at->first; c < at->first + at->count; ++c)
                shrink[c - first] = weigh(c, piece, at->span, weights[c - first]);
        for (int d = 0; d < padded_; d += kRun * kLanes) {
            const int vectors = std::min(kRun, (padded_ - d) / kLanes);
            for (const Together* at = all; at < all + count; ++at) {
                if (at->span.begin >= at->span.end) continue;
                const auto add = at->count == 3   ? add_values<3, Number>
                                 : at->count == 2 ? add_values<2, Number>
                                                  : add_values<1, Number>;
                const int c = at->first - first;
                add({at->span.begin - piece, at->span.end - piece}, weights + c, shrink + c, rows, d, padded_, vectors,
                    column(0, at->first).out + d);
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
            float four[kRun];
            sum_four(lanes, four);
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

    // out = out * shrink + weighted values, of kColumns columns and `vectors` vectors from element d on.
    template <int kColumns, typename Number>
    static void add_values(Span seen, const float (*weights)[kPiece], const float* shrink, const PieceRows& rows, int d,
                           int padded, int vectors, float* out) {
        if (vectors < kRun) {
            for (int v = 0; v < vectors * kLanes; v += kLanes)
                add_run<kColumns, 1, Number>(seen, weights, shrink, rows, d + v, padded, out + v);
        } else {
            add_run<kColumns, kRun, Number>(seen, weights, shrink, rows, d, padded, out);
        }
    }
    template <int kColumns, int kVectors, typename Number>
    static void add_run(Span seen, const float (*weights)[kPiece], const float* shrink, const PieceRows& rows, int d, int padded,
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
            if (rows.ahead) fetch(rows.ahead[t] + at, kVectors * kLanes * sizeof(Number));
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

    const Attention<T>& a_;
    const AttentionTask& task_;
    const int group_, padded_, columns_;
    const bool is_tree_;
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
