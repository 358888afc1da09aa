// The tokens of a step in the forms in which the matrix kernels read them.
//
// float32 rows, for dot products of vectors. Pairs of bfloat16, interleaved 16 tokens at a time: the second operand of
// AMX. Quads of int8, for weights in int8: each token is a fixed-point number of 15 bits, kept as two columns of int8,
// value = scale * (128 high + low), so that int8 tiles multiply it exactly; its rounding is 2^-15 of the token's
// largest element, which is finer than bfloat16's own where it counts.
#pragma once

#include <algorithm>
#include <type_traits>

#include "team.h"
#include "tiles.h"
#include "vectors.h"
#include "weights.h"

namespace quire {

enum class Form { rows, pairs, quads };

struct Activations {
    void* data = nullptr;
    int64_t tokens = 0, cols = 0;
    Form form = Form::rows;
    float* scales = nullptr;  // per token, whole tiles of them; quads only
    float* sums = nullptr;    // of every 32 inputs, [tiles][2][cols / 32][16 columns]; quads for groups only

    int64_t tiles() const { return (tokens + kTile - 1) / kTile; }
    // Rows are whole pieces, with zeros behind.
    int64_t row_stride() const { return (cols + kGroupPiece - 1) / kGroupPiece * kGroupPiece; }
    int64_t bytes() const { return form == Form::rows ? tokens * row_stride() * 4 : tiles() * kTile * cols * 2; }
    float* row(int64_t token) const { return static_cast<float*>(data) + token * row_stride(); }
    // [cols / 2][16 tokens]
    uint32_t* pairs(int64_t tile) const { return static_cast<uint32_t*>(data) + tile * (cols / 2) * kTile; }
    // [2][cols / 4][16 columns]: 8 tokens each, high and low of each token side by side.
    uint32_t* quads(int64_t tile) const { return static_cast<uint32_t*>(data) + tile * (cols / 2) * kTile; }
    float* sums_of(int64_t tile, int half, int64_t of) const { return sums + ((tile * 2 + half) * (cols / 32) + of) * kTile; }
};

// What the activations must be for weights of a coding.
template <typename T>
Form form_for(int64_t cols, Coding coding) {
#ifdef QUIRE_AMX
    if (std::is_same_v<T, BFloat16> && tiles_granted) {
        const bool pairs = coding == Coding::plain || coding == Coding::group_fp8;
        return cols % (pairs ? 32 : 64) ? Form::rows : pairs ? Form::pairs : Form::quads;
    }
#endif
    (void)cols;
    (void)coding;
    return Form::rows;
}

// Where a layer's activations keep their memory.
struct ActivationBuffers {
    Buffer data, scales, sums;
};

// Activations of this shape, by one thread.
template <typename T>
Activations make_activations(int64_t tokens, int64_t cols, Coding coding, ActivationBuffers& buffers) {
    Activations x;
    x.tokens = tokens;
    x.cols = cols;
    x.form = form_for<T>(cols, coding);
    x.data = buffers.data.get<char>(x.bytes());
    if (x.form == Form::rows && cols < x.row_stride())
        for (int64_t t = 0; t < tokens; ++t) std::fill(x.row(t) + cols, x.row(t) + x.row_stride(), 0.0f);
    if (x.form != Form::quads) return x;
    x.scales = buffers.scales.get<float>(x.tiles() * kTile);
    if (coding != Coding::int8) x.sums = buffers.sums.get<float>(x.tiles() * (cols / kTile) * kTile);
    return x;
}

#ifdef QUIRE_AMX
// One token as two rows of int8; returns its scale. A token with something that is no number gets such a scale.
inline float split_token(const BFloat16* from, int64_t cols, int8_t* high, int8_t* low) {
    Floats most{};
    for (int64_t k = 0; k < cols; k += kLanes) {
        const __m512 x = _mm512_abs_ps((__m512)load(from + k));
        most = (Floats)_mm512_max_ps((__m512)most, x);  // keeps what is no number
        most = (Floats)_mm512_mask_mov_ps((__m512)most, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x);
    }
    float largest = 0.0f;
    for (int i = 0; i < kLanes; ++i) largest = most[i] > largest || most[i] != most[i] ? most[i] : largest;
    if (!(largest < INFINITY)) {
        std::memset(high, 0, cols);
        std::memset(low, 0, cols);
        return NAN;
    }
    constexpr float kSteps = 127 * 128;
    const Floats inverse = splat(largest > 0.0f ? kSteps / largest : 0.0f);
    for (int64_t k = 0; k < cols; k += kLanes) {
        const __m512i whole = _mm512_cvtps_epi32((__m512)(load(from + k) * inverse));
        const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(64)), 7);
        const __m512i lower = _mm512_sub_epi32(whole, _mm512_slli_epi32(upper, 7));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(high + k), _mm512_cvtepi32_epi8(upper));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(low + k), _mm512_cvtepi32_epi8(lower));
    }
    return largest / kSteps;
}

