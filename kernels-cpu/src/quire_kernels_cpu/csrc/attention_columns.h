// Attention without tiles, column by column, for any way of multiplying: what a column has, what it sees, and its softmax.
// Included by `attention.h`.
//
// What a column gets does not depend on how it was grouped with others.
#pragma once

#include "attention.h"

namespace quire {

// Columns [query, head of the group] of some key-value heads, a piece of all of them before the next piece. Way: has
// `set_queries()`, which takes over the queries of the head at hand, and `attend_all(columns, piece, begin, end, now)`,
// see `run`.
template <typename Way, typename T>
class ColumnAttention {
public:
    ColumnAttention(const Attention<T>& a, const AttentionTask& task, AttentionScratch& scratch)
        : a_(a), task_(task), group_(a.group()), padded_((a.cache.head_dim + kLanes - 1) / kLanes * kLanes),
          value_padded_((a.cache.value_dim + kLanes - 1) / kLanes * kLanes), columns_((task.last - task.first) * group_), all_columns_(columns_ * task.num_kv_heads),
          is_tree_(a.is_tree(task.sequence)) {
        outputs_ = scratch.outputs.get<float>(2 * all_columns_ * value_padded_);
        state_ = scratch.state.get<float>(4 * all_columns_);
        row_scales_ = scratch.row_scales.get<float>(2 * kPiece);
    }

    // next: what this thread will do then, whose beginning is fetched; or none.
    void run(const AttentionTask* next, const Partials& partials, int64_t index) {
        for (int head = 0; head < task_.num_kv_heads; ++head) {
            enter(head);
            way().set_queries();
        }
        clear(0);
        bool merged = false;
        CacheRows rows(a_.cache, a_.sequences.table(task_.sequence), task_.kv_head);
        const Span span = task_.tokens(a_);
        const char *of_first[kPiece], *now[kPiece];
        for (int piece = span.begin / kPiece * kPiece; piece < span.end; piece += kPiece) {
            if (piece % kSegment == 0 && piece > span.begin) {
                keep(merged);
                merged = true;
            }
            const int begin = std::max(piece, span.begin), end = std::min(piece + kPiece, span.end);
            ahead_ = read_ahead(a_, task_, next, end);
            const bool by_path = is_tree_ && piece + kPiece > a_.path(task_.sequence, 0)[1];
            if (!by_path) locate(rows, piece, begin, end, of_first);
            for (int head = 0; head < task_.num_kv_heads; ++head) {
                enter(head);
                if (by_path) {
                    attend_paths(rows, piece, begin, end);
                } else {
                    for (int t = begin - piece; t < end - piece; ++t) now[t] = of_first[t] + head * a_.cache.head_bytes();
                    way().attend_all({0, columns_}, piece, begin, end, now);
                }
            }
        }
        if (merged) keep(true);
        for (int head = 0; head < task_.num_kv_heads; ++head) {
            enter(head);
            for (int c = 0; c < columns_; ++c) {
                const Column result = column(merged, c);
                if (task_.segment < 0) {
                    write_column(a_, task_, task_.first + c / group_, head_ * group_ + c % group_, result);
                } else {
                    const Column to = partials.column(index, entered_ + c);
                    *to.top = *result.top;
                    *to.total = *result.total;
                    std::memcpy(to.out, result.out, value_padded_ * sizeof(float));
                }
            }
        }
    }

protected:
    // Of the head at hand. which: 0 for the segment at hand, 1 for the segments before it.
    Column column(int which, int c) const { return column_of_all(which, entered_ + c); }

    // The tokens of [begin, end) that a column sees.
    Span seen_by(int c, int begin, int end) const {
        const int position = position_of(c);
        return {a_.window > 0 ? std::max(begin, position + 1 - a_.window) : begin, std::min(end, position + 1)};
    }
    int position_of(int c) const { return a_.position(task_.sequence, task_.first + c / group_); }

    // Products become weights, 0 where nothing is seen; what the column has so far is to be multiplied by the result.
    float weigh(int c, int piece, Span seen, float* weights) {
        if (seen.begin >= seen.end) return 1.0f;
        const Column of = column(0, c);
        float scale = a_.scale * a_.cache.head_scale(0, head_);
        if (a_.soft_cap > 0 || a_.slopes || seen.begin > piece || seen.end < piece + kPiece) {
            cap_and_mask(c, piece, seen, scale, weights);
            scale = 1.0f;
        }
        constexpr int kVectors = kPiece / kLanes;
        Floats scores[kVectors], most = splat(*of.top), sums{};
#pragma GCC unroll 16
        for (int i = 0; i < kVectors; ++i) {
            scores[i] = load(weights + i * kLanes) * scale;
            most = scores[i] > most ? scores[i] : most;
        }
        // A score that is not a number is not the highest, but its weight is none either, and so is their sum.
        const float highest = highest_lane(most);
        // 0 where nothing was seen yet; mostly nothing changes.
        float shrink = 1.0f;
        if (*of.top != highest) shrink = *of.top == -INFINITY ? 0.0f : exp(splat(*of.top - highest))[0];
#pragma GCC unroll 16
        for (int i = 0; i < kVectors; ++i) {
            const Floats weight = exp(scores[i] - highest);
            store(weights + i * kLanes, weight);
            sums += weight;
        }
        *of.total = *of.total * shrink + sum(sums);
        *of.top = highest;
        return shrink;
    }

