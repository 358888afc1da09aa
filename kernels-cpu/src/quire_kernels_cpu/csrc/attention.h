// Causal attention of a step's queries over the paged keys and values of their own sequences: prefill and decode alike.
//
// The cache of a layer is [num_blocks, 2, Hkv, block_size, D]. One task is one (sequence, key-value head, run of
// queries); its columns are the pairs (query, head of the group), so that what is loaded of the cache serves them all.
// Softmax is online (Milakov & Gimelshein 2018, algorithm 3) over pieces of 64 tokens that begin at multiples of 64,
// for every query alike: a column's result depends on nothing but its own query and the keys it sees, whether it is
// computed alone, in a chunk of any size, or beside others.
#pragma once

#include <algorithm>

#include "team.h"
#include "tiles.h"
#include "vectors.h"

namespace quire {

constexpr int kPiece = 64;          // tokens of the cache at a time: their keys and values stay in the first-level cache
constexpr int kMaxColumns = 256;    // columns of a task
constexpr int kMaxHeadDim = 256;

template <typename T>
struct Attention {
    const T* query;                  // [T, Hq, D] or [Hq, T, D]
    int64_t query_stride;            // from one token to the next
    int64_t head_stride;             // from one head to the next
    const T* kv;
    T* out;                          // [T, Hq, D]
    int64_t out_stride;
    const int32_t* block_table;      // [S, table_stride]
    int64_t table_stride;
    const int32_t* query_start_loc;  // [S + 1]
    const int32_t* kv_lens;          // [S], the step's tokens included
    const int32_t* order;            // [S] the sequences, those with the most work first
    int num_sequences, num_heads, num_kv_heads, head_dim, block_size;
    float scale;
    int window;                      // tokens a query sees, itself included; 0 for all
    float soft_cap;                  // 0 for none

    int group() const { return num_heads / num_kv_heads; }
    int64_t value_offset() const { return static_cast<int64_t>(num_kv_heads) * block_size * head_dim; }
};

// Finds keys of one sequence and head; positions that follow each other cost no division.
template <typename T>
class Keys {
public:
    Keys(const Attention<T>& a, int sequence, int kv_head)
        : a_(a), table_(a.block_table + sequence * a.table_stride), kv_head_(kv_head) {}

