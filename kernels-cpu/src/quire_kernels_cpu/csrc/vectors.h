// Vectors of the width the instruction set has, and the number formats that tensors come in.
//
// Everything here is written for any width with the compiler's vector types, so that AVX2, AVX-512, NEON and SVE share
// it; intrinsics appear only where the compiler cannot find the instruction itself.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#if defined(__ARM_FEATURE_SVE_BITS) && __ARM_FEATURE_SVE_BITS == 256
#include <arm_sve.h>
#define QUIRE_SVE  // vectors of 256 bits, as Neoverse V1 has them; those of 128 bits gain nothing over NEON
#endif
#endif

namespace quire {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__) || defined(QUIRE_SVE)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));
typedef int16_t Shorts __attribute__((vector_size(kLanes * 4)));

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

inline Floats splat(float x) { return x - Floats{}; }  // minus zero: what changes no number costs nothing

inline float to_float(float x) { return x; }
inline float to_float(BFloat16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline float to_float(Float16 x) {
#if defined(__aarch64__)
    __fp16 value;
    std::memcpy(&value, &x, 2);
    return value;
#else
    return _cvtsh_ss(x.bits);
#endif
}

#if defined(QUIRE_SVE)
typedef svfloat32_t SveFloats __attribute__((arm_sve_vector_bits(256)));
typedef svuint32_t SveWords __attribute__((arm_sve_vector_bits(256)));
inline Floats of_sve(svfloat32_t v) { return (Floats)(SveFloats)v; }
inline Words of_sve(svuint32_t v) { return (Words)(SveWords)v; }
inline svbool_t all_lanes() { return svptrue_b32(); }
#endif

inline Floats load(const float* from) {
    Floats v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
// gcc widens and narrows the compiler's vectors half by half, in seven instructions for what takes one.
inline Words widened(Halves h) {
#if defined(__AVX512F__)
    return (Words)_mm512_cvtepu16_epi32((__m256i)h);
#elif defined(__AVX2__)
    return (Words)_mm256_cvtepu16_epi32((__m128i)h);
#else
    return __builtin_convertvector(h, Words);
#endif
}
inline Halves narrowed(Words w) {
#if defined(__AVX512F__)
    return (Halves)_mm512_cvtepi32_epi16((__m512i)w);
#else
    return __builtin_convertvector(w, Halves);
#endif
}
inline Floats load(const BFloat16* from) {
#if defined(QUIRE_SVE)
    return (Floats)(of_sve(svld1uh_u32(all_lanes(), &from->bits)) << 16);
#else
    Halves h;
    std::memcpy(&h, from, sizeof h);
    return (Floats)(widened(h) << 16);
#endif
}
#if defined(__AVX2__)
typedef int16_t HalfInts __attribute__((vector_size(kLanes * 2)));
inline Floats half_to_floats(HalfInts half) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps((__m256i)half);
#else
    return (Floats)_mm256_cvtph_ps((__m128i)half);
#endif
}
#endif
inline Floats load(const Float16* from) {
#if defined(QUIRE_SVE)
    const svuint32_t h = svld1uh_u32(all_lanes(), &from->bits);
    return of_sve(svcvt_f32_f16_x(all_lanes(), svreinterpret_f16_u32(h)));
#elif defined(__aarch64__)
    float16x4_t h;
    std::memcpy(&h, from, sizeof h);
    return (Floats)vcvt_f32_f16(h);
#else
    HalfInts h;
    std::memcpy(&h, from, sizeof h);
    return half_to_floats(h);
#endif
}
inline Floats load(const int8_t* from) {
#if defined(QUIRE_SVE)
    return of_sve(svcvt_f32_s32_x(all_lanes(), svld1sb_s32(all_lanes(), from)));
#elif defined(__aarch64__)
    // gcc would widen these four bytes one by one.
    int32_t word;
    std::memcpy(&word, from, sizeof word);
    return (Floats)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(word))))));
#elif defined(__AVX512F__)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
    int8_t bytes __attribute__((vector_size(kLanes)));
    std::memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(bytes, Floats);
#endif
}

// 1 sign, 4 exponent and 3 mantissa bits, no infinities (Micikevicius et al. 2022, e4m3). A code that is no number is
// read as 480: whoever loads a checkpoint refuses it.
struct Float8 {
    uint8_t bits;
};
inline Words load_codes(const uint8_t* from) {
#if defined(__AVX512F__)
    return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__AVX2__)
    return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#elif defined(QUIRE_SVE)
    return of_sve(svld1ub_u32(all_lanes(), from));
