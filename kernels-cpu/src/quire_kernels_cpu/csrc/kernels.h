// The C interface of the kernels: everything that crosses from Python or from a C++ program, declared once.
//
// Python makes its ctypes structs and function types from this file (`abi.py`), and a library carries what its compiler made
// of it: keep to structs of plain fields and functions with named arguments. dtype: 0 float32, 1 bfloat16, 2 float16. Pointers
// are to memory of the caller, who checks shapes. Every function uses the threads of the OpenMP runtime that is loaded; a
// decoder may be run by one thread at a time.
#pragma once

#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

// What this was compiled from, as `compilation.py` sums up the files beside this one; empty if nobody has said it.
extern const char* const quire_sources;
// The version of this interface, and the size of each struct and the offset of each of its fields, in their order here.
extern const char* const quire_abi_version;
extern const int64_t quire_abi_layout[];

// A matrix as it arrives. format: a `WeightFormat`; scale: [rows] of the activations' type for int8 and w8a8, else of groups.
struct MatrixArgument {
    const void *data, *scale, *zero, *bias;
    int32_t format, group, wide_scale;
    float input_scale;  // w8a8, see `weights.h`
    const int64_t* rank_sizes;  // [ranks] outputs of each rank, which are gathered; or none: what is here is all
    const float* block_constants;  // of a block format, see `blocks.h`; or none
    int64_t block_format;
};

// Adapters of one linear layer by slot, see `lora.h`. No ranks: the layer never has any.
struct LoraTable {
    const void *a, *b;           // [slots, max_rank, inputs], [slots, max_rank, outputs]
    const int32_t* ranks;        // [slots]
    const int32_t* adjusted;     // [slots] whether the next two are in use
    const float *scale, *shift;  // [slots, outputs]
    const float *a_scale, *b_scale;  // [slots, max_rank], [slots, outputs] of narrow a and b
    int64_t form;                    // of a and b: a `LoraForm`
};

// Tokens [begin, end) of a list of those with adapters, all of one slot.
struct LoraGroup {
    int32_t slot, begin, end;
};

// How tokens choose their experts, see `routing.h`. scoring: a `Scoring`.
struct RoutingRule {
    int32_t top_k, scoring, renormalize, num_groups, topk_groups, group_best;
    float minimum, scale;
};

// Block tables of the runner's rows, of one KV cache group, and where a step's are to be gathered, see `step_inputs.h`.
struct RowTable {
    const int32_t* table;  // [rows, width]
    int64_t width, block_size;
    int64_t window;         // 0 for none
    int32_t* block_table;   // [S, num_blocks]
    int64_t num_blocks;
    int64_t* slot_mapping;  // [T]
};

// How tokens are sampled, of all rows, see `sample.h`.
struct SampleTable {
    const uint8_t* do_sample;
    const int64_t *seeds, *num_prompt_tokens;
    const float* inv_temperature;
    const int64_t* top_k;
    const double* top_p;
    const float* min_log2;
};

// A norm of the residual stream. kind: a `NormKind`; weight and bias [hidden] or none.
struct NormArgument {
    const float *weight, *bias;
    int32_t kind;
    float eps;
};

// The cache of a layer: its paged keys and values, or latents, or the states of its sequences, one per block. Strides from one
// block to the next, those of states in numbers.
struct CacheArgument {
    void* data;
    int64_t block_bytes, row_bytes;
    float *conv_state, *state;
    int64_t conv_stride, state_stride;
};

// One KV cache group of a step, as the layers that share a block table see it.
struct StepGroup {
    const int32_t* block_table;   // [S, table_stride]
    int64_t table_stride;
    const int64_t* slot_mapping;  // [T]
    int64_t block_size;
};

