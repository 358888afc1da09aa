// Products with weights in blocks, of bytes: numbers of few bits meet tokens of 15 bits as they are unpacked, in registers.
//
// A lane has the 16 inputs of a group. A number of a weight is `scale * code - least`, with codes from 0 to 255 (a signed number has its
// middle added, which `least` takes off), so that of a group of inputs
//     sum of w * x = scale * (sum of code * x) - least * (sum of x).
// What a lane sums to is exact; lanes are scaled, and added to what the row has in the order of the inputs, alike for one
// token and for many. So weights are not rounded to the type of the network: a number is as the file has it.
//
// Tokens are rows of two parts as in `int4.h`, with zeros up to whole pieces of 256 inputs (`Activations::block_parts`).
#pragma once

#include <algorithm>

#include "activations.h"
#include "blocks.h"
#include "sums.h"
#include "vectors.h"
#include "weights.h"

#ifdef QUIRE_VNNI
namespace quire {

typedef uint8_t Bytes64 __attribute__((vector_size(64)));
typedef uint16_t Words32 __attribute__((vector_size(64)));

// 256 inputs of a row: their codes in order, and scale and least of each group, of 16, 32 or 64 inputs, in the first lanes. Of
// groups of 32 the last eight lanes of `scale` are leasts, as in a token's sums of 32; `least` is of the other ones.
struct BlockPiece {
    __m512i codes[4];
    Floats scale, least;
};

// Inputs of a group.
constexpr int group_inputs(BlockFormat f) {
    if (f == BlockFormat::table4) return 64;
    return has_grid(f) || f == BlockFormat::q2_k || f == BlockFormat::q3_k || f == BlockFormat::q6_k || f == BlockFormat::nvfp4 ? 16 : 32;
}
// Codes of 14 bits, in two parts of 7: a table's numbers, rounded to a multiple of the largest magnitude / kTableSteps. 192
// divides it, so that the numbers of bitsandbytes' FP4 are exact; others are off by less than bfloat16 would have them.
constexpr bool two_parts(BlockFormat f) { return f == BlockFormat::table4; }
constexpr float kTableSteps = 16128.0f;

typedef long long Longs8 __attribute__((vector_size(64)));

inline __m512i all_bytes(uint32_t byte) { return (__m512i)(Bytes64{} + static_cast<uint8_t>(byte)); }
// 32 bytes, twice.
inline __m512i twice(const uint8_t* from) {
    const __m512i once = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    return _mm512_shuffle_i32x4(once, once, 0x44);
}
// Bytes a b of 16 each -> a a b b.
inline __m512i each_twice(__m512i both) { return _mm512_permutexvar_epi64((__m512i)Longs8{0, 1, 0, 1, 2, 3, 2, 3}, both); }
inline __m512i each_twice(const uint8_t* from) {
    return each_twice(_mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}
inline __m512i each_twice(const uint8_t* first, const uint8_t* second) {
    const __m512i a = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(first)));
    return _mm512_mask_broadcast_i32x4(a, 0xff00, _mm_loadu_si128(reinterpret_cast<const __m128i*>(second)));
}
// Bits [shift, shift + width) of the bytes; shifts of 16 and 16 bytes, or of 32 and 32.
inline __m512i bits_of(__m512i bytes, Words32 shifts, int width) {
    return _mm512_and_si512((__m512i)((Words32)bytes >> shifts), all_bytes((1u << width) - 1));
}
inline Words32 halves_shifts(uint16_t first, uint16_t second) {
    Words32 shifts{};
    for (int i = 0; i < 32; ++i) shifts[i] = i < 16 ? first : second;
    return shifts;
}
inline Words32 quarter_shifts() {
    Words32 shifts{};
    for (int i = 0; i < 32; ++i) shifts[i] = i / 8 % 2 * 4;
    return shifts;
}
// `value` where a byte has bit `first`, of the upper 32 bytes the next bit.
inline __m512i where_bit(__m512i bytes, int first, uint32_t value) {
    Bytes64 bit;
    for (int i = 0; i < 64; ++i) bit[i] = static_cast<uint8_t>((i < 32 ? 1 : 2) << first);
    return _mm512_and_si512((__m512i)(((Bytes64)bytes & bit) != 0), all_bytes(value));
}
// 16 for each bit that is set in two words of 32 bits.
inline __m512i fifth_bits(const uint8_t* first, const uint8_t* second) {
    uint64_t low = 0, high = 0;
    std::memcpy(&low, first, 4);
    std::memcpy(&high, second, 4);
    Longs8 words = Longs8{} + static_cast<int64_t>(low | high << 32);
    Bytes64 place, bit;
    for (int i = 0; i < 64; ++i) {
        place[i] = static_cast<uint8_t>(i / 8);
        bit[i] = static_cast<uint8_t>(1 << i % 8);
    }
    const Bytes64 spread = (Bytes64)_mm512_shuffle_epi8((__m512i)words, (__m512i)place);
    return _mm512_and_si512((__m512i)((spread & bit) != 0), all_bytes(16));
}
// Whole numbers of a table of 16 bytes.
inline __m512i table_bytes(const uint8_t* table, __m512i codes) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))), codes);
}
inline __m128i bytes16(const uint8_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
inline Floats floats_of(__m128i bytes) { return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)); }
inline Floats signed_floats_of(__m128i bytes) { return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)); }
// The 16 bits at eight blocks.
inline __m128i eight_words(const uint8_t* from, int64_t stride) {
    const auto word = [&](int i) {
        int16_t at;
        std::memcpy(&at, from + i * stride, 2);
        return at;
    };
    return _mm_setr_epi16(word(0), word(1), word(2), word(3), word(4), word(5), word(6), word(7));
}
// The float16 at eight blocks, in the first lanes; zeros behind.
inline Floats eight_halves(const uint8_t* from, int64_t stride) {
    return (Floats)_mm512_cvtph_ps(_mm256_zextsi128_si256(eight_words(from, stride)));
}
// The first eight lanes of each.
inline Floats side_by_side(Floats scale, Floats least) { return (Floats)_mm512_shuffle_i32x4((__m512i)scale, (__m512i)least, 0x44); }
inline Floats lanes_by_half(float first, float second) { return side_by_side(splat(first), splat(second)); }