#else
    uint8_t bytes __attribute__((vector_size(kLanes)));
    std::memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(bytes, Words);
#endif
}
#if defined(__AVX2__)
inline HalfInts load_signed_codes(const void* from) {
#if defined(__AVX512F__)
    return (HalfInts)_mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(from)));
#else
    return (HalfInts)_mm_cvtepi8_epi16(_mm_loadl_epi64(static_cast<const __m128i*>(from)));
#endif
}
// Codes of e4m3 as half precision, which has the same numbers with exponents that are 8 less: 2^-8 times what they are.
inline HalfInts half_of_e4m3(HalfInts codes) { return codes << 7 & int16_t(0xbfff); }
#endif
inline Floats load(const Float8* from) {
#if defined(__AVX2__)
    return half_to_floats(half_of_e4m3(load_signed_codes(from))) * 256.0f;
#else
    const Words code = load_codes(&from->bits);
    const Words magnitude = code & 0x7f;
    const Floats tiny = __builtin_convertvector((Ints)magnitude, Floats) * 0x1p-9f;  // below 2^-6 steps are even
    const Words normal = (magnitude << 20) + (120u << 23);
    return (Floats)((magnitude < 8 ? (Words)tiny : normal) | (code & 0x80) << 24);
#endif
}

inline void store(float* to, Floats v) { std::memcpy(to, &v, sizeof v); }
// Round to nearest even; a NaN stays one.
inline Halves round_to_bf16(Floats v) {
    const Words bits = (Words)v;
    const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const Words nan = (bits >> 16) | 0x40u;
    return narrowed((Words)(v != v ? (Ints)nan : (Ints)rounded));
}
inline void store(BFloat16* to, Floats v) {
#if defined(__AVX512BF16__)
    const __m256bh h = _mm512_cvtneps_pbh((__m512)v);
#else
    const Halves h = round_to_bf16(v);
#endif
    std::memcpy(to, &h, sizeof h);
}
inline void store(Float16* to, Floats v) {
#if defined(QUIRE_SVE)
    const svfloat16_t h = svcvt_f16_f32_x(all_lanes(), (SveFloats)v);
    svst1h_u32(all_lanes(), &to->bits, svreinterpret_u32_f16(h));
#else
    constexpr int kNearest = 0;  // to even, as everywhere
#if defined(__AVX512F__)
    const __m256i h = _mm512_cvtps_ph((__m512)v, kNearest);
#elif defined(__aarch64__)
    (void)kNearest;
    const float16x4_t h = vcvt_f16_f32((float32x4_t)v);
#else
    const __m128i h = _mm256_cvtps_ph((__m256)v, kNearest);
#endif
    std::memcpy(to, &h, sizeof h);
#endif
}
inline void store_one(float* to, float x) { *to = x; }
inline void store_one(BFloat16* to, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    to->bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u
                                                                        : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
inline void store_one(Float16* to, float x) {
#if defined(__aarch64__)
    const __fp16 h = static_cast<__fp16>(x);
    std::memcpy(to, &h, 2);
#else
    to->bits = static_cast<uint16_t>(_cvtss_sh(x, 0));
#endif
}
// What x becomes when it is kept in T.
inline Floats rounded(Floats v, float) { return v; }
inline Floats rounded(Floats v, BFloat16) {
#if defined(__AVX512BF16__)
    return (Floats)(widened((Halves)_mm512_cvtneps_pbh((__m512)v)) << 16);
#else
    return (Floats)(widened(round_to_bf16(v)) << 16);
#endif
}
inline Floats rounded(Floats v, Float16) {
    Float16 kept[kLanes];
    store(kept, v);
    return load(kept);
}

// The first `count` lanes, zeros behind them.
template <typename T>
inline Floats load_first(const T* from, int count) {
    T padded[kLanes] = {};
    std::memcpy(padded, from, count * sizeof(T));
    return load(padded);
}
template <typename T>
inline void store_first(T* to, Floats v, int count) {
    T whole[kLanes];
    store(whole, v);
    std::memcpy(to, whole, count * sizeof(T));
}

// As these, but whole vectors of what has `count` numbers or more; of 0 or less there is nothing to load or store.
template <typename T>
inline Floats load_some(const T* from, int64_t count) {
    return count >= kLanes ? load(from) : load_first(from, static_cast<int>(std::max<int64_t>(count, 0)));
}
template <typename T>
inline void store_some(T* to, Floats v, int64_t count) {
    if (count >= kLanes) {
        store(to, v);
    } else if (count > 0) {
        store_first(to, v, static_cast<int>(count));
    }
}

// Has a vector loaded once: compilers would rather read it from memory wherever it is used.
template <typename Vector>
inline void in_register(Vector& v) {
#if defined(__aarch64__)
    asm("" : "+w"(v));
#else
    if constexpr (sizeof(Vector) <= __BIGGEST_ALIGNMENT__) {
        asm("" : "+v"(v));
    } else {
        asm("" : "+m"(v));  // wider than any register, as where tests emulate AVX-512
    }
#endif
}

// Of 2 * kLanes numbers those with even places, and those with odd ones.
inline Floats even_numbers(const BFloat16* from) {
    Words both;
    std::memcpy(&both, from, sizeof both);
    return (Floats)(both << 16);
}
inline Floats odd_numbers(const BFloat16* from) {
    Words both;
    std::memcpy(&both, from, sizeof both);
    return (Floats)(both & 0xffff0000u);
}

// 2 * kLanes numbers of 8 bits.
inline Shorts widened_bytes(const int8_t* from) {
#if defined(__AVX512BW__)
    return (Shorts)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__)
    return (Shorts)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    int8_t bytes __attribute__((vector_size(kLanes * 2)));
    std::memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(bytes, Shorts);
#endif
}
// sum + products, added two by two.
inline Ints plus_pair_products(Ints sum, Shorts a, Shorts b) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
    return sum + (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return sum + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(QUIRE_SVE)
    return sum + ((Ints)a << 16 >> 16) * ((Ints)b << 16 >> 16) + ((Ints)a >> 16) * ((Ints)b >> 16);
#else
    const int16x8_t left = (int16x8_t)a, right = (int16x8_t)b;
    const int32x4_t low = vmull_s16(vget_low_s16(left), vget_low_s16(right));
    return sum + (Ints)vmlal_s16(low, vget_high_s16(left), vget_high_s16(right));
#endif
}
inline Floats whole_to_floats(Ints v) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtepi32_ps((__m512i)v);
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtepi32_ps((__m256i)v);
#else
    return __builtin_convertvector(v, Floats);