    const T* at(int position) {
        if (position < begin_ || position >= begin_ + a_.block_size) {
            const int block = position / a_.block_size;
            begin_ = block * a_.block_size;
            first_ = a_.kv + (table_[block] * 2LL * a_.num_kv_heads + kv_head_) * a_.block_size * a_.head_dim;
        }
        return first_ + static_cast<int64_t>(position - begin_) * a_.head_dim;
    }

private:
    const Attention<T>& a_;
    const int32_t* table_;
    const T* first_ = nullptr;
    int kv_head_, begin_ = -(1 << 30);
};

// Queries [first, last) of a sequence for the key-value heads [kv_head, kv_head + num_kv_heads).
struct AttentionTask {
    int sequence, kv_head, num_kv_heads, first, last;
};

template <typename T>
int queries_per_task(const Attention<T>& a) {
    return std::max(1, kMaxColumns / a.group());
}

struct AttentionScratch {
    Buffer keys, values, queries, outputs, weights, scores, state;
};

// Without tiles: one column at a time, dot products of vectors.
template <typename T>
void attend_rows(const Attention<T>& a, AttentionTask task, AttentionScratch& scratch) {
    for (; task.num_kv_heads > 1; ++task.kv_head, --task.num_kv_heads) {
        AttentionTask one = task;
        one.num_kv_heads = 1;
        attend_rows(a, one, scratch);
    }
    const int dim = a.head_dim, padded = (dim + kLanes - 1) / kLanes * kLanes, group = a.group();
    const int query_begin = a.query_start_loc[task.sequence];
    const int context = a.kv_lens[task.sequence] - (a.query_start_loc[task.sequence + 1] - query_begin);
    float* keys = scratch.keys.get<float>(kPiece * padded);
    float* values = scratch.values.get<float>(kPiece * padded);
    const int columns = (task.last - task.first) * group;
    float* queries = scratch.queries.get<float>(columns * padded);
    float* outputs = scratch.outputs.get<float>(columns * padded);
    float* top = scratch.state.get<float>(2 * kMaxColumns);
    float* total = top + kMaxColumns;
    std::fill(queries, queries + columns * padded, 0.0f);
    std::fill(outputs, outputs + columns * padded, 0.0f);
    std::fill(top, top + columns, -INFINITY);
    std::fill(total, total + columns, 0.0f);
    for (int c = 0; c < columns; ++c) {
        const T* q = a.query + (query_begin + task.first + c / group) * a.query_stride +
                     (static_cast<int64_t>(task.kv_head) * group + c % group) * a.head_stride;
        for (int d = 0; d < dim; ++d) queries[c * padded + d] = to_float(q[d]);
    }
    Keys<T> cache(a, task.sequence, task.kv_head);
    const int end = context + task.last;
    const int oldest = a.window > 0 ? std::max(0, context + task.first + 1 - a.window) : 0;
    for (int piece = oldest / kPiece * kPiece; piece < end; piece += kPiece) {
        const int begin = std::max(piece, oldest), stop = std::min(piece + kPiece, end);
        for (int t = begin; t < stop; ++t) {
            const T* key = cache.at(t);
            const T* value = key + a.value_offset();
            float *k = keys + (t - piece) * padded, *v = values + (t - piece) * padded;
            int d = 0;
            for (; d + kLanes <= dim; d += kLanes) {
                store(k + d, load(key + d));
                store(v + d, load(value + d));
            }
            if (d < dim) {
                store(k + d, load_first(key + d, dim - d));
                store(v + d, load_first(value + d, dim - d));
            }
        }
        for (int c = 0; c < columns; ++c) {
            const int position = context + task.first + c / group;
            const int from = a.window > 0 ? std::max(begin, position + 1 - a.window) : begin;
            const int to = std::min(stop, position + 1);
            if (from >= to) continue;
            alignas(64) float scores[kPiece];
            for (int t = 0; t < kPiece; ++t) scores[t] = -INFINITY;
            const float* q = queries + c * padded;
            float highest = top[c];
            for (int t = from; t < to; ++t) {
                const float* k = keys + (t - piece) * padded;
                Floats acc{};
                for (int d = 0; d < padded; d += kLanes) acc += load(q + d) * load(k + d);
                float score = sum(acc) * a.scale;
                if (a.soft_cap > 0) score = a.soft_cap * std::tanh(score / a.soft_cap);
                scores[t - piece] = score;
                highest = score > highest || score != score ? score : highest;
            }
            // Nothing seen yet, or a score that is not a number: the result says so by itself.
            const float shrink = top[c] == -INFINITY ? 0.0f : exp(splat(top[c] - highest))[0];
            Floats sums{};
            for (int t = 0; t < kPiece; t += kLanes) {
                const Floats weight = exp(load(scores + t) - highest);
                store(scores + t, weight);
                sums += weight;
            }
            total[c] = total[c] * shrink + sum(sums);
            top[c] = highest;
            float* o = outputs + c * padded;
            for (int d = 0; d < padded; d += kLanes) {
                Floats acc = load(o + d) * shrink;
                for (int t = from; t < to; ++t) acc += scores[t - piece] * load(values + (t - piece) * padded + d);
                store(o + d, acc);
            }
        }
    }
    for (int c = 0; c < columns; ++c) {
        T* o = a.out + (query_begin + task.first + c / group) * a.out_stride +
               (static_cast<int64_t>(task.kv_head) * group + c % group) * dim;
        const float inverse = 1.0f / total[c];
        for (int d = 0; d < dim; ++d) store_one(o + d, outputs[c * padded + d] * inverse);
    }
}

#ifdef QUIRE_AMX

// With tiles, in bfloat16: 16 columns at a time. Scores come out as [16 tokens][16 columns], so that softmax runs along
// the lanes without a sum across them; weights are rounded to bfloat16 and turned over before they meet the values,
// which then need no turning: pairs of tokens are interleaved as they are copied.
class TiledAttention {
public:
    // next: the task that this thread will do then, whose beginning is read ahead; or none.
    TiledAttention(const Attention<BFloat16>& a, const AttentionTask& task, const AttentionTask* next,
                   AttentionScratch& scratch)
        : a_(a), task_(task), next_(next), cache_(a, task.sequence, task.kv_head), coming_{cache_, 0, 0, task.num_kv_heads}, dim_(a.head_dim), group_(a.group()) {
        query_begin_ = a.query_start_loc[task.sequence];
        context_ = a.kv_lens[task.sequence] - (a.query_start_loc[task.sequence + 1] - query_begin_);
        columns_ = (task.last - task.first) * group_;
        tiles_ = (columns_ + kTile - 1) / kTile;
        const int heads = task.num_kv_heads;
        keys_ = scratch.keys.get<BFloat16>(kPiece * dim_);
        values_ = scratch.values.get<uint32_t>(kPiece / 2 * dim_);
        all_queries_ = scratch.queries.get<uint32_t>(heads * queries_size());
        all_outputs_ = scratch.outputs.get<float>(heads * outputs_size());
        weights_ = scratch.weights.get<uint32_t>(kPiece / 2 * kTile);
        scores_ = scratch.scores.get<float>(kPiece * kTile);
        all_top_ = scratch.state.get<float>(heads * 2 * tiles_ * kTile);
        for (int head = 0; head < heads; ++head) {
            select(head);
            set_queries();
        }
    }

