// A whole stack of pre-norm decoder layers in one call: one parallel region, a barrier between the parts of a layer.
//
// Knows weights, the paged cache and one step's tokens; allocates nothing once it has seen its largest step.
#pragma once

#include <vector>

#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "lora.h"
#include "moe.h"
#include "routing.h"

namespace quire {

// What stands in the place of gate, up and down where each token has experts of its own.
template <typename T>
struct RoutedExperts {
    const Moe<T>* moe = nullptr;
    Matrix<T> router;                  // [E, hidden]
    const float* router_bias = nullptr;  // [E] or none, as the next
    const float* choice_bias = nullptr;
    const T* shared_gate = nullptr;  // [hidden] of what all tokens share, or none
    RoutingRule rule{};
};

// x + attention(norm(x)), then x + feed_forward(norm(x)), where what is added may have a norm of its own, too.
template <typename T>
struct Layer {
    const float *input_norm, *attention_out_norm, *feed_forward_norm, *feed_forward_out_norm;  // [hidden] each, or none
    const float *q_norm, *k_norm;  // [D] each, or [Hq * D] and [Hkv * D] for all heads at once, or none
    bool norm_of_all_heads, norm_after_rotation;
    Matrix<T> qkv[3], o;
    Matrix<T> gate_up[2], down;  // beside experts: of the network that all tokens share, or without rows
    RoutedExperts<T> experts;    // without `moe` there are none
    int window;
    int group;         // of KV cache groups
    int rotation;      // which of the step's; -1: none
    bool interleaved;  // neighbours are the pairs that are rotated
    const float* kv_scale;  // [2, Hkv], or none
    const float* sinks;     // [Hq], or none
    float scale, soft_cap;  // of attention's scores; 0 for no cap
    float residual_factor;  // of both parts, before they are added

    bool has_shared() const { return experts.moe && down.rows; }
};

template <typename T>
struct Step {
    const T* x;       // [T, hidden] embeddings
    T* hidden;        // [T, hidden] after the final norm
    const void *const *cos, *const *sin;  // per rotation [T, rotary_dim]
    int64_t tokens;
    int num_sequences;
    const int32_t *query_start_loc, *kv_lens;
    const StepGroup* groups;
    void* const* kv_caches;  // per layer
    CacheFormat cache_format;
    int block_size;
    LoraTokens lora;  // without groups: no token has an adapter
    void* const* taps;  // per layer, and one behind the last: where to copy its input [T, hidden], or null; or none
    const int32_t* paths = nullptr;  // `Attention::path`
    int64_t path_stride = 0;
};

// The adapters of a layer, in this order.
enum LayerLora { kLoraQ, kLoraK, kLoraV, kLoraO, kLoraGate, kLoraUp, kLoraDown, kNumLora };

// Epilogue of gate and up side by side: both as they are, for adapters to be added before the activation.
template <typename T>
struct ToGateAndUp {
    const Matrix<T>* gate_up;
    float* to[2];  // [tokens, cols]
    int64_t tokens;

    void operator()(int, int64_t row, int64_t tile, const Sums& sums) const {
        const int64_t cols = gate_up[0].rows, first = tile * kTile, num_tokens = std::min<int64_t>(kTile, tokens - first);
        const int count = static_cast<int>(std::min<int64_t>(kTile, cols - row));
        Sums room;
        const Sums& of_tokens = ordered(sums, true, room);
        for (int half = 0; half < 2; ++half)
            for (int64_t t = 0; t < num_tokens; ++t) {
                float* const out = to[half] + (first + t) * cols + row;
                for_outputs(gate_up[half], row, of_tokens.at[half][t], count,
                            [&](int n, int left, Floats values) { store_some(out + n, values, left); });
            }
    }
};

template <typename T>
class Decoder {
public:
    int64_t hidden;
    int num_heads, num_kv_heads, head_dim, rotary_dim;
    float eps;
    Activation activation;
    const float* final_norm;
    std::vector<Layer<T>> layers;
    const LoraTable* lora = nullptr;  // [layers][kNumLora], or none