    // Products become scores: times `scale`, capped, less what their distance takes, and none where nothing is seen.
    void cap_and_mask(int c, int piece, Span seen, float scale, float* weights) const {
        const int position = position_of(c), from = seen.begin - piece, to = seen.end - piece;
        const float slope = a_.slopes ? a_.slopes[head_ * group_ + c % group_] : 0.0f;
        for (int t = 0; t < kPiece; t += kLanes) {
            const Floats score = load(weights + t) * scale;
            store(weights + t, a_.soft_cap > 0 ? tanh(score / a_.soft_cap) * a_.soft_cap : score);
        }
        for (int t = from; slope != 0.0f && t < to; ++t) weights[t] -= slope * static_cast<float>(position - piece - t);
        std::fill(weights, weights + from, -INFINITY);
        std::fill(weights + to, weights + kPiece, -INFINITY);
    }

    // The rows' own scales, if they have such, of the tokens of a piece that there are; 0 of others.
    void take_row_scales(Span here, const char* const* rows) {
        if (!a_.cache.scaled_by_row()) return;
        std::fill_n(row_scales_, 2 * kPiece, 0.0f);
        for (int t = here.begin; t < here.end; ++t) {
            const char* const of_key = rows[t] + to_scales_[t];
            std::memcpy(row_scales_ + t, of_key, sizeof(float));
            std::memcpy(row_scales_ + kPiece + t, of_key + a_.cache.value_offset(), sizeof(float));
        }
    }
    // Times those of the piece at hand. which: 0 for keys, 1 for values.
    void scale_by_row(int which, float* weights) const {
        if (!a_.cache.scaled_by_row()) return;
        for (int t = 0; t < kPiece; t += kLanes) store(weights + t, load(weights + t) * load(row_scales_ + which * kPiece + t));
    }

    // Where a query of the head at hand begins.
    const T* query_of(int c) const {
        return a_.query + (a_.sequences.query_start_loc[task_.sequence] + task_.first + c / group_) * a_.query_stride +
               static_cast<int64_t>(head_ * group_ + c % group_) * a_.head_stride;
    }

    const Attention<T>& a_;
    const AttentionTask& task_;
    const int group_, padded_, value_padded_, columns_, all_columns_;
    const bool is_tree_;
    int head_ = 0, entered_ = 0;  // the head at hand, and the task's columns before its own
    ReadAhead ahead_;
    float* row_scales_;  // [2][64 tokens], see `take_row_scales`
    int64_t to_scales_[kPiece];  // from the piece's rows, where these have scales

private:
    Way& way() { return static_cast<Way&>(*this); }

    void enter(int head_of_task) {
        head_ = task_.kv_head + head_of_task;
        entered_ = head_of_task * columns_;
    }

    Column column_of_all(int which, int c) const {
        float* state = state_ + which * 2 * all_columns_;
        return {state + c, state + all_columns_ + c, outputs_ + (which * all_columns_ + c) * value_padded_, kLanes};
    }

    // Where the keys of the tokens [begin, end) of a piece are.
    void locate(CacheRows& rows, int piece, int begin, int end, const char** to) {
        for (int t = begin; t < end;) {
            const char* key = rows.at(t);
            int64_t to_scale = a_.cache.to_scale(t);
            for (const int stop = std::min(end, rows.block_end(t)); t < stop; ++t, key += rows.row_bytes()) {
                to[t - piece] = key;
                to_scales_[t - piece] = to_scale;
                to_scale -= rows.row_bytes() - static_cast<int64_t>(sizeof(float));
            }
        }
    }
    void clear(int which) {
        for (int c = 0; c < all_columns_; ++c) {
            const Column of = column_of_all(which, c);
            *of.top = -INFINITY;
            *of.total = 0.0f;
            std::fill(of.out, of.out + value_padded_, 0.0f);
        }
    }

    // Puts the segment at hand behind those before it.
    void keep(bool there_are_some) {
        if (!there_are_some) clear(1);
        for (int c = 0; c < all_columns_; ++c) merge(column_of_all(1, c), column_of_all(0, c), value_padded_ / kLanes);
        clear(0);
    }

    // A piece in which each query has tokens of its own: one query after another, its tokens in their order, so that each
    // result is what it would be if its path were all there is.
    void attend_paths(CacheRows& rows, int piece, int begin, int end) {
        const char* own[kPiece];
        for (int query = task_.first; query < task_.last; ++query) {
            const int32_t* path = a_.path(task_.sequence, query);
            const int c = (query - task_.first) * group_;
            const Span seen = seen_by(c, begin, end);
            if (seen.begin >= seen.end) continue;
            const int64_t to_head = (head_ - task_.kv_head) * a_.cache.head_bytes();
            for (int t = seen.begin; t < seen.end; ++t) {
                const int position = t < path[1] ? t : path[2 + t - path[1]];
                own[t - piece] = rows.at(position) + to_head;
                to_scales_[t - piece] = a_.cache.to_scale(position);
            }
            way().attend_all({c, c + group_}, piece, seen.begin, seen.end, own);
        }
    }

    float *outputs_, *state_;
};

}  // namespace quire