    void run() {
        const Span span = tokens_of(task_);
        for (int piece = span.begin / kPiece * kPiece; piece < span.end; piece += kPiece) {
            if (piece + kPiece < span.end) {
                coming_.begin = piece + kPiece;
                coming_.end = std::min(piece + 2 * kPiece, span.end);
            } else if (next_) {
                const Span then = tokens_of(*next_);
                new (&coming_) Coming{Keys<BFloat16>(a_, next_->sequence, next_->kv_head), then.begin,
                                      std::min(then.begin / kPiece * kPiece + kPiece, then.end),
                                      next_->num_kv_heads};
            }
            for (int head = 0; head < task_.num_kv_heads; ++head) {
                select(head);
                load_piece(piece, std::max(span.begin, piece), std::min(piece + kPiece, span.end));
                for (int tile = 0; tile < tiles_; ++tile) attend_tile(tile, piece, span.end);
            }
        }
        for (int head = 0; head < task_.num_kv_heads; ++head) {
            select(head);
            write();
        }
    }

private:
    struct Span {
        int begin, end;
    };
    // Tokens of the cache that are read together next.
    struct Coming {
        Keys<BFloat16> keys;
        int begin, end, heads;
    };

    int64_t queries_size() const { return static_cast<int64_t>(tiles_) * dim_ / 2 * kTile; }
    int64_t outputs_size() const { return static_cast<int64_t>(tiles_) * dim_ * kTile; }

    // Turns to one of the task's heads.
    void select(int head) {
        head_ = head;
        queries_ = all_queries_ + head * queries_size();
        outputs_ = all_outputs_ + head * outputs_size();
        top_ = all_top_ + head * 2 * tiles_ * kTile;
        total_ = top_ + tiles_ * kTile;
    }

    // What the queries of a task see.
    Span tokens_of(const AttentionTask& task) const {
        const int queries = a_.query_start_loc[task.sequence + 1] - a_.query_start_loc[task.sequence];
        const int context = a_.kv_lens[task.sequence] - queries;
        return {a_.window > 0 ? std::max(0, context + task.first + 1 - a_.window) : 0, context + task.last};
    }

    // Reads up to `lines` cache lines ahead: of each token the keys of all heads, then the values.
    void fetch(int lines) {
        for (; lines > 0; --lines) {
            if (line_ == 0) {
                if (coming_.begin >= coming_.end) return;
                ahead_ = reinterpret_cast<const char*>(coming_.keys.at(coming_.begin++));
                half_ = coming_.heads * dim_ / 32;
                line_ = 2 * half_;
            }
            const int done = 2 * half_ - line_--;
            const int64_t offset = done < half_ ? done * 64 : (done - half_) * 64 + a_.value_offset() * 2;
            _mm_prefetch(ahead_ + offset, _MM_HINT_T1);
        }
    }

    int position_of(int column) const { return context_ + task_.first + column / group_; }

