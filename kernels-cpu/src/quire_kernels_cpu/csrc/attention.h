// Causal attention of a step's queries over the paged keys and values of their own sequences: prefill and decode alike.
//
// The cache of a layer is [num_blocks, block_size, 2, Hkv, D]. One task is one (sequence, key-value head, run of
// queries); its columns are the pairs (query, head of the group), so that what is loaded of the cache serves them all.
// Softmax is online (Milakov & Gimelshein 2018, algorithm 3) over pieces of 128 tokens that begin at multiples of 128,
// for every query alike: a column's result depends on nothing but its own query and the keys it sees, whether it is
// computed alone, in a chunk of any size, or beside others.
#pragma once

#include <algorithm>

#include "team.h"
#include "tiles.h"
#include "vectors.h"

namespace quire {

constexpr int kPiece = 128;         // tokens of the cache at a time
constexpr int kMaxColumns = 256;    // columns of a task
constexpr int kMaxHeadDim = 256;

template <typename T>
struct Attention {
    const T* query;                  // [T, Hq, D]
    int64_t query_stride;            // from one token to the next
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
    int64_t value_offset() const { return static_cast<int64_t>(num_kv_heads) * head_dim; }
    const T* key_at(int sequence, int kv_head, int position) const {
        const int64_t block = block_table[sequence * table_stride + position / block_size];
        const int64_t slot = block * block_size + position % block_size;
        return kv + (slot * 2 * num_kv_heads + kv_head) * head_dim;
    }
};

// Queries [first, last) of a sequence for one key-value head.
struct AttentionTask {
    int sequence, kv_head, first, last;
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
void attend_rows(const Attention<T>& a, const AttentionTask& task, AttentionScratch& scratch) {
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
                     (static_cast<int64_t>(task.kv_head) * group + c % group) * dim;
        for (int d = 0; d < dim; ++d) queries[c * padded + d] = to_float(q[d]);
    }
    const int end = context + task.last;
    const int oldest = a.window > 0 ? std::max(0, context + task.first + 1 - a.window) : 0;
    for (int piece = oldest / kPiece * kPiece; piece < end; piece += kPiece) {
        const int begin = std::max(piece, oldest), stop = std::min(piece + kPiece, end);
        for (int t = begin; t < stop; ++t) {
            const T* key = a.key_at(task.sequence, task.kv_head, t);
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
// the lanes without a sum across them; weights are rounded to bfloat16 before they meet the values.
class TiledAttention {
public:
    TiledAttention(const Attention<BFloat16>& a, const AttentionTask& task, AttentionScratch& scratch)
        : a_(a), task_(task), dim_(a.head_dim), group_(a.group()) {
        query_begin_ = a.query_start_loc[task.sequence];
        context_ = a.kv_lens[task.sequence] - (a.query_start_loc[task.sequence + 1] - query_begin_);
        columns_ = (task.last - task.first) * group_;
        tiles_ = (columns_ + kTile - 1) / kTile;
        keys_ = scratch.keys.get<BFloat16>(kPiece * dim_);
        values_ = scratch.values.get<BFloat16>(kPiece * dim_);
        queries_ = scratch.queries.get<uint32_t>(static_cast<int64_t>(tiles_) * dim_ / 2 * kTile);
        outputs_ = scratch.outputs.get<float>(static_cast<int64_t>(tiles_) * dim_ * kTile);
        weights_ = scratch.weights.get<uint32_t>(kPiece / 2 * kTile);
        scores_ = scratch.scores.get<float>(kPiece * kTile);
        top_ = scratch.state.get<float>(2 * kMaxColumns + 2 * kTile);
        total_ = top_ + kMaxColumns + kTile;
    }

    void run() {
        set_queries();
        const int end = context_ + task_.last;
        const int oldest = a_.window > 0 ? std::max(0, context_ + task_.first + 1 - a_.window) : 0;
        for (int piece = oldest / kPiece * kPiece; piece < end; piece += kPiece) {
            load_piece(piece, std::max(oldest, piece), std::min(piece + kPiece, end), end);
            for (int tile = 0; tile < tiles_; ++tile) attend_tile(tile, piece, end);
        }
        write();
    }

private:
    int position_of(int column) const { return context_ + task_.first + column / group_; }

    void set_queries() {
        for (int tile = 0; tile < tiles_; ++tile) {
            const BFloat16* rows[kTile];
            for (int i = 0; i < kTile; ++i) {
                const int c = tile * kTile + i;
                rows[i] = c < columns_ ? a_.query + (query_begin_ + task_.first + c / group_) * a_.query_stride +
                                             (static_cast<int64_t>(task_.kv_head) * group_ + c % group_) * dim_
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

    // Keys as rows, values transposed to [D / 16][32 tokens each][16 rows of D][32 tokens]; zeros where no token is.
    void load_piece(int piece, int begin, int stop, int end) {
        const int64_t offset = a_.value_offset();
        const int used = (stop - piece + 31) / 32 * 32;
        const BFloat16* value_rows[kPiece];
        for (int t = 0; t < used; ++t) {
            const int position = piece + t;
            BFloat16* to = keys_ + t * dim_;
            if (position < begin || position >= stop) {
                std::memset(to, 0, dim_ * 2);
                value_rows[t] = nullptr;
                continue;
            }
            const BFloat16* key = a_.key_at(task_.sequence, task_.kv_head, position);
            value_rows[t] = key + offset;
            for (int d = 0; d < dim_; d += 32) {
                _mm_prefetch(reinterpret_cast<const char*>(key + offset + d), _MM_HINT_T0);
                _mm512_store_si512(to + d, _mm512_loadu_si512(key + d));
            }
        }
        for (int t = 0; t < used; t += 32) {
            for (int ahead = piece + kPiece + t; ahead < std::min(piece + kPiece + t + 32, end); ++ahead) {
                const BFloat16* key = a_.key_at(task_.sequence, task_.kv_head, ahead);
                for (int d = 0; d < dim_; d += 32) _mm_prefetch(reinterpret_cast<const char*>(key + d), _MM_HINT_T1);
            }
            for (int d = 0; d < dim_; d += 32) {
                // 32 tokens x 32 elements: pairs of tokens first, then two transpositions of 16 x 16 pairs.
                __m512i low[16], high[16];
                for (int i = 0; i < 16; ++i) {
                    const __m512i even = value_rows[t + 2 * i] ? _mm512_loadu_si512(value_rows[t + 2 * i] + d)
                                                               : _mm512_setzero_si512();
                    const __m512i odd = value_rows[t + 2 * i + 1] ? _mm512_loadu_si512(value_rows[t + 2 * i + 1] + d)
                                                                  : _mm512_setzero_si512();
                    const __m512i a = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(even));
                    const __m512i b = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(odd));
                    low[i] = _mm512_or_si512(a, _mm512_slli_epi32(b, 16));
                    const __m512i c = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(even, 1));
                    const __m512i e = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(odd, 1));
                    high[i] = _mm512_or_si512(c, _mm512_slli_epi32(e, 16));
                }
                transpose(low);
                transpose(high);
                BFloat16* to = value_tile(d / 16, t / 32);
                BFloat16* next = value_tile(d / 16 + 1, t / 32);
                for (int i = 0; i < 16; ++i) {
                    _mm512_store_si512(to + i * 32, low[i]);
                    _mm512_store_si512(next + i * 32, high[i]);
                }
            }
        }
    }

    BFloat16* value_tile(int row_tile, int step) const { return values_ + (row_tile * (kPiece / 32) + step) * 512; }

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
        Floats highest = load(top_ + tile * kTile);
        const Floats before = highest;
        for (int t = 0; t < tokens; ++t) {
            Floats s = load(scores_ + t * kTile) * a_.scale;
            if (a_.soft_cap > 0) s = tanh(s / a_.soft_cap) * a_.soft_cap;
            if (!whole) {
                const Ints distance = at - (piece + t);
                Ints hidden = distance < 0;
                if (a_.window > 0) hidden |= distance >= a_.window;
                s = hidden ? splat(-INFINITY) : s;
            }
            store(scores_ + t * kTile, s);
            highest = s > highest ? s : highest;
        }
        // A column that has seen nothing yet keeps -inf; its weights become zeros.
        const Floats base = highest > -INFINITY ? highest : splat(0.0f);
        const Floats shrink = exp(before - base);
        Floats sums[2] = {};
        for (int t = 0; t < tokens; t += 2) {
            const Floats a = exp(load(scores_ + t * kTile) - base), b = exp(load(scores_ + (t + 1) * kTile) - base);
            sums[0] += a;
            sums[1] += b;
            _mm512_store_si512(weights_ + t / 2 * kTile, pair_up((__m512)a, (__m512)b));
        }
        store(total_ + tile * kTile, load(total_ + tile * kTile) * shrink + (sums[0] + sums[1]));
        store(top_ + tile * kTile, highest);
        if (_mm512_cmpneq_epi32_mask((__m512i)shrink, (__m512i)splat(1.0f))) {
            float* o = outputs_ + static_cast<int64_t>(tile) * dim_ * kTile;
            for (int d = 0; d < dim_; ++d) store(o + d * kTile, load(o + d * kTile) * shrink);
        }
    }

    void multiply_values(int tile, int steps) {
        float* o = outputs_ + static_cast<int64_t>(tile) * dim_ * kTile;
        for (int d = 0; d < dim_ / 16; d += 2) {
            _tile_loadd(0, o + d * 256, 64);
            _tile_loadd(1, o + (d + 1) * 256, 64);
            for (int step = 0; step < steps; ++step) {
                _tile_loadd(6, weights_ + step * 256, 64);
                _tile_loadd(4, value_tile(d, step), 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(5, value_tile(d + 1, step), 64);
                _tile_dpbf16ps(1, 5, 6);
            }
            _tile_stored(0, o + d * 256, 64);
            _tile_stored(1, o + (d + 1) * 256, 64);
        }
    }

    void write() {
        for (int tile = 0; tile < tiles_; ++tile) {
            const Floats inverse = 1.0f / load(total_ + tile * kTile);
            const float* o = outputs_ + static_cast<int64_t>(tile) * dim_ * kTile;
            for (int d = 0; d < dim_; d += 16) {
                __m512i r[16];
                for (int i = 0; i < 16; ++i) r[i] = (__m512i)(load(o + (d + i) * kTile) * inverse);
                transpose(r);
                for (int i = 0; i < kTile && tile * kTile + i < columns_; ++i) {
                    const int c = tile * kTile + i;
                    BFloat16* to = a_.out + (query_begin_ + task_.first + c / group_) * a_.out_stride +
                                   (static_cast<int64_t>(task_.kv_head) * group_ + c % group_) * dim_ + d;
                    store(to, (Floats)r[i]);
                }
            }
        }
    }

    const Attention<BFloat16>& a_;
    const AttentionTask& task_;
    const int dim_, group_;
    int query_begin_, context_, columns_, tiles_;
    BFloat16 *keys_, *values_;
    uint32_t *queries_, *weights_;
    float *outputs_, *scores_, *top_, *total_;
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

// The whole step; the team shares the tasks as they come. A barrier is at the end.
template <typename T>
void attention(const Attention<T>& a, AttentionScratch& scratch) {
    const int per_task = queries_per_task(a);
    const bool tiled = attends_with_tiles(a);
    int num_tasks = 0;
    for (int s = 0; s < a.num_sequences; ++s)
        num_tasks += (a.query_start_loc[s + 1] - a.query_start_loc[s] + per_task - 1) / per_task * a.num_kv_heads;
    int place = 0, begin = 0;  // the tasks of the sequence at this place begin at `begin`
#pragma omp for schedule(dynamic, 1)
    for (int i = 0; i < num_tasks; ++i) {
        int sequence, queries, runs;
        for (;; ++place) {
            sequence = a.order[place];
            queries = a.query_start_loc[sequence + 1] - a.query_start_loc[sequence];
            runs = (queries + per_task - 1) / per_task;
            if (i < begin + runs * a.num_kv_heads) break;
            begin += runs * a.num_kv_heads;
        }
        // Late queries see the most tokens: they go first.
        const int run = runs - 1 - (i - begin) / a.num_kv_heads, kv_head = (i - begin) % a.num_kv_heads;
        const AttentionTask task{sequence, kv_head, run * per_task, std::min(queries, (run + 1) * per_task)};
#ifdef QUIRE_AMX
        if constexpr (std::is_same_v<T, BFloat16>) {
            if (tiled) {
                TiledAttention(a, task, scratch).run();
                continue;
            }
        }
#endif
        attend_rows(a, task, scratch);
    }
    (void)tiled;
}

}  // namespace quire
