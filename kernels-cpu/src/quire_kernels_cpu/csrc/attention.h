// Causal attention of a step's queries over the paged keys and values of their own sequences: prefill and decode alike.
//
// One task is one (sequence, key-value heads, run of queries); its columns are the pairs (query, query head), so that
// what is loaded of the cache serves them all. Softmax is online (Milakov & Gimelshein 2018, algorithm 3) over pieces of
// 64 tokens within segments of 1024, and segments are merged in their order; both begin at multiples of their length,
// for every query alike. So a column's result depends on nothing but its own query and the keys it sees, whether it is
// computed alone, in a chunk of any size, beside others, or its segments by different threads.
#pragma once

#include <algorithm>

#include "kv_cache.h"
#include "team.h"
#include "tiles.h"
#include "vectors.h"

namespace quire {

constexpr int kPiece = 64;          // tokens of the cache at a time: their keys and values stay in the first-level cache
constexpr int kSegment = 1024;      // tokens that a thread may take for itself; a multiple of kPiece
constexpr int kMaxColumns = 512;    // columns of a task
constexpr int kLatentColumns = 128; // of a task over latents, whose values are long

template <typename T>
struct Attention {
    const T* query = nullptr;                  // [T, Hq, D] or [Hq, T, D]
    int64_t query_stride = 0;                  // from one token to the next
    int64_t head_stride = 0;                   // from one head to the next
    PagedCache cache;
    T* out = nullptr;                          // [T, Hq, D]
    int64_t out_stride = 0;
    Sequences sequences = {};
    const int32_t* order = nullptr;            // [S] the sequences, those with the most work first
    int num_heads = 0;
    float scale = 1.0f;
    int window = 0;                            // tokens a query sees, itself included; 0 for all
    float soft_cap = 0.0f;                     // 0 for none
    const float* sinks = nullptr;              // [Hq] score of a token that has no value; or none
    const float* slopes = nullptr;             // [Hq] what each token of distance takes from a score (ALiBi); or none
    const int32_t* paths = nullptr;            // [T, path_stride] of tokens in trees, see `path`; or none
    int64_t path_stride = 0;
    bool int8_products = false;                // queries and weights may be rounded to 8 bits where keys and values are

    int group() const { return num_heads / cache.num_kv_heads; }
    // Whether the step's tokens of a sequence are a tree: what follows a token is not always the next one in the cache.
    bool is_tree(int sequence) const { return paths && path(sequence, 0)[0] >= 0; }
    // Of a token in a tree: its position, the position r from which on tokens are not where their position says (the
    // same for all of the sequence), and the places of the tokens that it sees at r, r + 1, ..., its own position.
    const int32_t* path(int sequence, int query) const {
        return paths + (sequences.query_start_loc[sequence] + query) * path_stride;
    }
    int position(int sequence, int query) const {
        return is_tree(sequence) ? path(sequence, query)[0] : sequences.context(sequence) + query;
    }
    // No query from `query` on is at a lower position.
    int lowest_position(int sequence, int query) const {
        return is_tree(sequence) ? path(sequence, 0)[1] : sequences.context(sequence) + query;
    }
};

struct Span {
    int begin, end;
};

// Queries [first, last) of a sequence for the key-value heads [kv_head, kv_head + num_kv_heads), over one segment of the
// cache or over all that they see.
struct AttentionTask {
    int sequence, kv_head, num_kv_heads, first, last;
    int segment;  // or -1 for all

    template <typename T>
    Span tokens(const Attention<T>& a) const {
        const int from = a.lowest_position(sequence, first);
        // A token in a tree may see some that stand behind it: an image is one tree.
        const int end = a.is_tree(sequence) ? a.sequences.kv_lens[sequence] : a.sequences.context(sequence) + last;
        Span span{a.window > 0 ? std::max(0, from + 1 - a.window) : 0, end};
        if (segment >= 0) {
            span.begin = std::max(span.begin, segment * kSegment);
            span.end = std::min(span.end, (segment + 1) * kSegment);
        }
        return span;
    }
};

// Reads the cache ahead of its use, a few lines at a time, since a core waits for the first of too many. Block by block, of
// each the keys of all heads, then the values: the processor reads ahead by itself only along long runs of memory. The place
// where it is stays in memory, so that one line is asked for after another: lines asked for all at once outrun what the
// processor does by itself, and decoding at 16,384 tokens then read 22 GB/s instead of 26 (Zen 4, two cores).
class ReadAhead {
public:
    ReadAhead() = default;
    ReadAhead(const PagedCache& cache, const CacheRows& rows, int heads, Span tokens)
        : cache_(&cache), rows_(rows), position_(tokens.begin), end_(tokens.end), parts_(cache.latent ? 1 : 2 * heads),
          part_(-1) {}