    void set_queries() {
        for (int tile = 0; tile < tiles_; ++tile) {
            const BFloat16* rows[kTile];
            for (int i = 0; i < kTile; ++i) {
                const int c = tile * kTile + i;
                rows[i] = c < columns_ ? a_.query + (query_begin_ + task_.first + c / group_) * a_.query_stride +
                                             (static_cast<int64_t>(task_.kv_head + head_) * group_ + c % group_) * a_.head_stride
                                       : nullptr;
            }
            interleave_pairs(rows, dim_, queries_ + static_cast<int64_t>(tile) * dim_ / 2 * kTile);
        }
        std::memset(outputs_, 0, static_cast<int64_t>(tiles_) * dim_ * kTile * 4);
        for (int c = 0; c < tiles_ * kTile; ++c) {
            top_[c] = -INFINITY;
            total_[c] = 0.0f;
        }
    }

    // Keys as rows; values as pairs of tokens, [tokens / 2][D], each 32 elements of D in the order of `unpack`: the
    // elements 0-3, 8-11, 16-19, 24-27 of both, then the others. Zeros where no token is.
    void load_piece(int piece, int begin, int stop) {
        const int64_t offset = a_.value_offset();
        const int used = (stop - piece + 31) / 32 * 32;
        for (int t = 0; t < used; t += 2) {
            const BFloat16* row[2];
            for (int i = 0; i < 2; ++i) {
                const int position = piece + t + i;
                row[i] = position < begin || position >= stop ? nullptr : cache_.at(position) + head_ * a_.block_size * dim_;
            }
            const __m512i zero = _mm512_setzero_si512();
            for (int d = 0; d < dim_; d += 32) {
                fetch(4);
                for (int i = 0; i < 2; ++i)
                    _mm512_store_si512(keys_ + (t + i) * dim_ + d, row[i] ? _mm512_loadu_si512(row[i] + d) : zero);
                const __m512i even = row[0] ? _mm512_loadu_si512(row[0] + offset + d) : zero;
                const __m512i odd = row[1] ? _mm512_loadu_si512(row[1] + offset + d) : zero;
                uint32_t* to = values_ + t / 2 * dim_ + d;
                _mm512_store_si512(to, _mm512_unpacklo_epi16(even, odd));
                _mm512_store_si512(to + 16, _mm512_unpackhi_epi16(even, odd));
            }
        }
    }

    void attend_tile(int tile, int piece, int end) {
        const int first = position_of(tile * kTile);
        const int last = position_of(std::min(tile * kTile + kTile, columns_) - 1);
        if (piece > last) return;  // before all of these tokens
        if (a_.window > 0 && piece + kPiece <= first + 1 - a_.window) return;  // behind all their windows
        const int count = std::min({kPiece, last + 1 - piece, end - piece});
        const int steps = (count + 31) / 32;
        multiply_keys(tile, steps);
        const bool whole = piece + steps * 32 <= first + 1 && (a_.window == 0 || piece >= last + 1 - a_.window);
        softmax(tile, piece, steps, whole);
        multiply_values(tile, steps);
    }

    void multiply_keys(int tile, int steps) {
        const uint32_t* q = queries_ + static_cast<int64_t>(tile) * dim_ / 2 * kTile;
        for (int t = 0; t < steps * 32; t += 32) {
            _tile_zero(0);
            _tile_zero(1);
            for (int d = 0; d < dim_; d += 32) {
                _tile_loadd(6, q + d * 8, 64);
                _tile_loadd(4, keys_ + t * dim_ + d, dim_ * 2);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(5, keys_ + (t + 16) * dim_ + d, dim_ * 2);
                _tile_dpbf16ps(1, 5, 6);
            }
            _tile_stored(0, scores_ + t * kTile, 64);
            _tile_stored(1, scores_ + (t + 16) * kTile, 64);
        }
    }