    void run(const Step<T>& step) {
        const int64_t tokens = step.tokens, q = static_cast<int64_t>(num_heads) * head_dim;
        const int64_t kv = static_cast<int64_t>(num_kv_heads) * head_dim;
        const WeightFormat format = layers[0].o.format;
        normed_ = make_activations<T>(tokens, hidden, format, inputs_[0]);
        attended_ = make_activations<T>(tokens, q, format, inputs_[1]);
        int64_t widest = 0;
        for (int shared = 0; shared < 2; ++shared) {
            const int64_t width = inner_width(shared);
            activated_[shared] = make_activations<T>(tokens, width, format, inputs_[2 + shared]);
            widest = std::max(widest, width);
        }
        const bool adapted = lora && step.lora.num_groups > 0, routed = make_room_for_experts(tokens, format);
        const int64_t intermediate = activated_[0].cols;
        inner_ = adapted || activated_[0].takes_whole_tokens() ? buffers_[4].get<T>(tokens * widest) : nullptr;
        normed_rows_ = adapted || routed ? lora_buffers_[0].get<T>(tokens * hidden) : nullptr;
        gate_ = adapted ? lora_buffers_[1].get<float>(2 * tokens * intermediate) : nullptr;
        lora_inner_ = adapted ? lora_buffers_[2].get<float>(3 * step.lora.count() * step.lora.max_rank) : nullptr;
        residual_ = buffers_[0].get<T>(tokens * hidden);
        projected_ = buffers_[1].get<T>(tokens * hidden);
        heads_ = buffers_[2].get<T>(tokens * (q + 2 * kv));
        attention_out_ = buffers_[3].get<T>(tokens * q);
        head_factors_ = buffers_[9].get<float>(2 * tokens);
        std::memcpy(residual_, step.x, tokens * hidden * sizeof(T));
        order_ = by_work(step.query_start_loc, step.kv_lens, step.num_sequences, order_buffer_);
        WorkQueue queue;
#pragma omp parallel
        {
            static thread_local Thread mine;
            const HeldTiles tiles(layout_for<T>(kTile, 64, WeightFormat::plain) == ActLayout::pairs);
            QueueWorker worker(queue);
            for (size_t i = 0; i < layers.size(); ++i) {
                const Layer<T>* next = i + 1 < layers.size() ? &layers[i + 1] : nullptr;
                const LoraTable* adapters = adapted ? lora + i * kNumLora : nullptr;
                layer(layers[i], next, adapters, step.kv_caches[i], i, step, mine, worker);
            }
            const Range share = my_share(tokens);
            for (int64_t at = share.begin * hidden; at < share.end * hidden; at += hidden) {
                finish(layers.back(), kFeedForward, at);
                rms_norm(step.hidden + at, residual_ + at, projected_ + at, final_norm, hidden, eps);
            }
            tap(step, layers.size(), share);
        }
    }

private:
    struct Thread {
        LinearScratch linear;
        AttentionScratch attention;
        MoeScratch experts;
        Buffer rows, routing;
    };

    enum Part { kAttention, kFeedForward };

    // Inputs of down, of a layer without experts or beside some; 0 where there is none.
    int64_t inner_width(bool shared) const {
        for (const Layer<T>& l : layers)
            if ((l.experts.moe != nullptr) == shared && l.down.rows) return l.down.cols;
        return 0;
    }

    // Copies the residual stream of some tokens where it is asked for.
    void tap(const Step<T>& step, size_t layer, Range tokens) {
        if (!step.taps || !step.taps[layer]) return;
        std::memcpy(static_cast<T*>(step.taps[layer]) + tokens.begin * hidden, residual_ + tokens.begin * hidden,
                    (tokens.end - tokens.begin) * hidden * sizeof(T));
    }

