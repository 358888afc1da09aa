// A whole stack of pre-norm decoder layers in one call: one parallel region, a barrier between the parts of a layer.
//
// Knows weights, the paged cache and one step's tokens; allocates nothing once it has seen its largest step.
#pragma once

#include <vector>

#include "attention.h"
#include "elementwise.h"
#include "linear.h"

namespace quire {

template <typename T>
struct Layer {
    const T *input_norm, *post_norm;
    const T *q_norm, *k_norm;  // [D] each, or none
    Matrix<T> qkv[3], o, gate_up[2], down;
    int window;
    int group;  // of KV cache groups
    const float* kv_scale;  // [2, Hkv], or none
};

// One group of layers that share a block table.
struct StepGroup {
    const int32_t* block_table;
    int64_t table_stride;
    const int64_t* slot_mapping;
};

template <typename T>
struct Step {
    const T* x;       // [T, hidden] embeddings
    T* hidden;        // [T, hidden] after the final norm
    const T *cos, *sin;  // [T, D]
    int64_t tokens;
    int num_sequences;
    const int32_t *query_start_loc, *kv_lens;
    const StepGroup* groups;
    void* const* kv_caches;  // per layer
    CacheFormat cache_format;
    int block_size;
};

template <typename T>
class Decoder {
public:
    int64_t hidden, intermediate;
    int num_heads, num_kv_heads, head_dim;
    float eps, scale;
    Activation activation;
    const T* final_norm;
    std::vector<Layer<T>> layers;

    void run(const Step<T>& step) {
        const int64_t tokens = step.tokens, q = static_cast<int64_t>(num_heads) * head_dim;
        const int64_t kv = static_cast<int64_t>(num_kv_heads) * head_dim;
        const Coding coding = layers[0].o.coding;
        normed_ = make_activations<T>(tokens, hidden, coding, inputs_[0]);
        attended_ = make_activations<T>(tokens, q, coding, inputs_[1]);
        activated_ = make_activations<T>(tokens, intermediate, coding, inputs_[2]);
        inner_ = activated_.form == Form::quads ? buffers_[4].get<T>(tokens * intermediate) : nullptr;
        residual_ = buffers_[0].get<T>(tokens * hidden);
        projected_ = buffers_[1].get<T>(tokens * hidden);
        heads_ = buffers_[2].get<T>(tokens * (q + 2 * kv));
        attention_out_ = buffers_[3].get<T>(tokens * q);
        std::memcpy(residual_, step.x, tokens * hidden * sizeof(T));
        order_ = by_work(step.query_start_loc, step.kv_lens, step.num_sequences, order_buffer_);
        Claims claims;
#pragma omp parallel
        {
            static thread_local Thread mine;
            const HeldTiles tiles(form_for<T>(64, Coding::plain) != Form::rows);
            Claimer claimer(claims);
            for (size_t i = 0; i < layers.size(); ++i) {
                const Layer<T>* next = i + 1 < layers.size() ? &layers[i + 1] : nullptr;
                layer(layers[i], next, step.kv_caches[i], i > 0, step, mine, claimer);
            }
            const Range share = my_share(tokens);
            for (int64_t t = share.begin; t < share.end; ++t)
                rms_norm(step.hidden + t * hidden, residual_ + t * hidden, projected_ + t * hidden, final_norm, hidden,
                         eps);
        }
    }

private:
    struct Thread {
        LinearScratch linear;
        AttentionScratch attention;
        Buffer rows;
    };

