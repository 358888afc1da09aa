// The tokens of a step in the forms in which the matrix kernels read them.
//
// Rows, for dot products of vectors: float32; split, where of every 2 * kLanes inputs the even ones come before the odd
// ones, as a shift and a mask give those of bfloat16; bfloat16 as they are, where there are products of its pairs; or words
// of 16 bits, for weights in int8. Pairs of bfloat16, interleaved 16 tokens at a time: the second operand of AMX; of words
// for vectors. Quads of int8, for weights in int8: each token is a fixed-point number of 15 bits, kept as two columns of
// int8, value = scale * (128 high + low), so that int8 tiles multiply it exactly (words hold it whole); its rounding is
// 2^-15 of the token's largest element, which is finer than bfloat16's own where it counts. Bytes: the same two parts as
// rows of int8, 8 tokens together, which meet int4 by AMX, and where tokens are few int4 and int8 by VNNI. Columns: tokens rounded to
// int8 (w8a8), interleaved as the second operand; without VNNI words hold them. Block parts: the same two parts as bytes, a row
// of each token, which meet weights in blocks (`block_dots.h`).
#pragma once

#include <algorithm>
#include <type_traits>

#include "team.h"
#include "tiles.h"
#include "vectors.h"
#include "weights.h"

namespace quire {

enum class ActLayout { rows, split_rows, bf16_rows, block_parts, words, pairs, word_pairs, quads, bytes, columns };

struct Activations {
    void* data = nullptr;
    int64_t tokens = 0, cols = 0;
    ActLayout layout = ActLayout::rows;
    float* scales = nullptr;  // per token, whole tiles of them; of tokens that became integers
    float* sums = nullptr;    // of every 32 inputs, [tiles][2][cols / 32][16 columns]; quads for groups only
    int32_t* group_sums = nullptr;  // see `eight_sums`; bytes only
    bool int8 = false;  // w8a8: tokens are rounded to int8
    float step = 0.0f;  // the step then; 0: each token has its own, of its largest magnitude

