// Each instruction that `immintrin.h` beside this file has in C++, as a C function of its operands: compiled with that header,
// or without it where a processor has the instructions, so that tests can compare both with definitions of their own.
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

namespace {

struct Operands {
    alignas(64) unsigned char a[64], b[64], c[64];
    uint32_t mask;
};

template <typename Vector>
Vector of(const unsigned char* from) {
    Vector v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

__m256i lower_half(const __m512i& v) {
    __m256i half;
    std::memcpy(&half, &v, sizeof half);
    return half;
}

}  // namespace

#define CHECK(name, result)                                                  \
    extern "C" void name([[maybe_unused]] const Operands& in, void* to) {    \
        const auto value = result;                                           \
        std::memcpy(to, &value, sizeof value);                               \
    }
#define FLOATS(x) of<__m512>(in.x)
#define WORDS(x) of<__m512i>(in.x)
#define BF16(x) of<__m512bh>(in.x)
#define MASK16 static_cast<__mmask16>(in.mask)

CHECK(load_ps, _mm512_load_ps(in.a))
CHECK(load_si512, _mm512_load_si512(in.a))
CHECK(loadu_ps, _mm512_loadu_ps(in.a + 3))
CHECK(loadu_si512, _mm512_loadu_si512(in.a + 3))
CHECK(maskz_loadu_epi32, _mm512_maskz_loadu_epi32(MASK16, in.a + 3))
extern "C" void store_ps(const Operands& in, void* to) { _mm512_store_ps(static_cast<float*>(to), FLOATS(a)); }
extern "C" void store_si512(const Operands& in, void* to) { _mm512_store_si512(to, WORDS(a)); }
extern "C" void mask_storeu_ps(const Operands& in, void* to) {
    _mm512_mask_storeu_ps(static_cast<char*>(to) + 3, MASK16, FLOATS(a));
}
extern "C" void storeu_ps(const Operands& in, void* to) { _mm512_storeu_ps(static_cast<char*>(to) + 3, FLOATS(a)); }
extern "C" void storeu_si512(const Operands& in, void* to) { _mm512_storeu_si512(static_cast<char*>(to) + 3, WORDS(a)); }
CHECK(setzero_ps, _mm512_setzero_ps())
CHECK(setzero_si512, _mm512_setzero_si512())
CHECK(set1_ps, _mm512_set1_ps(of<float>(in.a)))
CHECK(set1_epi8, _mm512_set1_epi8(static_cast<char>(in.a[0])))
CHECK(set1_epi16, _mm512_set1_epi16(of<int16_t>(in.a)))
CHECK(set1_epi32, _mm512_set1_epi32(of<int32_t>(in.a)))
CHECK(setr_epi32, _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, -15))
CHECK(set_epi16, _mm512_set_epi16(-31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13, 12, 11, 10, 9, 8,
                                  7, 6, 5, 4, 3, 2, 1, 0))
CHECK(castps512_ps256, _mm512_castps512_ps256(FLOATS(a)))
CHECK(castsi256_si512, lower_half(_mm512_castsi256_si512(of<__m256i>(in.a))))
CHECK(broadcast_i32x4, _mm512_broadcast_i32x4(of<__m128i>(in.a)))
CHECK(mask_broadcast_i32x4, _mm512_mask_broadcast_i32x4(WORDS(a), MASK16, of<__m128i>(in.b)))
CHECK(extractf32x8_ps_0, _mm512_extractf32x8_ps(FLOATS(a), 0))
CHECK(extractf32x8_ps_1, _mm512_extractf32x8_ps(FLOATS(a), 1))
CHECK(inserti64x4_0, _mm512_inserti64x4(WORDS(a), of<__m256i>(in.b), 0))
CHECK(inserti64x4_1, _mm512_inserti64x4(WORDS(a), of<__m256i>(in.b), 1))