struct TableParts {
    alignas(16) uint8_t high[16], low[16];
    float step;
};
inline TableParts table_parts(const float* table) {
    TableParts parts;
    const __m512 values = _mm512_loadu_ps(table);
    const float largest = _mm512_reduce_max_ps(_mm512_abs_ps(values));
    parts.step = largest / kTableSteps;
    const Floats steps = (Floats)values * (largest > 0.0f ? kTableSteps / largest : 0.0f);
    const Ints codes = (Ints)_mm512_cvtps_epi32((__m512)steps) + 16384;
    _mm_store_si128(reinterpret_cast<__m128i*>(parts.high), _mm512_cvtepi32_epi8((__m512i)(codes >> 7)));
    _mm_store_si128(reinterpret_cast<__m128i*>(parts.low), _mm512_cvtepi32_epi8((__m512i)(codes & 127)));
    return parts;
}
// Whole numbers of 4 bits, with their middle added.
struct CodeTable {
    alignas(16) uint8_t bytes[16];
};
constexpr CodeTable code_table(const float values[16], float factor, float middle) {
    CodeTable table{};
    for (int i = 0; i < 16; ++i) table.bytes[i] = static_cast<uint8_t>(values[i] * factor + middle);
    return table;
}
constexpr float kIq4Middle = 127, kE2m1Middle = 12;
inline constexpr CodeTable kIq4Codes = code_table(kIq4Values, 1.0f, kIq4Middle), kE2m1Codes = code_table(kE2m1Values, 2.0f, kE2m1Middle);

