// Numbers of fp8 (e4m3) as pairs of bfloat16, which has each of them: its two bytes stand in tables.
#pragma once

#include <cstdint>

#include "vectors.h"

#if defined(__AVX512BF16__)
namespace quire {

// Of each magnitude. That of no number is read as 480, see `Float8`.
struct Float8Table {
    alignas(64) uint8_t low[128] = {}, high[128] = {};

    constexpr Float8Table() {
        for (int magnitude = 1; magnitude < 128; ++magnitude) {
            int exponent = magnitude >> 3, fraction = magnitude & 7;
            if (exponent == 0) {  // the first bit of the fraction becomes the one that is not kept
                for (exponent = 1; fraction < 8; --exponent) fraction <<= 1;
                fraction &= 7;
            }
            const int bits = (exponent + 120) << 7 | fraction << 4;
            low[magnitude] = static_cast<uint8_t>(bits);
            high[magnitude] = static_cast<uint8_t>(bits >> 8);
        }
    }
};
inline constexpr Float8Table kFloat8Table;

// The lower and the upper byte of each code's bfloat16.
inline void float8_bytes(__m512i codes, __m512i& low, __m512i& high) {
    const auto in_table = [&](const uint8_t* table) {
        return _mm512_permutex2var_epi8(_mm512_load_si512(table), codes, _mm512_load_si512(table + 64));
    };
    low = in_table(kFloat8Table.low);
    high = _mm512_or_si512(in_table(kFloat8Table.high), _mm512_and_si512(codes, _mm512_set1_epi8(-128)));
}

// Four codes in each lane -> the first two, then the other two.
inline void widen_float8_fours(__m512i fours, __m512i pairs[2]) {
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    __m512i low, high;
    float8_bytes(_mm512_shuffle_epi8(fours, _mm512_broadcast_i32x4(order)), low, high);
    pairs[0] = _mm512_unpacklo_epi8(low, high);
    pairs[1] = _mm512_unpackhi_epi8(low, high);
}

// 32 codes in order.
inline __m512i widen_float8(__m256i codes) {
    const __m512i order = _mm512_setr_epi32(0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0);  // of 64 bits
    __m512i low, high;
    float8_bytes(_mm512_permutexvar_epi64(order, _mm512_castsi256_si512(codes)), low, high);
    return _mm512_unpacklo_epi8(low, high);
}

}  // namespace quire
#endif