    __attribute__((always_inline)) void fetch(int lines) {
        if (position_ >= end_ && at_ >= stop_) return;  // all of it
        for (; lines > 0; --lines, at_ += 64) {
            if (at_ >= stop_ && !next_run()) return;
            __builtin_prefetch(at_, 0, 2);
            asm volatile("" : "+m"(at_));  // in memory, see above
        }
    }

private:
    __attribute__((noinline)) bool next_run() {
        if (++part_ == parts_) {
            position_ += run_;
            part_ = 0;
        }
        if (position_ >= end_) {
            part_ = parts_ - 1;
            run_ = 0;
            return false;
        }
        if (part_ == 0) run_ = std::min(rows_.block_end(position_), end_) - position_;
        const int heads = (parts_ + 1) / 2, is_value = part_ >= heads;
        at_ = rows_.at(position_) + is_value * cache_->value_offset() + (part_ - is_value * heads) * cache_->head_bytes();
        stop_ = at_ + run_ * (cache_->row_bytes + cache_->scale_bytes());  // the scales of a whole block, too
        return true;
    }

    const PagedCache* cache_ = nullptr;
    CacheRows rows_;
    const char *at_ = nullptr, *stop_ = nullptr;
    int position_ = 0, end_ = 0, parts_ = 2, part_ = -1, run_ = 0;
};

// What is to be read once the tokens of a task before `done` have been: its next piece, or the first one of the task that the
// thread will do then, if any.
template <typename T>
ReadAhead read_ahead(const Attention<T>& a, const AttentionTask& task, const AttentionTask* next, int done) {
    if (done >= task.tokens(a).end) {
        if (!next) return {};
        return read_ahead(a, *next, nullptr, next->tokens(a).begin);
    }
    const CacheRows rows(a.cache, a.sequences.table(task.sequence), task.kv_head);
    int stop = std::min(done / kPiece * kPiece + kPiece, task.tokens(a).end);
    if (a.is_tree(task.sequence)) stop = std::min(stop, a.path(task.sequence, 0)[1]);  // what follows is all over the cache
    if (done >= stop) return {};
    return {a.cache, rows, task.num_kv_heads, {done, stop}};
}

// What a column has of its result: the highest score, the sum of the weights below it, and the weighted values, 16 or 8
// at a time, `stride` apart.
struct Column {
    float *top, *total, *out;
    int64_t stride;
};

// into += from: the softmax over two sets of tokens. Never inlined, so that it is rounded in the same way everywhere.
__attribute__((noinline)) inline void merge(const Column& into, const Column& from, int vectors) {
    const float highest = *from.top > *into.top || *from.top != *from.top ? *from.top : *into.top;
    const float base = highest == -INFINITY ? 0.0f : highest;
    const float old = exp(splat(*into.top - base))[0], added = exp(splat(*from.top - base))[0];
    *into.top = highest;
    *into.total = *into.total * old + *from.total * added;
    for (int i = 0; i < vectors; ++i)
        store(into.out + i * into.stride, load(into.out + i * into.stride) * old + load(from.out + i * from.stride) * added);
}

// A token without a value takes its share of the weights.
inline void add_sink(const Column& column, float score) { *column.total += exp(splat(score - *column.top))[0]; }

struct AttentionScratch {
    Buffer keys, values, queries, outputs, weights, scores, state, row_scales, column;
};

// The results of segments until they are merged: for each task some columns of D numbers, their tops and their totals.
struct Partials {
    float* data = nullptr;
    int columns, value_dim;

    explicit Partials(const PagedCache& cache) : columns(most_columns(cache)), value_dim(cache.value_dim) {}

