// The functions of `kernels.h`, which says what they take. Compiled once per instruction set.
#include "kernels.h"

#include <cstddef>

#include "argmax.h"
#include "attention.h"
#include "decode_step.h"
#include "decoder.h"
#include "elementwise.h"
#include "encoder.h"
#include "group_collectives.h"
#include "head_linear.h"
#include "index.h"
#include "linear.h"
#include "lora.h"
#include "matrix_rows.h"
#include "maxsim.h"
#include "moe.h"
#include "recurrent.h"
#include "sample.h"
#include "step_inputs.h"

namespace quire {

namespace {

template <typename T>
void rms_norm_op(T* to, T* x, const T* added, const T* weight, int64_t rows, int64_t size, float eps) {
#pragma omp parallel for schedule(static) if (rows * size > 16384)
    for (int64_t i = 0; i < rows; ++i)
        rms_norm(to + i * size, x + i * size, added ? added + i * size : nullptr, weight, size, eps);
}

template <typename T>
void activate_op(Activation kind, T* to, const T* from, const T* up, int64_t count) {
    constexpr int64_t kRun = 8192;
    with_function(kind, [&](const auto& function) {
#pragma omp parallel for schedule(static) if (count > 2 * kRun)
        for (int64_t i = 0; i < count; i += kRun)
            activate(function, to + i, from + i, up ? up + i : nullptr, std::min(kRun, count - i));
    });
}

template <typename T, typename Out>
void lora_op(const LoraTable& table, const LoraTokens& tokens, const T* x, int64_t inputs, Out* out, int64_t outputs) {
    static thread_local Buffer buffer;
    float* const inner = buffer.get<float>(tokens.count() * tokens.max_rank);
#pragma omp parallel if (tokens.count() * (inputs + outputs) > 16384)
    {
        lora_shrink(&table, 1, tokens, x, inputs, inputs, inner);
        barrier();
        const LoraExpansion<Out> added{&table, inner, outputs, {out, outputs, 0, 0}};
        lora_expand<T>(&added, 1, tokens);
    }
}

template <typename T>
void attention_op(Attention<T> a) {
    static thread_local Buffer buffer, partials;
    Buffer& shared = partials;
    a.order = by_work(a.sequences.query_start_loc, a.sequences.kv_lens, a.sequences.count, buffer);
    if (a.cache.latent) part_heads(a, omp_get_max_threads());
    WorkQueue queue;
#pragma omp parallel
    {
        static thread_local AttentionScratch scratch;
        const HeldTiles tiles(attends_with_tiles(a));
        QueueWorker worker(queue);
        attention(a, scratch, worker, shared);
    }
}

// Each token over the rows in its own slots [slots_per_token], those of -1 left out: a sequence of its own for each of them,
// whose tokens are where its path says.
template <typename T>
void sparse_attention_op(Attention<T> a, const int64_t* slots, int64_t slots_per_token, int64_t num_blocks, int tokens) {
    static thread_local std::vector<int32_t> table, starts, lens, paths;
    const int64_t stride = slots_per_token + 2;
    table.resize(std::max(num_blocks, slots_per_token / a.cache.block_size + 1));
    for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(i);
    starts.resize(tokens + 1);
    lens.resize(tokens);
    paths.resize(tokens * stride);
    for (int t = 0; t < tokens; ++t) {
        int32_t* const path = &paths[t * stride];
        int seen = 0;
        for (const int64_t* slot = slots + t * slots_per_token; slot < slots + (t + 1) * slots_per_token; ++slot)
            if (*slot >= 0) path[2 + seen++] = static_cast<int32_t>(*slot);
        path[0] = seen - 1;
        path[1] = 0;
        starts[t] = t;
        lens[t] = seen;
    }
    starts[tokens] = tokens;
    a.sequences = {table.data(), 0, starts.data(), lens.data(), tokens, a.cache.block_size};
    a.paths = paths.data();
    a.path_stride = stride;
    attention_op(a);
}

template <typename T>
void write_kv_cache_op(const T* key, const T* value, const PagedCache& cache, const int64_t* slots, int64_t tokens) {
    const int64_t heads = cache.num_kv_heads;
#pragma omp parallel for schedule(static) if (tokens * heads > 64)
    for (int64_t i = 0; i < tokens * heads; ++i) {
        const int64_t slot = slots[i / heads];
        const int head = static_cast<int>(i % heads);
        write_row(cache, slot, key + i * cache.head_dim, 0, head);
        write_row(cache, slot, value + i * cache.head_dim, 1, head);
    }
}

// What stands between projections and attention: op `rope_and_write_kv`. Rows of heads lie together, tokens `strides` apart.
template <typename T>
struct HeadsToPlace {
    const T *query, *key, *value;
    int64_t strides[3];
    T* out;  // [tokens, heads, D] rotated queries
    const T *cos, *sin;  // [tokens, D]
    const void *query_norm, *key_norm;  // [D] of T, or of float32 if `wide_norms`, or none
    bool wide_norms;
    float eps;
    const int64_t* slots;
    int64_t tokens;
    int num_heads;
};

template <typename T>
void rope_and_write_kv_op(const HeadsToPlace<T>& a, const PagedCache& cache) {
    const int heads = a.num_heads, kv_heads = cache.num_kv_heads, dim = cache.head_dim, per_token = heads + 2 * kv_heads;
    const auto place = [&](const T* from, const void* norm, int64_t token, T* to) {
        std::memcpy(to, from, dim * sizeof(T));
        const T* const nothing = nullptr;
        if (norm && a.wide_norms) rms_norm(to, to, nothing, static_cast<const float*>(norm), dim, a.eps);
        if (norm && !a.wide_norms) rms_norm(to, to, nothing, static_cast<const T*>(norm), dim, a.eps);
        rotate(to, to, a.cos + token * dim, a.sin + token * dim, dim);
    };
#pragma omp parallel for schedule(static) if (a.tokens * per_token > 64)
    for (int64_t i = 0; i < a.tokens * per_token; ++i) {
        const int64_t token = i / per_token;
        const int head = static_cast<int>(i % per_token), kv_head = (head - heads) % kv_heads;
        if (head < heads) {
            const T* const from = a.query + token * a.strides[0] + head * dim;
            place(from, a.query_norm, token, a.out + (token * heads + head) * dim);
        } else if (head < heads + kv_heads) {
            T rotated[kMostHeadDim];
            place(a.key + token * a.strides[1] + kv_head * dim, a.key_norm, token, rotated);
            write_row(cache, a.slots[token], rotated, 0, kv_head);
        } else {
            const T* const from = a.value + token * a.strides[2] + kv_head * dim;
            write_row(cache, a.slots[token], from, 1, kv_head);
        }
    }
}

// Three matrices an expert: gate, up, down.
template <typename T>
Moe<T>* make_moe(int num_experts, const MatrixArgument* matrices, int64_t width, int64_t inner, int activation, float limit) {
    auto* moe = new Moe<T>;
    moe->activation = static_cast<Activation>(activation);
    moe->limit = limit;
    for (int i = 0; i < num_experts; ++i) {
        const auto matrix = [&](int which, int64_t rows, int64_t cols) {
            return make_matrix<T>(matrices[3 * i + which], rows, cols);
        };
        moe->experts.push_back({{matrix(0, inner, width), matrix(1, inner, width)}, matrix(2, width, inner)});
    }
    const auto in_blocks = [](const Expert<T>& e) {
        return e.gate_up[0].format == WeightFormat::blocks && e.gate_up[1].format == WeightFormat::blocks && e.down.format == WeightFormat::blocks;
    };
    if (!std::all_of(moe->experts.begin(), moe->experts.end(), in_blocks))  // as `common_format`
        for (Expert<T>& e : moe->experts)
            for (Matrix<T>* const m : {&e.gate_up[0], &e.gate_up[1], &e.down})
                if (m->format == WeightFormat::blocks) m->format = WeightFormat::plain;
    return moe;
}

template <typename T>
Step<T> make_step(const StepArgument& from) {
    return {.x = static_cast<const T*>(from.x),
            .hidden = static_cast<T*>(from.hidden),
            .cos = from.cos,
            .sin = from.sin,
            .tokens = from.tokens,
            .num_sequences = static_cast<int>(from.num_sequences),
            .query_start_loc = from.query_start_loc,
            .kv_lens = from.kv_lens,
            .groups = from.groups,
            .caches = from.caches,
            .cache_format = static_cast<CacheFormat>(from.cache_format),
            .lora = {from.lora_order, from.lora_groups, from.num_lora_groups, from.max_lora_rank},
            .taps = from.taps,
            .paths = from.paths,
            .path_stride = from.path_stride,
            .cross_start_loc = from.cross_start_loc,
            .cross_lens = from.cross_lens};
}

// function<T>() for the dtype's T.
template <typename Function>
auto for_dtype(int dtype, Function&& function) {
    switch (dtype) {
        case 0: return function.template operator()<float>();
        case 1: return function.template operator()<BFloat16>();
        default: return function.template operator()<Float16>();
    }
}

}  // namespace
}  // namespace quire