    void layer(const Layer<T>& l, const Layer<T>* next, const LoraTable* adapters, void* kv_cache, size_t index,
               const Step<T>& step, Thread& mine, QueueWorker& worker) {
        const int64_t q = static_cast<int64_t>(num_heads) * head_dim, kv = static_cast<int64_t>(num_kv_heads) * head_dim;
        const int64_t width = q + 2 * kv;
        const Strips<T> qkv{l.qkv, 3, false}, o{&l.o, 1, false};
        norm(l.input_norm, index > 0 ? &layers[index - 1] : nullptr, kFeedForward, mine);
        barrier();
        tap(step, index, my_share(step.tokens));
        // Heads whole, [heads][tokens][D], so that a tile's outputs lie close together; narrow ones as they come.
        const bool by_head = head_dim % (2 * kTile) == 0;
        const int64_t token_stride = by_head ? head_dim : width, head_stride = by_head ? step.tokens * head_dim : head_dim;
        {
            const int64_t per_head = by_head ? step.tokens : 1;
            T* const to[] = {heads_, heads_ + q * per_head, heads_ + (q + kv) * per_head};
            if (adapters) shrink(adapters + kLoraQ, 3, step, normed_rows_, hidden);
            linear(qkv, normed_, mine.linear, worker,
                   ToRows<T, T>{l.qkv, to, token_stride, step.tokens, by_head ? head_dim : 0}, &o);
            barrier();
            if (adapters) {
                LoraExpansion<T> added[3];
                for (int i = 0; i < 3; ++i)
                    added[i] = {adapters + kLoraQ + i, inner_of(i, step), i ? kv : q,
                                {to[i], token_stride, head_stride, by_head ? head_dim : 0}};
                lora_expand<T>(added, 3, step.lora);
                barrier();
            }
        }
        const PagedCache cache =
            make_cache<T>(kv_cache, step.cache_format, num_kv_heads, step.block_size, head_dim, l.kv_scale);
        if (l.norm_of_all_heads) {
            measure_heads(step.tokens, token_stride, head_stride);
            barrier();
        }
        place_heads(l, cache, step, token_stride, head_stride);
        barrier();
        const StepGroup& group = step.groups[l.group];
        attention(Attention<T>{.query = heads_,
                               .query_stride = token_stride,
                               .head_stride = head_stride,
                               .cache = cache,
                               .out = attention_out_,
                               .out_stride = q,
                               .block_table = group.block_table,
                               .table_stride = group.table_stride,
                               .query_start_loc = step.query_start_loc,
                               .kv_lens = step.kv_lens,
                               .order = order_,
                               .num_sequences = step.num_sequences,
                               .num_heads = num_heads,
                               .scale = l.scale,
                               .window = l.window,
                               .soft_cap = l.soft_cap,
                               .sinks = l.sinks,
                               .paths = step.paths,
                               .path_stride = step.path_stride},
                  mine.attention, worker, partials_);
        barrier();
        set_all(attended_, attention_out_, q);
        barrier();
        if (adapters) shrink(adapters + kLoraO, 1, step, attention_out_, q);
        const Matrix<T>& router = l.experts.router;
        const Strips<T> after = l.experts.moe ? Strips<T>{&router, 1, false} : Strips<T>{l.gate_up, 2, true};
        project(o, attended_, mine, worker, projected_, &after);
        barrier();
        if (adapters) expand_projected(adapters + kLoraO, step);
        norm(l.feed_forward_norm, &l, kAttention, mine);
        barrier();
        const Strips<T> next_qkv{next ? next->qkv : l.qkv, 3, false}, *const behind = next ? &next_qkv : nullptr;
        if (l.experts.moe) {
            run_experts(l, step, mine, worker, behind);
        } else {
            feed_forward(l, adapters, step, mine, worker, projected_, behind);
        }
        barrier();
        if (adapters) expand_projected(adapters + kLoraDown, step);
    }

    void feed_forward(const Layer<T>& l, const LoraTable* adapters, const Step<T>& step, Thread& mine, QueueWorker& worker,
                      T* to, const Strips<T>* behind) {
        const Strips<T> gate_up{l.gate_up, 2, true}, down{&l.down, 1, false};
        const Activations& activated = activated_[l.experts.moe != nullptr];
        const int64_t intermediate = activated.cols;
        if (adapters) {
            float* const up = gate_ + step.tokens * intermediate;
            shrink(adapters + kLoraGate, 2, step, normed_rows_, hidden);
            linear(gate_up, normed_, mine.linear, worker, ToGateAndUp<T>{l.gate_up, {gate_, up}, step.tokens}, &down);
            barrier();
            const LoraExpansion<float> added[] = {
                {adapters + kLoraGate, inner_of(0, step), intermediate, {gate_, intermediate, 0, 0}},
                {adapters + kLoraUp, inner_of(1, step), intermediate, {up, intermediate, 0, 0}}};
            lora_expand<T>(added, 2, step.lora);
            barrier();
            activate_all(up, step.tokens * intermediate);
        } else {
            linear(gate_up, normed_, mine.linear, worker, ToActivated<T>{l.gate_up, activation, activated, inner_}, &down);
        }
        barrier();
        if (inner_) {
            if (adapters) shrink(adapters + kLoraDown, 1, step, inner_, intermediate);
            set_all(activated, inner_, intermediate);
            barrier();
        }
        project(down, activated, mine, worker, to, behind);
    }

