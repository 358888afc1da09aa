// Of the C interface in `kernels.cpp`, what C++ programs call: one declaration for both sides, so that they cannot part.
#pragma once

#include <cstdint>

extern "C" {

// A matrix as it arrives. scale: [rows] of the activations' type for int8 and w8a8, else of groups (`weights.h`).
struct MatrixArgument {
    const void *data, *scale, *zero, *bias;
    int32_t coding, group, wide_scale;
    float input_scale;  // w8a8, see `weights.h`
};

void quire_linear(int dtype, const void* x, const MatrixArgument* argument, void* y, int64_t tokens, int64_t cols,
                  int64_t rows, int wide);

void quire_rms_norm(int dtype, void* to, void* x, const void* added, const void* weight, int64_t rows, int64_t size,
                    float eps);

void quire_activate(int dtype, int kind, void* to, const void* from, const void* up, int64_t count);

// Limits: D <= 256, Hq / Hkv <= 64. cache_format: a `CacheFormat`, with its scales or none. window, soft_cap: 0 for none;
// sinks, slopes: [Hq] or none; paths: [T, path_stride] (`Attention::path`), with -1 first for tokens in no tree, or none.
void quire_attention(int dtype, const void* query, void* kv, int cache_format, const float* kv_scale, void* out,
                     const int32_t* block_table, int64_t table_stride, const int32_t* query_start_loc,
                     const int32_t* kv_lens, int num_sequences, int num_heads, int num_kv_heads, int head_dim,
                     int block_size, int64_t block_bytes, float scale, int window, float soft_cap, const float* sinks,
                     const float* slopes, const int32_t* paths, int64_t path_stride);

// Over latents [blocks, block_size, width], whose rows and blocks are so many bytes apart: query [T, Hq, width] -> out [T, Hq,
// rank]. paths: see above.
void quire_latent_attention(int dtype, const void* query, const void* latents, void* out, const int32_t* block_table,
                            int64_t table_stride, const int32_t* query_start_loc, const int32_t* kv_lens, int num_sequences,
                            int num_heads, int width, int rank, int block_size, int64_t row_bytes, int64_t block_bytes,
                            float scale, const int32_t* paths, int64_t path_stride);

}