// Attention over keys and values; cross attention, to what is in the cache, without k and v. q_norm, k_norm: [D] each, or [Hq * D] and [Hkv * D] for all heads at once, or none.
struct AttentionArgument {
    MatrixArgument q, k, v, o;
    const float *q_norm, *k_norm;
    const float *kv_scale, *sinks, *slopes;  // [2, Hkv], [Hq], [Hq], or none
    const int64_t* rank_widths;  // [ranks] Hq * D of each rank, where they share heads out; or none
    int32_t num_heads, num_kv_heads, head_dim, rotary_dim;
    int32_t window;        // 0 for none
    int32_t rotation;      // which of the step's; -1 for none
    int32_t interleaved;   // neighbours are the pairs that are rotated
    int32_t norm_of_all_heads, norm_after_rotation;
    int32_t gated;         // behind each query of the projection is the gate of its result
    int32_t rounds_steps;  // a rotation rounds its products, too
    int32_t int8_products; // see op `paged_attention`
    float eps, scale, soft_cap;
};

// Multi-head latent attention with H heads of N + P dimensions, P of them rotated, latents of R numbers, values of V.
struct LatentAttentionArgument {
    MatrixArgument q_down, q_up, kv_down, o;  // without q_rank, q_down makes the queries
    const float *q_norm, *kv_norm;            // [q_rank], [R]
    const void *key_up, *value_up;            // [H, R, N], [H, V, R] of the network's type
    int64_t key_up_stride, value_up_stride;   // from a head to the next
    const int64_t* rank_widths;               // [ranks] H * V of each rank, where they share heads out; or none
    int32_t num_heads, nope_dim, rotary_dim, rank, value_dim, q_rank;
    int32_t rotation, interleaved;
    float eps, scale;
};

// A Mamba-2 mixer, see `Mamba2Scan` and `GatedNorm`. taps: [num_taps, channels] of the network's type, as conv_bias.
struct Mamba2Argument {
    MatrixArgument in_proj, out_proj;
    const void *taps, *conv_bias;
    const float *a, *d, *dt_bias, *norm;
    int32_t heads, head_dim, groups, state_size, num_taps, norm_groups, norm_before_gate;
    float eps, dt_min, dt_max;
};

// A gated delta net, see `DeltaRule`. by_key_head: in_qkv has the gates, too, and in_a the strengths, key head by key head.
struct GatedDeltaArgument {
    MatrixArgument in_qkv, in_z, in_a, in_b, out_proj;
    const void* taps;
    const float *a_log, *dt_bias, *norm;
    int32_t key_heads, value_heads, key_dim, value_dim, num_taps, by_key_head;
    float eps;
};

// A gated short convolution over `hidden` channels.
struct ShortConvArgument {
    MatrixArgument in_proj, out_proj;
    const void *taps, *conv_bias;
    int32_t num_taps;
};

// A gated feed-forward network of `inner` numbers; 0 for none. rounds_steps: gate and up are rounded before they meet.
struct GatedArgument {
    MatrixArgument gate, up, down;
    const int64_t* rank_widths;  // [ranks] of `inner`, how many each rank computes; or none
    int32_t inner, activation, rounds_steps;
};

// A feed-forward network without a gate.
struct MlpArgument {
    MatrixArgument up, down;
    const int64_t* rank_widths;  // as above
    int32_t inner, activation;
};

// Experts of `quire_moe_new`, their router [num_experts, hidden], and what all tokens share; biases or none.
struct ExpertsArgument {
    const void* experts;
    MatrixArgument router;
    const float *router_bias, *choice_bias;
    const void* shared_gate;  // [hidden] of the network's type, or none
    RoutingRule rule;
    int32_t num_experts;
    GatedArgument shared;
};

// x + out_norm(part(norm(x))). kind: a `SublayerKind`, `part` is a struct of that kind.
struct SublayerArgument {
    NormArgument norm, out_norm;
    const void* part;
    int32_t kind;
    int32_t layer;       // that it belongs to
    int32_t parallel;    // it reads what the sublayer before it reads
    int32_t cache, group;
    int32_t first_lora;  // of its matrices among all adapters; -1: they never have any
    float residual_factor;
};

struct DecoderArgument {
    const SublayerArgument* sublayers;
    int64_t num_sublayers, num_layers, hidden, rotary_dim;
    NormArgument final_norm;
    const LoraTable* lora;  // of all sublayers that may have adapters, or none
    void* group;            // the ranks that share it, as `quire_group_join` gave them; or none
};