    // Without adapters: no expert has any here, nor what stands beside them.
    void run_experts(const Layer<T>& l, const Step<T>& step, Thread& mine, QueueWorker& worker, const Strips<T>* behind) {
        const RoutedExperts<T>& e = l.experts;
        const int64_t num_experts = e.router.rows, tokens = step.tokens;
        linear(Strips<T>{&e.router, 1, false}, routed_.data ? routed_ : normed_, mine.linear, worker,
               ToRows<T, float>{&e.router, &logits_, num_experts, tokens});
        barrier();
        const Range share = my_share(tokens);
        for (int64_t i = share.begin * num_experts; e.router_bias && i < share.end * num_experts; ++i)
            logits_[i] += e.router_bias[i % num_experts];
        Routing{e.rule, logits_, num_experts, e.choice_bias, static_cast<int32_t>(num_experts), expert_ids_,
                expert_weights_}.choose(share, mine.routing);
        barrier();
        if (omp_get_thread_num() == 0)
            expert_step_.begin(*e.moe, normed_rows_, expert_ids_, expert_weights_, tokens, e.rule.top_k);
        if (l.has_shared()) feed_forward(l, nullptr, step, mine, worker, shared_, nullptr);
        barrier();
        expert_step_.run(mine.experts, worker, projected_, behind);
    }

    // Whether any layer has experts.
    bool make_room_for_experts(int64_t tokens, WeightFormat format) {
        int64_t num_experts = 0, top_k = 0;
        for (const Layer<T>& l : layers) {
            num_experts = std::max(num_experts, l.experts.moe ? l.experts.router.rows : 0);
            top_k = std::max<int64_t>(top_k, l.experts.rule.top_k);
        }
        logits_ = buffers_[5].get<float>(tokens * num_experts);
        expert_ids_ = buffers_[6].get<int64_t>(tokens * top_k);
        expert_weights_ = buffers_[7].get<float>(tokens * top_k);
        shared_ = buffers_[8].get<T>(activated_[1].cols ? tokens * hidden : 0);
        routed_ = num_experts && format != WeightFormat::plain ? make_activations<T>(tokens, hidden, WeightFormat::plain, inputs_[4])
                                                         : Activations{};
        return num_experts > 0;
    }

    // Adapters, first part: of `count` layers with the same inputs x [tokens, cols].
    void shrink(const LoraTable* tables, int count, const Step<T>& step, const T* x, int64_t cols) {
        lora_shrink(tables, count, step.lora, x, cols, cols, lora_inner_);
    }

    // Second part, of a layer whose outputs go to the residual stream.
    void expand_projected(const LoraTable* table, const Step<T>& step) {
        const LoraExpansion<T> added{table, inner_of(0, step), hidden, {projected_, hidden, 0, 0}};
        lora_expand<T>(&added, 1, step.lora);
        barrier();
    }

    // Of layer `which` in the first part.
    float* inner_of(int which, const Step<T>& step) const {
        return lora_inner_ + which * step.lora.count() * step.lora.max_rank;
    }

    // inner = act(gate) * up, rounded as `ToActivated` does.
    void activate_all(const float* up, int64_t count) {
        const Range share = my_share((count + kLanes - 1) / kLanes);
        for (int64_t k = share.begin * kLanes; k < std::min(share.end * kLanes, count); k += kLanes) {
            const int lanes = static_cast<int>(std::min<int64_t>(kLanes, count - k));
            if (lanes == kLanes) {
                store(inner_ + k, gated(activation, load(gate_ + k), load(up + k), 0.0f));
            } else {
                store_first(inner_ + k, gated(activation, load_first(gate_ + k, lanes), load_first(up + k, lanes), 0.0f),
                            lanes);
            }
        }
    }

    void project(const Strips<T>& strips, const Activations& x, Thread& mine, QueueWorker& worker, T* to,
                 const Strips<T>* following) {
        linear(strips, x, mine.linear, worker, ToRows<T, T>{strips.matrices, &to, hidden, x.tokens}, following);
    }

    // A token's part of a layer, as it is to be added; before the next norm.
    void finish(const Layer<T>& l, Part part, int64_t at) {
        T* const x = projected_ + at;
        if (part == kFeedForward && l.has_shared()) {
            if (const T* const gate = l.experts.shared_gate) {
                const Floats logit = rounded(splat(dot_product(normed_rows_ + at, gate, hidden)), T{});
                scale_row(shared_ + at, sigmoid(logit)[0], hidden);
            }
            add_row(x, shared_ + at, hidden);
        }
        const float* const weight = part == kAttention ? l.attention_out_norm : l.feed_forward_out_norm;
        if (weight) rms_norm(x, x, static_cast<const T*>(nullptr), weight, hidden, eps);
        if (l.residual_factor != 1.0f) scale_row(x, l.residual_factor, hidden);
    }