CHECK(add_ps, _mm512_add_ps(FLOATS(a), FLOATS(b)))
CHECK(max_ps, _mm512_max_ps(FLOATS(a), FLOATS(b)))
CHECK(abs_ps, _mm512_abs_ps(FLOATS(a)))
CHECK(fmadd_ps, _mm512_fmadd_ps(FLOATS(a), FLOATS(b), FLOATS(c)))
CHECK(fmsub_ps, _mm512_fmsub_ps(FLOATS(a), FLOATS(b), FLOATS(c)))
CHECK(fnmadd_ps, _mm512_fnmadd_ps(FLOATS(a), FLOATS(b), FLOATS(c)))
CHECK(reduce_add_ps, _mm512_reduce_add_ps(FLOATS(a)))
CHECK(reduce_max_ps, _mm512_reduce_max_ps(_mm512_max_ps(FLOATS(a), _mm512_set1_ps(1.0f))))
CHECK(roundscale_ps_nearest, _mm512_roundscale_ps(FLOATS(a), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))
CHECK(roundscale_ps_down, _mm512_roundscale_ps(FLOATS(a), _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC))
CHECK(reduce_ps_down, _mm512_reduce_ps(FLOATS(a), _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC))
CHECK(reduce_ps_nearest, _mm512_reduce_ps(FLOATS(a), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))
CHECK(maskz_scalef_ps, _mm512_maskz_scalef_ps(MASK16, FLOATS(a), FLOATS(b)))
CHECK(add_epi32, _mm512_add_epi32(WORDS(a), WORDS(b)))
CHECK(sub_epi16, _mm512_sub_epi16(WORDS(a), WORDS(b)))
CHECK(sub_epi32, _mm512_sub_epi32(WORDS(a), WORDS(b)))
CHECK(mullo_epi32, _mm512_mullo_epi32(WORDS(a), WORDS(b)))
CHECK(and_si512, _mm512_and_si512(WORDS(a), WORDS(b)))
CHECK(or_si512, _mm512_or_si512(WORDS(a), WORDS(b)))
CHECK(xor_si512, _mm512_xor_si512(WORDS(a), WORDS(b)))
CHECK(abs_epi8, _mm512_abs_epi8(WORDS(a)))
CHECK(madd_epi16, _mm512_madd_epi16(WORDS(a), WORDS(b)))
CHECK(slli_epi32_7, _mm512_slli_epi32(WORDS(a), 7))
CHECK(srai_epi32_7, _mm512_srai_epi32(WORDS(a), 7))
CHECK(srli_epi16_4, _mm512_srli_epi16(WORDS(a), 4))
CHECK(reduce_add_epi32, _mm512_reduce_add_epi32(WORDS(a)))

CHECK(cmp_ps_mask_unordered, _mm512_cmp_ps_mask(FLOATS(a), FLOATS(b), _CMP_UNORD_Q))
CHECK(cmp_ps_mask_not_less, _mm512_cmp_ps_mask(FLOATS(a), FLOATS(b), _CMP_NLT_UQ))
CHECK(cmpneq_epi32_mask, _mm512_cmpneq_epi32_mask(WORDS(a), WORDS(b)))
CHECK(knot_mask16, _knot_mask16(MASK16))
CHECK(mask_mov_ps, _mm512_mask_mov_ps(FLOATS(a), MASK16, FLOATS(b)))
CHECK(maskz_mov_epi32, _mm512_maskz_mov_epi32(MASK16, WORDS(a)))

CHECK(cvtepi16_epi32, _mm512_cvtepi16_epi32(of<__m256i>(in.a)))
CHECK(cvtepu16_epi32, _mm512_cvtepu16_epi32(of<__m256i>(in.a)))
CHECK(cvtepi8_epi16, _mm512_cvtepi8_epi16(of<__m256i>(in.a)))
CHECK(cvtepi8_epi32, _mm512_cvtepi8_epi32(of<__m128i>(in.a)))
CHECK(cvtepu8_epi32, _mm512_cvtepu8_epi32(of<__m128i>(in.a)))
CHECK(cvtepi32_epi16, _mm512_cvtepi32_epi16(WORDS(a)))
CHECK(cvtepi32_epi8, _mm512_cvtepi32_epi8(WORDS(a)))
CHECK(cvtsepi32_epi8, _mm512_cvtsepi32_epi8(WORDS(a)))
CHECK(cvtepi32_ps, _mm512_cvtepi32_ps(WORDS(a)))
CHECK(cvtps_epi32, _mm512_cvtps_epi32(FLOATS(a)))
CHECK(cvtph_ps, _mm512_cvtph_ps(of<__m256i>(in.a)))
CHECK(cvtps_ph, _mm512_cvtps_ph(FLOATS(a), 0))