inline Words32 shift_by(uint16_t bits) { return Words32{} + bits; }

// A piece of a row from its first block on; codes of 14 bits: places in the table's parts.
template <BlockFormat kFormat>
inline BlockPiece block_piece(const uint8_t* from, [[maybe_unused]] const float* constants) {
    constexpr int64_t kBytes = block_shape(kFormat).bytes;
    BlockPiece piece{};
    if constexpr (kFormat == BlockFormat::q4_k || kFormat == BlockFormat::q5_k) {
        constexpr bool kFive = kFormat == BlockFormat::q5_k;
        const __m512i fifth = kFive ? twice(from + 16) : __m512i{};
        for (int i = 0; i < 4; ++i) {
            const __m512i codes = bits_of(twice(from + (kFive ? 48 : 16) + i * 32), halves_shifts(0, 4), 4);
            piece.codes[i] = kFive ? _mm512_or_si512(codes, where_bit(fifth, 2 * i, 16)) : codes;
        }
        uint32_t a, b, c, all[4];
        std::memcpy(&a, from + 4, 4);
        std::memcpy(&b, from + 8, 4);
        std::memcpy(&c, from + 12, 4);
        all[0] = a & 0x3f3f3f3f;
        all[1] = (c & 0x0f0f0f0f) | (a >> 6 & 0x03030303) << 4;
        all[2] = b & 0x3f3f3f3f;
        all[3] = (c >> 4 & 0x0f0f0f0f) | (b >> 6 & 0x03030303) << 4;
        const auto pair = [&](int i) { return static_cast<long long>(all[i] | static_cast<uint64_t>(all[i + 1]) << 32); };
        piece.scale = floats_of(_mm_set_epi64x(pair(2), pair(0))) * lanes_by_half(half_at(from), half_at(from + 2));
    } else if constexpr (kFormat == BlockFormat::q2_k) {
        for (int i = 0; i < 4; ++i)
            piece.codes[i] = bits_of(twice(from + 16 + i / 2 * 32), i % 2 ? halves_shifts(4, 6) : halves_shifts(0, 2), 2);
        const __m512i own = _mm512_cvtepu8_epi32(bytes16(from));
        piece.scale = (Floats)_mm512_cvtepi32_ps((__m512i)((Ints)own & 15)) * half_at(from + 80);
        piece.least = (Floats)_mm512_cvtepi32_ps(_mm512_srli_epi32(own, 4)) * half_at(from + 82);
    } else if constexpr (kFormat == BlockFormat::q3_k) {
        const __m512i third = twice(from);
        for (int i = 0; i < 4; ++i) {
            const __m512i codes = bits_of(twice(from + 32 + i / 2 * 32), i % 2 ? halves_shifts(4, 6) : halves_shifts(0, 2), 2);
            piece.codes[i] = _mm512_or_si512(codes, where_bit(third, 2 * i, 4));
        }
        uint64_t low;
        uint32_t high;
        std::memcpy(&low, from + 96, 8);
        std::memcpy(&high, from + 104, 4);
        const auto upper = [&](int shift) { return static_cast<uint64_t>(high >> shift & 0x03030303) << 4; };
        const uint64_t first = (low & 0x0f0f0f0f0f0f0f0f) | upper(0) | upper(2) << 32;
        const uint64_t second = (low >> 4 & 0x0f0f0f0f0f0f0f0f) | upper(4) | upper(6) << 32;
        const Floats own = floats_of(_mm_set_epi64x(static_cast<long long>(second), static_cast<long long>(first)));
        piece.scale = (own - 32.0f) * half_at(from + 108);
        piece.least = piece.scale * 4.0f;
    } else if constexpr (kFormat == BlockFormat::q6_k) {
        for (int half = 0; half < 2; ++half) {
            const __m512i low = _mm512_loadu_si512(from + half * 64), high = twice(from + 128 + half * 32);
            for (int i = 0; i < 2; ++i) {
                const __m512i upper = bits_of(high, i ? halves_shifts(4, 6) : halves_shifts(0, 2), 2);
                piece.codes[half * 2 + i] = _mm512_or_si512(bits_of(low, shift_by(i ? 4 : 0), 4), (__m512i)((Words32)upper << 4));
            }
        }
        piece.scale = signed_floats_of(bytes16(from + 192)) * half_at(from + 208);
        piece.least = piece.scale * 32.0f;
    } else if constexpr (kFormat == BlockFormat::iq4_xs) {
        for (int i = 0; i < 4; ++i) piece.codes[i] = table_bytes(kIq4Codes.bytes, bits_of(each_twice(from + 8 + i * 32), quarter_shifts(), 4));
        uint32_t high = 0, low;
        std::memcpy(&high, from + 2, 2);
        std::memcpy(&low, from + 4, 4);
        Words place;
        for (int i = 0; i < 16; ++i) place[i] = i % 8;
        const Words own = ((Words{} + low) >> place * 4 & 15) | ((Words{} + high) >> place * 2 & 3) << 4;
        const Floats scale = (floats(own) - 32.0f) * half_at(from);
        piece.scale = scale * lanes_by_half(1.0f, kIq4Middle);
    } else if constexpr (has_grid(kFormat)) {
        alignas(64) int8_t codes[kBlockInputs];
        alignas(64) float scales[16];
        grid_codes<kFormat>(from, constants, codes, scales);
        for (int i = 0; i < 4; ++i) piece.codes[i] = (__m512i)((Bytes64)_mm512_load_si512(codes + i * 64) + static_cast<uint8_t>(64));
        piece.scale = load(scales);
        piece.least = piece.scale * 64.0f;
    } else if constexpr (kFormat == BlockFormat::table4) {
        float scales[4];
        for (int i = 0; i < 4; ++i) {
            piece.codes[i] = bits_of(each_twice(from + i * kBytes + 4), quarter_shifts(), 4);
            std::memcpy(scales + i, from + i * kBytes, 4);
        }
        const __m128 four = _mm_setr_ps(scales[0], scales[1], scales[2], scales[3]);
        piece.scale = (Floats)_mm512_broadcast_i32x4(_mm_castps_si128(four));
    } else {
        constexpr bool kFifth = kFormat == BlockFormat::q5_0 || kFormat == BlockFormat::q5_1;
        constexpr bool kMinimum = kFormat == BlockFormat::q4_1 || kFormat == BlockFormat::q5_1;
        constexpr bool kE2m1 = kFormat == BlockFormat::mxfp4 || kFormat == BlockFormat::nvfp4;
        constexpr int64_t kScaleBytes = kMinimum ? 4 : kFormat == BlockFormat::mxfp4 ? 1 : 2;
        constexpr int64_t kCodes = kScaleBytes + (kFifth ? 4 : 0);
        for (int i = 0; i < 4; ++i) {
            const uint8_t *const first = from + 2 * i * kBytes, *const second = first + kBytes;
            __m512i codes = bits_of(each_twice(first + kCodes, second + kCodes), quarter_shifts(), 4);
            if constexpr (kFifth) codes = _mm512_or_si512(codes, fifth_bits(first + kScaleBytes, second + kScaleBytes));
            if constexpr (kE2m1 || kFormat == BlockFormat::iq4_nl) codes = table_bytes((kE2m1 ? kE2m1Codes : kIq4Codes).bytes, codes);
            piece.codes[i] = codes;
        }
        if constexpr (kFormat == BlockFormat::nvfp4) {
            // As half precision the exponent is 8 less.
            const __m128i codes = eight_words(from, kBytes);
            const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7), _mm256_set1_epi16(-0x4001));
            const Floats scale = (Floats)_mm512_cvtph_ps(halves) * 256.0f;
            piece.scale = (constants[1] != 0.0f ? scale / constants[0] : scale * constants[0]) * 0.5f;
            piece.least = piece.scale * kE2m1Middle;
        } else if constexpr (kFormat == BlockFormat::mxfp4) {
            const auto byte = [&](int i) { return static_cast<char>(from[i * kBytes]); };
            const __m128i own = _mm_setr_epi8(byte(0), byte(1), byte(2), byte(3), byte(4), byte(5), byte(6), byte(7), 127, 127, 127, 127, 127, 127, 127, 127);  // of no denormal numbers
            const Words exponent = (Words)_mm512_cvtepu8_epi32(own);
            const Floats scale = (Floats)(exponent << 23 | ((Words)(exponent == 0) & 1u << 22)) * 0.5f;
            piece.scale = side_by_side(scale, scale * kE2m1Middle);
        } else {
            const Floats scale = eight_halves(from, kBytes);
            // A minimum is added, not taken off.
            const Floats least = kMinimum ? -eight_halves(from + 2, kBytes) : scale * (kFormat == BlockFormat::q5_0 ? 16.0f : kIq4Middle);
            piece.scale = side_by_side(scale, least);
        }
    }
    return piece;
}

