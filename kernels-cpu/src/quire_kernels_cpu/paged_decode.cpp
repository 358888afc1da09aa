// Paged decode attention: one query token per sequence, keys and values read where they are, no gather.
//
// Shapes: query and out [T, Hq, D]; kv [num_blocks, block_size, 2, Hkv, D]; block_table [S, table_stride] int32.
// One task is one (sequence, kv head): all its query heads share each key and value that is loaded. Scores, softmax
// (online, Milakov & Gimelshein 2018, algorithm 3) and sums are float32, in token order: a sequence's result depends on
// nothing but itself.
//
// Compiled once per instruction set with plain loops that the compiler vectorises; `kernels.py` chooses at run time.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int kTile = 64;        // tokens whose scores are held at a time
constexpr int kMaxHeadDim = 256;
constexpr int kMaxGroup = 16;    // query heads per kv head

struct BFloat16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(BFloat16 x) {
    uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline void store(float* to, float x) { *to = x; }
inline void store(BFloat16* to, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    // Round to nearest even; attention outputs are finite unless a value is not, and then stay so.
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        to->bits = static_cast<uint16_t>((bits >> 16) | 0x40);
        return;
    }
    to->bits = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

template <typename T, int kGroup>
void attend(const T* query, const T* kv, T* out, const int32_t* blocks, int begin, int end, int group, int head_dim,
            int block_size, int64_t slot_stride, int64_t value_offset, float scale) {
    const int heads = kGroup > 0 ? kGroup : group;
    alignas(64) float q[kMaxGroup][kMaxHeadDim];
    alignas(64) float acc[kMaxGroup][kMaxHeadDim];
    alignas(64) float scores[kMaxGroup][kTile];
    float highest[kMaxGroup], total[kMaxGroup];
    for (int g = 0; g < heads; ++g) {
        for (int d = 0; d < head_dim; ++d) {
            q[g][d] = to_float(query[static_cast<int64_t>(g) * head_dim + d]) * scale;
            acc[g][d] = 0.0f;
        }
        highest[g] = -INFINITY;
        total[g] = 0.0f;
    }
    const T* rows[kTile];
    for (int first = begin; first < end; first += kTile) {
        const int count = end - first < kTile ? end - first : kTile;
        for (int t = 0; t < count; ++t) {
            const int position = first + t;
            const int64_t slot =
                static_cast<int64_t>(blocks[position / block_size]) * block_size + position % block_size;
            rows[t] = kv + slot * slot_stride;
        }
        for (int t = 0; t < count; ++t) {
            const T* key = rows[t];
            if (t + 4 < count) {
                const char* ahead = reinterpret_cast<const char*>(rows[t + 4]);
                for (size_t byte = 0; byte < head_dim * sizeof(T); byte += 64) {
                    __builtin_prefetch(ahead + byte);
                    __builtin_prefetch(ahead + value_offset * sizeof(T) + byte);
                }
            }
            for (int g = 0; g < heads; ++g) {
                float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
                for (int d = 0; d < head_dim; ++d) sum += q[g][d] * to_float(key[d]);
                scores[g][t] = sum;
            }
        }
        for (int g = 0; g < heads; ++g) {
            float top = highest[g];
            for (int t = 0; t < count; ++t) top = scores[g][t] > top ? scores[g][t] : top;
            const float shrink = highest[g] == -INFINITY ? 0.0f : std::exp(highest[g] - top);
            float sum = 0.0f;
            for (int t = 0; t < count; ++t) {
                scores[g][t] = std::exp(scores[g][t] - top);
                sum += scores[g][t];
            }
            total[g] = total[g] * shrink + sum;
            highest[g] = top;
#pragma omp simd
            for (int d = 0; d < head_dim; ++d) acc[g][d] *= shrink;
        }
        for (int t = 0; t < count; ++t) {
            const T* value = rows[t] + value_offset;
            for (int g = 0; g < heads; ++g) {
                const float weight = scores[g][t];
#pragma omp simd
                for (int d = 0; d < head_dim; ++d) acc[g][d] += weight * to_float(value[d]);
            }
        }
    }
    for (int g = 0; g < heads; ++g) {
        const float inverse = 1.0f / total[g];
        for (int d = 0; d < head_dim; ++d) store(&out[static_cast<int64_t>(g) * head_dim + d], acc[g][d] * inverse);
    }
}

template <typename T>
void decode(const T* query, const T* kv, T* out, const int32_t* block_table, int64_t table_stride,
            const int32_t* sequences, const int32_t* query_rows, const int32_t* kv_lens, int num_sequences,
            int num_heads, int num_kv_heads, int head_dim, int block_size, float scale, int window) {
    const int group = num_heads / num_kv_heads;
    const int64_t slot_stride = 2LL * num_kv_heads * head_dim;
    const int64_t value_offset = static_cast<int64_t>(num_kv_heads) * head_dim;
    const int num_tasks = num_sequences * num_kv_heads;
#pragma omp parallel for schedule(dynamic, 1)
    for (int task = 0; task < num_tasks; ++task) {
        const int i = task / num_kv_heads, kv_head = task % num_kv_heads;
        const int end = kv_lens[i];
        const int begin = window > 0 && end > window ? end - window : 0;
        const int64_t head = static_cast<int64_t>(query_rows[i]) * num_heads + static_cast<int64_t>(kv_head) * group;
        const T* q = query + head * head_dim;
        T* o = out + head * head_dim;
        const T* base = kv + static_cast<int64_t>(kv_head) * head_dim;
        const int32_t* blocks = block_table + sequences[i] * table_stride;
        switch (group) {
            case 1: attend<T, 1>(q, base, o, blocks, begin, end, group, head_dim, block_size, slot_stride, value_offset, scale); break;
            case 2: attend<T, 2>(q, base, o, blocks, begin, end, group, head_dim, block_size, slot_stride, value_offset, scale); break;
            case 4: attend<T, 4>(q, base, o, blocks, begin, end, group, head_dim, block_size, slot_stride, value_offset, scale); break;
            default: attend<T, 0>(q, base, o, blocks, begin, end, group, head_dim, block_size, slot_stride, value_offset, scale); break;
        }
    }
}

}  // namespace

extern "C" {

// dtype: 0 float32, 1 bfloat16. window: 0 for none. Limits: D <= 256, Hq / Hkv <= 16 (checked by the caller).
void quire_paged_decode(const void* query, const void* kv, void* out, const int32_t* block_table, int64_t table_stride,
                        const int32_t* sequences, const int32_t* query_rows, const int32_t* kv_lens, int num_sequences,
                        int num_heads, int num_kv_heads, int head_dim, int block_size, float scale, int window,
                        int dtype) {
    if (dtype == 0) {
        decode(static_cast<const float*>(query), static_cast<const float*>(kv), static_cast<float*>(out), block_table,
               table_stride, sequences, query_rows, kv_lens, num_sequences, num_heads, num_kv_heads, head_dim,
               block_size, scale, window);
    } else {
        decode(static_cast<const BFloat16*>(query), static_cast<const BFloat16*>(kv), static_cast<BFloat16*>(out),
               block_table, table_stride, sequences, query_rows, kv_lens, num_sequences, num_heads, num_kv_heads,
               head_dim, block_size, scale, window);
    }
}
}