inline void set_quads(const Activations& x, int64_t tile, const BFloat16* const rows[kTile]) {
    static thread_local Buffer buffer;
    int8_t* split = buffer.get<int8_t>(kTile * x.cols);
    for (int half = 0; half < 2; ++half) {
        for (int i = 0; i < kTile / 2; ++i) {
            const BFloat16* row = rows[half * kTile / 2 + i];
            int8_t* to = split + 2 * i * x.cols;
            float scale = 0.0f;
            if (row) {
                scale = split_token(row, x.cols, to, to + x.cols);
            } else {
                std::memset(to, 0, 2 * x.cols);
            }
            x.scales[tile * kTile + half * kTile / 2 + i] = scale;
        }
        uint32_t* to = x.quads(tile) + half * (x.cols / 4) * kTile;
        for (int64_t k = 0; k < x.cols; k += 64) {
            __m512i r[16];
            for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(split + i * x.cols + k);
            transpose(r);
            for (int i = 0; i < 16; ++i) _mm512_store_si512(to + k * 4 + i * 16, r[i]);
            for (int i = 0; x.sums && i < 16; i += 8) {
                __m512i sum = _mm512_setzero_si512();
                for (int j = i; j < i + 8; ++j) sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), r[j]);
                _mm512_store_ps(x.sums_of(tile, half, k / 32 + i / 8), _mm512_cvtepi32_ps(sum));
            }
        }
    }
}
#endif

// Tokens [16 tile, 16 tile + 16) into their place: columns [first_col, first_col + num_cols), all of them for quads.
// rows: where each token is, null where there is none.
template <typename T>
void set_tile(const Activations& x, int64_t tile, const T* const rows[kTile], int64_t first_col, int64_t num_cols) {
#ifdef QUIRE_AMX
    if constexpr (std::is_same_v<T, BFloat16>) {
        if (x.form == Form::pairs) {
            const BFloat16* shifted[kTile];
            for (int i = 0; i < kTile; ++i) shifted[i] = rows[i] ? rows[i] + first_col : nullptr;
            interleave_pairs(shifted, num_cols, x.pairs(tile) + first_col * 8);
            return;
        }
        if (x.form == Form::quads) {
            set_quads(x, tile, rows);
            return;
        }
    }
#endif
    for (int i = 0; i < kTile && rows[i]; ++i) {
        float* to = x.row(tile * kTile + i) + first_col;
        const T* from = rows[i] + first_col;
        int64_t k = 0;
        for (; k + kLanes <= num_cols; k += kLanes) store(to + k, load(from + k));
        for (; k < num_cols; ++k) to[k] = to_float(from[k]);
    }
}

// Rows [tokens, cols] of a tensor into activations; the team shares the work. A barrier must follow.
template <typename T>
void set_all(const Activations& x, const T* from, int64_t stride) {
    const int64_t width = x.form == Form::quads ? x.cols : 512;
    const int64_t cuts = (x.cols + width - 1) / width;
    const Range mine = my_share(x.tiles() * cuts);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
        const int64_t tile = i / cuts, first_col = i % cuts * width;
        const T* rows[kTile];
        for (int t = 0; t < kTile; ++t) {
            const int64_t token = tile * kTile + t;
            rows[t] = token < x.tokens ? from + token * stride : nullptr;
        }
        set_tile(x, tile, rows, first_col, std::min(width, x.cols - first_col));
    }
}

}  // namespace quire