// A piece as it meets tokens: codes with a group of 16 inputs in each lane, its scale there, and leasts as a token's sums are.
template <BlockFormat kFormat>
struct LanePiece {
    __m512i codes[4], low[two_parts(kFormat) ? 4 : 1];
    Floats scale, least;

    LanePiece(const uint8_t* from, const float* constants, [[maybe_unused]] const TableParts& parts) {
        constexpr int kGroup = group_inputs(kFormat);
        BlockPiece piece = block_piece<kFormat>(from, constants);
        if constexpr (two_parts(kFormat)) piece.scale *= parts.step;
        groups_in_lanes(piece.codes, codes);
        if constexpr (two_parts(kFormat))
            for (int i = 0; i < 4; ++i) {
                low[i] = table_bytes(parts.low, codes[i]);
                codes[i] = table_bytes(parts.high, codes[i]);
            }
        Ints group;  // of each lane
        for (int i = 0; i < kLanes; ++i) group[i] = lane_group(i) * 16 / kGroup;
        scale = __builtin_shuffle(piece.scale, group);
        least = kGroup == 32 ? piece.scale : two_parts(kFormat) ? scale * 16384.0f : __builtin_shuffle(piece.least, group);
    }
    // total[r] += piece r times a token, of kRows rows, which share what is read of the token.
    template <int kRows>
    static void add(const LanePiece* pieces, const Activations& x, int64_t t, int64_t k, Floats* const total[kRows]) {
        const char *const upper = x.block_parts(t, k), *const lower = upper + kBlockInputs;
        __m512i sums[kRows] = {};
        const auto products = [&](auto codes, const char* from) {
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                const __m512i inputs = _mm512_loadu_si512(from + i * 64);
#pragma GCC unroll 4
                for (int r = 0; r < kRows; ++r) sums[r] = _mm512_dpbusd_epi32(sums[r], codes(pieces[r])[i], inputs);
            }
        };
        const auto high = [](const LanePiece& piece) { return piece.codes; };
        products(high, upper);
        Floats sum[kRows];
        for (int r = 0; r < kRows; ++r) sum[r] = *total[r];
        if constexpr (two_parts(kFormat)) {
            const auto low = [](const LanePiece& piece) { return piece.low; };
            for (int r = 0; r < kRows; ++r) {
                sum[r] = fused((Floats)_mm512_cvtepi32_ps(sums[r]), pieces[r].scale * 16384.0f, sum[r]);
                sums[r] = _mm512_setzero_si512();
            }
            products(high, lower);
            products(low, upper);
            for (int r = 0; r < kRows; ++r) sums[r] = _mm512_slli_epi32(sums[r], 7);
            products(low, lower);
        } else {
            for (int r = 0; r < kRows; ++r) sums[r] = _mm512_slli_epi32(sums[r], 7);
            products(high, lower);
        }
        const Floats groups = load(x.block_sums(t, k) + (group_inputs(kFormat) == 32 ? 16 : 0));
        for (int r = 0; r < kRows; ++r) {
            sum[r] = fused((Floats)_mm512_cvtepi32_ps(sums[r]), pieces[r].scale, sum[r]);
            *total[r] = fused(-pieces[r].least, groups, sum[r]);
        }
    }
};