    int64_t tiles() const { return (tokens + kTile - 1) / kTile; }
    // Whether tokens lie in tiles.
    bool tiled() const { return layout > ActLayout::words; }
    // Rows are whole pieces, with zeros behind.
    int64_t row_stride() const { return (cols + kGroupPiece - 1) / kGroupPiece * kGroupPiece; }
    // From one row to the next: never a power of two, so that tokens side by side do not meet in the first-level cache.
    int64_t token_stride() const { return row_stride() + 32; }
    // Whether a token's layout depends on all of its inputs.
    bool takes_whole_tokens() const {
        return int8 || layout == ActLayout::block_parts || layout == ActLayout::words || layout == ActLayout::word_pairs || layout == ActLayout::quads || layout == ActLayout::bytes;
    }
    int64_t bytes() const {
        if (layout == ActLayout::block_parts) return tokens * block_stride();
        if (!tiled()) return tokens * token_stride() * (layout < ActLayout::bf16_rows ? 4 : 2);
        if (layout == ActLayout::columns) return tiles() * kTile * cols;
        return tiles() * kTile * (layout == ActLayout::bytes ? row_stride() : cols) * 2;
    }
    float* row(int64_t token) const { return static_cast<float*>(data) + token * token_stride(); }
    BFloat16* bf16_row(int64_t token) const { return static_cast<BFloat16*>(data) + token * token_stride(); }
    int16_t* words(int64_t token) const { return static_cast<int16_t*>(data) + token * token_stride(); }
    // Where in a row of float32 an input is.
    int64_t place(int64_t col) const {
        if (layout == ActLayout::rows) return col;
        const int64_t within = col % (2 * kLanes);
        return col - within + within / 2 + within % 2 * kLanes;
    }
    // Zeros behind the inputs of rows that are written input by input.
    void clear_ends() const {
        if (layout == ActLayout::bf16_rows)
            for (int64_t t = 0; t < tokens; ++t) std::fill(bf16_row(t) + cols, bf16_row(t) + row_stride(), BFloat16{});
        if (layout >= ActLayout::bf16_rows) return;
        const int64_t begin = layout == ActLayout::rows ? cols : cols / (2 * kLanes) * (2 * kLanes);
        for (int64_t t = 0; t < tokens; ++t) std::fill(row(t) + begin, row(t) + row_stride(), 0.0f);
    }
    // [cols / 2][16 tokens]
    uint32_t* pairs(int64_t tile) const { return static_cast<uint32_t*>(data) + tile * (cols / 2) * kTile; }
    // [cols / 4][16 tokens]
    uint32_t* columns(int64_t tile) const { return static_cast<uint32_t*>(data) + tile * (cols / 4) * kTile; }
    // [2][cols / 4][16 columns]: 8 tokens each, high and low of each token side by side.
    uint32_t* quads(int64_t tile) const { return static_cast<uint32_t*>(data) + tile * (cols / 2) * kTile; }
    // [64 inputs]: the high parts of inputs k and on (a multiple of 64); 64 bytes on, the low parts.
    char* parts(int64_t token, int64_t k) const {
        return static_cast<char*>(data) + (token / 8 * row_stride() + k) * 16 + token % 8 * 128;
    }
    // Of a token in block parts: [256 high parts][256 low ones] of the piece of 256 inputs from k on, as `groups_in_lanes` has
    // them; and behind the parts of all pieces the sums of its 16 groups, by their lanes, eight zeros, the sums of every 32 inputs.
    int64_t block_pieces() const { return (cols + kBlockInputs - 1) / kBlockInputs; }
    int64_t block_stride() const { return block_pieces() * (2 * kBlockInputs + 32 * 4) + 64; }
    char* block_parts(int64_t token, int64_t k) const { return static_cast<char*>(data) + token * block_stride() + 2 * k; }
    float* block_sums(int64_t token, int64_t k) const {
        return reinterpret_cast<float*>(block_parts(token, block_pieces() * kBlockInputs)) + k / kBlockInputs * 32;
    }
    // [groups]: 8 times what the inputs of each group of this size sum to, in steps of the token's number.
    int32_t* eight_sums(int64_t token, int64_t group) const {
        const int64_t pieces = row_stride() / kGroupPiece;
        return group_sums + token * sums_stride() + pieces * (group == 32 ? 0 : group == 64 ? 4 : group == 128 ? 6 : 7);
    }
    int64_t sums_stride() const { return row_stride() / kGroupPiece * 8; }
    // [16 tokens]: -128 times what a piece of the inputs sums to, for weights that have 128 added; columns only, where there
    // are no tiles.
    int32_t* offsets(int64_t tile, int64_t piece) const { return group_sums + (tile * offset_pieces() + piece) * kTile; }
    int64_t offset_pieces() const { return (cols + kBytePiece - 1) / kBytePiece; }
    void set_sums(float* to) {
        sums = to;
        group_sums = reinterpret_cast<int32_t*>(to);
    }
    // 4-byte numbers that sums of inputs take, where weights of this format need them.
    int64_t num_sums(WeightFormat format) const {
        if (layout == ActLayout::bytes) return tiles() * kTile * sums_stride();
        if (layout == ActLayout::columns) return tiles_granted ? 0 : tiles() * kTile * offset_pieces();
        return layout == ActLayout::quads && format >= WeightFormat::group_int4 ? tiles() * cols : 0;
    }
    float* sums_of(int64_t tile, int half, int64_t of) const { return sums + ((tile * 2 + half) * (cols / 32) + of) * kTile; }
};

constexpr int64_t kFewLaneTokens = 12;  // whose numbers are in all lanes, see `lane_sums.h`

// Whether weights of this format are multiplied as `lane_sums.h` does where there are no tiles.
template <typename T>
constexpr bool in_lanes([[maybe_unused]] int64_t cols, [[maybe_unused]] WeightFormat format) {
#ifdef QUIRE_VNNI
    if (!std::is_same_v<T, BFloat16>) return false;
    if (format == WeightFormat::w8a8) return cols % 64 == 0;
    if (format == WeightFormat::blocks) return false;
    const bool of_pairs = format == WeightFormat::plain || format == WeightFormat::group_fp8;
    return cols % 32 == 0 && (kPairProducts || !of_pairs);
#endif
    return false;
}

// What the activations must be for weights of a format.
template <typename T>
ActLayout layout_for(int64_t tokens, int64_t cols, WeightFormat format) {
    const bool few = tokens <= kFewLaneTokens;
    if (format == WeightFormat::blocks) return ActLayout::block_parts;
#ifdef QUIRE_VNNI
    if (std::is_same_v<T, BFloat16> && format == WeightFormat::group_int4 && cols % kLanes == 0 &&
        (tiles_granted || few || !in_lanes<T>(cols, format)))
        return ActLayout::bytes;
#endif
#ifdef QUIRE_AMX
    if (std::is_same_v<T, BFloat16> && tiles_granted) {
        const bool pairs = format == WeightFormat::plain || format == WeightFormat::group_fp8;
        if (format == WeightFormat::w8a8 && cols % 64 == 0) return ActLayout::columns;
        if (format != WeightFormat::group_int4 && format != WeightFormat::w8a8 && cols % (pairs ? 32 : 64) == 0)
            return pairs ? ActLayout::pairs : ActLayout::quads;
    }
#endif
    if (in_lanes<T>(cols, format)) {
        if (format == WeightFormat::w8a8) return ActLayout::columns;
        if (format == WeightFormat::plain || format == WeightFormat::group_fp8) return few ? ActLayout::bf16_rows : ActLayout::pairs;
        return few ? ActLayout::bytes : ActLayout::word_pairs;
    }
    if (format == WeightFormat::w8a8) return ActLayout::words;
    if (!std::is_same_v<T, BFloat16>) return ActLayout::rows;
    if (format == WeightFormat::int8) return ActLayout::words;
    if (format == WeightFormat::plain) return ActLayout::split_rows;
    return ActLayout::rows;
}

// Where a layer's activations keep their memory.
struct ActivationBuffers {
    Buffer data, scales, sums;
};

// Activations of this shape, by one thread.
template <typename T>
Activations make_activations(int64_t tokens, int64_t cols, WeightFormat format, ActivationBuffers& buffers, float step = 0.0f) {
    Activations x;
    x.int8 = format == WeightFormat::w8a8;
    x.step = step;
    x.tokens = tokens;
    x.cols = cols;
    x.layout = layout_for<T>(tokens, cols, format);
    x.data = buffers.data.get<char>(x.bytes());
    x.clear_ends();
    if (!x.takes_whole_tokens()) return x;
    x.scales = buffers.scales.get<float>(x.tiles() * kTile);
    if (const int64_t count = x.num_sums(format)) x.set_sums(buffers.sums.get<float>(count));
    return x;
}

// The step of a token in whole numbers up to `most`, and its inverse; a token with something that is no number gets such a
// step. Where the inverse is not finite, the token becomes zeros.
struct TokenStep {
    float step, inverse;
};
constexpr float kInt8Most = 127.0f, kFixedMost = 127.0f * 128.0f;  // w8a8, and fixed-point numbers of 15 bits
template <typename T>
inline TokenStep step_of(const T* from, int64_t cols, float most, float given) {
    Ints top = {};  // magnitudes in the order of their bits, in which those of NaN come last
    for (int64_t k = 0; k < cols; k += kLanes) {
        const int rest = static_cast<int>(std::min<int64_t>(kLanes, cols - k));
        const Ints bits = (Ints)(rest == kLanes ? load(from + k) : load_first(from + k, rest)) & 0x7fffffff;
        top = bits > top ? bits : top;
    }
    int32_t largest_bits = 0;
    for (int i = 0; i < kLanes; ++i) largest_bits = std::max(largest_bits, top[i]);
    float largest;
    std::memcpy(&largest, &largest_bits, 4);
    if (!(largest < INFINITY)) return {NAN, 0.0f};
    if (given > 0.0f) return {given, 1.0f / given};
    const float inverse = most / largest;
    return {largest / most, inverse < INFINITY ? inverse : 0.0f};
}

// One token as whole numbers in words, up to `most` in magnitude and zeros behind; returns its step.
template <typename T>
inline float set_words(const T* from, const Activations& x, float most, int16_t* to) {
    const TokenStep of = step_of(from, x.cols, most, x.step);
    constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23: numbers this large are whole, rounded to nearest even
    for (int64_t k = 0; k < x.row_stride(); k += kLanes) {
        const int rest = static_cast<int>(std::clamp<int64_t>(x.cols - k, 0, kLanes));
        Floats v = (rest == kLanes ? load(from + k) : load_first(from + k, rest)) * of.inverse;
        v = v > most ? splat(most) : (v < -most - 1.0f ? splat(-most - 1.0f) : v);
        const Halves h = narrowed((Words)__builtin_convertvector((v + kWhole) - kWhole, Ints));
        std::memcpy(to + k, &h, sizeof h);
    }
    return of.step;
}

#ifdef QUIRE_VNNI
// 16 tokens as columns of int8.
inline void set_columns(const Activations& x, int64_t tile, const BFloat16* const rows[kTile]) {
    static thread_local Buffer buffer;
    char* rounded_rows = buffer.get<char>(kTile * x.cols);
    for (int i = 0; i < kTile; ++i) {
        char* to = rounded_rows + i * x.cols;
        const TokenStep of = rows[i] ? step_of(rows[i], x.cols, kInt8Most, x.step) : TokenStep{0.0f, 0.0f};
        x.scales[tile * kTile + i] = of.step;
        if (!rows[i]) {
            std::memset(to, 0, x.cols);
            continue;
        }
        for (int64_t k = 0; k < x.cols; k += kLanes) {
            const __m512i whole = _mm512_cvtps_epi32((__m512)(load(rows[i] + k) * of.inverse));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(to + k), _mm512_cvtsepi32_epi8(whole));
        }
    }
    uint32_t* to = x.columns(tile);
    __m512i sum = _mm512_setzero_si512();
    for (int64_t k = 0; k < x.cols; k += 64) {
        __m512i r[kTile];
        for (int i = 0; i < kTile; ++i) r[i] = _mm512_loadu_si512(rounded_rows + i * x.cols + k);
        transpose(r);
        for (int i = 0; i < kTile; ++i) _mm512_store_si512(to + k * 4 + i * kTile, r[i]);
        if (tiles_granted) continue;
        for (int i = 0; i < kTile; ++i) sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), r[i]);
        if ((k + 64) % kBytePiece && k + 64 < x.cols) continue;
        const __m512i offset = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(sum, 7));
        _mm512_storeu_si512(x.offsets(tile, k / kBytePiece), offset);
        sum = _mm512_setzero_si512();
    }
}

