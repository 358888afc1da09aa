// The paged cache of one layer, [num_blocks, 2, Hkv, block_size, X], and the formats that its rows come in. There may be room
// between blocks, where pages are shared with states that are larger.
//
// A row is one token's key or value of one head: D numbers of the network's type, of fp8, or of int8 or int4. These have a
// float32 scale of their own: of a block and head there are all tokens' rows, then all tokens' scales, so that rows begin at
// multiples of their length. What the formats mean is declared in `quire_ops.kv_cache_ops`.
//
// The cache of multi-head latent attention is [num_blocks, block_size, W]: one row for a token, which is the key of all heads,
// and whose beginning is their value. Its heads here are as many as share work well: all of them read the same rows. Of fp8_ds_mla
// a row has the beginning in fp8_e4m3, float32 scales of its groups, and bfloat16 (`quire_ops.latent_format`).
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "vectors.h"

namespace quire {

enum class CacheFormat { network, fp8_e4m3, fp8_e5m2, int8, int4, fp8_ds_mla };

constexpr int kLatentGroup = 128;  // numbers of a latent that share a scale

struct PagedCache {
    char* data;
    CacheFormat format;
    int num_kv_heads, block_size, head_dim;
    int64_t row_bytes;
    const float* scale;  // [2, Hkv] of fp8, keys first; or none
    int64_t block_bytes;  // from a block to the next
    int value_dim;        // numbers of a value: D, or of latents as many as of their row are the value
    bool latent = false;

    int64_t scale_bytes() const { return scaled_by_row() ? sizeof(float) : 0; }
    int64_t head_bytes() const { return latent ? 0 : block_size * (row_bytes + scale_bytes()); }
    int64_t value_offset() const { return num_kv_heads * head_bytes(); }  // from a key to its value
    bool scaled_by_row() const { return format == CacheFormat::int8 || format == CacheFormat::int4; }
    char* row(int64_t slot, int64_t head) const {
        return data + slot / block_size * block_bytes + head * head_bytes() + slot % block_size * row_bytes;
    }
    // Bytes from the row of a position or slot to its scale.
    int64_t to_scale(int64_t position) const {
        return block_size * row_bytes - position % block_size * (row_bytes - static_cast<int64_t>(sizeof(float)));
    }
    float head_scale(int which, int head) const { return scale ? scale[which * num_kv_heads + head] : 1.0f; }
};

template <typename T>
PagedCache make_cache(void* data, CacheFormat format, int num_kv_heads, int block_size, int head_dim,
                      const float* scale, int64_t block_bytes = 0) {
    const int64_t bytes[] = {static_cast<int64_t>(head_dim * sizeof(T)), head_dim, head_dim, head_dim, head_dim / 2};
    const bool fp8 = format == CacheFormat::fp8_e4m3 || format == CacheFormat::fp8_e5m2;
    PagedCache cache{static_cast<char*>(data), format, num_kv_heads, block_size, head_dim, bytes[static_cast<int>(format)],
                     fp8 ? scale : nullptr, block_bytes, head_dim};
    if (!block_bytes) cache.block_bytes = 2 * cache.value_offset();
    return cache;
}

// Latents of W numbers in rows that are `row_bytes` apart, in fp8_ds_mla or as the network computes.
inline PagedCache make_latent_cache(const void* data, bool fp8, int block_size, int width, int value_dim, int64_t row_bytes,
                                    int64_t block_bytes) {
    char* const rows = static_cast<char*>(const_cast<void*>(data));  // attention writes none
    const CacheFormat format = fp8 ? CacheFormat::fp8_ds_mla : CacheFormat::network;
    return {rows, format, 1, block_size, width, row_bytes, nullptr, block_bytes, value_dim, true};
}

// The sequences of a step, and where their rows are in the paged cache; of recurrent layers the states, one per block.
struct Sequences {
    const int32_t* block_table = nullptr;      // [S, table_stride]
    int64_t table_stride = 0;
    const int32_t* query_start_loc = nullptr;  // [S + 1]
    const int32_t* kv_lens = nullptr;          // [S], the step's tokens included
    int count = 0;
    int block_size = 0;

    int queries(int64_t sequence) const { return query_start_loc[sequence + 1] - query_start_loc[sequence]; }
    int context(int64_t sequence) const { return kv_lens[sequence] - queries(sequence); }
    const int32_t* table(int64_t sequence) const { return block_table + sequence * table_stride; }