// What `compilation.py` says of a build; one that nobody has said it of is refused when Python loads it.
#ifndef QUIRE_SOURCES
#define QUIRE_SOURCES ""
#define QUIRE_ABI_VERSION ""
#define QUIRE_ABI_LAYOUT 0
#endif

extern "C" {

const char* const quire_sources = QUIRE_SOURCES;
const char* const quire_abi_version = QUIRE_ABI_VERSION;
const int64_t quire_abi_layout[] = {QUIRE_ABI_LAYOUT};

using quire::for_dtype;

static quire::SharedGroup& as_group(void* group) { return *static_cast<quire::SharedGroup*>(group); }

void quire_linear(int dtype, const void* x, const MatrixArgument* argument, void* y, int64_t tokens, int64_t cols,
                  int64_t rows, int wide) {
    for_dtype(dtype, [&]<typename T>() {
        const quire::Matrix<T> matrix = quire::make_matrix<T>(*argument, rows, cols);
        if (wide) {
            quire::linear_op(static_cast<const T*>(x), matrix, static_cast<float*>(y), tokens);
        } else {
            quire::linear_op(static_cast<const T*>(x), matrix, static_cast<T*>(y), tokens);
        }
    });
}

void quire_read_rows(int dtype, const MatrixArgument* argument, const int64_t* which, int64_t count, int64_t rows,
                     int64_t cols, void* to) {
    for_dtype(dtype, [&]<typename T>() {
        quire::read_rows(quire::make_matrix<T>(*argument, rows, cols), which, count, static_cast<T*>(to));
    });
}

void quire_linear_argmax(int dtype, const void* x, const void* weight, int64_t* ids, float* max_logits, int64_t tokens,
                          int64_t cols, int64_t rows) {
    for_dtype(dtype, [&]<typename T>() {
        const quire::Matrix<T> matrix{weight, rows, cols};
        quire::argmax_op(static_cast<const T*>(x), matrix, ids, max_logits, tokens);
    });
}

void quire_sample(float* logits, int64_t vocab, const int64_t* rows, const int64_t* positions, int64_t count,
                  const SampleTable* table, const int64_t* mask_of, const uint32_t* mask_bits, int64_t* ids, float* max_logits) {
    quire::sample_op(logits, vocab, rows, positions, count, *table, ids, max_logits, {mask_of, mask_bits});
}

void quire_step_inputs(const int32_t* token_ids, int64_t row_len, const int64_t* rows, const int64_t* starts,
                       const int64_t* ends, int64_t count, int64_t* input_ids, int64_t* positions,
                       int32_t* query_start_loc, int32_t* seq_lens, const RowTable* groups, int num_groups) {
    const quire::Entries entries{rows, starts, ends, count};
    quire::gather_tokens(token_ids, row_len, entries, input_ids, positions, query_start_loc, seq_lens);
    for (int i = 0; i < num_groups; ++i)
        quire::gather_blocks(groups[i], entries);
}

void quire_layer_norm(int dtype, void* to, const void* x, const float* weight, const float* bias, int64_t rows,
                      int64_t size, float eps) {
    for_dtype(dtype, [&]<typename T>() {
#pragma omp parallel for schedule(static) if (rows * size > 16384)
        for (int64_t i = 0; i < rows; ++i)
            quire::layer_norm(static_cast<T*>(to) + i * size, static_cast<const T*>(x) + i * size, weight, bias, size, eps);
    });
}

void quire_rms_norm(int dtype, void* to, void* x, const void* added, const void* weight, int64_t rows, int64_t size,
                    float eps) {
    for_dtype(dtype, [&]<typename T>() {
        quire::rms_norm_op(static_cast<T*>(to), static_cast<T*>(x), static_cast<const T*>(added),
                           static_cast<const T*>(weight), rows, size, eps);
    });
}

void quire_activate(int dtype, int kind, void* to, const void* from, const void* up, int64_t count) {
    for_dtype(dtype, [&]<typename T>() {
        quire::activate_op(static_cast<quire::Activation>(kind), static_cast<T*>(to), static_cast<const T*>(from),
                           static_cast<const T*>(up), count);
    });
}

void quire_write_kv_cache(int dtype, const void* key, const void* value, void* kv, int cache_format,
                          const float* kv_scale, const int64_t* slots, int64_t tokens, int num_kv_heads, int head_dim,
                          int block_size, int64_t block_bytes) {
    for_dtype(dtype, [&]<typename T>() {
        const auto cache = quire::make_cache<T>(kv, static_cast<quire::CacheFormat>(cache_format), num_kv_heads,
                                                block_size, head_dim, kv_scale, block_bytes);
        quire::write_kv_cache_op(static_cast<const T*>(key), static_cast<const T*>(value), cache, slots, tokens);
    });
}

void quire_attention(int dtype, const void* query, void* kv, int cache_format, const float* kv_scale, void* out,
                     const int32_t* block_table, int64_t table_stride, const int32_t* query_start_loc,
                     const int32_t* kv_lens, int num_sequences, int num_heads, int num_kv_heads, int head_dim,
                     int block_size, int64_t block_bytes, float scale, int window, float soft_cap, const float* sinks, const float* slopes,
                     const int32_t* paths, int64_t path_stride, int int8_products) {
    const int64_t stride = static_cast<int64_t>(num_heads) * head_dim;
    for_dtype(dtype, [&]<typename T>() {
        const auto cache = quire::make_cache<T>(kv, static_cast<quire::CacheFormat>(cache_format), num_kv_heads,
                                                block_size, head_dim, kv_scale, block_bytes);
        quire::attention_op(quire::Attention<T>{.query = static_cast<const T*>(query),
                                                .query_stride = stride,
                                                .head_stride = head_dim,
                                                .cache = cache,
                                                .out = static_cast<T*>(out),
                                                .out_stride = stride,
                                                .sequences = {block_table, table_stride, query_start_loc, kv_lens, num_sequences, block_size},
                                                .num_heads = num_heads,
                                                .scale = scale,
                                                .window = window,
                                                .soft_cap = soft_cap,
                                                .sinks = sinks,
                                                .slopes = slopes,
                                                .paths = paths,
                                                .path_stride = path_stride,
                                                .int8_products = int8_products != 0});
    });
}

void quire_write_latents(int dtype, const void* entries, void* latents, const int64_t* slots, int64_t tokens, int width, int rank,
                         int block_size, int64_t row_bytes, int64_t block_bytes) {
    for_dtype(dtype, [&]<typename T>() {
        const auto cache = quire::make_latent_cache(latents, true, block_size, width, rank, row_bytes, block_bytes);
#pragma omp parallel for schedule(static) if (tokens > 16)
        for (int64_t t = 0; t < tokens; ++t)
            quire::write_latents(cache, cache.row(slots[t], 0), static_cast<const T*>(entries) + t * width);
    });
}

void quire_latent_attention(int dtype, const void* query, const void* latents, int fp8, void* out, const int32_t* block_table,
                            int64_t table_stride, const int32_t* query_start_loc, const int32_t* kv_lens, int num_sequences,
                            int num_heads, int width, int rank, int block_size, int64_t row_bytes, int64_t block_bytes,
                            float scale, const int32_t* paths, int64_t path_stride) {
    for_dtype(dtype, [&]<typename T>() {
        const auto cache = quire::make_latent_cache(latents, fp8, block_size, width, rank, row_bytes, block_bytes);
        quire::attention_op(quire::Attention<T>{.query = static_cast<const T*>(query),
                                                .query_stride = static_cast<int64_t>(num_heads) * width,
                                                .head_stride = width,
                                                .cache = cache,
                                                .out = static_cast<T*>(out),
                                                .out_stride = static_cast<int64_t>(num_heads) * rank,
                                                .sequences = {block_table, table_stride, query_start_loc, kv_lens, num_sequences, block_size},
                                                .num_heads = num_heads,
                                                .scale = scale,
                                                .paths = paths,
                                                .path_stride = path_stride});
    });
}

void quire_sparse_latent_attention(int dtype, const void* query, const void* latents, int fp8, void* out, const int64_t* slots,
                                   int64_t slots_per_token, int64_t num_blocks, int tokens, int num_heads, int width,
                                   int rank, int block_size, int64_t row_bytes, int64_t block_bytes, float scale) {
    for_dtype(dtype, [&]<typename T>() {
        const auto cache = quire::make_latent_cache(latents, fp8, block_size, width, rank, row_bytes, block_bytes);
        const quire::Attention<T> a{.query = static_cast<const T*>(query),
                                    .query_stride = static_cast<int64_t>(num_heads) * width,
                                    .head_stride = width,
                                    .cache = cache,
                                    .out = static_cast<T*>(out),
                                    .out_stride = static_cast<int64_t>(num_heads) * rank,
                                    .num_heads = num_heads,
                                    .scale = scale};
        quire::sparse_attention_op(a, slots, slots_per_token, num_blocks, tokens);
    });
}

void quire_index_topk(int dtype, const void* query, const float* weights, const void* keys, int64_t* out,
                      const int32_t* block_table, int64_t table_stride, const int32_t* query_start_loc,
                      const int32_t* kv_lens, int num_sequences, int heads, int width, int block_size, int64_t row_bytes,
                      int64_t block_bytes, int k) {
    for_dtype(dtype, [&]<typename T>() {
        const auto cache = quire::make_latent_cache(keys, false, block_size, width, width, row_bytes, block_bytes);
        quire::index_topk(quire::IndexSearch<T>{.query = static_cast<const T*>(query),
                                                .weights = weights,
                                                .cache = cache,
                                                .sequences = {block_table, table_stride, query_start_loc, kv_lens, num_sequences, block_size},
                                                .heads = heads,
                                                .out = out,
                                                .k = k});
    });
}

void quire_head_linear(int dtype, const void* x, int64_t token_stride, int64_t x_head_stride, const void* weight,
                       int64_t weight_head_stride, void* out, int64_t tokens, int64_t heads, int64_t inputs,
                       int64_t outputs) {
    for_dtype(dtype, [&]<typename T>() {
        quire::head_linear_op(quire::HeadLinear<T>{.x = static_cast<const T*>(x),
                                                .token_stride = token_stride,
                                                .x_head_stride = x_head_stride,
                                                .weight = static_cast<const T*>(weight),
                                                .weight_head_stride = weight_head_stride,
                                                .out = static_cast<T*>(out),
                                                .out_token_stride = heads * outputs,
                                                .out_head_stride = outputs,
                                                .tokens = tokens,
                                                .heads = heads,
                                                .inputs = inputs,
                                                .outputs = outputs});
    });
}

void* quire_decoder_new(int dtype, const DecoderArgument* decoder) {
    return for_dtype(dtype, [&]<typename T>() -> void* { return new quire::Decoder<T>(*decoder); });
}

void quire_lora_linear(int dtype, int wide, void* out, const void* x, const LoraTable* table, int64_t inputs, int64_t outputs,
                       const int32_t* order, const LoraGroup* groups, int64_t num_groups, int64_t max_rank) {
    const quire::LoraTokens tokens{order, groups, num_groups, max_rank};
    for_dtype(dtype, [&]<typename T>() {
        if (wide) {
            quire::lora_op<T>(*table, tokens, static_cast<const T*>(x), inputs, static_cast<float*>(out), outputs);
        } else {
            quire::lora_op<T>(*table, tokens, static_cast<const T*>(x), inputs, static_cast<T*>(out), outputs);
        }
    });
}

void quire_rope_and_write_kv(int dtype, const void* const* inputs, const int64_t* strides, void* out, const void* cos,
                            const void* sin, const void* query_norm, const void* key_norm, int wide_norms, float eps,
                            void* kv, int cache_format, const float* kv_scale, const int64_t* slots, int64_t tokens,
                            int num_heads, int num_kv_heads, int head_dim, int block_size, int64_t block_bytes) {
    for_dtype(dtype, [&]<typename T>() {
        const auto of = [](const void* numbers) { return static_cast<const T*>(numbers); };
        const auto cache = quire::make_cache<T>(kv, static_cast<quire::CacheFormat>(cache_format), num_kv_heads,
                                                block_size, head_dim, kv_scale, block_bytes);
        quire::rope_and_write_kv_op(
            quire::HeadsToPlace<T>{.query = of(inputs[0]),
                                   .key = of(inputs[1]),
                                   .value = of(inputs[2]),
                                   .strides = {strides[0], strides[1], strides[2]},
                                   .out = static_cast<T*>(out),
                                   .cos = of(cos),
                                   .sin = of(sin),
                                   .query_norm = query_norm,
                                   .key_norm = key_norm,
                                   .wide_norms = wide_norms != 0,
                                   .eps = eps,
                                   .slots = slots,
                                   .tokens = tokens,
                                   .num_heads = num_heads},
            cache);
    });
}

void quire_maxsim(int dtype, const void* queries, const int64_t* query_lens, int64_t num_queries, const void* documents,
                  const int64_t* document_lens, int64_t num_documents, int64_t dim, float* scores) {
    for_dtype(dtype, [&]<typename T>() {
        quire::maxsim(quire::MaxSim<T>{.queries = static_cast<const T*>(queries),
                                       .documents = static_cast<const T*>(documents),
                                       .query_lens = query_lens,
                                       .document_lens = document_lens,
                                       .num_queries = num_queries,
                                       .num_documents = num_documents,
                                       .dim = dim,
                                       .scores = scores});
    });
}

void quire_route_experts(const float* logits, int64_t stride, const float* bias, const RoutingRule* rule, int64_t tokens,
                         int num_experts, int64_t* ids, float* weights) {
    quire::route_op({*rule, logits, stride, bias, num_experts, ids, weights}, tokens);
}

void quire_decoder_delete(int dtype, void* decoder) {
    for_dtype(dtype, [&]<typename T>() { delete static_cast<quire::Decoder<T>*>(decoder); });
}

void quire_decoder_run(int dtype, void* decoder, const StepArgument* step) {
    for_dtype(dtype, [&]<typename T>() {
        static_cast<quire::Decoder<T>*>(decoder)->run(quire::make_step<T>(*step));
    });
}

void* quire_encoder_new(int dtype, const EncoderArgument* encoder) {
    return for_dtype(dtype, [&]<typename T>() -> void* { return new quire::Encoder<T>(*encoder); });
}

void quire_encoder_delete(int dtype, void* encoder) {
    for_dtype(dtype, [&]<typename T>() { delete static_cast<quire::Encoder<T>*>(encoder); });
}

void quire_encoder_run(int dtype, void* encoder, const EncoderStep* step) {
    for_dtype(dtype, [&]<typename T>() { static_cast<quire::Encoder<T>*>(encoder)->run(*step); });
}

int quire_decode_step(int dtype, void* decoder, const DecodeArguments* arguments) {
    return for_dtype(dtype, [&]<typename T>() -> int {
        return quire::decode_step(*static_cast<quire::Decoder<T>*>(decoder), *arguments);
    });
}

void* quire_moe_new(int dtype, int num_experts, const MatrixArgument* matrices, int64_t width, int64_t inner, int activation,
                    float limit) {
    return for_dtype(dtype, [&]<typename T>() -> void* {
        return quire::make_moe<T>(num_experts, matrices, width, inner, activation, limit);
    });
}

void quire_moe_delete(int dtype, void* moe) {
    for_dtype(dtype, [&]<typename T>() { delete static_cast<quire::Moe<T>*>(moe); });
}

void quire_moe_run(int dtype, void* moe, const void* x, const int64_t* ids, const float* weights, int64_t tokens, int k,
                   void* out) {
    for_dtype(dtype, [&]<typename T>() {
        quire::moe_op(*static_cast<quire::Moe<T>*>(moe), static_cast<const T*>(x), ids, weights, tokens, k, static_cast<T*>(out));
    });
}

void quire_moe_outputs(int dtype, void* moe, const void* x, const int64_t* ids, const float* ones, int64_t pairs,
                       float* out) {
    for_dtype(dtype, [&]<typename T>() {
        quire::moe_op(*static_cast<quire::Moe<T>*>(moe), static_cast<const T*>(x), ids, ones, pairs, 1, out);
    });
}

void quire_moe_sum(int dtype, const float* values, const float* weights, const int64_t* order, int64_t tokens, int k,
                   int64_t width, void* out) {
    for_dtype(dtype, [&]<typename T>() {
        quire::moe_sum(values, weights, order, tokens, k, width, static_cast<T*>(out));
    });
}

// Recurrent ops. Strides are those of rows in numbers; `states` holds float32. `where`: block table, query_start_loc,
// kv_lens; `sizes`: stride of the block table, sequences, block size, tokens.
static quire::Sequences sequences_of(const int32_t* const* where, const int64_t* sizes) {
    return {where[0], sizes[0], where[1], where[2], static_cast<int>(sizes[1]), static_cast<int>(sizes[2])};
}

void quire_causal_conv1d(int dtype, const void* x, int64_t x_stride, const void* taps, const void* bias, float* states,
                         int64_t state_stride, void* out, const int32_t* const* where, const int64_t* sizes,
                         int64_t channels, int num_taps, int silu) {
    for_dtype(dtype, [&]<typename T>() {
        const quire::Convolution<T> convolution{.x = {static_cast<const T*>(x), x_stride},
                                                .taps_by_channel = static_cast<const T*>(taps),
                                                .bias = static_cast<const T*>(bias),
                                                .state = {states, state_stride},
                                                .out = static_cast<T*>(out),
                                                .channels = channels,
                                                .taps = num_taps,
                                                .silu = silu != 0};
        const auto sequences = sequences_of(where, sizes);
        constexpr int64_t kRun = 8 * quire::kLanes;
        const int64_t cost = sizes[3] * channels * num_taps;
        quire::for_parts(sequences.count, (channels + kRun - 1) / kRun, cost, [&](int64_t sequence, int64_t part) {
            for (int64_t c = part * kRun; c < std::min((part + 1) * kRun, channels); c += quire::kLanes)
                convolution.run(sequences, sequence, c, static_cast<int>(std::min<int64_t>(quire::kLanes, channels - c)));
        });
    });
}

void quire_mamba2_scan(int dtype, const void* const* tensors, const int64_t* strides, const float* const* fixed,
                       float* states, int64_t state_stride, void* out, const int32_t* const* where,
                       const int64_t* sizes, int heads, int size, int groups, int numbers, float dt_min, float dt_max) {
    for_dtype(dtype, [&]<typename T>() {
        const auto tokens = [&](int i) { return quire::TokenView<T>{static_cast<const T*>(tensors[i]), strides[i]}; };
        const quire::Mamba2Scan<T> scan{.x = tokens(0),
                                        .dt = tokens(1),
                                        .b = tokens(2),
                                        .c = tokens(3),
                                        .a = fixed[0],
                                        .d = fixed[1],
                                        .dt_bias = fixed[2],
                                        .state = {states, state_stride},
                                        .out = static_cast<T*>(out),
                                        .heads = heads,
                                        .size = size,
                                        .groups = groups,
                                        .numbers = numbers,
                                        .dt_min = dt_min,
                                        .dt_max = dt_max};
        const auto sequences = sequences_of(where, sizes);
        const int64_t cost = sizes[3] * heads * size * numbers;
        quire::for_parts(sequences.count, heads, cost, [&](int64_t sequence, int64_t head) {
            static thread_local quire::Buffer buffer;
            scan.run(sequences, sequence, static_cast<int>(head), buffer);
        });
    });
}

void quire_selective_scan(int dtype, const void* const* tensors, const int64_t* strides, const float* const* fixed,
                          float* states, int64_t state_stride, void* out, const int32_t* const* where,
                          const int64_t* sizes, int64_t channels, int numbers) {
    for_dtype(dtype, [&]<typename T>() {
        const auto tokens = [&](int i) { return quire::TokenView<T>{static_cast<const T*>(tensors[i]), strides[i]}; };
        const quire::SelectiveScan<T> scan{.x = tokens(0),
                                           .dt = tokens(1),
                                           .b = tokens(2),
                                           .c = tokens(3),
                                           .a = fixed[0],
                                           .d = fixed[1],
                                           .dt_bias = fixed[2],
                                           .state = {states, state_stride},
                                           .out = static_cast<T*>(out),
                                           .channels = channels,
                                           .numbers = numbers};
        const auto sequences = sequences_of(where, sizes);
        constexpr int64_t kRun = quire::kChannels;
        const int64_t cost = sizes[3] * channels * numbers;
        quire::for_parts(sequences.count, (channels + kRun - 1) / kRun, cost, [&](int64_t sequence, int64_t part) {
            static thread_local quire::Buffer buffer;
            const int64_t begin = part * kRun;
            scan.run(sequences, sequence, begin, static_cast<int>(std::min(kRun, channels - begin)), buffer);
        });
    });
}

void quire_gated_delta_rule(int dtype, const void* const* tensors, const int64_t* strides, const float* const* fixed,
                            float* states, int64_t state_stride, void* out, const int32_t* const* where,
                            const int64_t* sizes, int keys, int values, int key_size, int value_size) {
    for_dtype(dtype, [&]<typename T>() {
        const auto tokens = [&](int i) { return quire::TokenView<T>{static_cast<const T*>(tensors[i]), strides[i]}; };
        const quire::DeltaRule<T> rule{.query = tokens(0),
                                       .key = tokens(1),
                                       .value = tokens(2),
                                       .a = tokens(3),
                                       .b = tokens(4),
                                       .a_log = fixed[0],
                                       .dt_bias = fixed[1],
                                       .state = {states, state_stride},
                                       .out = static_cast<T*>(out),
                                       .keys = keys,
                                       .values = values,
                                       .key_size = key_size,
                                       .value_size = value_size};
        const auto sequences = sequences_of(where, sizes);
        const int parts = (value_size + rule.kWidth - 1) / rule.kWidth;
        const int64_t cost = sizes[3] * values * key_size * value_size;
        quire::for_parts(sequences.count, static_cast<int64_t>(values) * parts, cost, [&](int64_t sequence, int64_t i) {
            static thread_local quire::Buffer buffer;
            rule.run(sequences, sequence, static_cast<int>(i / parts), static_cast<int>(i % parts) * rule.kWidth, buffer);
        });
    });
}

void quire_wkv(int dtype, const void* const* tensors, const int64_t* strides, const float* const* fixed, float* states,
               int64_t state_stride, void* out, const int32_t* const* where, const int64_t* sizes, int64_t channels) {
    for_dtype(dtype, [&]<typename T>() {
        const auto tokens = [&](int i) { return quire::TokenView<T>{static_cast<const T*>(tensors[i]), strides[i]}; };
        const quire::Wkv<T> average{tokens(0), tokens(1), fixed[0], fixed[1], {states, state_stride},
                                    static_cast<T*>(out), channels};
        const auto sequences = sequences_of(where, sizes);
        constexpr int64_t kRun = quire::kChannels;
        quire::for_parts(sequences.count, (channels + kRun - 1) / kRun, 64 * sizes[3] * channels,
                         [&](int64_t sequence, int64_t part) {
                             const int64_t begin = part * kRun;
                             average.run(sequences, sequence, begin, std::min(kRun, channels - begin));
                         });
    });
}

int quire_group_create(int fd, int size, int64_t capacity, int64_t channel_bytes) {
    return quire::SharedGroup::create(fd, size, capacity, channel_bytes) ? 0 : errno;
}

int quire_group_join(int fd, int rank, int size, int64_t spin_ns, void** group) {
    *group = quire::SharedGroup::join(fd, rank, size, spin_ns);
    return *group ? 0 : errno;
}

int quire_group_wait_for_all(void* group, int64_t milliseconds) { return as_group(group).wait_for_all(milliseconds); }

void quire_group_delete(void* group) { delete &as_group(group); }

int quire_group_barrier(void* group) {
    quire::SharedGroup& shared = as_group(group);
    return int(!shared.has_failed() && shared.meet() ? quire::GroupResult::kDone : quire::GroupResult::kRankGone);
}

int quire_group_all_gather(void* group, const void* x, void* out, int64_t rows, const int64_t* widths) {
    return int(quire::all_gather(as_group(group), static_cast<const uint8_t*>(x), static_cast<uint8_t*>(out), rows, widths));
}

int quire_group_all_to_all(void* group, const void* x, const int64_t* offset, void* out, const int64_t* sizes) {
    return int(quire::all_to_all(as_group(group), static_cast<const uint8_t*>(x), offset, static_cast<uint8_t*>(out), sizes));
}

int quire_group_all_reduce(void* group, int type, const void* x, void* out, int64_t count) {
    const auto reduce = [&]<typename T>(T) {
        return int(quire::all_reduce(as_group(group), static_cast<const T*>(x), static_cast<T*>(out), count));
    };
    switch (type) {
        case 0: return reduce(float{});
        case 1: return reduce(quire::BFloat16{});
        case 2: return reduce(quire::Float16{});
        case 3: return reduce(double{});
        case 4: return reduce(bool{});
        case 5: return reduce(uint8_t{});
        case 6: return reduce(uint16_t{});
        case 7: return reduce(uint32_t{});
        default: return reduce(uint64_t{});
    }
}

int64_t quire_group_send_some(void* group, int to, const void* from, int64_t bytes) {
    return as_group(group).send_some(to, static_cast<const uint8_t*>(from), bytes);
}

int64_t quire_group_receive_some(void* group, int from, void* to, int64_t bytes) {
    return as_group(group).receive_some(from, static_cast<uint8_t*>(to), bytes);
}

int quire_group_wait_for_channel(void* group, int peer, int receives, int64_t milliseconds) {
    return as_group(group).wait_for_channel(peer, receives, milliseconds);
}

void quire_group_fail(void* group, int rank, const char* cause) { as_group(group).fail(rank, cause); }

int quire_group_failed_rank(void* group) {
    return as_group(group).has_failed() ? as_group(group).failed_rank() : -1;
}

const char* quire_group_cause(void* group) { return as_group(group).cause(); }

int64_t quire_read(const void* data, int64_t bytes) {
    int64_t total = 0;
#pragma omp parallel reduction(+ : total)
    {
        constexpr int64_t kRun = 4 * sizeof(quire::Ints);
        const quire::Range mine = quire::my_share(bytes / kRun);
        const char* from = static_cast<const char*>(data);
        quire::Ints seen[4] = {};
        for (int64_t i = mine.begin; i < mine.end; ++i) {
            for (int j = 0; j < 4; ++j) {
                quire::Ints v;  // one by one: gcc would copy an array by way of the stack
                std::memcpy(&v, from + i * kRun + j * sizeof v, sizeof v);
                seen[j] ^= v;
            }
        }
        total += (seen[0] ^ seen[1] ^ seen[2] ^ seen[3])[0];
    }
    return total;
}
}