// One token as two rows of int8; returns its scale. A token with something that is no number gets such a scale.
// block_bytes: from 64 inputs to the next 64. sums: of every 32 inputs, or none.
inline float split_token(const BFloat16* from, int64_t cols, char* high, char* low, int64_t block_bytes, int32_t* sums) {
    Floats most{};
    for (int64_t k = 0; k < cols; k += kLanes) {
        const __m512 x = _mm512_abs_ps((__m512)load(from + k));
        most = (Floats)_mm512_max_ps((__m512)most, x);  // keeps what is no number
        most = (Floats)_mm512_mask_mov_ps((__m512)most, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x);
    }
    float largest = 0.0f;
    for (int i = 0; i < kLanes; ++i) largest = most[i] > largest || most[i] != most[i] ? most[i] : largest;
    const bool is_number = largest < INFINITY;
    const Floats inverse = splat(is_number && largest > 0.0f ? kFixedMost / largest : 0.0f);
    __m512i sum = _mm512_setzero_si512();
    for (int64_t k = 0; k < cols; k += kLanes) {
        const Floats x = is_number ? load(from + k) : Floats{};
        const __m512i whole = _mm512_cvtps_epi32((__m512)(x * inverse));
        const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(64)), 7);
        const __m512i lower = _mm512_sub_epi32(whole, _mm512_slli_epi32(upper, 7));
        const int64_t at = k / 64 * block_bytes + k % 64;
        _mm_storeu_si128(reinterpret_cast<__m128i*>(high + at), _mm512_cvtepi32_epi8(upper));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(low + at), _mm512_cvtepi32_epi8(lower));
        if (!sums) continue;
        sum = _mm512_add_epi32(sum, whole);
        if (k % 32 == 0 && k + kLanes < cols) continue;
        sums[k / 32] = _mm512_reduce_add_epi32(sum);
        sum = _mm512_setzero_si512();
    }
    return is_number ? largest / kFixedMost : NAN;
}