    // Of a task whose segments may be different threads' work. Latents have many columns, and little else to share.
    static int most_columns(const PagedCache& cache) { return cache.latent ? kLatentColumns : 16; }
    int64_t padded() const { return static_cast<int64_t>(value_dim + kLanes - 1) / kLanes * kLanes; }
    int64_t size() const { return columns * (padded() + 2); }
    Column column(int64_t task, int column) const {
        float* of_task = data + task * size();
        return {of_task + column, of_task + columns + column, of_task + 2 * columns + column * padded(), kLanes};
    }
};

// The tasks of a step in the order in which they are taken. Each thread has its own, and asks for later ones mostly.
template <typename T>
class AttentionTasks {
public:
    AttentionTasks(const Attention<T>& a, int threads)
        : a_(a), per_task_(std::max(1, (a.cache.latent ? kLatentColumns : kMaxColumns) / a.group())),
          widest_(a.cache.latent ? 1 : kTile) {
        // Long runs of memory are the fastest to read: as many heads together as share a tile. But every thread should
        // find some tasks, and a long sequence is cut before its heads are.
        split_ = count_tasks() < 4 * threads;
        while (widest_ > 1 && count_tasks() < 2 * threads) widest_ /= 2;
        count_ = count_tasks();
    }

    int64_t count() const { return count_; }
    AttentionTask at(int64_t i) {
        if (i < begin_) place_ = 0, begin_ = 0;
        while (i >= begin_ + tasks_of(a_.order[place_])) begin_ += tasks_of(a_.order[place_++]);
        const int sequence = a_.order[place_], within = static_cast<int>(i - begin_);
        const Span segments = segments_of(sequence);
        const int per_group = segments.end - segments.begin, per_run = per_group * groups_of(sequence);
        // Late queries see the most tokens: they go first.
        const int run = runs_of(sequence) - 1 - within / per_run, heads = heads_of(sequence);
        return {sequence, within % per_run / per_group * heads, heads, run * per_task_,
                std::min(a_.sequences.queries(sequence), (run + 1) * per_task_),
                is_split(sequence) ? segments.begin + within % per_group : -1};
    }
    bool any_split() const {
        for (int s = 0; s < a_.sequences.count; ++s)
            if (is_split(s)) return true;
        return false;
    }
    // Segments of the task's queries if it is the first of them, else 0.
    int segments_from(const AttentionTask& task) const {
        const Span segments = segments_of(task.sequence);
        return task.segment == segments.begin ? segments.end - segments.begin : 0;
    }

private:
    bool is_narrow(int s) const { return a_.sequences.queries(s) * a_.group() <= Partials::most_columns(a_.cache); }
    bool is_split(int s) const { return split_ && is_narrow(s) && a_.sequences.kv_lens[s] > kSegment; }
    int runs_of(int s) const { return (a_.sequences.queries(s) + per_task_ - 1) / per_task_; }
    int heads_of(int s) const {
        int heads = 1;
        while (heads * 2 <= widest_ && heads * 2 * a_.sequences.queries(s) * a_.group() <= kTile &&
               a_.cache.num_kv_heads % (heads * 2) == 0)
            heads *= 2;
        return heads;
    }
    int groups_of(int s) const { return a_.cache.num_kv_heads / heads_of(s); }
    Span segments_of(int s) const {
        if (!is_split(s)) return {0, 1};
        const Span span = AttentionTask{s, 0, 1, 0, a_.sequences.queries(s), -1}.tokens(a_);
        return {span.begin / kSegment, (span.end + kSegment - 1) / kSegment};
    }
    int64_t tasks_of(int s) const {
        const Span segments = segments_of(s);
        return static_cast<int64_t>(runs_of(s)) * groups_of(s) * (segments.end - segments.begin);
    }
    int64_t count_tasks() const {
        int64_t count = 0;
        for (int s = 0; s < a_.sequences.count; ++s) count += tasks_of(s);
        return count;
    }