#endif
}

// a * b + c, rounded once wherever there is an instruction for it: compilers may choose differently from loop to loop.
inline Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(QUIRE_SVE)
    return of_sve(svmla_f32_x(all_lanes(), (SveFloats)c, (SveFloats)a, (SveFloats)b));
#elif defined(__aarch64__)
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// sum + a * b, rounded once. Where there are 16 registers gcc now and then has a product take the place of an operand and
// spills sums for it: with all of them in use it must not choose.
inline Floats accumulated(Floats sum, Floats a, Floats b) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    asm volatile("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    return sum;
#else
    return fused(a, b, sum);
#endif
}

// Whether any of them is not below a number, or none itself.
inline bool any_not_below(Floats v, float limit) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)v, (__m512)splat(limit), _CMP_NLT_UQ) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)v, (__m256)splat(limit), _CMP_NLT_UQ)) != 0;
#else
    bool any = false;
    for (int i = 0; i < kLanes; ++i) any |= !(v[i] < limit);
    return any;
#endif
}

inline Floats max(Floats a, Floats b) { return a > b ? a : b; }

// One fixed order of additions, whoever asks.
inline float sum(Floats v) {
    float lane[kLanes];
    std::memcpy(lane, &v, sizeof v);
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
    return lane[0];
#endif
}

// The largest lane, of lanes that are numbers.
inline float highest_lane(Floats v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float highest = v[0];
    for (int i = 1; i < kLanes; ++i) highest = v[i] > highest ? v[i] : highest;
    return highest;
#endif
}

// The lanes of each of four vectors, added in one order.
inline void sum_four(const Floats v[4], float to[4]) {
#if defined(__AVX2__)
    __m256 lanes[4];
    for (int i = 0; i < 4; ++i) {
#if defined(__AVX512F__)
        const __m512 whole = (__m512)v[i];
        lanes[i] = _mm256_add_ps(_mm512_castps512_ps256(whole), _mm512_extractf32x8_ps(whole, 1));
#else
        lanes[i] = (__m256)v[i];
#endif
    }
    const __m256 quads = _mm256_hadd_ps(_mm256_hadd_ps(lanes[0], lanes[1]), _mm256_hadd_ps(lanes[2], lanes[3]));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(quads), _mm256_extractf128_ps(quads, 1)));