inline void set_bytes(const Activations& x, int64_t tile, const BFloat16* const rows[kTile]) {
    const int64_t stride = x.row_stride();
    for (int i = 0; i < kTile && rows[i]; ++i) {
        const int64_t token = tile * kTile + i;
        char *high = x.parts(token, 0), *low = high + 64;
        for (int64_t k = x.cols / 64 * 64; k < stride; k += 64) std::memset(x.parts(token, k), 0, 128);
        int32_t *of_32 = x.eight_sums(token, 32), *of_64 = x.eight_sums(token, 64), *of_128 = x.eight_sums(token, 128);
        int32_t* const of_256 = x.eight_sums(token, 256);
        std::memset(of_32, 0, stride / 32 * 4);
        x.scales[token] = split_token(rows[i], x.cols, high, low, 1024, of_32);
        for (int64_t g = 0; g < stride / 32; ++g) of_32[g] *= 8;
        for (int64_t g = 0; g < stride / 64; ++g) of_64[g] = of_32[2 * g] + of_32[2 * g + 1];
        for (int64_t g = 0; g < stride / 128; ++g) of_128[g] = of_64[2 * g] + of_64[2 * g + 1];
        for (int64_t g = 0; g < stride / 128; g += 2) of_256[g / 2] = of_128[g] + (g + 1 < stride / 128 ? of_128[g + 1] : 0);
    }
}