constexpr int64_t kBlocksAhead = 4096;  // bytes of blocks that are asked for while others multiply

// One half against tokens.
template <BlockFormat kFormat>
class BlockDots {
public:
    BlockDots(const Half& half, const float* constants, const Activations& x)
        : rows_(reinterpret_cast<const uint8_t*>(half.data)), count_(half.count), constants_(constants), x_(x),
          row_bytes_(x.cols / kShape.inputs * kShape.bytes) {
        if constexpr (two_parts(kFormat)) parts_ = table_parts(constants);
    }
    // kTokens from `first` on, a row after the other: sums[t][output].
    template <int kTokens>
    void few(int64_t first, float sums[kTile][kTile]) const {
        for (int begin = 0; begin < count_; begin += 4) {
            Floats total[4][kTokens] = {};
            for (int i = 0; i < 4 && begin + i < count_; ++i)
                for (int64_t k = 0; k < x_.cols; k += kBlockInputs) {
                    const Piece piece = at(begin + i, k);
#pragma GCC unroll 8
                    for (int t = 0; t < kTokens; ++t) {
                        Floats* const to[] = {&total[i][t]};
                        Piece::template add<1>(&piece, x_, first + t, k, to);
                    }
                }
            for (int t = 0; t < kTokens; ++t) {
                const Floats lanes[4] = {total[0][t], total[1][t], total[2][t], total[3][t]};
                finish(lanes, first + t, sums[t] + begin);
            }
        }
    }
    // A tile of `count` tokens from `first` on: a piece of theirs stays in the first-level cache while all rows meet it.
    void many(int64_t first, int64_t count, float sums[kTile][kTile]) const {
        Floats total[kTile][kTile] = {};
        for (int64_t k = 0; k < x_.cols; k += kBlockInputs)
            for (int row = 0; row < count_; row += 2) {
                const Piece pieces[] = {at(row, k), at(std::min(row + 1, count_ - 1), k)};
                for (int64_t t = 0; t < count; ++t) {
                    Floats* const to[] = {&total[row][t], &total[row + 1][t]};
                    Piece::template add<2>(pieces, x_, first + t, k, to);
                }
            }
        for (int64_t t = 0; t < count; ++t)
            for (int begin = 0; begin < count_; begin += 4) {
                const Floats lanes[4] = {total[begin][t], total[begin + 1][t], total[begin + 2][t], total[begin + 3][t]};
                finish(lanes, first + t, sums[t] + begin);
            }
    }

private:
    using Piece = LanePiece<kFormat>;
    static constexpr BlockShape kShape = block_shape(kFormat);
    static constexpr int64_t kPieceBytes = kBlockInputs / kShape.inputs * kShape.bytes;

