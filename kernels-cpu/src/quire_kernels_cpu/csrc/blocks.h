// Weights in blocks: some inputs of an output with their scales, side by side in memory as checkpoints have them. A strip is
// decoded into rows of the network's type when its turn comes, and multiplied as a plain one. Every number is rounded once,
// as it is where a whole weight is decoded while it is loaded: products have the same bits.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "vectors.h"

namespace quire {

// In the order of `BLOCK_FORMATS` of quire_ops; 0: not in blocks. The layouts are described there.
enum class BlockFormat : int32_t {
    none, q4_1, q5_0, q5_1, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs, mxfp4, nvfp4, table4,
    iq2_xxs, iq2_xs, iq2_s, iq3_xxs, iq3_s, iq1_s, iq1_m
};

struct BlockShape {
    int64_t inputs, bytes;
};

constexpr BlockShape block_shape(BlockFormat format) {
    switch (format) {
        case BlockFormat::none: return {1, 0};
        case BlockFormat::q4_1: return {32, 20};
        case BlockFormat::q5_0: return {32, 22};
        case BlockFormat::q5_1: return {32, 24};
        case BlockFormat::q2_k: return {256, 84};
        case BlockFormat::q3_k: return {256, 110};
        case BlockFormat::q4_k: return {256, 144};
        case BlockFormat::q5_k: return {256, 176};
        case BlockFormat::q6_k: return {256, 210};
        case BlockFormat::iq4_nl: return {32, 18};
        case BlockFormat::iq4_xs: return {256, 136};
        case BlockFormat::mxfp4: return {32, 17};
        case BlockFormat::nvfp4: return {32, 18};
        case BlockFormat::table4: return {64, 36};
        case BlockFormat::iq2_xxs: return {256, 66};
        case BlockFormat::iq2_xs: return {256, 74};
        case BlockFormat::iq2_s: return {256, 82};
        case BlockFormat::iq3_xxs: return {256, 98};
        case BlockFormat::iq3_s: return {256, 110};
        case BlockFormat::iq1_s: return {256, 50};
        case BlockFormat::iq1_m: return {256, 56};
    }
    return {1, 0};
}

constexpr float kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr float kE2m1Values[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};

inline float half_at(const uint8_t* from) {
    Float16 half;
    std::memcpy(&half, from, sizeof half);
    return to_float(half);
}
// One `Float8`: as half precision its exponent is 8 less.
inline float one_float8(const uint8_t* from) {
    const auto code = static_cast<int8_t>(*from);
    return to_float(Float16{static_cast<uint16_t>(code * 128 & 0xbfff)}) * 256.0f;
}
// A scale of NVFP4: its own number times the tensor's, or divided by that.
inline float nvfp4_scale(const uint8_t* from, const float* constants) {
    return constants[1] != 0.0f ? one_float8(from) / constants[0] : one_float8(from) * constants[0];
}
// 2^(exponent - 127).
inline float power_of_two(uint8_t exponent) {
    const uint32_t bits = exponent ? exponent << 23 : 1u << 22;
    float power;
    std::memcpy(&power, &bits, 4);
    return power;
}
inline Floats floats(Words numbers) { return __builtin_convertvector((Ints)numbers, Floats); }

// table[index] of each lane, of 16 numbers.
inline Floats at_index(const float* table, Words index) {
    Floats found;
    if constexpr (kLanes == 16) {
        found = __builtin_shuffle(load(table), (Ints)index);
    } else if constexpr (kLanes == 8) {
        found = __builtin_shuffle(load(table), load(table + 8), (Ints)index);
    } else {
        for (int i = 0; i < kLanes; ++i) found[i] = table[index[i]];
    }
    return found;
}

// `make`(codes, place of the first) of 16 bytes from `from` on -> 16 numbers.
template <typename T, typename Make>
inline void sixteen(T* to, const uint8_t* from, Make&& make) {
    for (int i = 0; i < 16; i += kLanes) store(to + i, make(load_codes(from + i), i));
}
// 32 numbers of 4 bits: those in the lower halves of 16 bytes, then those in the upper ones.
template <typename T, typename Make>
inline void halves_of_bytes(T* to, const uint8_t* from, Make&& make) {
    sixteen(to, from, [&](Words codes, int i) { return make(codes & 15, i); });
    sixteen(to + 16, from, [&](Words codes, int i) { return make(codes >> 4, i + 16); });
}
// Bit `first` of a word, and those behind it, in the lowest bits of the lanes.
inline Words bits_from(uint32_t word, int first) {
    Words lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = i + first;
    return (Words{} + word) >> lane & 1;
}

// Scale and minimum of group j of 8, 6 bits each in 12 bytes (Q4_K and Q5_K).
inline void scale_and_minimum(const uint8_t* from, int j, int& scale, int& minimum) {
    if (j < 4) {
        scale = from[j] & 63;
        minimum = from[j + 4] & 63;
    } else {
        scale = (from[j + 4] & 15) | from[j - 4] >> 6 << 4;
        minimum = from[j + 4] >> 4 | from[j] >> 6 << 4;
    }
}

// Formats whose inputs are, four or eight together, an entry of a grid, which the constants are, a byte a number.
constexpr bool has_grid(BlockFormat f) { return f >= BlockFormat::iq2_xxs; }

template <typename Number>
inline Number number_at(const void* from) {
    Number number;
    std::memcpy(&number, from, sizeof number);
    return number;
}
// Seven signs and the one that makes the count of ones even.
inline uint32_t even_signs(uint32_t seven) { return seven | static_cast<uint32_t>(__builtin_parity(seven)) << 7; }
// Eight numbers of a byte, none of them 0, negative where a bit is set.
inline uint64_t with_signs(uint64_t eight, uint32_t signs) {
    const uint64_t bits = signs * 0x0101010101010101ull & 0x8040201008040201ull;
    const uint64_t ones = (bits + 0x7f7f7f7f7f7f7f7full) >> 7 & 0x0101010101010101ull;
    return (eight ^ ones * 0xff) + ones;
}

// A block of 256 inputs as whole numbers, from -62 to 62, and a scale for each 16 of them.
template <BlockFormat kFormat>
inline void grid_codes(const uint8_t* from, const float* constants, int8_t codes[256], float scales[16]) {
    const auto* const grid = reinterpret_cast<const uint8_t*>(constants);
    const auto eight = [&](uint32_t entry) { return number_at<uint64_t>(grid + entry * 8); };
    const auto two_fours = [&](uint32_t first, uint32_t second) {
        return number_at<uint32_t>(grid + first * 4) | static_cast<uint64_t>(number_at<uint32_t>(grid + second * 4)) << 32;
    };
    const auto put = [&](int i, uint64_t numbers) { std::memcpy(codes + i * 8, &numbers, 8); };
    const auto of_four_bits = [&](const uint8_t* at, int i) { return static_cast<float>(at[i / 2] >> i % 2 * 4 & 15); };
    typedef int8_t Eight __attribute__((vector_size(8)));
    // Of IQ1 an eighth is added to or taken off each number: numbers are eighths, in the grid, too.
    const auto put_shifted = [&](int i, uint32_t entry, bool down) {
        put(i, number_at<uint64_t>(grid + entry * 8));
        const int8_t step = down ? -1 : 1;
        const Eight shifted = number_at<Eight>(codes + i * 8) + step;
        std::memcpy(codes + i * 8, &shifted, 8);
    };
    if constexpr (kFormat == BlockFormat::iq1_m) {
        uint32_t words[4];
        for (int i = 0; i < 4; ++i) words[i] = number_at<uint16_t>(from + 48 + 2 * i);
        const uint16_t bits = static_cast<uint16_t>(words[0] >> 12 | (words[1] >> 8 & 0xf0) | (words[2] >> 4 & 0xf00) | (words[3] & 0xf000));
        const float scale = half_at(reinterpret_cast<const uint8_t*>(&bits));
        for (int i = 0; i < 16; ++i) scales[i] = scale * static_cast<float>(2 * (words[i / 4] >> i % 4 * 3 & 7) + 1) * 0.125f;
        for (int i = 0; i < 32; ++i) {
            const uint32_t own = from[32 + i / 2] >> i % 2 * 4;
            put_shifted(i, from[i] | (own & 7) << 8, own & 8);
        }
        return;
    }
    const float scale = half_at(from);
    for (int group = 0; group < 8; ++group) {  // of 32 inputs
        float* const own = scales + 2 * group;
        if constexpr (kFormat == BlockFormat::iq2_xxs || kFormat == BlockFormat::iq3_xxs) {
            constexpr bool kTwo = kFormat == BlockFormat::iq2_xxs;
            const uint8_t* const entries = from + 2 + group * 8;
            const uint32_t word = number_at<uint32_t>(kTwo ? entries + 4 : from + 66 + group * 4);
            own[0] = own[1] = scale * (0.5f + static_cast<float>(word >> 28)) * (kTwo ? 0.25f : 0.5f);
            for (int i = 0; i < 4; ++i)
                put(group * 4 + i, with_signs(kTwo ? eight(entries[i]) : two_fours(entries[2 * i], entries[2 * i + 1]), even_signs(word >> 7 * i & 127)));
        } else if constexpr (kFormat == BlockFormat::iq2_xs || kFormat == BlockFormat::iq2_s) {
            constexpr bool kSmall = kFormat == BlockFormat::iq2_xs;
            for (int i = 0; i < 2; ++i) own[i] = scale * (0.5f + of_four_bits(from + (kSmall ? 66 : 74), 2 * group + i)) * 0.25f;
            for (int i = group * 4; i < group * 4 + 4; ++i) {
                if constexpr (kSmall) {
                    const uint32_t word = number_at<uint16_t>(from + 2 + i * 2);
                    put(i, with_signs(eight(word & 511), even_signs(word >> 9)));
                } else {
                    put(i, with_signs(eight(from[2 + i] | (from[66 + group] >> i % 4 * 2 & 3u) << 8), from[34 + i]));
                }
            }
        } else if constexpr (kFormat == BlockFormat::iq3_s) {
            own[0] = own[1] = scale * (1.0f + 2.0f * of_four_bits(from + 106, group));
            const uint32_t high = from[66 + group];
            for (int i = 0; i < 4; ++i) {
                const uint8_t* const entries = from + 2 + group * 8 + i * 2;
                const uint32_t first = entries[0] | (high >> 2 * i & 1) << 8, second = entries[1] | (high >> (2 * i + 1) & 1) << 8;
                put(group * 4 + i, with_signs(two_fours(first, second), from[74 + group * 4 + i]));
            }
        } else {
            const uint32_t word = number_at<uint16_t>(from + 34 + group * 2);
            own[0] = own[1] = scale * static_cast<float>(2 * (word >> 12 & 7) + 1) * 0.125f;
            for (int i = 0; i < 4; ++i) put_shifted(group * 4 + i, from[2 + group * 4 + i] | (word >> 3 * i & 7) << 8, word & 0x8000);
        }
    }
}

template <BlockFormat kFormat, typename T>
inline void decode_block(const uint8_t* from, [[maybe_unused]] const float* constants, T* to) {
    if constexpr (kFormat == BlockFormat::q4_1) {
        const float scale = half_at(from), minimum = half_at(from + 2);
        halves_of_bytes(to, from + 4, [&](Words codes, int) { return floats(codes) * scale + minimum; });
    } else if constexpr (kFormat == BlockFormat::q5_0) {
        const float scale = half_at(from);
        uint32_t fifth;
        std::memcpy(&fifth, from + 2, 4);
        halves_of_bytes(to, from + 6, [&](Words codes, int i) { return (floats(codes | bits_from(fifth, i) << 4) - 16.0f) * scale; });
    } else if constexpr (kFormat == BlockFormat::q5_1) {
        const float scale = half_at(from), minimum = half_at(from + 2);
        uint32_t fifth;
        std::memcpy(&fifth, from + 4, 4);
        halves_of_bytes(to, from + 8, [&](Words codes, int i) { return floats(codes | bits_from(fifth, i) << 4) * scale + minimum; });
    } else if constexpr (kFormat == BlockFormat::q2_k) {
        const float scale = half_at(from + 80), minimum = half_at(from + 82);
        for (int group = 0; group < 16; ++group) {
            const float factor = scale * (from[group] & 15), least = minimum * (from[group] >> 4);
            const uint8_t* const codes = from + 16 + group / 8 * 32 + group % 2 * 16;
            sixteen(to + group * 16, codes, [&](Words c, int) { return floats(c >> (group / 2 % 4 * 2) & 3) * factor - least; });
        }
    } else if constexpr (kFormat == BlockFormat::q3_k) {
        const float scale = half_at(from + 108);
        const uint8_t* const scales = from + 96;
        for (int group = 0; group < 16; ++group) {
            const int low = group < 8 ? scales[group] & 15 : scales[group - 8] >> 4, pair = group / 2;
            const float factor = scale * ((low | (scales[8 + group % 4] >> (group / 4 * 2) & 3) << 4) - 32);
            const uint8_t *const codes = from + 32 + group / 8 * 32 + group % 2 * 16, *const high = from + group % 2 * 16;
            sixteen(to + group * 16, codes, [&](Words c, int i) {
                const Words upper = load_codes(high + i) >> pair & 1;
                return (floats((c >> (pair % 4 * 2) & 3) | upper << 2) - 4.0f) * factor;
            });
        }
    } else if constexpr (kFormat == BlockFormat::q4_k || kFormat == BlockFormat::q5_k) {
        constexpr bool kFive = kFormat == BlockFormat::q5_k;
        const float scale = half_at(from), minimum = half_at(from + 2);
        for (int group = 0; group < 8; ++group) {
            int own, least_own;
            scale_and_minimum(from + 4, group, own, least_own);
            const float factor = scale * own, least = minimum * least_own;
            const uint8_t* const codes = from + (kFive ? 48 : 16) + group / 2 * 32;
            for (int half = 0; half < 32; half += 16)
                sixteen(to + group * 32 + half, codes + half, [&](Words c, int i) {
                    Words number = c >> (group % 2 * 4) & 15;
                    if constexpr (kFive) number |= (load_codes(from + 16 + half + i) >> group & 1) << 4;
                    return floats(number) * factor - least;
                });
        }
    } else if constexpr (kFormat == BlockFormat::q6_k) {
        const float scale = half_at(from + 208);
        for (int group = 0; group < 16; ++group) {
            const int quarter = group % 8 / 2, second = group % 2 * 16;
            const float factor = scale * static_cast<int8_t>(from[192 + group]);
            const uint8_t* const codes = from + group / 8 * 64 + quarter % 2 * 32 + second;
            const uint8_t* const high = from + 128 + group / 8 * 32 + second;
            sixteen(to + group * 16, codes, [&](Words c, int i) {
                const Words upper = load_codes(high + i) >> (quarter * 2) & 3;
                return (floats((c >> (quarter / 2 * 4) & 15) | upper << 4) - 32.0f) * factor;
            });
        }
    } else if constexpr (kFormat == BlockFormat::iq4_nl) {
        const float scale = half_at(from);
        halves_of_bytes(to, from + 2, [&](Words codes, int) { return at_index(kIq4Values, codes) * scale; });
    } else if constexpr (kFormat == BlockFormat::iq4_xs) {
        const float scale = half_at(from);
        for (int group = 0; group < 8; ++group) {
            const int high = from[2 + group / 4] >> (group % 4 * 2) & 3, low = from[4 + group / 2] >> (group % 2 * 4) & 15;
            const float factor = scale * ((low | high << 4) - 32);
            halves_of_bytes(to + group * 32, from + 8 + group * 16, [&](Words codes, int) { return at_index(kIq4Values, codes) * factor; });
        }
    } else if constexpr (kFormat == BlockFormat::mxfp4) {
        const float scale = power_of_two(from[0]);
        halves_of_bytes(to, from + 1, [&](Words codes, int) { return at_index(kE2m1Values, codes) * scale; });
    } else if constexpr (kFormat == BlockFormat::nvfp4) {
        const float factors[2] = {nvfp4_scale(from, constants), nvfp4_scale(from + 1, constants)};
        halves_of_bytes(to, from + 2, [&](Words codes, int i) { return at_index(kE2m1Values, codes) * factors[i / 16]; });
    } else if constexpr (kFormat == BlockFormat::table4) {
        float scale;
        std::memcpy(&scale, from, 4);
        for (int half = 0; half < 2; ++half)
            halves_of_bytes(to + half * 32, from + 4 + half * 16, [&](Words codes, int) { return at_index(constants, codes) * scale; });
    } else if constexpr (has_grid(kFormat)) {
        int8_t codes[256];
        float scales[16];
        grid_codes<kFormat>(from, constants, codes, scales);
        for (int i = 0; i < 256; i += kLanes) store(to + i, load(codes + i) * scales[i / 16]);
    }
}

#if defined(__AVX512BW__)
inline Halves bf16_of(Floats v) {
#if defined(__AVX512BF16__)
    return (Halves)_mm512_cvtneps_pbh((__m512)v);
#else
    return round_to_bf16(v);
#endif
}
// 32 numbers in bfloat16.
inline Shorts table_of(Floats first, Floats second) {
    const Halves low = bf16_of(first), high = bf16_of(second);
    return (Shorts)__builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20,
                                           21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31);
}
inline void store_at(BFloat16* to, Shorts table, Shorts index) {
    const Shorts found = __builtin_shuffle(table, index);
    std::memcpy(to, &found, sizeof found);
}
inline Shorts codes_at(const uint8_t* from) { return widened_bytes(reinterpret_cast<const int8_t*>(from)); }

