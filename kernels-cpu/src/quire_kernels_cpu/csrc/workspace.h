// What the parts of a fused decoder share while a step runs: its tokens, the residual stream, memory, and each thread's own.
//
// Knows sizes, not layers. Memory is made before the team starts, as wide as the widest layer needs: a step allocates nothing
// once the largest has been seen.
#pragma once

#include <memory>

#include "attention.h"
#include "elementwise.h"
#include "kernels.h"
#include "linear.h"
#include "lora.h"
#include "moe.h"
#include "rank_columns.h"
#include "recurrent.h"

namespace quire {

// One step. Pointers to arrays per layer are per cache: a layer says which cache is its own.
template <typename T>
struct Step {
    const T* x;                           // [T, hidden] embeddings
    T* hidden;                            // [T, hidden] after the final norm
    const void *const *cos, *const *sin;  // per rotation [T, rotary_dim]
    int64_t tokens;
    int num_sequences;
    const int32_t *query_start_loc, *kv_lens;
    const StepGroup* groups;
    const CacheArgument* caches;
    CacheFormat cache_format;
    LoraTokens lora;                 // without groups: no token has an adapter
    void* const* taps = nullptr;     // per layer, and one behind the last: where to copy its input [T, hidden], or null; or none
    const int32_t* paths = nullptr;  // `Attention::path`
    int64_t path_stride = 0;
    // Of groups of cross attention, in which each token is a sequence of its own: [T + 1], and [T] what it attends to; or none.
    const int32_t *cross_start_loc = nullptr, *cross_lens = nullptr;

    // The sequences with the block tables of a group.
    Sequences sequences(int group) const {
        const StepGroup& g = groups[group];
        return {.block_table = g.block_table, .table_stride = g.table_stride, .query_start_loc = query_start_loc,
                .kv_lens = kv_lens, .count = num_sequences, .block_size = static_cast<int>(g.block_size)};
    }
    Sequences cross_sequences(const StepGroup& g) const {
        return {.block_table = g.block_table, .table_stride = g.table_stride, .query_start_loc = cross_start_loc,
                .kv_lens = cross_lens, .count = static_cast<int>(tokens), .block_size = static_cast<int>(g.block_size)};
    }
};

// Which of a layer's matrices read activations: a thread may write those of the next while another still reads.
enum class Stage { first, middle, last };

// The activations of a step in the layouts in which its matrices read them, one for each stage, width and weight format.
// Layers take turns: what one has written is read before the next writes.
template <typename T>
class ActivationPool {
public:
    // The number of the activations that matrices of this format and so many inputs read.
    int add(Stage stage, int64_t cols, WeightFormat format) {
        for (size_t i = 0; i < entries_.size(); ++i)
            if (entries_[i]->stage == stage && entries_[i]->cols == cols && entries_[i]->format == format) return static_cast<int>(i);
        entries_.push_back(std::make_unique<Entry>(stage, cols, format));
        return static_cast<int>(entries_.size()) - 1;
    }
    // Makes room for a step; by one thread.
    void begin(int64_t tokens) {
        for (const auto& each : entries_) each->now = make_activations<T>(tokens, each->cols, each->format, each->buffers);
    }
    const Activations& operator[](int i) const { return entries_[i]->now; }

private:
    struct Entry {
        Stage stage;
        int64_t cols;
        WeightFormat format;
        Activations now = {};
        ActivationBuffers buffers = {};
        Entry(Stage stage, int64_t cols, WeightFormat format) : stage(stage), cols(cols), format(format) {}
    };
    std::vector<std::unique_ptr<Entry>> entries_;  // buffers stay where they are
};

// Numbers of T, and of float32, that a layer keeps for each token between its matrices.
enum TokenBuffer { kResidual, kAdded, kNormed, kProjected, kMixed, kAttended, kInner, kShared, kOwn, kNumTokenBuffers };
enum FloatBuffer { kHeadFactors, kLogits, kExpertWeights, kGateUp, kNumFloatBuffers };

// What a thread keeps for itself.
struct ThreadScratch {
    LinearScratch linear;
    AttentionScratch attention;
    MoeScratch experts;
    Buffer tokens, routing, states;
    ActivationBuffers heads;
};

template <typename T>
class Workspace {
public:
    ActivationPool<T> activations;
    DecoderRanks ranks;
    const Step<T>* step = nullptr;
    const int32_t* order = nullptr;  // the sequences, those with the most work first
    const int32_t* cross_order = nullptr;  // the same of cross attention
    bool adapted = false;            // some tokens have adapters
    int64_t hidden = 0, most_experts = 0;
    float* lora_inner = nullptr;     // what the first part of adapters gives
    MoeStep<T> experts;
    Buffer partials;