// One step of a decoder. cos, sin: of each rotation [tokens, rotary_dim]; caches as sublayers number them.
struct StepArgument {
    const void* x;  // [tokens, hidden] embeddings
    void* hidden;   // [tokens, hidden] after the final norm
    const void *const *cos, *const *sin;
    int64_t tokens, num_sequences;
    const int32_t *query_start_loc, *kv_lens;
    const StepGroup* groups;
    const CacheArgument* caches;
    int64_t cache_format;
    const int32_t* lora_order;
    const LoraGroup* lora_groups;
    int64_t num_lora_groups, max_lora_rank;
    void* const* taps;     // per layer and one behind the last: where to copy its input [tokens, hidden], or null; or none
    const int32_t* paths;  // [tokens, path_stride], see `Attention::path`; or none
    int64_t path_stride;
    const int32_t *cross_start_loc, *cross_lens;  // [tokens + 1], [tokens], of groups of cross attention; or none
};

// A layer of an encoder, see `encoder.h`: norms before both parts, or behind their sums where `post_ln`. Matrices are plain or int8.
struct EncoderLayerArgument {
    MatrixArgument q, k, v, o, gate, up, down;  // gate: without data where there is none
    NormArgument attention_norm, feed_forward_norm;
    const float* bias;  // [num_heads, 2 * max_distance + 1] of scores by how far the key is behind the query; or none
    int32_t num_heads, num_kv_heads, head_dim, inner, activation;
    int32_t max_distance;
    int32_t post_ln;
    int32_t window;    // tokens see those at most so far away, on either side; -1: all
    int32_t rotation;  // which of the step's; -1 for none
    float scale;
};

// rounds_inputs: of all matrices, which are then in int8 with groups of 64 inputs, see `column_bytes.h`.
struct EncoderArgument {
    const EncoderLayerArgument* layers;
    int64_t num_layers, hidden, rotary_dim, rounds_inputs;
    NormArgument final_norm;
};

// Whole texts, one behind the other. cos, sin: of each rotation [tokens, rotary_dim].
struct EncoderStep {
    const void* x;  // [tokens, hidden] embeddings
    void* hidden;   // [tokens, hidden] behind the last norm
    const void *const *cos, *const *sin;
    const int64_t* lens;  // [texts]
    int64_t tokens, num_texts, num_rotations;
};

// A decode step, see `decode_step.h`.
struct DecodeArguments {
    // The same in every step.
    const MatrixArgument* embedding;  // [num_embeddings, hidden]; of the rank's rows where these are shared out
    int64_t num_embeddings;
    const int64_t* embedding_rows;  // [ranks] rows of it that each rank has, one behind the other; or none: all of them
    const MatrixArgument* head;  // [vocab, hidden]
    int64_t vocab_size;
    int32_t* token_ids;  // [R, row_len]
    int64_t row_len;
    int64_t* num_tokens;              // [R]
    const RowTable* tables;           // per group; what is of one step is left empty
    const int64_t* const* num_blocks;  // per group [R]
    int64_t num_groups;
    const CacheArgument* caches;
    int64_t cache_format;
    const int32_t* lora_slots;  // [R] slot of each row's adapter, -1 for none
    int64_t max_lora_rank;      // 0: there are no adapters
    const int64_t* position_deltas;  // [R] added to a token's place in its row, for its rotation
    const SampleTable* sample_table;
    double embedding_factor, logits_factor;
    double soft_cap;  // of logits, after the factor; 0 for none
    // This step's.
    const void *const *cos, *const *sin;  // per rotation [positions, rotary_dim]
    int64_t num_rotations;
    const int64_t *rows, *starts;
    int64_t count;
    const int64_t* mask_of;  // [count] as in SampleMasks; null: no row has a mask
    const uint32_t* mask_bits;
    float* logits;  // [count, vocab] to leave the logits there, and choose and write no tokens; or null
    int64_t* ids;  // [count]
    float* max_logits;
};

// x [tokens, cols], matrix [rows, cols] -> y [tokens, rows], float32 if `wide`.
void quire_linear(int dtype, const void* x, const MatrixArgument* argument, void* y, int64_t tokens, int64_t cols,
                  int64_t rows, int wide);