    Piece at(int row, int64_t k) const {
        const uint8_t* const from = rows_ + row * row_bytes_ + k / kShape.inputs * kShape.bytes;
        if (k + kBlockInputs <= x_.cols) {
            for (int64_t line = 0; line < kPieceBytes; line += 64) __builtin_prefetch(from + kBlocksAhead + line, 0, 2);
            return {from, constants_, parts_};
        }
        uint8_t rest[kPieceBytes] = {};  // blocks that are not there are zeros, as their inputs are
        std::memcpy(rest, from, (x_.cols - k) / kShape.inputs * kShape.bytes);
        return {rest, constants_, parts_};
    }
    void finish(const Floats lanes[4], int64_t token, float to[4]) const {
        sum_four(lanes, to);
        for (int i = 0; i < 4; ++i) to[i] *= x_.scales[token];
    }

    const uint8_t* const rows_;
    const int count_;
    const float* const constants_;
    const Activations& x_;
    const int64_t row_bytes_;
    TableParts parts_;
};

// Tokens [begin, end); sums[0] is of the tile that `begin` opens.
template <BlockFormat kFormat>
void dot_blocks(const Half& half, const float* constants, const Activations& x, int64_t begin, int64_t end, Sums* sums, int h) {
    constexpr int kFew = 8;  // whose sums stay in registers
    const BlockDots<kFormat> dots(half, constants, x);
    if (end - begin > kFew) {
        for (int64_t t = begin; t < end; t += kTile, ++sums) dots.many(t, std::min<int64_t>(kTile, end - t), sums->at[h]);
    } else {
        with_count<kFew>(end - begin, [&](auto tokens) { dots.template few<decltype(tokens)::value>(begin, sums->at[h]); });
    }
}