    // A layer keeps so many numbers of each token.
    void need(TokenBuffer buffer, int64_t per_token) { widths_[buffer] = std::max(widths_[buffer], per_token); }
    void need(FloatBuffer buffer, int64_t per_token) { float_widths_[buffer] = std::max(float_widths_[buffer], per_token); }

    // A matrix with `rows` outputs of all ranks, as this rank has it.
    Matrix<T> matrix(const MatrixArgument& from, int64_t rows, int64_t cols) {
        const int64_t own = ranks.own(from.rank_sizes, rows);
        if (from.rank_sizes) need(kOwn, own);
        return make_matrix<T>(from, own, cols);
    }

    // Makes room for a step; by one thread.
    void begin(const Step<T>& now, bool has_adapters) {
        step = &now;
        adapted = has_adapters && now.lora.num_groups > 0;
        activations.begin(now.tokens);
        for (int i = 0; i < kNumTokenBuffers; ++i) buffers_[i].template get<T>(now.tokens * widths_[i]);
        for (int i = 0; i < kNumFloatBuffers; ++i)
            if (i != kGateUp || adapted) float_buffers_[i].template get<float>(now.tokens * float_widths_[i]);
        ids_.get<int64_t>(now.tokens * most_experts);
        lora_inner = adapted ? lora_buffer_.get<float>(3 * now.lora.count() * now.lora.max_rank) : nullptr;
        order = by_work(now.query_start_loc, now.kv_lens, now.num_sequences, order_buffer_);
        if (now.cross_lens)
            cross_order = by_work(now.cross_start_loc, now.cross_lens, static_cast<int>(now.tokens), cross_order_buffer_);
    }

    int64_t tokens() const { return step->tokens; }
    T* at(TokenBuffer buffer) { return buffers_[buffer].template get<T>(0); }
    float* at(FloatBuffer buffer) { return float_buffers_[buffer].template get<float>(0); }
    int64_t* expert_ids() { return ids_.get<int64_t>(0); }

    // Adapters, first part: of `count` matrices with the same inputs x [tokens, cols]; the team shares the work.
    void shrink(const LoraTable* tables, int count, const T* x, int64_t cols) {
        lora_shrink(tables, count, step->lora, x, cols, cols, lora_inner);
    }
    // Of matrix `which` in the first part.
    float* inner_of(int which) const { return lora_inner + which * step->lora.count() * step->lora.max_rank; }

private:
    int64_t widths_[kNumTokenBuffers] = {}, float_widths_[kNumFloatBuffers] = {};
    Buffer buffers_[kNumTokenBuffers], float_buffers_[kNumFloatBuffers], ids_, lora_buffer_, order_buffer_,
        cross_order_buffer_;
};

// Where this rank's outputs of some matrices go, rows `stride` apart: where all outputs belong, or to be gathered.
template <typename T>
struct OwnOutputs {
    T* to[4];
    int64_t stride;
    bool shared;
};

// What a part of a layer gets for a step: what all share, this thread's own, its place in the network.
template <typename T>
struct Pass {
    Workspace<T>& work;
    ThreadScratch& mine;
    QueueWorker& worker;
    const CacheArgument* cache;     // of a part that has one
    const StepGroup* group;
    Sequences sequences;            // with the block tables of its group
    const LoraTable* adapters;      // of its matrices in their order, or none
    const Strips<T>* following;     // what is multiplied next, or none