// As `decode_block`, for formats whose groups have few different numbers: those of a group are made once, and looked up, 32
// at a time. The two halves of a table may be those of two groups of 16 inputs.
template <BlockFormat kFormat>
inline void decode_by_table(const uint8_t* from, const float* constants, BFloat16* to) {
    Floats number;
    Shorts upper_half;  // 0 in the first 16 lanes, 16 in the others
    for (int i = 0; i < kLanes; ++i) number[i] = static_cast<float>(i);
    for (int i = 0; i < 2 * kLanes; ++i) upper_half[i] = i / kLanes * 16;
    const auto halves = [&](const uint8_t* bytes) {  // of 16 bytes, which are twice there
        const __m128i once = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
        const Shorts both = (Shorts)_mm512_cvtepi8_epi16(_mm256_broadcastsi128_si256(once));
        return both >> (upper_half >> 2) & 15;
    };
    const auto fifth_bits = [&](const uint8_t* bytes) {  // of 4 bytes
        uint32_t word;
        std::memcpy(&word, bytes, 4);
        Shorts place;
        for (int i = 0; i < 2 * kLanes; ++i) place[i] = i % 16;
        const Shorts low = Shorts{} + static_cast<int16_t>(word), high = Shorts{} + static_cast<int16_t>(word >> 16);
        return ((upper_half != 0 ? high : low) >> place & 1) << 4;
    };
    if constexpr (kFormat == BlockFormat::q4_1) {
        const Floats table = number * half_at(from) + half_at(from + 2);
        store_at(to, table_of(table, table), halves(from + 4));
    } else if constexpr (kFormat == BlockFormat::q5_0) {
        const float scale = half_at(from);
        store_at(to, table_of((number - 16.0f) * scale, number * scale), halves(from + 6) | fifth_bits(from + 2));
    } else if constexpr (kFormat == BlockFormat::q5_1) {
        const float scale = half_at(from), minimum = half_at(from + 2);
        store_at(to, table_of(number * scale + minimum, (number + 16.0f) * scale + minimum), halves(from + 8) | fifth_bits(from + 4));
    } else if constexpr (kFormat == BlockFormat::q2_k) {
        const float scale = half_at(from + 80), minimum = half_at(from + 82);
        const auto group = [&](int i) { return number * (scale * (from[i] & 15)) - minimum * (from[i] >> 4); };
        for (int i = 0; i < 16; i += 2) {
            const Shorts codes = codes_at(from + 16 + i / 8 * 32) >> i % 8 & 3;
            store_at(to + i * 16, table_of(group(i), group(i + 1)), codes | upper_half);
        }
    } else if constexpr (kFormat == BlockFormat::q3_k) {
        const float scale = half_at(from + 108);
        const uint8_t* const scales = from + 96;
        const auto group = [&](int i) {
            const int low = i < 8 ? scales[i] & 15 : scales[i - 8] >> 4;
            return (number - 4.0f) * (scale * ((low | (scales[8 + i % 4] >> (i / 4 * 2) & 3) << 4) - 32));
        };
        for (int i = 0; i < 16; i += 2) {
            const Shorts codes = codes_at(from + 32 + i / 8 * 32) >> i % 8 & 3, third = (codes_at(from) >> i / 2 & 1) << 2;
            store_at(to + i * 16, table_of(group(i), group(i + 1)), codes | third | upper_half);
        }
    } else if constexpr (kFormat == BlockFormat::q4_k || kFormat == BlockFormat::q5_k) {
        constexpr bool kFive = kFormat == BlockFormat::q5_k;
        const float scale = half_at(from), minimum = half_at(from + 2);
        float factor[8], least[8];
        for (int i = 0; i < 8; ++i) {
            int own, least_own;
            scale_and_minimum(from + 4, i, own, least_own);
            factor[i] = scale * own;
            least[i] = minimum * least_own;
        }
#pragma GCC unroll 8
        for (int i = 0; i < 8; i += 2) {
            const Shorts codes = codes_at(from + (kFive ? 48 : 16) + i * 16);
            const Floats first = number * factor[i] - least[i], second = number * factor[i + 1] - least[i + 1];
            if constexpr (kFive) {
                const Shorts fifth = codes_at(from + 16) >> i;
                store_at(to + i * 32, table_of(first, (number + 16.0f) * factor[i] - least[i]), (codes & 15) | (fifth & 1) << 4);
                store_at(to + i * 32 + 32, table_of(second, (number + 16.0f) * factor[i + 1] - least[i + 1]),
                         (codes >> 4 & 15) | (fifth >> 1 & 1) << 4);
            } else {
                const Shorts table = table_of(first, second);
                store_at(to + i * 32, table, codes & 15);
                store_at(to + i * 32 + 32, table, (codes >> 4 & 15) | 16);
            }
        }
    } else if constexpr (kFormat == BlockFormat::iq4_nl) {
        const Floats table = load(kIq4Values) * half_at(from);
        store_at(to, table_of(table, table), halves(from + 2));
    } else if constexpr (kFormat == BlockFormat::iq4_xs) {
        const float scale = half_at(from);
        for (int i = 0; i < 8; ++i) {
            const int high = from[2 + i / 4] >> (i % 4 * 2) & 3, low = from[4 + i / 2] >> (i % 2 * 4) & 15;
            const Floats table = load(kIq4Values) * (scale * ((low | high << 4) - 32));
            store_at(to + i * 32, table_of(table, table), halves(from + 8 + i * 16));
        }
    } else if constexpr (kFormat == BlockFormat::mxfp4) {
        const Floats table = load(kE2m1Values) * power_of_two(from[0]);
        store_at(to, table_of(table, table), halves(from + 1));
    } else if constexpr (kFormat == BlockFormat::nvfp4) {
        const Floats values = load(kE2m1Values);
        const float low = nvfp4_scale(from, constants), high = nvfp4_scale(from + 1, constants);
        store_at(to, table_of(values * low, values * high), halves(from + 2) | upper_half);
    } else if constexpr (kFormat == BlockFormat::table4) {
        float scale;
        std::memcpy(&scale, from, 4);
        const Floats table = load(constants) * scale;
        const Shorts values = table_of(table, table);
        for (int i = 0; i < 2; ++i) store_at(to + i * 32, values, halves(from + 4 + i * 16));
    }
}
#endif

