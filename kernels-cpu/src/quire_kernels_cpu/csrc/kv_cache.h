// The paged cache of one layer, [num_blocks, 2, Hkv, block_size, X], and the formats that its rows come in. There may be room
// between blocks, where pages are shared with states that are larger.
//
// A row is one token's key or value of one head: D numbers of the network's type, of fp8, or of int8 or int4 with the
// row's own float32 scale behind them. What the formats mean is declared in `quire_ops.declarations`.
//
// The cache of multi-head latent attention is [num_blocks, block_size, W]: one row for a token, which is the key of all heads,
// and whose beginning is their value. Its heads here are as many as share work well: all of them read the same rows.
#pragma once

#include <algorithm>
#include <cmath>

#include "vectors.h"

namespace quire {

enum class CacheFormat { network, fp8_e4m3, fp8_e5m2, int8, int4 };

struct PagedCache {
    char* data;
    CacheFormat format;
    int num_kv_heads, block_size, head_dim;
    int64_t row_bytes;
    const float* scale;  // [2, Hkv] of fp8, keys first; or none
    int64_t block_bytes;  // from a block to the next
    int value_dim;        // numbers of a value: D, or of latents as many as of their row are the value
    bool latent = false;

    int64_t head_bytes() const { return latent ? 0 : block_size * row_bytes; }
    int64_t value_offset() const { return num_kv_heads * head_bytes(); }  // from a key to its value
    bool scaled_by_row() const { return format == CacheFormat::int8 || format == CacheFormat::int4; }
    char* row(int64_t slot, int64_t head) const {
        return data + slot / block_size * block_bytes + head * head_bytes() + slot % block_size * row_bytes;
    }
    float row_scale(const char* row) const {
        float scale;
        std::memcpy(&scale, row + (format == CacheFormat::int8 ? head_dim : head_dim / 2), 4);
        return scale;
    }
    float head_scale(int which, int head) const { return scale ? scale[which * num_kv_heads + head] : 1.0f; }
};

template <typename T>
PagedCache make_cache(void* data, CacheFormat format, int num_kv_heads, int block_size, int head_dim,
                      const float* scale, int64_t block_bytes = 0) {
    const int64_t bytes[] = {static_cast<int64_t>(head_dim * sizeof(T)), head_dim, head_dim, head_dim + 4, head_dim / 2 + 4};
    const bool fp8 = format == CacheFormat::fp8_e4m3 || format == CacheFormat::fp8_e5m2;
    const int64_t row_bytes = bytes[static_cast<int>(format)], filled = 2 * num_kv_heads * block_size * row_bytes;
    return {static_cast<char*>(data), format, num_kv_heads, block_size, head_dim, row_bytes, fp8 ? scale : nullptr,
            block_bytes ? block_bytes : filled, head_dim};
}

// Latents of W numbers in rows that are `row_bytes` apart.
template <typename T>
PagedCache make_latent_cache(const void* data, int block_size, int width, int value_dim, int64_t row_bytes, int64_t block_bytes) {
    char* const rows = static_cast<char*>(const_cast<void*>(data));  // attention writes none
    return {rows, CacheFormat::network, 1, block_size, width, row_bytes, nullptr, block_bytes, value_dim, true};
}

// Finds rows of one sequence; positions that follow each other cost no division.
class CacheRows {
public:
    CacheRows() = default;
    CacheRows(const PagedCache& cache, const int32_t* table, int head) : cache_(&cache), table_(table), head_(head) {}

    const char* at(int position) {
        if (position < begin_ || position >= begin_ + cache_->block_size) {
            const int block = position / cache_->block_size;
            begin_ = block * cache_->block_size;
            first_ = cache_->data + table_[block] * cache_->block_bytes + head_ * cache_->head_bytes();
        }
        return first_ + (position - begin_) * cache_->row_bytes;
    }
    int64_t row_bytes() const { return cache_->row_bytes; }
    int block_end(int position) const { return (position / cache_->block_size + 1) * cache_->block_size; }

private:
    const PagedCache* cache_ = nullptr;
    const int32_t* table_ = nullptr;
    const char* first_ = nullptr;
    int head_ = 0, begin_ = -(1 << 30);
};

// Eight bits of floating point, with the numbers that they stand for.
struct Fp8 {
    int mantissa, bias;
    float largest;
    float value[256];
    BFloat16 positive[128];  // exact

    Fp8(int mantissa_bits, int exponent_bias, float largest_finite, bool infinities)
        : mantissa(mantissa_bits), bias(exponent_bias), largest(largest_finite) {
        for (int code = 0; code < 256; ++code) {
            const int exponent = (code & 0x7f) >> mantissa, fraction = code & ((1 << mantissa) - 1);
            const int top = 0x7f >> mantissa;
            float x = exponent ? std::ldexp(1.0f + std::ldexp(fraction, -mantissa), exponent - bias)
                               : std::ldexp(fraction, 1 - bias - mantissa);
            if (infinities && exponent == top) x = fraction ? NAN : INFINITY;
            if (!infinities && (code & 0x7f) == 0x7f) x = NAN;
            value[code] = code & 0x80 ? -x : x;
            if (code < 128) store_one(positive + code, x);
        }
    }