// Four vectors whose 16 bytes are groups of 16 inputs each, in order -> a group's inputs in one lane of all four.
inline void groups_in_lanes(const __m512i from[4], __m512i to[4]) {
    const __m512i a = _mm512_unpacklo_epi32(from[0], from[1]), b = _mm512_unpackhi_epi32(from[0], from[1]);
    const __m512i c = _mm512_unpacklo_epi32(from[2], from[3]), d = _mm512_unpackhi_epi32(from[2], from[3]);
    to[0] = _mm512_unpacklo_epi64(a, c);
    to[1] = _mm512_unpackhi_epi64(a, c);
    to[2] = _mm512_unpacklo_epi64(b, d);
    to[3] = _mm512_unpackhi_epi64(b, d);
}
// The group that a lane has then.
constexpr int lane_group(int lane) { return lane % 4 * 4 + lane / 4; }

inline void set_block_parts(const Activations& x, int64_t token, const BFloat16* row) {
    static thread_local Buffer buffer;
    char* const parts = buffer.get<char>(x.block_pieces() * 2 * kBlockInputs);  // [high, low][inputs]
    char* const low = parts + x.block_pieces() * kBlockInputs;
    std::memset(parts, 0, x.block_pieces() * 2 * kBlockInputs);
    x.scales[token] = split_token(row, x.cols, parts, low, 64, nullptr);
    for (int64_t k = 0; k < x.block_pieces() * kBlockInputs; k += kBlockInputs) {
        Ints sums = {};
        for (int part = 0; part < 2; ++part) {
            __m512i from[4], to[4];
            for (int i = 0; i < 4; ++i) from[i] = _mm512_loadu_si512((part ? low : parts) + k + i * 64);
            groups_in_lanes(from, to);
            for (int i = 0; i < 4; ++i) {
                _mm512_storeu_si512(x.block_parts(token, k) + part * kBlockInputs + i * 64, to[i]);
                sums = (Ints)_mm512_dpbusd_epi32((__m512i)sums, _mm512_set1_epi8(1), to[i]);
            }
            if (part == 0) sums <<= 7;
        }
        float* const to = x.block_sums(token, k);
        store(to, __builtin_convertvector(sums, Floats));
        float of_32[kLanes] = {};
        for (int i = 0; i < kLanes; ++i) of_32[8 + lane_group(i) / 2] += to[i];
        store(to + kLanes, load(of_32));
    }
}

