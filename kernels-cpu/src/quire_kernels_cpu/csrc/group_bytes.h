// How weights of one byte in groups (`groups.h`) meet the numbers of tokens: in float32, or in bfloat16 two at a time where
// the network and the processor have that. A weight without its scale is exact in both.
#pragma once

#include "activations.h"
#include "vectors.h"
#include "weights.h"

namespace quire {

// kStep inputs at a time. What fp8 is widened to times `factor<Float8>` is the weight.
template <typename T>
struct ByteDot {
    using Number = float;
    using Operand = Floats;
    static constexpr int kStep = kLanes;

    static const Number* token(const Activations& x, int64_t t) { return x.row(t); }
    static Operand read(const Number* from) { return load(from); }
    static void keep(Number* to, Operand numbers) { store(to, numbers); }
    static Floats add(Floats sum, Operand a, Operand b) { return accumulated(sum, a, b); }
    template <typename W>
    static Operand widened(const W* from, float zero) {
        return load(from) - splat(zero);
    }
    template <typename W>
    static constexpr float factor = 1.0f;
};

#if defined(__AVX512BF16__)
// 32 numbers of e4m3 -> bfloat16, by way of float16, whose exponent has the same place: 2^8 smaller.
inline __m512i widen_float8(__m256i codes) {
    const __m512i shifted = _mm512_srai_epi16(_mm512_slli_epi16(_mm512_cvtepu8_epi16(codes), 8), 1);
    const __m512i halves = _mm512_and_si512(shifted, _mm512_set1_epi16(static_cast<int16_t>(0xbfff)));
    const __m512 low = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
    const __m512 high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}
constexpr float kFloat8Factor = 0x1p-8f;

template <>
struct ByteDot<BFloat16> {
    using Number = BFloat16;
    using Operand = Shorts;
    static constexpr int kStep = 2 * kLanes;

    static const Number* token(const Activations& x, int64_t t) { return x.bf16_row(t); }
    static Operand read(const Number* from) { return (Shorts)_mm512_loadu_si512(from); }
    static void keep(Number* to, Operand numbers) { std::memcpy(to, &numbers, sizeof numbers); }
    static Floats add(Floats sum, Operand a, Operand b) {
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    }
    // Differences of bytes have eight bits and a sign, as bfloat16 has.
    static Operand widened(const int8_t* from, float zero) {
        const Floats low = load(from) - zero, high = load(from + kLanes) - zero;
        return (Shorts)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    }
    static Operand widened(const Float8* from, float) {
        return (Shorts)widen_float8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    }
    template <typename W>
    static constexpr float factor = std::is_same_v<W, Float8> ? 1.0f / kFloat8Factor : 1.0f;
};
#endif

// The first `count` weights of a step; behind them stands what meets zeros.
template <typename T, typename W>
inline typename ByteDot<T>::Operand widened_step(const W* from, int count, float zero) {
    using Dot = ByteDot<T>;
    if (count == Dot::kStep) return Dot::widened(from, zero);
    W padded[Dot::kStep] = {};
    std::memcpy(padded, from, count * sizeof *padded);
    return Dot::widened(padded, zero);
}

}  // namespace quire