    // x [tokens, cols] -> [tokens, outputs] of T, `stride` apart.
    void project(const Strips<T>& strips, int activations, T* const* to, int64_t stride, const Strips<T>* next = nullptr) const {
        linear(strips, work.activations[activations], mine.linear, worker,
               ToRows<T, T>{.matrices = strips.matrices, .to = to, .stride = stride, .tokens = work.tokens()}, next);
    }
    // Where to put what matrices give that belongs to `to`, `stride` apart.
    OwnOutputs<T> own_outputs(const Strips<T>& strips, T* const* to, int64_t stride) const {
        OwnOutputs<T> own{.to = {}, .stride = stride, .shared = false};
        for (int i = 0; i < strips.num_matrices; ++i) own.shared = own.shared || strips.matrices[i].rank_sizes;
        if (own.shared) own.stride = 0;
        for (int i = 0; i < strips.num_matrices; ++i) {
            own.to[i] = own.shared ? work.at(kOwn) + own.stride : to[i];
            if (own.shared) own.stride += strips.matrices[i].rows;
        }
        return own;
    }
    // The outputs of all ranks where they belong; with a barrier before and behind.
    void gather(const Strips<T>& strips, const OwnOutputs<T>& own, T* const* to, int64_t stride) const {
        if (!own.shared) return;
        RankColumns<T> columns[4];
        for (int i = 0; i < strips.num_matrices; ++i) {
            const Matrix<T>& m = strips.matrices[i];
            int64_t all = m.rank_sizes ? 0 : m.rows;
            for (int rank = 0; m.rank_sizes && rank < work.ranks.size(); ++rank) all += m.rank_sizes[rank];
            columns[i] = {m.rank_sizes, all, to[i], stride};
        }
        work.ranks.gather(own.to[0], columns, strips.num_matrices, work.tokens());
    }
    // What each rank has some columns of, [tokens, widths[rank]] -> [tokens, all of them]; with a barrier before and behind.
    void gather(const T* own, const int64_t* widths, T* whole, int64_t width) const {
        const RankColumns<T> columns{widths, width, whole, width};
        work.ranks.gather(own, &columns, 1, work.tokens());
    }
    // As `project`, whole; with a barrier behind.
    void project_whole(const Strips<T>& strips, int activations, T* const* to, int64_t stride, const Strips<T>* next) const {
        const OwnOutputs<T> own = own_outputs(strips, to, stride);
        project(strips, activations, own.to, own.stride, next);
        barrier();
        gather(strips, own, to, stride);
    }
    // The last product of a part to `to` [tokens, hidden], with adapters whose first part is done; with a barrier behind.
    void project_last(const Matrix<T>& matrix, int activations, T* to, const Strips<T>* next, const LoraTable* adapter) const {
        const Strips<T> strips{&matrix, 1, false};
        const OwnOutputs<T> own = own_outputs(strips, &to, work.hidden);
        project(strips, activations, own.to, own.stride, next);
        barrier();
        if (adapter) {
            const LoraExpansion<T> added{adapter, work.inner_of(0), matrix.rows, {own.to[0], own.stride, 0, 0}};
            lora_expand<T>(&added, 1, work.step->lora);
            barrier();
        }
        gather(strips, own, &to, work.hidden);
    }
    // Into what is to be added to the residual stream; with a barrier behind.
    void project_added(const Matrix<T>& matrix, int activations, const LoraTable* adapter = nullptr) const {
        project_last(matrix, activations, work.at(kAdded), following, adapter);
    }
    // x [tokens, cols], rows `stride` apart, as activations; with a barrier behind.
    void set(int activations, const T* x, int64_t stride) const {
        set_all(work.activations[activations], x, stride);
        barrier();
    }
};

}  // namespace quire