    void layer(const Layer<T>& l, const Layer<T>* next, void* kv_cache, bool add, const Step<T>& step, Thread& mine,
               Claimer& claimer) {
        const int64_t q = static_cast<int64_t>(num_heads) * head_dim, kv = static_cast<int64_t>(num_kv_heads) * head_dim;
        const int64_t width = q + 2 * kv;
        const Strips<T> qkv{l.qkv, 3, false}, o{&l.o, 1, false}, gate_up{l.gate_up, 2, true}, down{&l.down, 1, false};
        norm(l.input_norm, add, mine);
        wait_for_team();
        // Heads whole, [heads][tokens][D], so that a tile's outputs lie close together; narrow ones as they come.
        const bool by_head = head_dim % (2 * kTile) == 0;
        const int64_t token_stride = by_head ? head_dim : width, head_stride = by_head ? step.tokens * head_dim : head_dim;
        {
            const int64_t per_head = by_head ? step.tokens : 1;
            T* const to[] = {heads_, heads_ + q * per_head, heads_ + (q + kv) * per_head};
            linear(qkv, normed_, mine.linear, claimer,
                   ToRows<T, T>{l.qkv, to, token_stride, step.tokens, by_head ? head_dim : 0}, &o);
        }
        wait_for_team();
        const PagedCache cache =
            make_cache<T>(kv_cache, step.cache_format, num_kv_heads, step.block_size, head_dim, l.kv_scale);
        place_heads(l, cache, step, token_stride, head_stride);
        wait_for_team();
        const StepGroup& group = step.groups[l.group];
        attention(Attention<T>{heads_, token_stride, head_stride, cache, attention_out_, q, group.block_table,
                               group.table_stride, step.query_start_loc, step.kv_lens, order_, step.num_sequences,
                               num_heads, scale, l.window, 0.0f, nullptr, nullptr},
                  mine.attention, claimer, partials_);
        wait_for_team();
        set_all(attended_, attention_out_, q);
        wait_for_team();
        project(o, attended_, mine, claimer, &gate_up);
        wait_for_team();
        norm(l.post_norm, true, mine);
        wait_for_team();
        linear(gate_up, normed_, mine.linear, claimer, ToActivated<T>{l.gate_up, activation, activated_, inner_}, &down);
        wait_for_team();
        if (inner_) {
            set_all(activated_, inner_, intermediate);
            wait_for_team();
        }
        const Strips<T> next_qkv{next ? next->qkv : l.qkv, 3, false};
        project(down, activated_, mine, claimer, next ? &next_qkv : nullptr);
        wait_for_team();
    }

    void project(const Strips<T>& strips, const Activations& x, Thread& mine, Claimer& claimer,
                 const Strips<T>* following) {
        linear(strips, x, mine.linear, claimer, ToRows<T, T>{strips.matrices, &projected_, hidden, x.tokens}, following);
    }

    // residual += projected (but in the first layer), then its norm into the activations.
    void norm(const T* weight, bool add, Thread& mine) {
        T* rows = mine.rows.template get<T>(kTile * hidden);
        const Range share = my_share(normed_.tiles());
        for (int64_t tile = share.begin; tile < share.end; ++tile) {
            const T* of[kTile] = {};
            for (int i = 0; i < kTile && tile * kTile + i < normed_.tokens; ++i) {
                const int64_t at = (tile * kTile + i) * hidden;
                rms_norm(rows + i * hidden, residual_ + at, add ? projected_ + at : nullptr, weight, hidden, eps);
                of[i] = rows + i * hidden;
            }
            set_tile(normed_, tile, of, 0, hidden);
        }
    }

    // Norms and rotates queries and keys; keys and values go to their slots.
    void place_heads(const Layer<T>& l, const PagedCache& cache, const Step<T>& step, int64_t token_stride,
                     int64_t head_stride) {
        const int per_token = num_heads + 2 * num_kv_heads;
        const int64_t* slots = step.groups[l.group].slot_mapping;
        const Range share = my_share(step.tokens * per_token);
        for (int64_t i = share.begin; i < share.end; ++i) {
            const int64_t token = i / per_token;
            const int head = static_cast<int>(i % per_token);
            T* x = heads_ + token * token_stride + head * head_stride;
            const T *cos = step.cos + token * head_dim, *sin = step.sin + token * head_dim;
            if (head < num_heads) {
                if (l.q_norm) rms_norm(x, x, static_cast<const T*>(nullptr), l.q_norm, head_dim, eps);
                rotate(x, x, cos, sin, head_dim);
                continue;
            }
            const int kv_head = head - num_heads, is_value = kv_head >= num_kv_heads;  // keys, then values, as in the cache
            if (!is_value) {
                if (l.k_norm) rms_norm(x, x, static_cast<const T*>(nullptr), l.k_norm, head_dim, eps);
                rotate(x, x, cos, sin, head_dim);
            }
            write_row(cache, cache.row(slots[token], kv_head), x, is_value, kv_head - is_value * num_kv_heads);
        }
    }

    Activations normed_, attended_, activated_;
    T *residual_, *projected_, *heads_, *attention_out_, *inner_;
    const int32_t* order_;
    ActivationBuffers inputs_[3];
    Buffer buffers_[5], order_buffer_, partials_;
};

}  // namespace quire