// `count` blocks.
template <BlockFormat kFormat, typename T>
void decode_blocks(const uint8_t* from, int64_t count, const float* constants, T* to) {
    constexpr BlockShape kShape = block_shape(kFormat);
    for (int64_t i = 0; i < count; ++i) {
        const uint8_t* const block = from + i * kShape.bytes;
#if defined(__AVX512BW__)
        if constexpr (std::is_same_v<T, BFloat16> && kFormat != BlockFormat::q6_k && !has_grid(kFormat)) {
            decode_by_table<kFormat>(block, constants, to + i * kShape.inputs);
            continue;
        }
#endif
        decode_block<kFormat>(block, constants, to + i * kShape.inputs);
    }
}

template <typename T>
using BlockDecoder = void (*)(const uint8_t* from, int64_t count, const float* constants, T* to);

template <typename T>
BlockDecoder<T> block_decoder(BlockFormat format) {
    switch (format) {
        case BlockFormat::none: return nullptr;
        case BlockFormat::q4_1: return decode_blocks<BlockFormat::q4_1, T>;
        case BlockFormat::q5_0: return decode_blocks<BlockFormat::q5_0, T>;
        case BlockFormat::q5_1: return decode_blocks<BlockFormat::q5_1, T>;
        case BlockFormat::q2_k: return decode_blocks<BlockFormat::q2_k, T>;
        case BlockFormat::q3_k: return decode_blocks<BlockFormat::q3_k, T>;
        case BlockFormat::q4_k: return decode_blocks<BlockFormat::q4_k, T>;
        case BlockFormat::q5_k: return decode_blocks<BlockFormat::q5_k, T>;
        case BlockFormat::q6_k: return decode_blocks<BlockFormat::q6_k, T>;
        case BlockFormat::iq4_nl: return decode_blocks<BlockFormat::iq4_nl, T>;
        case BlockFormat::iq4_xs: return decode_blocks<BlockFormat::iq4_xs, T>;
        case BlockFormat::mxfp4: return decode_blocks<BlockFormat::mxfp4, T>;
        case BlockFormat::nvfp4: return decode_blocks<BlockFormat::nvfp4, T>;
        case BlockFormat::table4: return decode_blocks<BlockFormat::table4, T>;
        case BlockFormat::iq2_xxs: return decode_blocks<BlockFormat::iq2_xxs, T>;
        case BlockFormat::iq2_xs: return decode_blocks<BlockFormat::iq2_xs, T>;
        case BlockFormat::iq2_s: return decode_blocks<BlockFormat::iq2_s, T>;
        case BlockFormat::iq3_xxs: return decode_blocks<BlockFormat::iq3_xxs, T>;
        case BlockFormat::iq3_s: return decode_blocks<BlockFormat::iq3_s, T>;
        case BlockFormat::iq1_s: return decode_blocks<BlockFormat::iq1_s, T>;
        case BlockFormat::iq1_m: return decode_blocks<BlockFormat::iq1_m, T>;
    }
    return nullptr;
}

}  // namespace quire