    const Attention<T>& a_;
    const int per_task_;
    bool split_ = false;
    int widest_, place_ = 0;
    int64_t count_ = 0, begin_ = 0;
};

// Has latents read by as few parts of their heads, each of which goes through all the rows, as give every thread something
// to do.
template <typename T>
void part_heads(Attention<T>& a, int threads) {
    while (a.group() % kTile == 0 && AttentionTasks<T>(a, threads).count() < 2 * threads) a.cache.num_kv_heads *= 2;
}

// What one task gives for one of its columns, to its place in `out` or, for a segment, to the partial results.
template <typename T>
void write_column(const Attention<T>& a, const AttentionTask& task, int query, int head, const Column& column) {
    const int dim = a.cache.value_dim;
    if (a.sinks) add_sink(column, a.sinks[head]);
    const float inverse = a.cache.head_scale(1, head / a.group()) / *column.total;
    T* to = a.out + (a.sequences.query_start_loc[task.sequence] + query) * a.out_stride + static_cast<int64_t>(head) * dim;
    int d = 0;
    for (; d + kLanes <= dim; d += kLanes) store(to + d, load(column.out + d / kLanes * column.stride) * inverse);
    if (d < dim) store_first(to + d, load(column.out + d / kLanes * column.stride) * inverse, dim - d);
}

}  // namespace quire

#include "attention_bytes.h"
#include "attention_pairs.h"
#include "attention_rows.h"
#include "attention_tiles.h"

namespace quire {

template <typename T>
bool attends_with_tiles(const Attention<T>& a) {
#ifdef QUIRE_AMX
    return std::is_same_v<T, BFloat16> && tiles_granted && PairAttention::fits(a.cache);
#else
    (void)a;
    return false;
#endif
}

// A task without tiles. next: the task that this thread will do then, or none.
template <typename T>
void attend_columns(const Attention<T>& a, const AttentionTask& task, const AttentionTask* next, AttentionScratch& scratch,
                    const Partials& partials, int64_t index) {
#ifdef QUIRE_VNNI
    if constexpr (std::is_same_v<T, BFloat16>) {
        if (a.int8_products && ByteAttention::fits(a.cache)) {
            ByteAttention(a, task, scratch).run(next, partials, index);
            return;
        }
    }
#endif
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, BFloat16>) {
        if (PairAttention::fits(a.cache)) {
            PairAttention(a, task, scratch).run(next, partials, index);
            return;
        }
    }
#endif
    RowAttention<T>(a, task, scratch).run(next, partials, index);
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

// The columns of tasks that were split, of all their segments.
template <typename T>
void merge_segments(const Attention<T>& a, const Partials& partials) {
    AttentionTasks<T> tasks(a, omp_get_num_threads());
    const int group = a.group(), vectors = static_cast<int>(partials.padded()) / kLanes;
    const Range share = my_share(tasks.count());
    for (int64_t i = share.begin; i < share.end; ++i) {
        const AttentionTask task = tasks.at(i);
        const int segments = task.segment < 0 ? 0 : tasks.segments_from(task);
        if (!segments) continue;
        const int per_head = (task.last - task.first) * group;
        for (int c = 0; c < per_head * task.num_kv_heads; ++c) {
            const Column whole = partials.column(i, c);
            for (int segment = 1; segment < segments; ++segment)
                merge(whole, partials.column(i + segment, c), vectors);
            write_column(a, task, task.first + c % per_head / group,
                         (task.kv_head + c / per_head) * group + c % group, whole);
        }
    }
}

// The whole step; the team shares the tasks as they come. A barrier must follow before results are read. `shared` belongs
// to the team.
template <typename T>
void attention(const Attention<T>& a, AttentionScratch& scratch, QueueWorker& worker, Buffer& shared) {
    AttentionTasks<T> tasks(a, omp_get_num_threads());
    Partials partials(a.cache);
    const bool split = tasks.any_split();
    if (split) {
#pragma omp single
        shared.get<float>(tasks.count() * partials.size());
        partials.data = shared.get<float>(0);
    }
    int64_t i = worker.first(tasks.count());
    AttentionTask task = i < tasks.count() ? tasks.at(i) : AttentionTask{};
    while (i < tasks.count()) {
        const int64_t following = worker.next();
        const bool more = following < tasks.count();
        const AttentionTask next = more ? tasks.at(following) : task;
#ifdef QUIRE_AMX
        if constexpr (std::is_same_v<T, BFloat16>) {
            if (attends_with_tiles(a)) {
                TiledAttention(a, task, more ? &next : nullptr, scratch).run(partials, i);
                task = next;
                i = following;
                continue;
            }
        }
#endif
        attend_columns(a, task, more ? &next : nullptr, scratch, partials, i);
        task = next;
        i = following;
    }
    if (split) {
        barrier();
        merge_segments(a, partials);
    }
}

}  // namespace quire