// Rows of a matrix [rows, cols] as numbers of `dtype`: to [count, cols].
void quire_read_rows(int dtype, const MatrixArgument* argument, const int64_t* which, int64_t count, int64_t rows,
                     int64_t cols, void* to);

// Per token the largest of x weight^T in float32 and its place, the first among equals: max_logits and ids [tokens].
void quire_linear_argmax(int dtype, const void* x, const void* weight, int64_t* ids, float* max_logits, int64_t tokens,
                          int64_t cols, int64_t rows);

// See sample.h. mask_of [count]: which of the masks [masks, ceil(vocab / 32)] in `mask_bits` a row has, -1 for none; or none.
void quire_sample(float* logits, int64_t vocab, const int64_t* rows, const int64_t* positions, int64_t count,
                  const SampleTable* table, const int64_t* mask_of, const uint32_t* mask_bits, int64_t* ids, float* max_logits);

// See step_inputs.h; groups: an array of RowTable.
void quire_step_inputs(const int32_t* token_ids, int64_t row_len, const int64_t* rows, const int64_t* starts,
                       const int64_t* ends, int64_t count, int64_t* input_ids, int64_t* positions,
                       int32_t* query_start_loc, int32_t* seq_lens, const RowTable* groups, int num_groups);

// to [rows, size] = layer norm of x; weight and bias [size] or none.
void quire_layer_norm(int dtype, void* to, const void* x, const float* weight, const float* bias, int64_t rows,
                      int64_t size, float eps);

// to [rows, size] = norm of x; with `added`, x becomes x + added first.
void quire_rms_norm(int dtype, void* to, void* x, const void* added, const void* weight, int64_t rows, int64_t size,
                    float eps);

// to = act(from), times `up` unless that is null, `count` numbers; to may be from. kind: an Activation, not swigluoai.
void quire_activate(int dtype, int kind, void* to, const void* from, const void* up, int64_t count);

// key, value [tokens, Hkv, D] into the slots of the cache. block_bytes: from a block of it to the next.
void quire_write_kv_cache(int dtype, const void* key, const void* value, void* kv, int cache_format,
                          const float* kv_scale, const int64_t* slots, int64_t tokens, int num_kv_heads, int head_dim,
                          int block_size, int64_t block_bytes);

// Limits: D <= 256, Hq / Hkv <= 64. cache_format: a `CacheFormat`, with its scales or none. window, soft_cap: 0 for none;
// sinks, slopes: [Hq] or none; paths: [T, path_stride] (`Attention::path`), with -1 first for tokens in no tree, or none.
void quire_attention(int dtype, const void* query, void* kv, int cache_format, const float* kv_scale, void* out,
                     const int32_t* block_table, int64_t table_stride, const int32_t* query_start_loc,
                     const int32_t* kv_lens, int num_sequences, int num_heads, int num_kv_heads, int head_dim,
                     int block_size, int64_t block_bytes, float scale, int window, float soft_cap, const float* sinks, const float* slopes,
                     const int32_t* paths, int64_t path_stride, int int8_products);

// Entries [tokens, width] into rows of fp8_ds_mla (`CacheFormat`), of latents of `rank` numbers.
void quire_write_latents(int dtype, const void* entries, void* latents, const int64_t* slots, int64_t tokens, int width, int rank,
                         int block_size, int64_t row_bytes, int64_t block_bytes);

// Over latents [blocks, block_size, width], whose rows and blocks are so many bytes apart: query [T, Hq, width] -> out [T, Hq,
// rank]. fp8: rows are of fp8_ds_mla; paths: see above.
void quire_latent_attention(int dtype, const void* query, const void* latents, int fp8, void* out, const int32_t* block_table,
                            int64_t table_stride, const int32_t* query_start_loc, const int32_t* kv_lens, int num_sequences,
                            int num_heads, int width, int rank, int block_size, int64_t row_bytes, int64_t block_bytes,
                            float scale, const int32_t* paths, int64_t path_stride);

