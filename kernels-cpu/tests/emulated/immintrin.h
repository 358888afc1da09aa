// AVX-512, its products of bfloat16 (BF16) and of bytes (VNNI), its places of bytes (VBMI), and AMX, in C++ for processors that have AVX2 only.
//
// Found before the compiler's header of this name, it has every build's source compiled and run on any x86-64 machine of
// the tests: `-march=x86-64-v3 -I` this folder; `-DQUIRE_EMULATED_VNNI`, `-DQUIRE_EMULATED_BF16` and `-DQUIRE_EMULATED_AMX`
// say what else there is than AVX-512 F, BW, DQ, VL and CD. It holds what the kernels use and no more: what it lacks does not compile.
//
// Each function does what Intel's manual says of the instruction, half of a vector after the other by AVX2's instruction
// where that is the same one on 256 bits. What would be a fault ends the process: an aligned access to another address,
// tiles that were not configured, shapes that do not fit. Two things may differ: which of several NaNs comes through, and,
// where results are flushed, one that rounds up to the smallest normal number only because it was denormal: it is kept here.
#pragma once

#include_next <immintrin.h>

#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace quire_emulated {

[[noreturn]] inline void fault(const char* what) {
    std::fprintf(stderr, "emulated processor: %s\n", what);
    std::abort();
}

// ---- Vectors as two halves, and as arrays.

typedef float F8 __attribute__((vector_size(32)));
typedef int32_t I8 __attribute__((vector_size(32)));
typedef uint32_t U8 __attribute__((vector_size(32)));