    // run(begin, end, read, write) for the tokens of a sequence, cut where its state is stored; read < 0 at a beginning.
    template <typename Run>
    void for_runs(int64_t sequence, Run&& run) const {
        const int64_t first = query_start_loc[sequence], end = kv_lens[sequence];
        const int64_t start = context(sequence);
        const int32_t* const blocks = table(sequence);
        int64_t read = start > 0 ? blocks[(start - 1) / block_size] : -1;
        for (int64_t begin = start; begin < end;) {
            int64_t block = begin / block_size;
            while ((block + 1) * block_size < end && blocks[block] == 0) ++block;
            const int64_t stop = std::min((block + 1) * block_size, end);
            run(first + begin - start, first + stop - start, read, static_cast<int64_t>(blocks[block]));
            begin = stop;
            read = blocks[block];
        }
    }
};

// Finds rows of one sequence; positions that follow each other cost no division.
class CacheRows {
public:
    CacheRows() = default;
    CacheRows(const PagedCache& cache, const int32_t* table, int head) : cache_(&cache), table_(table), head_(head) {}

    const char* at(int position) {
        if (position < begin_ || position >= begin_ + cache_->block_size) find_block(position);
        return first_ + (position - begin_) * cache_->row_bytes;
    }
    int64_t row_bytes() const { return cache_->row_bytes; }
    int block_end(int position) const { return (position / cache_->block_size + 1) * cache_->block_size; }

private:
    [[gnu::noinline]] void find_block(int position) {
        const int block = position / cache_->block_size;
        begin_ = block * cache_->block_size;
        first_ = cache_->data + table_[block] * cache_->block_bytes + head_ * cache_->head_bytes();
    }

    const PagedCache* cache_ = nullptr;
    const int32_t* table_ = nullptr;
    const char* first_ = nullptr;
    int head_ = 0, begin_ = -(1 << 30);
};

// Eight bits of floating point: by vectors, for whom a copy keeps its numbers in registers.
struct Fp8Format {
    int mantissa, bias;
    int first_special;  // magnitude that is infinite, or no number
    float largest, least, step;  // of finite numbers; the least normal one, and the steps below it

    Fp8Format(int mantissa_bits, int exponent_bias, float largest_finite, bool infinities)
        : mantissa(mantissa_bits), bias(exponent_bias), first_special(infinities ? 0x7f >> mantissa_bits << mantissa_bits : 0x7f),
          largest(largest_finite), least(std::ldexp(1.0f, 1 - exponent_bias)), step(std::ldexp(least, -mantissa_bits)) {}

    Floats decode(Words codes) const {
        const Ints magnitude = (Ints)(codes & 0x7f);
        const Ints tiny = (Ints)(whole_to_floats(magnitude) * step), normal = (magnitude << (23 - mantissa)) + ((127 - bias) << 23);
        const Ints size = magnitude < 1 << mantissa ? tiny : normal;
        return (Floats)((Words)(magnitude < first_special ? size : size | 0x7f800000) | (codes & 0x80) << 24);
    }

    // Rounded to nearest even; what is too large becomes the largest.
    Words encode(Floats x) const {
        const Words bits = (Words)x, sign = bits >> 24 & 0x80;
        Floats magnitude = (Floats)(bits & 0x7fffffffu);
        magnitude = magnitude > largest ? splat(largest) : magnitude;
        const Words size = (Words)magnitude;
        // Half a step less a bit, and that bit where the code is odd; a carry goes on into the exponent by itself.
        const int dropped = 23 - mantissa;
        const Words normal = ((size + ((1u << (dropped - 1)) - 1) + (size >> dropped & 1)) >> dropped) - ((127u - bias) << mantissa);
        // Below the least normal number steps are even: those of the float to which it is added.
        const Floats even = splat(step * 0x1p23f);
        const Words tiny = (Words)(magnitude + even) - (Words)even;
        const Words code = magnitude < least ? tiny : normal;
        return sign | (x == x ? code : Words{} + 0x7f);
    }
};

// The numbers that the codes stand for.
struct Fp8 : Fp8Format {
    float value[256];