// Latent attention over the rows in a token's own slots [tokens, slots_per_token] of a cache of `num_blocks` blocks; -1 for none.
void quire_sparse_latent_attention(int dtype, const void* query, const void* latents, int fp8, void* out, const int64_t* slots,
                                   int64_t slots_per_token, int64_t num_blocks, int tokens, int num_heads, int width,
                                   int rank, int block_size, int64_t row_bytes, int64_t block_bytes, float scale);

// See index.h: query [tokens, heads, width], weights [tokens, heads] -> out [tokens, k], -1 behind where fewer are seen.
void quire_index_topk(int dtype, const void* query, const float* weights, const void* keys, int64_t* out,
                      const int32_t* block_table, int64_t table_stride, const int32_t* query_start_loc,
                      const int32_t* kv_lens, int num_sequences, int heads, int width, int block_size, int64_t row_bytes,
                      int64_t block_bytes, int k);

// x [tokens, heads, inputs] by its strides, weight [heads, outputs, inputs] by that of a head -> out [tokens, heads, outputs].
void quire_head_linear(int dtype, const void* x, int64_t token_stride, int64_t x_head_stride, const void* weight,
                       int64_t weight_head_stride, void* out, int64_t tokens, int64_t heads, int64_t inputs,
                       int64_t outputs);

// See maxsim.h. queries, documents: [tokens, dim], so many tokens each; num_queries: 1 or num_documents; scores [num_documents].
void quire_maxsim(int dtype, const void* queries, const int64_t* query_lens, int64_t num_queries, const void* documents,
                  const int64_t* document_lens, int64_t num_documents, int64_t dim, float* scores);

// A decoder keeps what it needs of the structs, and the pointers to weights: they must outlive it.
void* quire_decoder_new(int dtype, const DecoderArgument* decoder);

// out [tokens, outputs], float32 if `wide`, in place; x [tokens, inputs]. See lora.h.
void quire_lora_linear(int dtype, int wide, void* out, const void* x, const LoraTable* table, int64_t inputs, int64_t outputs,
                       const int32_t* order, const LoraGroup* groups, int64_t num_groups, int64_t max_rank);

// strides: of tokens of query, key and value, in numbers. Limit: D <= 256.
void quire_rope_and_write_kv(int dtype, const void* const* inputs, const int64_t* strides, void* out, const void* cos,
                            const void* sin, const void* query_norm, const void* key_norm, int wide_norms, float eps,
                            void* kv, int cache_format, const float* kv_scale, const int64_t* slots, int64_t tokens,
                            int num_heads, int num_kv_heads, int head_dim, int block_size, int64_t block_bytes);

// Rows of logits are `stride` numbers apart; bias [num_experts] or none; ids and weights [tokens, top_k].
void quire_route_experts(const float* logits, int64_t stride, const float* bias, const RoutingRule* rule, int64_t tokens,
                         int num_experts, int64_t* ids, float* weights);

void quire_decoder_delete(int dtype, void* decoder);

void quire_decoder_run(int dtype, void* decoder, const StepArgument* step);

// An encoder keeps what it needs of the structs, and the pointers to weights: they must outlive it.
void* quire_encoder_new(int dtype, const EncoderArgument* encoder);

void quire_encoder_delete(int dtype, void* encoder);

void quire_encoder_run(int dtype, void* encoder, const EncoderStep* step);

// Whether it was done; see decode_step.h.
int quire_decode_step(int dtype, void* decoder, const DecodeArguments* arguments);

// Experts keep the pointers: the weights must outlive them. activation: 0 SiLU, 1 GELU, 2 swigluoai with its limit.
void* quire_moe_new(int dtype, int num_experts, const MatrixArgument* matrices, int64_t width, int64_t inner, int activation,
                    float limit);

void quire_moe_delete(int dtype, void* moe);

// x [tokens, width], ids and weights [tokens, k] -> out [tokens, width]; ids must be experts' numbers.
void quire_moe_run(int dtype, void* moe, const void* x, const int64_t* ids, const float* weights, int64_t tokens, int k,
                   void* out);

// x [pairs, width], ids [pairs], ones [pairs] -> out [pairs, width] float32: what one expert makes of each row.
void quire_moe_outputs(int dtype, void* moe, const void* x, const int64_t* ids, const float* ones, int64_t pairs,
                       float* out);