    // residual += that part of a layer (of none before the first one), then its norm into the activations.
    void norm(const float* weight, const Layer<T>* from, Part part, Thread& mine) {
        T* const scratch = mine.rows.template get<T>(kTile * hidden);
        const Range share = my_share(normed_.tiles());
        for (int64_t tile = share.begin; tile < share.end; ++tile) {
            T* const rows = normed_rows_ ? normed_rows_ + tile * kTile * hidden : scratch;
            const T* of[kTile] = {};
            for (int i = 0; i < kTile && tile * kTile + i < normed_.tokens; ++i) {
                const int64_t at = (tile * kTile + i) * hidden;
                const T* const added = from ? projected_ + at : nullptr;
                if (from) finish(*from, part, at);
                if (weight) {
                    rms_norm(rows + i * hidden, residual_ + at, added, weight, hidden, eps);
                } else {
                    if (added) add_row(residual_ + at, added, hidden);
                    std::memcpy(rows + i * hidden, residual_ + at, hidden * sizeof(T));
                }
                of[i] = rows + i * hidden;
            }
            set_tile(normed_, tile, of, 0, hidden);
            if (routed_.data) set_tile(routed_, tile, of, 0, hidden);
        }
    }

    // What queries, and keys, of each token are divided by where all heads have one norm; the inverse.
    void measure_heads(int64_t tokens, int64_t token_stride, int64_t head_stride) {
        const Range share = my_share(2 * tokens);
        for (int64_t i = share.begin; i < share.end; ++i) {
            const int first = i % 2 ? num_heads : 0, count = i % 2 ? num_kv_heads : num_heads;
            float total = 0.0f;
            for (int head = first; head < first + count; ++head)
                total += sum_of_squares(heads_ + i / 2 * token_stride + head * head_stride, head_dim);
            head_factors_[i] = 1.0f / std::sqrt(total / static_cast<float>(count * head_dim) + eps);
        }
    }

    // Norms and rotates queries and keys; keys and values go to their slots. A head's tokens lie together, and so do their
    // slots: some of them at a time, as many as share a tile.
    void place_heads(const Layer<T>& l, const PagedCache& cache, const Step<T>& step, int64_t token_stride,
                     int64_t head_stride) {
        const int per_token = num_heads + 2 * num_kv_heads;
        const int64_t* slots = step.groups[l.group].slot_mapping;
        const Range share = my_share((step.tokens + kTile - 1) / kTile * per_token);
        for (int64_t i = share.begin; i < share.end; ++i) {
            const int64_t first = i / per_token * kTile, last = std::min(first + kTile, step.tokens);
            const int head = static_cast<int>(i % per_token);
            const int kv_head = head - num_heads, is_value = kv_head >= num_kv_heads;  // keys, then values, as in the cache
            const float* norm = is_value ? nullptr : kv_head < 0 ? l.q_norm : l.k_norm;
            for (int64_t token = first; token < last; ++token) {
                T* x = heads_ + token * token_stride + head * head_stride;
                const auto normalise = [&] {
                    if (l.norm_of_all_heads) {
                        const int64_t at = kv_head < 0 ? head : kv_head;
                        weigh_row(x, head_factors_[2 * token + (kv_head >= 0)], norm + at * head_dim, head_dim);
                    } else {
                        rms_norm(x, x, static_cast<const T*>(nullptr), norm, head_dim, eps);
                    }
                };
                if (norm && !l.norm_after_rotation) normalise();
                if (!is_value && l.rotation >= 0) {
                    if (l.interleaved) deinterleave(x, rotary_dim);
                    rotate(x, x, angles(step.cos, l, token), angles(step.sin, l, token), rotary_dim);
                }
                if (norm && l.norm_after_rotation) normalise();
                if (kv_head < 0) continue;
                write_row(cache, cache.row(slots[token], kv_head), x, is_value, kv_head - is_value * num_kv_heads);
            }
        }
    }

    // Of a token, in the rotation of a layer.
    const T* angles(const void* const* of, const Layer<T>& l, int64_t token) const {
        return static_cast<const T*>(of[l.rotation]) + token * rotary_dim;
    }

    Activations normed_, attended_, routed_;  // the last one only if it is not as the first
    Activations activated_[2];                // of layers without experts, and beside some
    T *residual_, *projected_, *shared_, *heads_, *attention_out_, *inner_, *normed_rows_;
    float *gate_, *lora_inner_, *logits_, *expert_weights_, *head_factors_;
    int64_t* expert_ids_;
    MoeStep<T> expert_step_;
    const int32_t* order_;
    ActivationBuffers inputs_[5];
    Buffer buffers_[10], lora_buffers_[3], order_buffer_, partials_;
};

}  // namespace quire