    Fp8(int mantissa_bits, int exponent_bias, float largest_finite, bool infinities)
        : Fp8Format(mantissa_bits, exponent_bias, largest_finite, infinities) {
        for (int code = 0; code < 256; ++code) {
            const int exponent = (code & 0x7f) >> mantissa, fraction = code & ((1 << mantissa) - 1);
            float x = exponent ? std::ldexp(1.0f + std::ldexp(fraction, -mantissa), exponent - bias)
                               : std::ldexp(fraction, 1 - bias - mantissa);
            if ((code & 0x7f) >= first_special) x = infinities && fraction == 0 ? INFINITY : NAN;
            value[code] = code & 0x80 ? -x : x;
        }
    }
};

inline const Fp8& fp8_of(CacheFormat format) {
    static const Fp8 e4m3(3, 7, 448.0f, false), e5m2(2, 15, 57344.0f, true);
    return format == CacheFormat::fp8_e4m3 ? e4m3 : e5m2;
}

// Numbers of fp8 in a row.
template <CacheFormat kFormat>
struct CachedFp8 {
    uint8_t bits;
};
template <CacheFormat kFormat>
inline Floats load(const CachedFp8<kFormat>* from) {
#if defined(__AVX2__)
    const HalfInts codes = load_signed_codes(from);
    if (kFormat == CacheFormat::fp8_e5m2) return half_to_floats(codes << 8);  // the upper byte of half precision
    HalfInts half = half_of_e4m3(codes);
    half |= (half & 0x7fff) == 0x3f80;  // no number
    return half_to_floats(half) * 256.0f;
#else
    const Fp8Format format = fp8_of(kFormat);
    return format.decode(load_codes(&from->bits));
#endif
}

// A row of fp8_ds_mla as float32, [W], its scales included.
inline void widen_latents(const PagedCache& cache, const char* row, float* to) {
    typedef CachedFp8<CacheFormat::fp8_e4m3> Code;
    const auto* const codes = reinterpret_cast<const Code*>(row);
    const float* const values = fp8_of(CacheFormat::fp8_e4m3).value;
    const int rank = cache.value_dim;
    const char* from = row + rank;
    int d = 0;
    for (int end; d < rank; from += 4) {
        float scale;
        std::memcpy(&scale, from, 4);
        end = std::min(d + kLatentGroup, rank);
        for (; d + kLanes <= end; d += kLanes) store(to + d, load(codes + d) * splat(scale));
        for (; d < end; ++d) to[d] = values[codes[d].bits] * scale;
    }
    const auto* const rest = reinterpret_cast<const BFloat16*>(from) - rank;
    for (; d + kLanes <= cache.head_dim; d += kLanes) store(to + d, load(rest + d));
    for (; d < cache.head_dim; ++d) to[d] = to_float(rest[d]);
}

// A row as float32, [D] and zeros up to `padded`, without its scale.
template <typename T>
void widen_row(const PagedCache& cache, const char* row, float* to, int padded) {
    const int dim = cache.head_dim;
    const auto* const codes = reinterpret_cast<const uint8_t*>(row);
    int d = 0;
    if (cache.format == CacheFormat::network) {
        const T* x = reinterpret_cast<const T*>(row);
        for (; d + kLanes <= dim; d += kLanes) store(to + d, load(x + d));
        for (; d < dim; ++d) to[d] = to_float(x[d]);
    } else if (cache.format == CacheFormat::int8) {
        const auto* const x = reinterpret_cast<const int8_t*>(row);
        for (; d + kLanes <= dim; d += kLanes) store(to + d, load(x + d));
        for (; d < dim; ++d) to[d] = x[d];
    } else if (cache.format == CacheFormat::int4) {
        const int half = dim / 2;
        for (; d + kLanes <= half; d += kLanes) {
            const Words both = load_codes(codes + d);
            store(to + d, whole_to_floats((Ints)(both & 15) - 8));
            store(to + half + d, whole_to_floats((Ints)(both >> 4) - 8));
        }
        for (; d < half; ++d) {
            to[d] = (codes[d] & 15) - 8;
            to[half + d] = (codes[d] >> 4) - 8;
        }
        d = dim;
    } else if (cache.format == CacheFormat::fp8_ds_mla) {
        widen_latents(cache, row, to);
        d = dim;
    } else {
        const auto widen = [&](const auto* x) {
            for (; d + kLanes <= dim; d += kLanes) store(to + d, load(x + d));
        };
        if (cache.format == CacheFormat::fp8_e4m3) {
            widen(reinterpret_cast<const CachedFp8<CacheFormat::fp8_e4m3>*>(row));
        } else {
            widen(reinterpret_cast<const CachedFp8<CacheFormat::fp8_e5m2>*>(row));
        }
        for (; d < dim; ++d) to[d] = fp8_of(cache.format).value[codes[d]];
    }
    for (; d < padded; ++d) to[d] = 0.0f;
}

// The lowest bytes of `count` lanes at most.
inline void store_bytes(char* to, Words v, int64_t count) {
#if defined(__AVX512F__)
    const __m128i bytes = _mm512_cvtepi32_epi8((__m512i)v);
#else
    typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
    const Bytes bytes = __builtin_convertvector(v, Bytes);
#endif
    std::memcpy(to, &bytes, std::min<int64_t>(count, kLanes));
}

// Whole numbers of magnitudes below 2^22, rounded to nearest even; 0 of what is no number.
inline Ints rounded_whole(Floats x) {
    const Floats even = splat(12582912.0f);  // whose neighbours are 1 apart
    return (Ints)((x == x ? x : Floats{}) + even) - (Ints)even;
}

// The largest magnitude of x [n]; that of NaN is above all others.
template <typename T>
float largest_magnitude(const T* x, int n) {
    Ints top = {};  // in the order of their bits
    for (int d = 0; d < n; d += kLanes) {
        const Ints bits = (Ints)load_some(x + d, n - d) & 0x7fffffff;
        top = bits > top ? bits : top;
    }
    int32_t largest = 0;
    for (int i = 0; i < kLanes; ++i) largest = std::max(largest, top[i]);
    float most;
    std::memcpy(&most, &largest, 4);
    return most;
}

// x [W] into a row of latents.
template <typename T>
void write_latents(const PagedCache& cache, char* row, const T* x) {
    if (cache.format == CacheFormat::network) {
        std::memcpy(row, x, cache.head_dim * sizeof(T));
        return;
    }
    const Fp8Format format = fp8_of(CacheFormat::fp8_e4m3);
    const int rank = cache.value_dim;
    char* to = row + rank;
    for (int begin = 0; begin < rank; begin += kLatentGroup, to += 4) {
        const int end = std::min(begin + kLatentGroup, rank);
        const float exact = largest_magnitude(x + begin, end - begin) / format.largest;
        const float scale = exact < FLT_MIN ? FLT_MIN : exact;  // a group of zeros divides
        for (int d = begin; d < end; d += kLanes)
            store_bytes(row + d, format.encode(load_some(x + d, end - d) / scale), end - d);
        std::memcpy(to, &scale, 4);
    }
    for (int d = rank; d < cache.head_dim; d += kLanes)
        store_some(reinterpret_cast<BFloat16*>(to) + d - rank, load_some(x + d, cache.head_dim - d), cache.head_dim - d);
}

// x [D] into a slot. which: 0 for keys, 1 for values.
template <typename T>
void write_row(const PagedCache& cache, int64_t slot, const T* x, int which, int head) {
    char* const row = cache.row(slot, which * cache.num_kv_heads + head);
    const int dim = cache.head_dim;
    if (cache.format == CacheFormat::network) {
        std::memcpy(row, x, dim * sizeof(T));
        return;
    }
    if (!cache.scaled_by_row()) {
        const Fp8Format format = fp8_of(cache.format);
        const float scale = cache.head_scale(which, head);
        for (int d = 0; d < dim; d += kLanes) store_bytes(row + d, format.encode(load_some(x + d, dim - d) / scale), dim - d);
        return;
    }
    const float most = largest_magnitude(x, dim);
    // A row of zeros has no inverse, nor has one of hardly more: they become zeros. What is not a number says so by the
    // scale.
    const float limit = cache.format == CacheFormat::int8 ? 127.0f : 7.0f, scale = most / limit;
    float inverse = limit / most;
    if (!std::isfinite(inverse)) inverse = 0.0f;
    std::memcpy(row + cache.to_scale(slot), &scale, sizeof scale);
    const auto codes = [&](const T* from, int64_t count) { return rounded_whole(load_some(from, count) * inverse); };
    if (cache.format == CacheFormat::int8) {
        for (int d = 0; d < dim; d += kLanes) store_bytes(row + d, (Words)codes(x + d, dim - d), dim - d);
        return;
    }
    const int half = dim / 2;
    for (int d = 0; d < half; d += kLanes) {
        const Ints low = codes(x + d, half - d) + 8, high = codes(x + half + d, half - d) + 8;
        store_bytes(row + d, (Words)(low | high << 4), half - d);
    }
}

}  // namespace quire