// A strip in blocks against the tiles [first, last) of the tokens; sums[0] belongs to tile `first`.
template <typename T>
void block_strip(const Strips<T>& strips, int matrix, const Half half[2], const Activations& x, int64_t first, int64_t last, Sums* sums) {
    for (int64_t tile = first; tile < last; ++tile) sums[tile - first].by_token = true;
    for (int h = 0; h < 2; ++h) {
        if (half[h].count == 0) continue;
        const Matrix<T>& m = strips.matrix_of(matrix, h);
        const auto run = [&]<BlockFormat kFormat>() {
            dot_blocks<kFormat>(half[h], m.block_constants, x, first * kTile, std::min(x.tokens, last * kTile), sums, h);
        };
        switch (m.blocks) {
            case BlockFormat::none: break;
            case BlockFormat::q4_1: run.template operator()<BlockFormat::q4_1>(); break;
            case BlockFormat::q5_0: run.template operator()<BlockFormat::q5_0>(); break;
            case BlockFormat::q5_1: run.template operator()<BlockFormat::q5_1>(); break;
            case BlockFormat::q2_k: run.template operator()<BlockFormat::q2_k>(); break;
            case BlockFormat::q3_k: run.template operator()<BlockFormat::q3_k>(); break;
            case BlockFormat::q4_k: run.template operator()<BlockFormat::q4_k>(); break;
            case BlockFormat::q5_k: run.template operator()<BlockFormat::q5_k>(); break;
            case BlockFormat::q6_k: run.template operator()<BlockFormat::q6_k>(); break;
            case BlockFormat::iq4_nl: run.template operator()<BlockFormat::iq4_nl>(); break;
            case BlockFormat::iq4_xs: run.template operator()<BlockFormat::iq4_xs>(); break;
            case BlockFormat::mxfp4: run.template operator()<BlockFormat::mxfp4>(); break;
            case BlockFormat::nvfp4: run.template operator()<BlockFormat::nvfp4>(); break;
            case BlockFormat::table4: run.template operator()<BlockFormat::table4>(); break;
            case BlockFormat::iq2_xxs: run.template operator()<BlockFormat::iq2_xxs>(); break;
            case BlockFormat::iq2_xs: run.template operator()<BlockFormat::iq2_xs>(); break;
            case BlockFormat::iq2_s: run.template operator()<BlockFormat::iq2_s>(); break;
            case BlockFormat::iq3_xxs: run.template operator()<BlockFormat::iq3_xxs>(); break;
            case BlockFormat::iq3_s: run.template operator()<BlockFormat::iq3_s>(); break;
            case BlockFormat::iq1_s: run.template operator()<BlockFormat::iq1_s>(); break;
            case BlockFormat::iq1_m: run.template operator()<BlockFormat::iq1_m>(); break;
        }
    }
}

}  // namespace quire
#endif