    // Rounds to nearest even; what is too large becomes the largest.
    uint8_t encode(float x) const {
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        const uint8_t sign = bits >> 24 & 0x80;
        if (x != x) return sign | 0x7f;
        const float magnitude = std::min(std::fabs(x), largest);
        // The distance of neighbours: that of the numbers with this exponent, or of the smallest.
        std::memcpy(&bits, &magnitude, 4);
        const int exponent = std::max(static_cast<int>(bits >> 23) - 127, 1 - bias);
        const int steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, mantissa - exponent)));
        // Without its hidden bit in the smallest exponent; a carry goes on into the exponent by itself.
        return sign | static_cast<uint8_t>(((exponent + bias - 1) << mantissa) + steps);
    }
};

inline const Fp8& fp8_of(CacheFormat format) {
    static const Fp8 e4m3(3, 7, 448.0f, false), e5m2(2, 15, 57344.0f, true);
    return format == CacheFormat::fp8_e4m3 ? e4m3 : e5m2;
}

// A row as float32, [D] and zeros up to `padded`. Scales by head are left out, scales by row are not.
template <typename T>
void widen_row(const PagedCache& cache, const char* row, float* to, int padded) {
    const int dim = cache.head_dim;
    int d = 0;
    if (cache.format == CacheFormat::network) {
        const T* x = reinterpret_cast<const T*>(row);
        for (; d + kLanes <= dim; d += kLanes) store(to + d, load(x + d));
        for (; d < dim; ++d) to[d] = to_float(x[d]);
    } else if (cache.format == CacheFormat::int8) {
        const float scale = cache.row_scale(row);
        for (; d < dim; ++d) to[d] = static_cast<int8_t>(row[d]) * scale;
    } else if (cache.format == CacheFormat::int4) {
        const float scale = cache.row_scale(row);
        for (; d < dim; ++d) {
            const uint8_t byte = row[d % (dim / 2)];
            to[d] = ((d < dim / 2 ? byte & 15 : byte >> 4) - 8) * scale;
        }
    } else {
        const float* values = fp8_of(cache.format).value;
        for (; d < dim; ++d) to[d] = values[static_cast<uint8_t>(row[d])];
    }
    for (; d < padded; ++d) to[d] = 0.0f;
}

// x [D] into a row. which: 0 for keys, 1 for values.
template <typename T>
void write_row(const PagedCache& cache, char* row, const T* x, int which, int head) {
    const int dim = cache.head_dim;
    if (cache.format == CacheFormat::network) {
        std::memcpy(row, x, dim * sizeof(T));
        return;
    }
    if (!cache.scaled_by_row()) {
        const Fp8& format = fp8_of(cache.format);
        const float scale = cache.head_scale(which, head);
        for (int d = 0; d < dim; ++d) row[d] = static_cast<char>(format.encode(to_float(x[d]) / scale));
        return;
    }
    const float limit = cache.format == CacheFormat::int8 ? 127.0f : 7.0f;
    float most = 0.0f;
    bool numbers = true;
    for (int d = 0; d < dim; ++d) {
        most = std::max(most, std::fabs(to_float(x[d])));
        numbers &= to_float(x[d]) == to_float(x[d]);
    }
    // A row of zeros has no inverse, nor has one of hardly more: they become zeros. What is not a number says so by the
    // scale.
    if (!numbers) most = NAN;
    const float scale = most / limit;
    float inverse = limit / most;
    if (!std::isfinite(inverse)) inverse = 0.0f;
    const auto code = [&](int d) {
        const float x_d = to_float(x[d]) * inverse;
        return x_d == x_d ? static_cast<int>(std::nearbyint(x_d)) : 0;
    };
    if (cache.format == CacheFormat::int8) {
        for (int d = 0; d < dim; ++d) row[d] = static_cast<char>(code(d));
        std::memcpy(row + dim, &scale, 4);
    } else {
        for (int d = 0; d < dim / 2; ++d) row[d] = static_cast<char>((code(d) + 8) | (code(d + dim / 2) + 8) << 4);
        std::memcpy(row + dim / 2, &scale, 4);
    }
}

#if defined(__AVX512BF16__)
// 32 numbers of a row from element d on, as bfloat16; exact, without any scale. For int4, D is a multiple of 64.
class BFloat16Rows {
public:
    explicit BFloat16Rows(const PagedCache& cache) : format_(cache.format), half_(cache.head_dim / 2) {
        if (format_ == CacheFormat::fp8_e4m3 || format_ == CacheFormat::fp8_e5m2)
            for (int i = 0; i < 4; ++i) table_[i] = _mm512_loadu_si512(fp8_of(format_).positive + i * 32);
    }
    __m512i load32(const char* row, int d) const {
        if (format_ == CacheFormat::network) return _mm512_loadu_si512(row + 2 * d);
        if (format_ == CacheFormat::int8) return widened(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + d)));
        if (format_ == CacheFormat::int4) {
            const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + d % half_));
            const __m256i codes = _mm256_and_si256(d < half_ ? bytes : _mm256_srli_epi16(bytes, 4), _mm256_set1_epi8(15));
            return widened(_mm256_sub_epi8(codes, _mm256_set1_epi8(8)));
        }
        const __m512i codes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + d)));
        const __m512i small = _mm512_permutex2var_epi16(table_[0], codes, table_[1]);
        const __m512i large = _mm512_permutex2var_epi16(table_[2], codes, table_[3]);
        const __mmask32 is_large = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(0x40));
        const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(0x80)), 8);
        return _mm512_or_si512(_mm512_mask_blend_epi16(is_large, small, large), sign);
    }

private:
    static __m512i widened(__m256i bytes) {
        const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
        const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
        return (__m512i)_mm512_cvtne2ps_pbh(high, low);
    }

    const CacheFormat format_;
    const int half_;
    __m512i table_[4] = {};
};
#endif

}  // namespace quire