    void softmax(int tile, int piece, int steps, bool whole) {
        alignas(64) int32_t position[kTile];
        for (int i = 0; i < kTile; ++i)
            position[i] = tile * kTile + i < columns_ ? position_of(tile * kTile + i) : -1;
        Ints at;
        std::memcpy(&at, position, sizeof at);
        const int tokens = steps * 32;
        // The scale is left for the exponent, which has a multiplication anyway, whether something is hidden or not: a
        // column must not depend on what its neighbours see.
        const bool capped = a_.soft_cap > 0;
        const float factor = capped ? 1.0f : a_.scale;
        const Floats before = load(top_ + tile * kTile);
        Floats most = splat(-INFINITY);
        for (int t = 0; t < tokens; ++t) {
            Floats s = load(scores_ + t * kTile);
            if (capped) s = tanh(s * (a_.scale / a_.soft_cap)) * a_.soft_cap;
            if (!whole) {
                const Ints distance = at - (piece + t);
                Ints hidden = distance < 0;
                if (a_.window > 0) hidden |= distance >= a_.window;
                s = hidden ? splat(-INFINITY) : s;
            }
            if (capped || !whole) store(scores_ + t * kTile, s);
            most = max(s, most);
        }
        const Floats highest = max(most * factor, before);
        // A column that has seen nothing yet keeps -inf; its weights become zeros.
        const Floats base = highest > -INFINITY ? highest : splat(0.0f);
        const Floats shrink = exp(before - base);
        Floats sums[2] = {};
        for (int t = 0; t < tokens; t += 32) {
            __m512i pairs[16];
            for (int i = 0; i < 16; ++i) {
                const float* at_pair = scores_ + (t + 2 * i) * kTile;
                const Floats a = exp(load(at_pair) * factor - base), b = exp(load(at_pair + kTile) * factor - base);
                sums[0] += a;
                sums[1] += b;
                pairs[i] = pair_up((__m512)a, (__m512)b);
            }
            transpose(pairs);
            for (int i = 0; i < 16; ++i) _mm512_store_si512(weights_ + t * 8 + i * 16, pairs[i]);
        }
        store(total_ + tile * kTile, load(total_ + tile * kTile) * shrink + (sums[0] + sums[1]));
        store(top_ + tile * kTile, highest);
        if (_mm512_cmpneq_epi32_mask((__m512i)shrink, (__m512i)splat(1.0f))) {
            for (int c = 0; c < kTile; ++c) {
                float* o = output(tile, c, 0);
                for (int d = 0; d < dim_; d += 16) store(o + d * kTile, load(o + d * kTile) * shrink[c]);
            }
        }
    }

    // Sums [D / 16][16 columns][16 of D, in the order of the values].
    float* output(int tile, int column, int d) const {
        return outputs_ + static_cast<int64_t>(tile) * dim_ * kTile + d * kTile + column * kTile;
    }

    void multiply_values(int tile, int steps) {
        for (int d = 0; d < dim_; d += 32) {
            _tile_loadd(0, output(tile, 0, d), 64);
            _tile_loadd(1, output(tile, 0, d + 16), 64);
            for (int step = 0; step < steps; ++step) {
                _tile_loadd(4, weights_ + step * 256, 64);
                _tile_loadd(6, values_ + step * 16 * dim_ + d, dim_ * 4);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, values_ + step * 16 * dim_ + d + 16, dim_ * 4);
                _tile_dpbf16ps(1, 4, 7);
            }
            _tile_stored(0, output(tile, 0, d), 64);
            _tile_stored(1, output(tile, 0, d + 16), 64);
        }
    }

    void write() {
        const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        for (int c = 0; c < columns_; ++c) {
            const int tile = c / kTile;
            const Floats inverse = splat(1.0f / total_[c]);
            BFloat16* to = a_.out + (query_begin_ + task_.first + c / group_) * a_.out_stride +
                           (static_cast<int64_t>(task_.kv_head + head_) * group_ + c % group_) * dim_;
            for (int d = 0; d < dim_; d += 32) {
                const __m512 a = (__m512)(load(output(tile, c % kTile, d)) * inverse);
                const __m512 b = (__m512)(load(output(tile, c % kTile, d + 16)) * inverse);
                store(to + d, (Floats)_mm512_permutex2var_ps(a, low, b));
                store(to + d + 16, (Floats)_mm512_permutex2var_ps(a, high, b));
            }
        }
    }