#else
    for (int i = 0; i < 4; ++i) to[i] = sum(v[i]);
#endif
}

// 2^r on [-1/2, 1/2] by its Taylor polynomial of degree 6.
inline Floats power_of_two(Floats r) {
    Floats p = splat(0.000154035304f);
    p = p * r + 0.00133335581f;
    p = p * r + 0.00961812911f;
    p = p * r + 0.0555041087f;
    p = p * r + 0.240226507f;
    p = p * r + 0.693147181f;
    return p * r + 1.0f;
}

// e^x within two units in the last place; 0 below -87, where float32 has no room left.
__attribute__((always_inline)) inline Floats exp(Floats x) {
#if defined(__AVX512F__)
    // Of the two operands of max the second comes through when one is not a number. Results too small for a normal
    // number become zeros by the mask: the instruction would take its slow path for them.
    const Floats scaled = (Floats)_mm512_max_ps((__m512)splat(-87.0f), (__m512)x) * 1.44269504088896341f;
    const __mmask16 kept = _mm512_cmp_ps_mask((__m512)x, (__m512)splat(-87.0f), _CMP_NLT_UQ);
    const Floats whole = (Floats)_mm512_roundscale_ps((__m512)scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Floats p = power_of_two(scaled - whole);
    return (Floats)_mm512_maskz_scalef_ps(kept, (__m512)p, (__m512)whole);
#else
    const Floats scaled = x * 1.44269504088896341f;
    const Floats clamped = scaled > 127.0f ? splat(127.0f) : scaled;
    const Floats whole = (clamped + 12582912.0f) - 12582912.0f;
    const Ints bits = (Ints)power_of_two(clamped - whole) + (__builtin_convertvector(whole, Ints) << 23);
    const Floats kept = x > -87.0f ? (Floats)bits : splat(0.0f);
    return x == x ? kept : x;
#endif
}

inline Floats sigmoid(Floats x) { return 1.0f / (1.0f + exp(-x)); }
inline Floats silu(Floats x) { return x / (1.0f + exp(-x)); }
// Near zero an odd polynomial, fitted to tanh within 4.4e-9 of it for |x| < 0.625: there e^2x - 1 has lost its last digits.
inline Floats tanh(Floats x) {
    const Floats bounded = x > 15.0f ? splat(15.0f) : (x < -15.0f ? splat(-15.0f) : x);
    const Floats e = exp(bounded * 2.0f);
    const Floats far = (e - 1.0f) / (e + 1.0f);
    const Floats q = x * x;
    Floats p = splat(-0.00570499664f);
    p = p * q + 0.0206390955f;
    p = p * q - 0.0537397191f;
    p = p * q + 0.133314416f;
    p = p * q - 0.333332807f;
    const Floats near = x + x * q * p;
    return q >= 0.390625f ? far : near;
}
// e^x - 1. The square of e^(x/2) overflows only where e^x does.
inline Floats expm1(Floats x) {
    const Floats half = exp(x * 0.5f), t = tanh(x * 0.5f);
    return x * x >= 1.0f ? half * half - 1.0f : 2.0f * t / (1.0f - t);
}
inline Floats gelu(Floats x) {
    return 0.5f * x * (1.0f + tanh(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}
// x times the share of a standard normal distribution that is below x: the share beyond |x| is e^(-x^2/2) times a polynomial
// of 1 / (1 + 0.35 |x|), which was fitted to it within 3.2e-8 of it for |x| < 14.
inline Floats gelu_erf(Floats x) {
    const Floats size = x < 0.0f ? -x : x;
    const Floats t = 1.0f / (1.0f + 0.35f * size);
    Floats p = splat(-0.0291459225f);
    p = p * t + 0.143971667f;
    p = p * t - 0.255714208f;
    p = p * t + 0.159174129f;
    p = p * t - 0.0231098291f;
    p = p * t + 0.105508007f;
    p = p * t + 0.119832866f;
    p = p * t + 0.139861867f;
    p = p * t + 0.139621407f;
    const Floats beyond = p * t * exp(x * x * -0.5f);
    return x * (x < 0.0f ? beyond : 1.0f - beyond);
}

// run(how many as a constant) for a count from 1 to kMost.
template <int kMost, typename Run>
inline void with_count(int64_t count, const Run& run) {
    if constexpr (kMost > 1) {
        if (count < kMost) return with_count<kMost - 1>(count, run);
    }
    run(std::integral_constant<int, kMost>{});
}

}  // namespace quire