inline void set_quads(const Activations& x, int64_t tile, const BFloat16* const rows[kTile]) {
    static thread_local Buffer buffer;
    char* split = buffer.get<char>(kTile * x.cols);
    for (int half = 0; half < 2; ++half) {
        for (int i = 0; i < kTile / 2; ++i) {
            const BFloat16* row = rows[half * kTile / 2 + i];
            char* to = split + 2 * i * x.cols;
            float scale = 0.0f;
            if (row) {
                scale = split_token(row, x.cols, to, to + x.cols, 64, nullptr);
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

// The even inputs of every 2 * kLanes, then the odd ones.
inline void split_row(const BFloat16* from, int64_t cols, float* to) {
    constexpr int64_t kStep = 2 * kLanes;
    for (int64_t k = 0; k < cols; k += kStep) {
        BFloat16 padded[kStep] = {};
        const bool whole = k + kStep <= cols;
        if (!whole) std::memcpy(padded, from + k, (cols - k) * sizeof *from);
        const BFloat16* const step = whole ? from + k : padded;
        store(to + k, even_numbers(step));
        store(to + k + kLanes, odd_numbers(step));
    }
}

#ifdef QUIRE_VNNI
inline void set_word_pairs(const Activations& x, int64_t tile, const BFloat16* const rows[kTile]) {
    static thread_local Buffer buffer;
    const int64_t stride = x.row_stride();
    int16_t* const words = buffer.get<int16_t>(kTile * stride);
    for (int i = 0; i < kTile; ++i) {
        if (rows[i]) {
            x.scales[tile * kTile + i] = set_words(rows[i], x, kFixedMost, words + i * stride);
        } else {
            std::memset(words + i * stride, 0, stride * sizeof *words);
        }
    }
    uint32_t* const to = x.pairs(tile);
    for (int64_t k = 0; k < x.cols; k += 32) {
        __m512i r[kTile];
        for (int i = 0; i < kTile; ++i) r[i] = _mm512_loadu_si512(words + i * stride + k);
        transpose(r);
        for (int i = 0; i < kTile; ++i) _mm512_storeu_si512(to + k * 8 + i * kTile, r[i]);
    }
}
#endif

// Tokens [16 tile, 16 tile + 16) into their place: columns [first_col, first_col + num_cols), all of them where whole tokens are taken.
// rows: where each token is, null where there is none.
template <typename T>
void set_tile(const Activations& x, int64_t tile, const T* const rows[kTile], int64_t first_col, int64_t num_cols) {
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, BFloat16>) {
        if (x.layout == ActLayout::pairs) {
            const BFloat16* shifted[kTile];
            for (int i = 0; i < kTile; ++i) shifted[i] = rows[i] ? rows[i] + first_col : nullptr;
            interleave_pairs(shifted, num_cols, x.pairs(tile) + first_col * 8);
            return;
        }
    }
#endif
#ifdef QUIRE_AMX
    if constexpr (std::is_same_v<T, BFloat16>) {
        if (x.layout == ActLayout::quads) {
            set_quads(x, tile, rows);
            return;
        }
    }
#endif
#ifdef QUIRE_VNNI
    if constexpr (std::is_same_v<T, BFloat16>) {
        if (x.layout == ActLayout::columns) {
            set_columns(x, tile, rows);
            return;
        }
        if (x.layout == ActLayout::bytes) {
            set_bytes(x, tile, rows);
            return;
        }
        if (x.layout == ActLayout::word_pairs) {
            set_word_pairs(x, tile, rows);
            return;
        }
    }
#endif
    for (int i = 0; i < kTile && rows[i]; ++i) {
        const int64_t token = tile * kTile + i;
#ifdef QUIRE_VNNI
        if constexpr (std::is_same_v<T, BFloat16>) {
            if (x.layout == ActLayout::block_parts) {
                set_block_parts(x, token, rows[i]);
                continue;
            }
        }
#endif
        if (x.layout == ActLayout::words) {
            x.scales[token] = set_words(rows[i], x, x.int8 ? kInt8Most : kFixedMost, x.words(token));
            continue;
        }
        const T* const from = rows[i] + first_col;
        if constexpr (std::is_same_v<T, BFloat16>) {
            if (x.layout == ActLayout::bf16_rows) {
                std::memcpy(x.bf16_row(token) + first_col, from, num_cols * sizeof *from);
                continue;
            }
        }
        float* const to = x.row(token) + first_col;
        if constexpr (std::is_same_v<T, BFloat16>) {
            if (x.layout == ActLayout::split_rows) {
                split_row(from, num_cols, to);
                continue;
            }
        }
        int64_t k = 0;
        for (; k + kLanes <= num_cols; k += kLanes) store(to + k, load(from + k));
        for (; k < num_cols; ++k) to[k] = to_float(from[k]);
    }
}

// Rows [tokens, cols] of a tensor into activations; the team shares the work. A barrier must follow.
template <typename T>
void set_all(const Activations& x, const T* from, int64_t stride) {
    const int64_t width = x.takes_whole_tokens() ? x.cols : 512;
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
