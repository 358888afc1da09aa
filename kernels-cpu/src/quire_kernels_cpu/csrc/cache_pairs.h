// Numbers of the cache's rows as bfloat16: exact, without any scale. A way for each format.
//
// Each way knows how many numbers stand in 32 bytes, and where those from number d on begin (`at`). `widen` makes pairs of 16
// lanes that are so many rows' numbers from d on; `load` takes 32 numbers of one row, and `interleave` puts those of two rows
// side by side. D of int4 is a multiple of 64.
#pragma once

#include "byte_pairs.h"
#include "kv_cache.h"

#if defined(__AVX512BF16__)
namespace quire {

// 32 numbers of each of two rows side by side: the first 16, then the other 16.
inline void interleave(__m512i even, __m512i odd, __m512i pairs[2]) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                         36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    pairs[0] = _mm512_permutex2var_epi16(even, low, odd);
    pairs[1] = _mm512_permutex2var_epi16(even, _mm512_or_si512(low, _mm512_set1_epi16(16)), odd);
}

struct NetworkRows {
    static constexpr int kNumbers = 16;
    static const char* at(const char* row, int d) { return row + 2 * d; }
    void widen(__m512i lanes, int, __m512i pairs[1]) const { pairs[0] = lanes; }
    __m512i load(const char* row, int d) const { return _mm512_loadu_si512(at(row, d)); }
    void interleave(const char* even, const char* odd, int d, __m512i pairs[2]) const {
        quire::interleave(load(even, d), load(odd, d), pairs);
    }
};

inline __m256i load_codes32(const char* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }

template <typename Codes>
struct ByteRows {
    static constexpr int kNumbers = 32;
    Codes codes;

    static const char* at(const char* row, int d) { return row + d; }
    void widen(__m512i fours, int, __m512i pairs[2]) const { widen_fours(codes, fours, pairs); }
    __m512i load(const char* row, int d) const { return widen_in_order(codes, load_codes32(at(row, d))); }
    void interleave(const char* even, const char* odd, int d, __m512i pairs[2]) const {
        widen_side_by_side(codes, load_codes32(at(even, d)), load_codes32(at(odd, d)), pairs);
    }
};

// The first half of a row's numbers stands in the lower halves of its bytes, the second in the upper ones.
struct Int4Rows {
    static constexpr int kNumbers = 32;
    Int4Codes codes;
    int half;

    const char* at(const char* row, int d) const { return row + (d < half ? d : d - half); }
    void widen(__m512i fours, int d, __m512i pairs[2]) const { widen_fours(codes_at(d), fours, pairs); }
    __m512i load(const char* row, int d) const { return widen_in_order(codes_at(d), load_codes32(at(row, d))); }
    void interleave(const char* even, const char* odd, int d, __m512i pairs[2]) const {
        widen_side_by_side(codes_at(d), load_codes32(at(even, d)), load_codes32(at(odd, d)), pairs);
    }
    Int4Codes codes_at(int d) const { return d < half ? codes : codes.of_upper_halves(); }
};

// run(the way of a cache's format)
template <typename Run>
inline void with_rows(const PagedCache& cache, const Run& run) {
    switch (cache.format) {
        case CacheFormat::network: return run(NetworkRows{});
        case CacheFormat::fp8_e4m3: return run(ByteRows<Float8Codes>{Float8Codes(kFloat8E4M3)});
        case CacheFormat::fp8_e5m2: return run(ByteRows<Float8Codes>{Float8Codes(kFloat8E5M2)});
        case CacheFormat::int8: return run(ByteRows<Int8Codes>{});
        case CacheFormat::int4: return run(Int4Rows{{}, cache.head_dim / 2});
        case CacheFormat::fp8_ds_mla: return;  // see `PairAttention::fits`
    }
}

}  // namespace quire
#endif