CHECK(permutex2var_epi16, _mm512_permutex2var_epi16(WORDS(a), WORDS(c), WORDS(b)))
CHECK(permutex2var_epi32, _mm512_permutex2var_epi32(WORDS(a), WORDS(c), WORDS(b)))
CHECK(permutex2var_ps, _mm512_permutex2var_ps(FLOATS(a), WORDS(c), FLOATS(b)))
CHECK(permutexvar_epi16, _mm512_permutexvar_epi16(WORDS(c), WORDS(a)))
CHECK(permutexvar_epi64, _mm512_permutexvar_epi64(WORDS(c), WORDS(a)))
CHECK(shuffle_epi8, _mm512_shuffle_epi8(WORDS(a), WORDS(c)))
CHECK(shuffle_i32x4_88, _mm512_shuffle_i32x4(WORDS(a), WORDS(b), 0x88))
CHECK(shuffle_i32x4_dd, _mm512_shuffle_i32x4(WORDS(a), WORDS(b), 0xdd))
CHECK(shuffle_i32x4_44, _mm512_shuffle_i32x4(WORDS(a), WORDS(b), 0x44))
CHECK(shuffle_i32x4_ee, _mm512_shuffle_i32x4(WORDS(a), WORDS(b), 0xee))
CHECK(shuffle_i32x4_1b, _mm512_shuffle_i32x4(WORDS(a), WORDS(b), 0x1b))
CHECK(unpacklo_epi8, _mm512_unpacklo_epi8(WORDS(a), WORDS(b)))
CHECK(unpackhi_epi8, _mm512_unpackhi_epi8(WORDS(a), WORDS(b)))
CHECK(unpacklo_epi16, _mm512_unpacklo_epi16(WORDS(a), WORDS(b)))
CHECK(unpackhi_epi16, _mm512_unpackhi_epi16(WORDS(a), WORDS(b)))
CHECK(unpacklo_epi32, _mm512_unpacklo_epi32(WORDS(a), WORDS(b)))
CHECK(unpackhi_epi32, _mm512_unpackhi_epi32(WORDS(a), WORDS(b)))
CHECK(unpacklo_epi64, _mm512_unpacklo_epi64(WORDS(a), WORDS(b)))
CHECK(unpackhi_epi64, _mm512_unpackhi_epi64(WORDS(a), WORDS(b)))

#if defined(__AVX512VNNI__)
CHECK(dpbusd_epi32, _mm512_dpbusd_epi32(WORDS(c), WORDS(a), WORDS(b)))
CHECK(dpwssd_epi32, _mm512_dpwssd_epi32(WORDS(c), WORDS(a), WORDS(b)))
#endif
#if defined(__AVX512VBMI__)
CHECK(permutexvar_epi8, _mm512_permutexvar_epi8(WORDS(c), WORDS(a)))
CHECK(permutex2var_epi8, _mm512_permutex2var_epi8(WORDS(a), WORDS(c), WORDS(b)))
#endif
#if defined(__AVX512BF16__)
CHECK(dpbf16_ps, _mm512_dpbf16_ps(FLOATS(c), BF16(a), BF16(b)))
CHECK(cvtneps_pbh, _mm512_cvtneps_pbh(FLOATS(a)))
CHECK(cvtne2ps_pbh, _mm512_cvtne2ps_pbh(FLOATS(a), FLOATS(b)))
#endif

#if defined(__AMX_TILE__)
// Whether the system gives this process tiles.
extern "C" int request_tiles() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

struct Matrix {
    void* data;
    int64_t stride;
};

// sums = (sums, or zeros) + a x b of tiles that `config` shapes: 0 the sums, 1 a, 2 b. kind: 0 bfloat16, 1 signed bytes, 2
// signed bytes of a and unsigned ones of b.
extern "C" void tile_product(const unsigned char* config, int kind, int from_zero, const Matrix& sums, const Matrix& a,
                             const Matrix& b) {
    _tile_loadconfig(config);
    _tile_loadd(0, sums.data, sums.stride);
    if (from_zero) _tile_zero(0);
    _tile_loadd(1, a.data, a.stride);
    _tile_loadd(2, b.data, b.stride);
    if (kind == 0) {
        _tile_dpbf16ps(0, 1, 2);
    } else if (kind == 1) {
        _tile_dpbssd(0, 1, 2);
    } else {
        _tile_dpbsud(0, 1, 2);
    }
    _tile_stored(0, sums.data, sums.stride);
    _tile_release();
}

extern "C" void use_no_tile() { _tile_zero(0); }
#endif
#if defined(QUIRE_EMULATED_AMX)  // an assembler refuses this one
extern "C" void multiply_a_tile_by_itself(const unsigned char* config) {
    _tile_loadconfig(config);
    _tile_dpbf16ps(0, 1, 1);
}
#endif