    const Attention<BFloat16>& a_;
    const AttentionTask& task_;
    const AttentionTask* next_;
    Keys<BFloat16> cache_;
    Coming coming_;
    const char* ahead_ = nullptr;
    int line_ = 0, half_ = 0, head_ = 0;
    const int dim_, group_;
    int query_begin_, context_, columns_, tiles_;
    BFloat16* keys_;
    uint32_t *values_, *weights_, *all_queries_, *queries_;
    float *scores_, *all_outputs_, *outputs_, *all_top_, *top_, *total_;
};

#endif

template <typename T>
bool attends_with_tiles(const Attention<T>& a) {
#ifdef QUIRE_AMX
    return std::is_same_v<T, BFloat16> && tiles_granted && a.head_dim % 32 == 0;
#else
    (void)a;
    return false;
#endif
}

// The sequences of a step, those with the most work first, so that no thread is left with one at the end.
inline const int32_t* by_work(const int32_t* query_start_loc, const int32_t* kv_lens, int count, Buffer& buffer) {
    int32_t* order = buffer.get<int32_t>(count);
    for (int i = 0; i < count; ++i) order[i] = i;
    const auto work = [&](int32_t s) {
        return static_cast<int64_t>(query_start_loc[s + 1] - query_start_loc[s]) * kv_lens[s];
    };
    std::stable_sort(order, order + count, [&](int32_t a, int32_t b) { return work(a) > work(b); });
    return order;
}

// The tasks of a step in the order in which they are taken. Each thread has its own, and asks for later and later ones.
template <typename T>
class AttentionTasks {
public:
    explicit AttentionTasks(const Attention<T>& a) : a_(a), per_task_(queries_per_task(a)) {
        int64_t runs = 0, tokens = a.query_start_loc[a.num_sequences];
        for (int s = 0; s < a.num_sequences; ++s) runs += runs_of(s);
        // Decodes wait for memory, which is fastest in long runs: as many heads together as leave each thread some tasks.
        const int64_t enough = 4 * omp_get_num_threads();
        if (tokens == a.num_sequences)
            while (heads_ * 2 <= a.num_kv_heads && a.num_kv_heads % (heads_ * 2) == 0 &&
                   runs * a.num_kv_heads / (heads_ * 2) >= std::min<int64_t>(enough, omp_get_num_threads() * runs))
                heads_ *= 2;
        count_ = runs * groups();
    }

    int64_t count() const { return count_; }
    AttentionTask at(int64_t i) {
        while (i >= begin_ + static_cast<int64_t>(runs_of(a_.order[place_])) * groups()) {
            begin_ += static_cast<int64_t>(runs_of(a_.order[place_])) * groups();
            ++place_;
        }
        const int sequence = a_.order[place_], within = static_cast<int>(i - begin_);
        // Late queries see the most tokens: they go first.
        const int run = runs_of(sequence) - 1 - within / groups();
        return {sequence, within % groups() * heads_, heads_, run * per_task_,
                std::min(queries_of(sequence), (run + 1) * per_task_)};
    }

private:
    int groups() const { return a_.num_kv_heads / heads_; }
    int queries_of(int s) const { return a_.query_start_loc[s + 1] - a_.query_start_loc[s]; }
    int runs_of(int s) const { return (queries_of(s) + per_task_ - 1) / per_task_; }

    const Attention<T>& a_;
    const int per_task_;
    int heads_ = 1, place_ = 0;
    int64_t count_ = 0, begin_ = 0;
};

// The whole step; the team shares the tasks as they come. A barrier must follow before results are read.
template <typename T>
void attention(const Attention<T>& a, AttentionScratch& scratch, Claimer& claimer) {
    AttentionTasks<T> tasks(a);
    int64_t i = claimer.first();
    if (i >= tasks.count()) return;
    AttentionTask task = tasks.at(i);
    for (bool more = true; more;) {
        i = claimer.next();
        more = i < tasks.count();
        const AttentionTask next = more ? tasks.at(i) : task;
#ifdef QUIRE_AMX
        if constexpr (std::is_same_v<T, BFloat16>) {
            if (attends_with_tiles(a)) {
                TiledAttention(a, task, more ? &next : nullptr, scratch).run();
                task = next;
                continue;
            }
        }
#endif
        attend_rows(a, task, scratch);
        task = next;
    }
}

}  // namespace quire
