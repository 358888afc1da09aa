// The transpositions of AVX2 (8x8) and AVX-512 (16x16), and the tile registers of AMX that it feeds. Each is there if its instructions are.
#pragma once

#include "vectors.h"

namespace quire {

constexpr int kTile = 16;
#if defined(__AVX512BF16__)
constexpr bool kPairProducts = true;  // of bfloat16
#else
constexpr bool kPairProducts = false;
#endif

}  // namespace quire

#if defined(__AVX2__) && !defined(__AVX512F__)
namespace quire {

inline void transpose(Floats v[8]) {
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_ps((__m256)v[i], (__m256)v[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps((__m256)v[i], (__m256)v[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; ++j) {
            b[i + 2 * j] = _mm256_shuffle_ps(a[i + j], a[i + j + 2], 0x44);
            b[i + 2 * j + 1] = _mm256_shuffle_ps(a[i + j], a[i + j + 2], 0xee);
        }
    for (int i = 0; i < 4; ++i) {
        v[i] = (Floats)_mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
        v[i + 4] = (Floats)_mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
    }
}

}  // namespace quire
#endif

#if defined(__AVX512F__)
namespace quire {

inline void transpose(__m512i r[16]) {
    __m512i a[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; ++i) {
        a[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        a[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        a[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        a[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; ++i) {
        r[i] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0x88);
        r[i + 4] = _mm512_shuffle_i32x4(a[i + 4], a[i + 12], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd);
        r[i + 12] = _mm512_shuffle_i32x4(a[i + 4], a[i + 12], 0xdd);
    }
}

inline __m512i pair_everywhere(const void* from) {
    int32_t pair;
    std::memcpy(&pair, from, sizeof pair);
    return _mm512_set1_epi32(pair);
}

// 32 bytes of each of 16 rows, those of a row beside those of the row four on; and the next 32 bytes, if `kLines`.
template <bool kLines>
inline void load_rows(const char* row, int64_t stride, __m512i to[8], __m512i next[8]) {
    const auto load = [](const char* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); };
#pragma GCC unroll 2
    for (int eight = 0; eight < 8; eight += 4) {
        __m256i first[4], first_next[4];
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i, row += stride) {
            asm("" : "+r"(row));  // one address, not 16 that do not fit the registers
            const int at = eight + i % 4;
            if (i < 4) {
                first[i] = load(row);
                if (kLines) first_next[i] = load(row + 32);
            } else {
                to[at] = _mm512_inserti64x4(_mm512_castsi256_si512(first[i - 4]), load(row), 1);
                if (kLines) next[at] = _mm512_inserti64x4(_mm512_castsi256_si512(first_next[i - 4]), load(row + 32), 1);
            }
        }
    }
}

// What `load_rows` gave -> 8 vectors, each of four bytes of every row.
inline void turn(__m512i v[8], __m512i to[8]) {
    __m512i a[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        v[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        v[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        v[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        v[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        to[i] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88);
        to[i + 4] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd);
    }
}

inline void turn_rows(const char* row, int64_t stride, __m512i to[8]) {
    __m512i v[8];
    load_rows<false>(row, stride, v, nullptr);
    turn(v, to);
}

// Turns over 16 rows, 32 bytes of each at a time from the first on.
struct RowTurner {
    const char* rows;
    int64_t row_bytes;

    void turn_at(int64_t at, __m512i to[8]) const { turn_rows(rows + at, row_bytes, to); }
};

// 16 bytes of each of 16 rows -> 4 vectors, each of four bytes of every row.
inline void turn_blocks(const char* row, int64_t stride, __m512i to[4]) {
    __m512i v[4], a[4];
#pragma GCC unroll 16
    for (int i = 0; i < kTile; ++i, row += stride) {
        asm("" : "+r"(row));  // one address, not 16 that do not fit the registers
        const __m128i block = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row));
        v[i % 4] = i < 4 ? _mm512_broadcast_i32x4(block)
                         : _mm512_mask_broadcast_i32x4(v[i % 4], static_cast<__mmask16>(15 << i / 4 * 4), block);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 4; i += 2) {
        a[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
        to[2 * i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        to[2 * i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    }
}

// The same as `RowTurner`: blocks of 128 bits come into their places as they are read, which takes two loads for one, and 16
// shuffles for 24, whose ports products need.
struct BlockTurner {
    const char* rows;
    int64_t row_bytes;

    void turn_at(int64_t at, __m512i to[8]) const {
        turn_blocks(rows + at, row_bytes, to);
        turn_blocks(rows + at + 16, row_bytes, to + 4);
    }
};

// The same of rows that are a multiple of 4,096 bytes apart. All their lines share one set of the first-level cache, which
// has no room for them: 64 bytes are read, so that a line is asked for once. Of rows that begin within lines, as in most
// files, a line is kept for the 64 bytes that it ends and the next ones.
class LineTurner {
public:
    static bool fits(int64_t row_bytes) { return row_bytes % 4096 == 0; }

    LineTurner(const char* rows, int64_t row_bytes)
        : rows_(rows), row_bytes_(row_bytes), begin_(reinterpret_cast<uintptr_t>(rows) % 64),
          keeps_lines_(begin_ != 0 && begin_ % 4 == 0) {
        if (!keeps_lines_) return;
        const __m512i places = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        from_begin_ = _mm512_add_epi32(places, _mm512_set1_epi32(static_cast<int>(begin_ / 4)));
        for (int i = 0; i < 16; ++i) lines_[i] = _mm512_load_si512(rows - begin_ + i * row_bytes);
    }

    void turn_at(int64_t at, __m512i to[8]) {
        __m512i v[8];
        if (at % 64 != 0) {
            for (int i = 0; i < 8; ++i) v[i] = others_[i];
        } else if (keeps_lines_) {
            next_lines(rows_ - begin_ + at + 64, v);
        } else {
            load_rows<true>(rows_ + at, row_bytes_, v, others_);
        }
        turn(v, to);
    }

private:
    // As `load_rows`, of the lines kept and the next ones.
    void next_lines(const char* line, __m512i to[8]) {
#pragma GCC unroll 2
        for (int eight = 0; eight < 8; eight += 4) {
            const char* four_on = line + 4 * row_bytes_;
#pragma GCC unroll 4
            for (int i = eight; i < eight + 4; ++i, line += row_bytes_, four_on += row_bytes_) {
                asm("" : "+r"(line), "+r"(four_on));
                __m512i *const kept = &lines_[eight + i], *const kept_four_on = kept + 4;
                const __m512i a = _mm512_load_si512(line), b = _mm512_load_si512(four_on);
                const __m512i row = _mm512_permutex2var_epi32(*kept, from_begin_, a);
                const __m512i row_four_on = _mm512_permutex2var_epi32(*kept_four_on, from_begin_, b);
                *kept = a;
                *kept_four_on = b;
                to[i] = _mm512_shuffle_i32x4(row, row_four_on, 0x44);
                others_[i] = _mm512_shuffle_i32x4(row, row_four_on, 0xee);
            }
            line = four_on;
        }
    }

    const char* const rows_;
    const int64_t row_bytes_, begin_;
    const bool keeps_lines_;
    __m512i from_begin_, others_[8], lines_[16];
};

#if defined(__AVX512BF16__)
// Two vectors of 16 numbers -> 16 pairs of bfloat16, the first number in the lower half.
inline __m512i pair_up(__m512 low, __m512 high) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                           5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

inline __m512 plus_pairs(__m512 sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

// 16 rows of bfloat16 (null rows count as zeros) -> pairs: to[k / 2][row] holds elements k and k + 1 of the row.
// AMX takes its second operand in this layout. cols: a multiple of 32.
inline void interleave_pairs(const BFloat16* const rows[16], int64_t cols, uint32_t* to) {
    for (int64_t k = 0; k < cols; k += 32) {
        __m512i r[16];
        for (int i = 0; i < 16; ++i) r[i] = rows[i] ? _mm512_loadu_si512(rows[i] + k) : _mm512_setzero_si512();
        transpose(r);
        for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + k * 8 + i * 16, r[i]);
    }
}
#endif

}  // namespace quire
#endif

#if defined(__AVX512VNNI__)
#define QUIRE_VNNI 1  // products of bytes, four at a time
#endif

#if defined(__AMX_BF16__)
#define QUIRE_AMX 1
#include <sys/syscall.h>
#include <unistd.h>

namespace quire {

// Whether the kernel gives this process the tile state (ARCH_REQ_XCOMP_PERM, XTILEDATA); asked when the library loads.
inline const bool tiles_granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;

// While one lives that was asked to, and tiles were granted, this thread's eight tiles are 16 rows of 64 bytes each.
class HeldTiles {
public:
    explicit HeldTiles(bool wanted) : held_(wanted && tiles_granted) {
        if (!held_) return;
        // gcc 12 believes that the instruction reads 8 bytes and would drop the stores to the rest.
        alignas(64) volatile uint8_t config[64];
        for (int i = 0; i < 64; ++i) config[i] = 0;
        config[0] = 1;
        for (int i = 0; i < 8; ++i) {
            config[16 + 2 * i] = 64;
            config[48 + i] = 16;
        }
        asm volatile("" ::: "memory");
        _tile_loadconfig(const_cast<const uint8_t*>(config));
    }
    ~HeldTiles() {
        if (held_) _tile_release();
    }
    HeldTiles(const HeldTiles&) = delete;
    HeldTiles& operator=(const HeldTiles&) = delete;

private:
    const bool held_;
};

}  // namespace quire
#else
namespace quire {

constexpr bool tiles_granted = false;

struct HeldTiles {
    explicit HeldTiles(bool) {}
};

}  // namespace quire
#endif
