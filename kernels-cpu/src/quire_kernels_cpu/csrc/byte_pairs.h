// Numbers of one byte or less as pairs of bfloat16, which has each of them: its two bytes stand in tables.
#pragma once

#include <cstdint>

#include "vectors.h"

#if defined(__AVX512BF16__)
namespace quire {

// The two bytes of each magnitude of seven bits: floating-point numbers with this bias, of whose bits the lowest `mantissa` are
// the fraction. Those from `infinite` on are infinite, those from `nan` on no numbers.
struct MagnitudeTable {
    alignas(64) uint8_t low[128] = {}, high[128] = {};

    constexpr MagnitudeTable(int mantissa, int bias, int infinite = 128, int nan = 128) {
        const int one = 1 << mantissa;
        for (int magnitude = 1; magnitude < 128; ++magnitude) {
            int exponent = magnitude >> mantissa, fraction = magnitude & (one - 1);
            if (exponent == 0) {  // the first bit of the fraction becomes the one that is not kept
                for (exponent = 1; fraction < one; --exponent) fraction <<= 1;
                fraction -= one;
            }
            int bits = (exponent + 127 - bias) << 7 | fraction << (7 - mantissa);
            if (magnitude >= infinite) bits = 0x7f80;
            if (magnitude >= nan) bits = 0x7fc0;
            low[magnitude] = static_cast<uint8_t>(bits);
            high[magnitude] = static_cast<uint8_t>(bits >> 8);
        }
    }
};
inline constexpr MagnitudeTable kFloat8Weights(3, 7);  // e4m3; that of no number is read as 480, see `Float8`
inline constexpr MagnitudeTable kFloat8E4M3(3, 7, 127, 127), kFloat8E5M2(2, 15, 0x7c, 0x7d);
inline constexpr MagnitudeTable kWholeNumbers(7, -6);  // as fractions, all of them

// The bytes of the whole numbers from -8 to 7.
struct SmallTable {
    alignas(16) uint8_t low[16] = {}, high[16] = {};

    constexpr SmallTable() {
        for (int code = 0; code < 16; ++code) {
            const int magnitude = code < 8 ? 8 - code : code - 8;
            low[code] = kWholeNumbers.low[magnitude];
            high[code] = kWholeNumbers.high[magnitude] | (code < 8 ? 0x80 : 0);
        }
    }
};
inline constexpr SmallTable kSmallNumbers;

// What makes bytes of each code, its lower one and its upper one: of fp8, ...
class Float8Codes {
public:
    explicit Float8Codes(const MagnitudeTable& table) {
        for (int i = 0; i < 2; ++i) {
            low_[i] = _mm512_load_si512(table.low + 64 * i);
            high_[i] = _mm512_load_si512(table.high + 64 * i);
        }
    }
    void split(__m512i codes, __m512i& low, __m512i& high) const { split(codes, codes, low, high); }

protected:
    void split(__m512i magnitudes, __m512i signs, __m512i& low, __m512i& high) const {
        low = _mm512_permutex2var_epi8(low_[0], magnitudes, low_[1]);
        high = _mm512_or_si512(_mm512_permutex2var_epi8(high_[0], magnitudes, high_[1]),
                               _mm512_and_si512(signs, _mm512_set1_epi8(-128)));
    }

private:
    __m512i low_[2], high_[2];
};

// ... of int8 but -128, ...
class Int8Codes : Float8Codes {
public:
    Int8Codes() : Float8Codes(kWholeNumbers) {}
    void split(__m512i codes, __m512i& low, __m512i& high) const {
        Float8Codes::split(_mm512_abs_epi8(codes), codes, low, high);
    }
};

// ... and of a half of each byte, a whole number with 8 added.
class Int4Codes {
public:
    Int4Codes() : low_(in_each_block(kSmallNumbers.low)), high_(in_each_block(kSmallNumbers.high)) {}
    Int4Codes of_upper_halves() const {
        Int4Codes of = *this;
        of.shift_ = 4;
        return of;
    }
    void split(__m512i codes, __m512i& low, __m512i& high) const {
        codes = _mm512_and_si512((__m512i)((Shorts)codes >> shift_), _mm512_set1_epi8(15));
        low = _mm512_shuffle_epi8(low_, codes);
        high = _mm512_shuffle_epi8(high_, codes);
    }

private:
    static __m512i in_each_block(const uint8_t* bytes) {
        return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
    }

    __m512i low_, high_;
    int shift_ = 0;
};

// Four codes in each lane -> the first two, then the other two.
template <typename Codes>
inline void widen_fours(const Codes& numbers, __m512i fours, __m512i pairs[2]) {
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    __m512i low, high;
    numbers.split(_mm512_shuffle_epi8(fours, _mm512_broadcast_i32x4(order)), low, high);
    pairs[0] = _mm512_unpacklo_epi8(low, high);
    pairs[1] = _mm512_unpackhi_epi8(low, high);
}

// 32 codes in order.
template <typename Codes>
inline __m512i widen_in_order(const Codes& numbers, __m256i codes) {
    const __m512i order = _mm512_setr_epi32(0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0);  // of 64 bits
    __m512i low, high;
    numbers.split(_mm512_permutexvar_epi64(order, _mm512_castsi256_si512(codes)), low, high);
    return _mm512_unpacklo_epi8(low, high);
}

// 32 codes of each of two rows side by side: the first 16, then the other 16.
template <typename Codes>
inline void widen_side_by_side(const Codes& numbers, __m256i one, __m256i other, __m512i pairs[2]) {
    // In each 128 bits what becomes its part of the first pairs, then of the second.
    alignas(64) static constexpr uint8_t kOrder[64] = {
        0,  32, 1,  33, 2,  34, 3,  35, 16, 48, 17, 49, 18, 50, 19, 51,  //
        4,  36, 5,  37, 6,  38, 7,  39, 20, 52, 21, 53, 22, 54, 23, 55,  //
        8,  40, 9,  41, 10, 42, 11, 43, 24, 56, 25, 57, 26, 58, 27, 59,  //
        12, 44, 13, 45, 14, 46, 15, 47, 28, 60, 29, 61, 30, 62, 31, 63};
    const __m512i codes = _mm512_inserti64x4(_mm512_castsi256_si512(one), other, 1);
    __m512i low, high;
    numbers.split(_mm512_permutexvar_epi8(_mm512_load_si512(kOrder), codes), low, high);
    pairs[0] = _mm512_unpacklo_epi8(low, high);
    pairs[1] = _mm512_unpackhi_epi8(low, high);
}

}  // namespace quire
#endif