template <typename To, typename From>
inline To bits(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

template <typename Part, typename Whole>
inline Part part(const Whole& whole, int i) {
    Part p;
    std::memcpy(&p, reinterpret_cast<const char*>(&whole) + i * sizeof p, sizeof p);
    return p;
}
inline __m256 half(const __m512& v, int i) { return part<__m256>(v, i); }
inline __m256i half(const __m512i& v, int i) { return part<__m256i>(v, i); }
inline __m128i half(const __m256i& v, int i) { return part<__m128i>(v, i); }

inline __m512 joined(const __m256 (&halves)[2]) { return bits<__m512>(halves); }
inline __m512i joined(const __m256i (&halves)[2]) { return bits<__m512i>(halves); }
inline __m256i joined(const __m128i (&halves)[2]) { return bits<__m256i>(halves); }

// of(first halves), of(second halves), side by side.
template <typename Of, typename... Vectors>
inline auto by_halves(const Of& of, const Vectors&... v) {
    const decltype(of(half(v, 0)...)) halves[2] = {of(half(v, 0)...), of(half(v, 1)...)};
    return joined(halves);
}

template <typename Number, int kCount>
struct Array {
    Number at[kCount];

    template <typename Vector>
    static Array of(const Vector& v) {
        return bits<Array>(v);
    }
    template <typename Vector>
    Vector as() const {
        return bits<Vector>(*this);
    }
};

// to[i] = of(from[i]) for numbers of two sizes.
template <typename ToVector, typename To, typename From, int kCount, typename FromVector, typename Of>
inline ToVector each(const FromVector& v, const Of& of) {
    const auto from = Array<From, kCount>::of(v);
    Array<To, kCount> to;
    for (int i = 0; i < kCount; ++i) to.at[i] = of(from.at[i]);
    return to.template as<ToVector>();
}

// ---- Loads, stores, constants.

inline void check_aligned(const void* address) {
    if (reinterpret_cast<uintptr_t>(address) % 64) fault("an aligned access to an address that is no multiple of 64");
}

template <typename Vector>
inline Vector load(const void* from) {
    Vector v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
inline __m512 loadu_ps(const void* from) { return load<__m512>(from); }
inline __m512i loadu_si512(const void* from) { return load<__m512i>(from); }
inline __m512 load_ps(const void* from) {
    check_aligned(from);
    return load<__m512>(from);
}
inline __m512i load_si512(const void* from) {
    check_aligned(from);
    return load<__m512i>(from);
}
inline __m512i maskz_loadu_epi32(__mmask16 mask, const void* from) {  // reads nothing of what is masked out
    Array<int32_t, 16> to = {};
    for (int i = 0; i < 16; ++i)
        if (mask >> i & 1) std::memcpy(&to.at[i], static_cast<const char*>(from) + 4 * i, 4);
    return to.as<__m512i>();
}
inline void storeu_ps(void* to, __m512 v) { std::memcpy(to, &v, sizeof v); }
inline void mask_storeu_ps(void* to, __mmask16 mask, __m512 v) {  // writes nothing of what is masked out
    for (int i = 0; i < 16; ++i)
        if (mask >> i & 1) std::memcpy(static_cast<char*>(to) + 4 * i, reinterpret_cast<const char*>(&v) + 4 * i, 4);
}
inline void storeu_si512(void* to, __m512i v) { std::memcpy(to, &v, sizeof v); }
inline void store_ps(void* to, __m512 v) {
    check_aligned(to);
    std::memcpy(to, &v, sizeof v);
}
inline void store_si512(void* to, __m512i v) {
    check_aligned(to);
    std::memcpy(to, &v, sizeof v);
}

inline __m512 setzero_ps() { return __m512{}; }
inline __m512i setzero_si512() { return __m512i{}; }
inline __m512 set1_ps(float x) {
    const __m256 halves[2] = {_mm256_set1_ps(x), _mm256_set1_ps(x)};
    return joined(halves);
}
inline __m512i twice(__m256i v) {
    const __m256i halves[2] = {v, v};
    return joined(halves);
}
inline __m512i set1_epi8(char x) { return twice(_mm256_set1_epi8(x)); }
inline __m512i set1_epi16(short x) { return twice(_mm256_set1_epi16(x)); }
inline __m512i set1_epi32(int x) { return twice(_mm256_set1_epi32(x)); }
template <typename... Numbers>
inline __m512i setr_epi32(Numbers... x) {  // the first one lowest
    static_assert(sizeof...(x) == 16);
    return Array<int32_t, 16>{{static_cast<int32_t>(x)...}}.template as<__m512i>();
}
template <typename... Numbers>
inline __m512i set_epi16(Numbers... x) {  // the last one lowest
    static_assert(sizeof...(x) == 32);
    const int16_t from[32] = {static_cast<int16_t>(x)...};
    Array<int16_t, 32> to;
    for (int i = 0; i < 32; ++i) to.at[i] = from[31 - i];
    return to.as<__m512i>();
}

inline __m256 castps512_ps256(__m512 v) { return half(v, 0); }
inline __m512i castsi256_si512(__m256i v) {  // the upper half is undefined: something that nobody would want
    const __m256i halves[2] = {v, _mm256_set1_epi32(0x7fa5a5a5)};
    return joined(halves);
}
template <int kHalf>
inline __m256 extractf32x8_ps(__m512 v) {
    return half(v, kHalf & 1);
}
template <int kHalf>
inline __m512i inserti64x4(__m512i v, __m256i into) {
    const __m256i halves[2] = {kHalf & 1 ? half(v, 0) : into, kHalf & 1 ? into : half(v, 1)};
    return joined(halves);
}

// ---- Arithmetic, number by number.

#define QUIRE_TWO(name, Vector, Half, instruction)                                            \
    inline Vector name(Vector a, Vector b) {                                                  \
        return by_halves([](Half x, Half y) { return instruction(x, y); }, a, b);             \
    }
#define QUIRE_THREE(name, instruction)                                                                  \
    inline __m512 name(__m512 a, __m512 b, __m512 c) {                                                  \
        return by_halves([](__m256 x, __m256 y, __m256 z) { return instruction(x, y, z); }, a, b, c);   \
    }
#define QUIRE_SHIFT(name, instruction)                                                 \
    inline __m512i name(__m512i v, unsigned count) {                                   \
        return by_halves([=](__m256i x) { return instruction(x, static_cast<int>(count)); }, v); \
    }

QUIRE_TWO(add_ps, __m512, __m256, _mm256_add_ps)
QUIRE_TWO(max_ps, __m512, __m256, _mm256_max_ps)
QUIRE_THREE(fmadd_ps, _mm256_fmadd_ps)
QUIRE_THREE(fmsub_ps, _mm256_fmsub_ps)
QUIRE_THREE(fnmadd_ps, _mm256_fnmadd_ps)
QUIRE_TWO(add_epi32, __m512i, __m256i, _mm256_add_epi32)
QUIRE_TWO(sub_epi16, __m512i, __m256i, _mm256_sub_epi16)
QUIRE_TWO(sub_epi32, __m512i, __m256i, _mm256_sub_epi32)
QUIRE_TWO(mullo_epi32, __m512i, __m256i, _mm256_mullo_epi32)
QUIRE_TWO(and_si512, __m512i, __m256i, _mm256_and_si256)
QUIRE_TWO(or_si512, __m512i, __m256i, _mm256_or_si256)
QUIRE_TWO(xor_si512, __m512i, __m256i, _mm256_xor_si256)
QUIRE_TWO(madd_epi16, __m512i, __m256i, _mm256_madd_epi16)
QUIRE_SHIFT(slli_epi32, _mm256_slli_epi32)
QUIRE_SHIFT(srai_epi32, _mm256_srai_epi32)
QUIRE_SHIFT(srli_epi32, _mm256_srli_epi32)
QUIRE_SHIFT(srli_epi16, _mm256_srli_epi16)
inline __m512i abs_epi8(__m512i v) { return by_halves([](__m256i x) { return _mm256_abs_epi8(x); }, v); }
inline __m512 abs_ps(__m512 v) { return bits<__m512>(and_si512(bits<__m512i>(v), set1_epi32(0x7fffffff))); }

// Halves, quarters, then eighths, as compilers write it: it is no instruction.
inline float reduce_add_ps(__m512 v) {
    auto a = Array<float, 16>::of(v);
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) a.at[i] += a.at[i + width];
    return a.at[0];
}
inline float reduce_max_ps(__m512 v) {  // of numbers, whose order does not matter
    const auto a = Array<float, 16>::of(v);
    float highest = a.at[0];
    for (int i = 1; i < 16; ++i) highest = a.at[i] > highest ? a.at[i] : highest;
    return highest;
}
inline int reduce_add_epi32(__m512i v) {
    const auto a = Array<uint32_t, 16>::of(v);
    uint32_t sum = 0;
    for (int i = 0; i < 16; ++i) sum += a.at[i];
    return static_cast<int>(sum);
}

template <int kRounding>
inline __m256 roundscale_ps(__m256 v) {
    static_assert(kRounding >> 4 == 0, "the kernels keep no bits behind the point");
    return _mm256_round_ps(v, kRounding);
}
template <int kRounding>
inline __m512 roundscale_ps(__m512 v) {
    return by_halves([](__m256 x) { return roundscale_ps<kRounding>(x); }, v);
}
// What rounding takes away, itself rounded in the same direction. Of an infinity that is zero; other zeros are negative where
// rounding goes down.
template <int kRounding>
inline __m512 reduce_ps(__m512 v) {
    constexpr bool kDown = (kRounding & 7) == _MM_FROUND_TO_NEG_INF;
    static_assert(kDown || (kRounding & 7) == _MM_FROUND_TO_NEAREST_INT, "the kernels round in no other way");
    return by_halves(
        [](__m256 of) {
            const F8 x = (F8)of, whole = (F8)roundscale_ps<kRounding>(of);
            F8 rest = x - whole;
            if (kDown) {
                // What the subtraction, which rounds to nearest, left away, exactly (Knuth's sum of two).
                const F8 back = rest - x, error = (x - (rest - back)) - (whole + back);
                rest = (F8)(error < 0.0f ? (I8)rest - 1 : (I8)rest);  // then it is positive
            }
            const F8 magnitude = (F8)((U8)x & 0x7fffffff), zero = (kDown ? -0.0f : 0.0f) - F8{};
            return (__m256)(magnitude == INFINITY ? F8{} : rest == 0.0f ? zero : rest);
        },
        v);
}

// Of what is no number: whether it is the kind that raises no exception.
inline bool is_quiet(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits >> 22 & 1;
}

// a * 2^floor(b), rounded once.
inline float scaled(float a, float b) {
    if (std::isnan(b)) return b;
    if (std::isinf(b)) {
        if (std::isnan(a)) return !is_quiet(a) ? NAN : b > 0 ? INFINITY : 0.0f;
        if (b > 0) return a == 0 ? NAN : std::copysign(INFINITY, a);
        return std::isinf(a) ? NAN : std::copysign(0.0f, a);
    }
    // 2^300 takes the smallest denormal number over the largest number, 2^-300 the largest below the smallest.
    return static_cast<float>(std::ldexp(static_cast<double>(a), static_cast<int>(std::fmin(std::fmax(std::floor(b), -300.0f), 300.0f))));
}
inline __m512 maskz_scalef_ps(__mmask16 mask, __m512 a, __m512 b) {
    Array<float, 16> to = {};
    const auto x = Array<float, 16>::of(a), y = Array<float, 16>::of(b);
    for (int i = 0; i < 16; ++i)
        if (mask >> i & 1) to.at[i] = scaled(x.at[i], y.at[i]);
    return to.as<__m512>();
}

// ---- Masks.

template <int kPredicate>
inline __mmask16 cmp_ps_mask(__m512 a, __m512 b) {
    int mask = 0;
    for (int i = 0; i < 2; ++i) mask |= _mm256_movemask_ps(_mm256_cmp_ps(half(a, i), half(b, i), kPredicate)) << 8 * i;
    return static_cast<__mmask16>(mask);
}
inline __mmask16 cmpneq_epi32_mask(__m512i a, __m512i b) {
    const auto x = Array<int32_t, 16>::of(a), y = Array<int32_t, 16>::of(b);
    unsigned mask = 0;
    for (int i = 0; i < 16; ++i) mask |= static_cast<unsigned>(x.at[i] != y.at[i]) << i;
    return static_cast<__mmask16>(mask);
}
inline __mmask16 knot_mask16(__mmask16 mask) { return static_cast<__mmask16>(~mask); }
template <typename Number, int kCount, typename Vector, typename Mask>
inline Vector blended(Mask mask, const Vector& unset, const Vector& set) {
    auto to = Array<Number, kCount>::of(unset);
    const auto from = Array<Number, kCount>::of(set);
    for (int i = 0; i < kCount; ++i) to.at[i] = mask >> i & 1 ? from.at[i] : to.at[i];
    return to.template as<Vector>();
}
inline __m512 mask_mov_ps(__m512 unset, __mmask16 mask, __m512 set) { return blended<uint32_t, 16>(mask, unset, set); }
inline __m512i maskz_mov_epi32(__mmask16 mask, __m512i set) { return blended<uint32_t, 16>(mask, __m512i{}, set); }

// ---- From one kind of number to another.

inline __m512i cvtepi16_epi32(__m256i v) { return by_halves([](__m128i x) { return _mm256_cvtepi16_epi32(x); }, v); }
inline __m512i cvtepu16_epi32(__m256i v) { return by_halves([](__m128i x) { return _mm256_cvtepu16_epi32(x); }, v); }
inline __m512i cvtepi8_epi16(__m256i v) { return by_halves([](__m128i x) { return _mm256_cvtepi8_epi16(x); }, v); }
inline __m512i cvtepi8_epi32(__m128i v) {
    const __m256i halves[2] = {_mm256_cvtepi8_epi32(v), _mm256_cvtepi8_epi32(_mm_srli_si128(v, 8))};
    return joined(halves);
}
inline __m512i cvtepu8_epi32(__m128i v) {
    const __m256i halves[2] = {_mm256_cvtepu8_epi32(v), _mm256_cvtepu8_epi32(_mm_srli_si128(v, 8))};
    return joined(halves);
}
inline __m256i cvtepi32_epi16(__m512i v) {
    return each<__m256i, uint16_t, uint32_t, 16>(v, [](uint32_t x) { return static_cast<uint16_t>(x); });
}
inline __m128i cvtepi32_epi8(__m512i v) {
    return each<__m128i, uint8_t, uint32_t, 16>(v, [](uint32_t x) { return static_cast<uint8_t>(x); });
}
inline __m128i cvtsepi32_epi8(__m512i v) {
    return each<__m128i, int8_t, int32_t, 16>(
        v, [](int32_t x) { return static_cast<int8_t>(x < -128 ? -128 : x > 127 ? 127 : x); });
}
inline __m512 cvtepi32_ps(__m512i v) { return by_halves([](__m256i x) { return _mm256_cvtepi32_ps(x); }, v); }
inline __m512i cvtps_epi32(__m512 v) { return by_halves([](__m256 x) { return _mm256_cvtps_epi32(x); }, v); }
inline __m512 cvtph_ps(__m256i v) { return by_halves([](__m128i x) { return _mm256_cvtph_ps(x); }, v); }
template <int kRounding>
inline __m256i cvtps_ph(__m512 v) {
    return by_halves([](__m256 x) { return _mm256_cvtps_ph(x, kRounding); }, v);
}

// ---- Other places.

template <typename Index, int kCount, typename Vector>
inline Vector permuted(const Vector& a, __m512i index, const Vector& b) {
    const auto at = Array<Index, kCount>::of(index);
    Index from[2 * kCount];
    std::memcpy(from, &a, 64);
    std::memcpy(from + kCount, &b, 64);
    Array<Index, kCount> to;
    for (int i = 0; i < kCount; ++i) to.at[i] = from[at.at[i] % (2 * kCount)];
    return to.template as<Vector>();
}
inline __m512i permutex2var_epi8(__m512i a, __m512i index, __m512i b) { return permuted<uint8_t, 64>(a, index, b); }
inline __m512i permutex2var_epi16(__m512i a, __m512i index, __m512i b) { return permuted<uint16_t, 32>(a, index, b); }
inline __m512i permutex2var_epi32(__m512i a, __m512i index, __m512i b) { return permuted<uint32_t, 16>(a, index, b); }
inline __m512 permutex2var_ps(__m512 a, __m512i index, __m512 b) { return permuted<uint32_t, 16>(a, index, b); }
inline __m512i permutexvar_epi8(__m512i index, __m512i a) { return permuted<uint8_t, 64>(a, index, a); }
inline __m512i permutexvar_epi16(__m512i index, __m512i a) { return permuted<uint16_t, 32>(a, index, a); }
inline __m512i permutexvar_epi64(__m512i index, __m512i a) { return permuted<uint64_t, 8>(a, index, a); }

inline __m512i broadcast_i32x4(__m128i v) {
    const __m128i blocks[4] = {v, v, v, v};
    return bits<__m512i>(blocks);
}
inline __m512i mask_broadcast_i32x4(__m512i unset, __mmask16 mask, __m128i v) {
    return blended<uint32_t, 16>(mask, unset, broadcast_i32x4(v));
}
// Of four blocks of 128 bits two of a, then two of b.
template <int kBlocks>
inline __m512i shuffle_i32x4(__m512i a, __m512i b) {
    const __m128i blocks[4] = {part<__m128i>(a, kBlocks & 3), part<__m128i>(a, kBlocks >> 2 & 3),
                               part<__m128i>(b, kBlocks >> 4 & 3), part<__m128i>(b, kBlocks >> 6 & 3)};
    return bits<__m512i>(blocks);
}
QUIRE_TWO(shuffle_epi8, __m512i, __m256i, _mm256_shuffle_epi8)
QUIRE_TWO(unpacklo_epi8, __m512i, __m256i, _mm256_unpacklo_epi8)
QUIRE_TWO(unpackhi_epi8, __m512i, __m256i, _mm256_unpackhi_epi8)
QUIRE_TWO(unpacklo_epi16, __m512i, __m256i, _mm256_unpacklo_epi16)
QUIRE_TWO(unpackhi_epi16, __m512i, __m256i, _mm256_unpackhi_epi16)
QUIRE_TWO(unpacklo_epi32, __m512i, __m256i, _mm256_unpacklo_epi32)
QUIRE_TWO(unpackhi_epi32, __m512i, __m256i, _mm256_unpackhi_epi32)
QUIRE_TWO(unpacklo_epi64, __m512i, __m256i, _mm256_unpacklo_epi64)
QUIRE_TWO(unpackhi_epi64, __m512i, __m256i, _mm256_unpackhi_epi64)

#undef QUIRE_TWO
#undef QUIRE_THREE
#undef QUIRE_SHIFT

// ---- VNNI: products of bytes and of 16 bits, added without saturation.

inline __m256i plus_byte_products(__m256i sum, __m256i unsigned_bytes, __m256i signed_bytes) {
    // Even and odd bytes as 16 bits; each sum of two products fits 32.
    const __m256i low = _mm256_set1_epi16(0xff);
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(unsigned_bytes, low), _mm256_srai_epi16(_mm256_slli_epi16(signed_bytes, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(unsigned_bytes, 8), _mm256_srai_epi16(signed_bytes, 8));
    return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}
inline __m512i dpbusd_epi32(__m512i sum, __m512i a, __m512i b) { return by_halves(plus_byte_products, sum, a, b); }
inline __m512i dpwssd_epi32(__m512i sum, __m512i a, __m512i b) {
    return by_halves([](__m256i s, __m256i x, __m256i y) { return _mm256_add_epi32(s, _mm256_madd_epi16(x, y)); }, sum, a, b);
}

// ---- bfloat16. Denormal numbers are zeros, as operands and as results; rounding is to nearest even.

inline F8 flushed(F8 x) {
    const U8 w = (U8)x;
    return (F8)(w & ((w & 0x7f800000) == 0 ? 0x80000000 : 0xffffffff + U8{}));
}
inline F8 fused(F8 a, F8 b, F8 sum) { return flushed((F8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum)); }
inline F8 lower_numbers(U8 pairs) { return flushed((F8)(pairs << 16)); }
inline F8 upper_numbers(U8 pairs) { return flushed((F8)(pairs & 0xffff0000)); }

// The upper numbers of the pairs first, then the lower ones, each product added and rounded by itself.
template <typename Pairs>
inline __m512 dpbf16_ps(__m512 sum, const Pairs& a, const Pairs& b) {
    F8 halves[2];
    for (int i = 0; i < 2; ++i) {
        const U8 x = part<U8>(a, i), y = part<U8>(b, i);
        const F8 once = fused(upper_numbers(x), upper_numbers(y), flushed(part<F8>(sum, i)));
        halves[i] = fused(lower_numbers(x), lower_numbers(y), once);
    }
    return bits<__m512>(halves);
}

// In the lower halves of the words.
inline U8 rounded_to_bf16(__m256 v) {
    const U8 w = (U8)v;
    const U8 magnitude = w & 0x7fffffff;
    const U8 number = magnitude < 0x00800000 ? w & 0x80000000 : w + 0x7fff + (w >> 16 & 1);
    return magnitude > 0x7f800000 ? w >> 16 | 0x40 : number >> 16;
}
inline __m256i narrowed(__m512 v) {
    const __m256i packed = _mm256_packus_epi32((__m256i)rounded_to_bf16(half(v, 0)), (__m256i)rounded_to_bf16(half(v, 1)));
    return _mm256_permute4x64_epi64(packed, 0xd8);  // packing goes by blocks of 128 bits
}
inline __m256bh cvtneps_pbh(__m512 v) { return bits<__m256bh>(narrowed(v)); }
inline __m512bh cvtne2ps_pbh(__m512 upper, __m512 lower) {  // the second operand in the lower half
    const __m256i halves[2] = {narrowed(lower), narrowed(upper)};
    return bits<__m512bh>(halves);
}

// ---- AMX: eight tiles of up to 16 rows of 64 bytes, of each thread its own.

constexpr int kRows = 16, kRowBytes = 64, kTiles = 8;

struct Tile {
    alignas(64) uint8_t row[kRows][kRowBytes];
};
struct Shape {
    int rows, bytes;  // of a row
};
struct Tiles {
    bool configured;
    Shape shape[kTiles];
    Tile tile[kTiles];
};
inline thread_local Tiles tiles;

inline Shape shape_of(int tile) {
    if (!tiles.configured) fault("a tile is used and none was configured by this thread");
    const Shape shape = tiles.shape[tile];
    if (shape.rows == 0) fault("a tile is used that was configured without rows");
    return shape;
}

inline void tile_release() { tiles = {}; }
inline void tile_loadconfig(const void* from) {
    const auto* config = static_cast<const uint8_t*>(from);
    tile_release();
    if (config[0] == 0) return;
    if (config[0] > 1) fault("a palette of tiles that there is not");
    for (int i = 1; i < 64; ++i) {
        const bool used = (i >= 16 && i < 16 + 2 * kTiles) || (i >= 48 && i < 48 + kTiles);
        if (!used && config[i]) fault("a configuration of tiles with something in its reserved bytes");
    }
    for (int i = 0; i < kTiles; ++i) {
        const int bytes = config[16 + 2 * i] + 256 * config[17 + 2 * i], rows = config[48 + i];
        if (bytes > kRowBytes || rows > kRows || (bytes == 0) != (rows == 0)) fault("a shape that no tile has");
        tiles.shape[i] = {rows, bytes};
    }
    tiles.configured = true;
}

inline void tile_zero(int to) {
    shape_of(to);
    tiles.tile[to] = {};
}
inline void tile_loadd(int to, const void* from, int64_t stride) {
    const Shape shape = shape_of(to);
    tiles.tile[to] = {};
    for (int i = 0; i < shape.rows; ++i)
        std::memcpy(tiles.tile[to].row[i], static_cast<const char*>(from) + i * stride, shape.bytes);
}
inline void tile_stored(int from, void* to, int64_t stride) {
    const Shape shape = shape_of(from);
    for (int i = 0; i < shape.rows; ++i)
        std::memcpy(static_cast<char*>(to) + i * stride, tiles.tile[from].row[i], shape.bytes);
}

// Rows of the sums, words of a row of a.
inline Shape product_shape(int sums, int a, int b) {
    const Shape to = shape_of(sums), left = shape_of(a), right = shape_of(b);
    if (sums == a || sums == b || a == b) fault("a product of tiles one of which stands twice");
    if (to.bytes % 4 || left.bytes % 4 || right.bytes % 4) fault("a product of tiles with part of a word");
    if (to.rows != left.rows || to.bytes != right.bytes || left.bytes / 4 != right.rows)
        fault("a product of tiles whose shapes do not fit");
    return {to.rows, left.bytes / 4};
}

struct Words {
    U8 half[kRows][2];

    template <typename Of>
    Words(const Tile& tile, const Of& of) {
        for (int i = 0; i < kRows; ++i)
            for (int h = 0; h < 2; ++h) half[i][h] = (U8)of(part<U8>(tile.row[i], h));
    }
    // Word k of row m everywhere.
    U8 everywhere(int m, int k) const { return half[m][k / 8][k % 8] + U8{}; }
};

// Lower and upper numbers of all pairs are summed apart from zero on, in the order of the pairs; then both sums are added, and
// their sum to what was there. What a shape leaves out is zero in every tile and adds zeros.
inline void tile_dpbf16ps(int sums, int a, int b) {
    const Shape shape = product_shape(sums, a, b);
    const Words lower_a(tiles.tile[a], lower_numbers), upper_a(tiles.tile[a], upper_numbers);
    const Words lower_b(tiles.tile[b], lower_numbers), upper_b(tiles.tile[b], upper_numbers);
    for (int m = 0; m < shape.rows; ++m)
        for (int h = 0; h < 2; ++h) {
            F8 lower = {}, upper = {};
            for (int k = 0; k < shape.bytes; ++k) {
                lower = fused((F8)lower_a.everywhere(m, k), (F8)lower_b.half[k][h], lower);
                upper = fused((F8)upper_a.everywhere(m, k), (F8)upper_b.half[k][h], upper);
            }
            uint8_t* const to = tiles.tile[sums].row[m] + 32 * h;
            const F8 sum = flushed(flushed(load<F8>(to)) + flushed(lower + upper));
            std::memcpy(to, &sum, sizeof sum);
        }
}

// Bytes of a with a sign; those of b with one or without.
template <bool kSigned>
inline void byte_products(int sums, int a, int b) {
    const Shape shape = product_shape(sums, a, b);
    const auto even = [](U8 w) { return _mm256_srai_epi16(_mm256_slli_epi16((__m256i)w, 8), 8); };
    const auto odd = [](U8 w) { return _mm256_srai_epi16((__m256i)w, 8); };
    const auto even_b = [&](U8 w) { return kSigned ? even(w) : _mm256_and_si256((__m256i)w, _mm256_set1_epi16(0xff)); };
    const auto odd_b = [&](U8 w) { return kSigned ? odd(w) : _mm256_srli_epi16((__m256i)w, 8); };
    const Words left[2] = {{tiles.tile[a], even}, {tiles.tile[a], odd}};
    const Words right[2] = {{tiles.tile[b], even_b}, {tiles.tile[b], odd_b}};
    for (int m = 0; m < shape.rows; ++m)
        for (int h = 0; h < 2; ++h) {
            uint8_t* const to = tiles.tile[sums].row[m] + 32 * h;
            __m256i sum = load<__m256i>(to);
            for (int k = 0; k < shape.bytes; ++k)
                for (int odds = 0; odds < 2; ++odds)
                    sum = _mm256_add_epi32(sum, _mm256_madd_epi16((__m256i)left[odds].everywhere(m, k),
                                                                  (__m256i)right[odds].half[k][h]));
            std::memcpy(to, &sum, sizeof sum);
        }
}
inline void tile_dpbssd(int sums, int a, int b) { byte_products<true>(sums, a, b); }
inline void tile_dpbsud(int sums, int a, int b) { byte_products<false>(sums, a, b); }

// Linux is asked once whether a process may use tiles; here it may. Other calls are made.
inline long system_call(long number, int first, int second) {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    if (number != SYS_arch_prctl) return syscall(number, first, second);
    if (first != kRequestPermission || second != kTileData) fault("another question than the one for tiles");
    return 0;
}
template <class... Arguments>
long system_call(long number, Arguments... arguments) {
    return syscall(number, arguments...);
}

}  // namespace quire_emulated

// ---- The names by which the kernels call them. Constants that an instruction has inside become template arguments.

#undef _knot_mask16
#undef _mm512_setr_epi32
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_loadconfig
#undef _tile_loadd
#undef _tile_release
#undef _tile_stored
#undef _tile_zero
#define _knot_mask16 quire_emulated::knot_mask16
#define _mm512_abs_epi8 quire_emulated::abs_epi8
#define _mm512_abs_ps quire_emulated::abs_ps
#define _mm512_add_epi32 quire_emulated::add_epi32
#define _mm512_add_ps quire_emulated::add_ps
#define _mm512_and_si512 quire_emulated::and_si512
#define _mm512_broadcast_i32x4 quire_emulated::broadcast_i32x4
#define _mm512_castps512_ps256 quire_emulated::castps512_ps256
#define _mm512_castsi256_si512 quire_emulated::castsi256_si512
#define _mm512_cmp_ps_mask(a, b, constant) quire_emulated::cmp_ps_mask<constant>(a, b)
#define _mm512_cmpneq_epi32_mask quire_emulated::cmpneq_epi32_mask
#define _mm512_cvtepi16_epi32 quire_emulated::cvtepi16_epi32
#define _mm512_cvtepi32_epi16 quire_emulated::cvtepi32_epi16
#define _mm512_cvtepi32_epi8 quire_emulated::cvtepi32_epi8
#define _mm512_cvtepi32_ps quire_emulated::cvtepi32_ps
#define _mm512_cvtepi8_epi16 quire_emulated::cvtepi8_epi16
#define _mm512_cvtepi8_epi32 quire_emulated::cvtepi8_epi32
#define _mm512_cvtepu16_epi32 quire_emulated::cvtepu16_epi32
#define _mm512_cvtepu8_epi32 quire_emulated::cvtepu8_epi32
#define _mm512_cvtne2ps_pbh quire_emulated::cvtne2ps_pbh
#define _mm512_cvtneps_pbh quire_emulated::cvtneps_pbh
#define _mm512_cvtph_ps quire_emulated::cvtph_ps
#define _mm512_cvtps_epi32 quire_emulated::cvtps_epi32
#define _mm512_cvtps_ph(v, constant) quire_emulated::cvtps_ph<constant>(v)
#define _mm512_cvtsepi32_epi8 quire_emulated::cvtsepi32_epi8
#define _mm512_dpbf16_ps quire_emulated::dpbf16_ps
#define _mm512_dpbusd_epi32 quire_emulated::dpbusd_epi32
#define _mm512_dpwssd_epi32 quire_emulated::dpwssd_epi32
#define _mm512_extractf32x8_ps(v, constant) quire_emulated::extractf32x8_ps<constant>(v)
#define _mm512_fmadd_ps quire_emulated::fmadd_ps
#define _mm512_fmsub_ps quire_emulated::fmsub_ps
#define _mm512_fnmadd_ps quire_emulated::fnmadd_ps
#define _mm512_inserti64x4(a, b, constant) quire_emulated::inserti64x4<constant>(a, b)
#define _mm512_load_ps quire_emulated::load_ps
#define _mm512_load_si512 quire_emulated::load_si512
#define _mm512_loadu_ps quire_emulated::loadu_ps
#define _mm512_loadu_si512 quire_emulated::loadu_si512
#define _mm512_madd_epi16 quire_emulated::madd_epi16
#define _mm512_mask_broadcast_i32x4 quire_emulated::mask_broadcast_i32x4
#define _mm512_mask_mov_ps quire_emulated::mask_mov_ps
#define _mm512_mask_storeu_ps quire_emulated::mask_storeu_ps
#define _mm512_maskz_loadu_epi32 quire_emulated::maskz_loadu_epi32
#define _mm512_maskz_mov_epi32 quire_emulated::maskz_mov_epi32
#define _mm512_maskz_scalef_ps quire_emulated::maskz_scalef_ps
#define _mm512_max_ps quire_emulated::max_ps
#define _mm512_mullo_epi32 quire_emulated::mullo_epi32
#define _mm512_or_si512 quire_emulated::or_si512
#define _mm512_permutex2var_epi16 quire_emulated::permutex2var_epi16
#define _mm512_permutex2var_epi8 quire_emulated::permutex2var_epi8
#define _mm512_permutex2var_epi32 quire_emulated::permutex2var_epi32
#define _mm512_permutex2var_ps quire_emulated::permutex2var_ps
#define _mm512_permutexvar_epi8 quire_emulated::permutexvar_epi8
#define _mm512_permutexvar_epi16 quire_emulated::permutexvar_epi16
#define _mm512_permutexvar_epi64 quire_emulated::permutexvar_epi64
#define _mm512_reduce_add_epi32 quire_emulated::reduce_add_epi32
#define _mm512_reduce_add_ps quire_emulated::reduce_add_ps
#define _mm512_reduce_max_ps quire_emulated::reduce_max_ps
#define _mm512_reduce_ps(v, constant) quire_emulated::reduce_ps<constant>(v)
#define _mm512_roundscale_ps(v, constant) quire_emulated::roundscale_ps<constant>(v)
#define _mm512_set1_epi16 quire_emulated::set1_epi16
#define _mm512_set1_epi32 quire_emulated::set1_epi32
#define _mm512_set1_epi8 quire_emulated::set1_epi8
#define _mm512_set1_ps quire_emulated::set1_ps
#define _mm512_set_epi16 quire_emulated::set_epi16
#define _mm512_setr_epi32 quire_emulated::setr_epi32
#define _mm512_setzero_ps quire_emulated::setzero_ps
#define _mm512_setzero_si512 quire_emulated::setzero_si512
#define _mm512_shuffle_epi8 quire_emulated::shuffle_epi8
#define _mm512_shuffle_i32x4(a, b, constant) quire_emulated::shuffle_i32x4<constant>(a, b)
#define _mm512_slli_epi32 quire_emulated::slli_epi32
#define _mm512_srai_epi32 quire_emulated::srai_epi32
#define _mm512_srli_epi16 quire_emulated::srli_epi16
#define _mm512_srli_epi32 quire_emulated::srli_epi32
#define _mm512_store_ps quire_emulated::store_ps
#define _mm512_store_si512 quire_emulated::store_si512
#define _mm512_storeu_ps quire_emulated::storeu_ps
#define _mm512_storeu_si512 quire_emulated::storeu_si512
#define _mm512_sub_epi16 quire_emulated::sub_epi16
#define _mm512_sub_epi32 quire_emulated::sub_epi32
#define _mm512_unpackhi_epi16 quire_emulated::unpackhi_epi16
#define _mm512_unpackhi_epi32 quire_emulated::unpackhi_epi32
#define _mm512_unpackhi_epi64 quire_emulated::unpackhi_epi64
#define _mm512_unpackhi_epi8 quire_emulated::unpackhi_epi8
#define _mm512_unpacklo_epi16 quire_emulated::unpacklo_epi16
#define _mm512_unpacklo_epi32 quire_emulated::unpacklo_epi32
#define _mm512_unpacklo_epi64 quire_emulated::unpacklo_epi64
#define _mm512_unpacklo_epi8 quire_emulated::unpacklo_epi8
#define _mm512_xor_si512 quire_emulated::xor_si512
#define _tile_dpbf16ps quire_emulated::tile_dpbf16ps
#define _tile_dpbssd quire_emulated::tile_dpbssd
#define _tile_dpbsud quire_emulated::tile_dpbsud
#define _tile_loadconfig quire_emulated::tile_loadconfig
#define _tile_loadd quire_emulated::tile_loadd
#define _tile_release quire_emulated::tile_release
#define _tile_stored quire_emulated::tile_stored
#define _tile_zero quire_emulated::tile_zero

// ---- What the compiler would say of such a processor; after its own headers, which would believe it.

#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512DQ__ 1
#define __AVX512VL__ 1
#define __AVX512CD__ 1
#if defined(QUIRE_EMULATED_VNNI) || defined(QUIRE_EMULATED_BF16) || defined(QUIRE_EMULATED_AMX)
#define __AVX512VNNI__ 1
#endif
#if defined(QUIRE_EMULATED_BF16) || defined(QUIRE_EMULATED_AMX)
#define __AVX512BF16__ 1
#define __AVX512VBMI__ 1
#endif
#if defined(QUIRE_EMULATED_AMX)
#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1
#define syscall quire_emulated::system_call
#endif