// values [tokens, k, width] float32, weights and order [tokens, k] -> out [tokens, width]: sums as `quire_moe_run` makes
// them, of each token's values in that order.
void quire_moe_sum(int dtype, const float* values, const float* weights, const int64_t* order, int64_t tokens, int k,
                   int64_t width, void* out);

// x [tokens, channels], taps [taps, channels], bias [channels] or none, state [blocks, taps - 1, channels].
void quire_causal_conv1d(int dtype, const void* x, int64_t x_stride, const void* taps, const void* bias, float* states,
                         int64_t state_stride, void* out, const int32_t* const* where, const int64_t* sizes,
                         int64_t channels, int num_taps, int silu);

// tensors: x, dt, b, c; strides likewise; fixed: a, d, dt_bias [heads].
void quire_mamba2_scan(int dtype, const void* const* tensors, const int64_t* strides, const float* const* fixed,
                       float* states, int64_t state_stride, void* out, const int32_t* const* where,
                       const int64_t* sizes, int heads, int size, int groups, int numbers, float dt_min, float dt_max);

// tensors: x, dt, b, c; strides likewise; fixed: a [channels, numbers], d and dt_bias [channels].
void quire_selective_scan(int dtype, const void* const* tensors, const int64_t* strides, const float* const* fixed,
                          float* states, int64_t state_stride, void* out, const int32_t* const* where,
                          const int64_t* sizes, int64_t channels, int numbers);

// tensors: query, key, value, a, b; strides likewise; fixed: a_log, dt_bias [values]. Limit: key_size <= 256.
void quire_gated_delta_rule(int dtype, const void* const* tensors, const int64_t* strides, const float* const* fixed,
                            float* states, int64_t state_stride, void* out, const int32_t* const* where,
                            const int64_t* sizes, int keys, int values, int key_size, int value_size);

// tensors: key, value; strides likewise; fixed: decay, first [channels].
void quire_wkv(int dtype, const void* const* tensors, const int64_t* strides, const float* const* fixed, float* states,
               int64_t state_stride, void* out, const int32_t* const* where, const int64_t* sizes, int64_t channels);

// Makes an empty file the memory of a group of ranks, see `SharedGroup::create`. 0 or an errno.
int quire_group_create(int fd, int size, int64_t capacity, int64_t channel_bytes);

// Joins a group; the handle is what a fused kernel makes a `SharedGroup` of (shared_group.h). 0 or an errno.
int quire_group_join(int fd, int rank, int size, int64_t spin_ns, void** group);

// Whether all ranks came in that time, see `SharedGroup::wait_for_all`.
int quire_group_wait_for_all(void* group, int64_t milliseconds);

// Unmaps the memory; the other ranks keep theirs.
void quire_group_delete(void* group);

// Each gives a `GroupResult`; see group_collectives.h.
int quire_group_barrier(void* group);
int quire_group_all_gather(void* group, const void* x, void* out, int64_t rows, const int64_t* widths);
int quire_group_all_to_all(void* group, const void* x, const int64_t* offset, void* out, const int64_t* sizes);

// type: 0 float32, 1 bfloat16, 2 float16, 3 float64, 4 bool; whole numbers of 1, 2, 4 and 8 bytes: 5, 6, 7, 8.
int quire_group_all_reduce(void* group, int type, const void* x, void* out, int64_t count);

// Bytes that were sent to a rank, or received from it, without waiting.
int64_t quire_group_send_some(void* group, int to, const void* from, int64_t bytes);
int64_t quire_group_receive_some(void* group, int from, void* to, int64_t bytes);

// Waits until some can be, or that time has passed. 0 if a rank is gone.
int quire_group_wait_for_channel(void* group, int peer, int receives, int64_t milliseconds);

// Says that a rank is gone, and reads which and why: -1 if none is.
void quire_group_fail(void* group, int rank, const char* cause);
int quire_group_failed_rank(void* group);
const char* quire_group_cause(void* group);

// Reads memory and does nothing with it: how many bytes a second is what the other kernels can be compared to.
int64_t quire_read(const void* data, int64_t bytes);

}
#pragma GCC visibility pop
