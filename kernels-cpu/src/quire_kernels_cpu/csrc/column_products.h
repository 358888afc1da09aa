// Matrices times activations in columns, by vectors or by AMX tiles.
//
// With tiles a float32 number is three of bfloat16 that sum to it: of the nine products of two such numbers the six that
// float32 can tell from zero are added (Henry, Tang & Heinecke 2019, "Leveraging the bfloat16 Artificial Intelligence
// Datatype For Higher-Precision Computations", arXiv:1904.06376, sec. 3). So a product has the precision of float32 and
// takes six steps of tiles, which are 16 times as fast as vectors. Numbers of bfloat16 and of int8 are one piece, exactly.
//
// Without tiles weights of another type than float32 are widened, some outputs at a time, and stay in the second-level
// cache while all tokens meet them.
#pragma once

#include "column_bytes.h"

namespace quire {

constexpr int64_t kWidenedRows = 192;  // outputs whose weights meet all tokens before the next ones
constexpr int64_t kUnitRows = 64;      // of which threads take some

struct ProductScratch {
    Buffer weights;
};

// The matrices that take the same input, and where each one's outputs go.
template <typename T>
struct ColumnProduct {
    const Matrix<T>* matrices;
    const ColumnOutput* outputs;
    int count;

    int64_t units() const {
        int64_t total = 0;
        for (int i = 0; i < count; ++i) total += (matrices[i].rows + kUnitRows - 1) / kUnitRows;
        return total;
    }
    // run(matrix, first row, end) for units [share.begin, share.end).
    template <typename Run>
    void each(Range share, const Run& run) const {
        int64_t before = 0;
        for (int i = 0; i < count; ++i) {
            const int64_t units = (matrices[i].rows + kUnitRows - 1) / kUnitRows;
            const int64_t begin = std::max(share.begin - before, int64_t{0}), end = std::min(share.end - before, units);
            if (begin < end) run(i, begin * kUnitRows, std::min(end * kUnitRows, matrices[i].rows));
            before += units;
        }
    }
};

// What products read of an input: the columns themselves, and for tiles their pieces.
struct ColumnInput {
    Columns columns;
    uint32_t* pieces = nullptr;  // [tiles][steps of 32 inputs][pieces][16][16] pairs of bfloat16; null: vectors multiply
    int num_pieces = 0;
    ByteColumns bytes = {};  // of networks whose inputs are rounded

    int64_t steps() const { return (columns.features + 31) / 32; }
    uint32_t* at(int64_t tile, int64_t step) const { return pieces + (tile * steps() + step) * num_pieces * 256; }
};

#ifdef QUIRE_AMX

// The nearest bfloat16 of each lane is taken from two vectors -> pairs, those of `low` in the lower halves. Ties go away from zero.
inline __m512i take_pairs(__m512& low, __m512& high) {
    const __m512i half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    const __m512i a = _mm512_and_si512(_mm512_add_epi32((__m512i)low, half), upper);
    const __m512i b = _mm512_and_si512(_mm512_add_epi32((__m512i)high, half), upper);
    low -= (__m512)a;
    high -= (__m512)b;
    return _mm512_or_si512(_mm512_srli_epi32(a, 16), b);
}

// A tile of columns as pieces. Of 32 inputs a pair has two that follow each other, or of three pieces two that are 16 apart, for
// which weights need no rearrangement.
template <int kPieces>
inline void split_tile(const ColumnInput& input, int64_t tile) {
    const int64_t features = input.columns.features;
    const auto column = [&](int64_t k) { return k < features ? (__m512)load(input.columns.at(tile, k)) : _mm512_setzero_ps(); };
    for (int64_t step = 0; step < input.steps(); ++step) {
        uint32_t* const to = input.at(tile, step);
        for (int64_t i = 0; i < kTile; ++i) {
            if constexpr (kPieces == 1) {
                _mm512_store_si512(to + i * kTile, pair_up(column(step * 32 + 2 * i), column(step * 32 + 2 * i + 1)));
            } else {
                __m512 low = column(step * 32 + i), high = column(step * 32 + 16 + i);
#pragma GCC unroll 3
                for (int piece = 0; piece < kPieces; ++piece) _mm512_store_si512(to + piece * 256 + i * kTile, take_pairs(low, high));
            }
        }
    }
}

inline void split_tile(const ColumnInput& input, int64_t tile) {
    input.num_pieces == 3 ? split_tile<3>(input, tile) : split_tile<1>(input, tile);
}

// 32 inputs of a row of weights as pieces, in the order of an input of so many pieces, 64 bytes each and `stride` bytes apart; those
// from `count` on as zeros.
template <int kInputPieces>
inline void split_weights(const float* from, int64_t count, char* to, int64_t stride) {
    static_assert(kInputPieces == 3);
    __m512 low = (__m512)load_some(from, count), high = (__m512)load_some(from + 16, count - 16);
#pragma GCC unroll 3
    for (int piece = 0; piece < 3; ++piece) _mm512_store_si512(to + piece * stride, take_pairs(low, high));
}
template <int kInputPieces>
inline void split_weights(const BFloat16* from, int64_t count, char* to, int64_t) {
    static_assert(kInputPieces == 1);
    if (count >= 32) return _mm512_store_si512(to, _mm512_loadu_si512(from));
    std::memset(to, 0, 64);
    std::memcpy(to, from, count * sizeof *from);
}
template <int kInputPieces>
inline void split_weights(const int8_t* from, int64_t count, char* to, int64_t) {
    __m512 low = (__m512)load_some(from, count), high = (__m512)load_some(from + 16, count - 16);
    _mm512_store_si512(to, kInputPieces == 1 ? (__m512i)_mm512_cvtne2ps_pbh(high, low) : take_pairs(low, high));
}

// What a weight's elements are split into.
template <typename W>
constexpr int kWeightPieces = std::is_same_v<W, float> ? 3 : 1;

// Steps of 32 inputs whose weights stay in the first-level cache, beside those of a tile of tokens and its sums.
template <int kPieces>
constexpr int64_t kTileSteps = kPieces == 1 ? 6 : 2;
constexpr int64_t kTogetherTiles = 16;  // tiles of tokens that meet weights before they are split again
constexpr int64_t kPartSteps = 24;      // steps of 32 inputs of which so many tiles stay in the second-level cache

// 16 * kHalves outputs times a tile of tokens over `steps` steps, whose weights are [steps][pieces][kHalves][16][32]. y:
// [outputs][16 tokens]. fetch(step): called before each step.
template <int kWeightPieces, int kInputPieces, int kHalves, typename Fetch>
inline void multiply_pieces(const char* weights, const uint32_t* x, int64_t steps, float* y, bool begins, const Fetch& fetch) {
    if (begins) {
        _tile_zero(0);
        if constexpr (kHalves > 1) _tile_zero(1);
        if constexpr (kHalves > 2) _tile_zero(2);
        if constexpr (kHalves > 3) _tile_zero(3);
    } else {
        _tile_loadd(0, y, 64);
        if constexpr (kHalves > 1) _tile_loadd(1, y + 256, 64);
        if constexpr (kHalves > 2) _tile_loadd(2, y + 512, 64);
        if constexpr (kHalves > 3) _tile_loadd(3, y + 768, 64);
    }
    // Sums wait for nothing: each gets a product in turn.
#define QUIRE_MULTIPLY_HALVES(piece, input)                                        \
    _tile_loadd(7, weights + (piece) * kHalves * 1024, 64);                        \
    _tile_dpbf16ps(0, 7, input);                                                   \
    if constexpr (kHalves > 1) {                                                   \
        _tile_loadd(7, weights + ((piece) * kHalves + 1) * 1024, 64);              \
        _tile_dpbf16ps(1, 7, input);                                               \
    }                                                                              \
    if constexpr (kHalves > 2) {                                                   \
        _tile_loadd(7, weights + ((piece) * kHalves + 2) * 1024, 64);              \
        _tile_dpbf16ps(2, 7, input);                                               \
    }                                                                              \
    if constexpr (kHalves > 3) {                                                   \
        _tile_loadd(7, weights + ((piece) * kHalves + 3) * 1024, 64);              \
        _tile_dpbf16ps(3, 7, input);                                               \
    }
    for (int64_t k = 0; k < steps; ++k) {
        fetch(k);
        _tile_loadd(4, x, 64);
        if constexpr (kInputPieces > 1) _tile_loadd(5, x + 256, 64);
        if constexpr (kInputPieces > 2) _tile_loadd(6, x + 512, 64);
        if constexpr (kWeightPieces > 2) {
            QUIRE_MULTIPLY_HALVES(2, 4)
        }
        if constexpr (kWeightPieces > 1) {
            QUIRE_MULTIPLY_HALVES(1, 5)
            QUIRE_MULTIPLY_HALVES(1, 4)
        }
        if constexpr (kInputPieces > 2) {
            QUIRE_MULTIPLY_HALVES(0, 6)
            QUIRE_MULTIPLY_HALVES(0, 5)
        }
        QUIRE_MULTIPLY_HALVES(0, 4)
        weights += kWeightPieces * kHalves * 1024;
        x += kInputPieces * 256;
    }
#undef QUIRE_MULTIPLY_HALVES
    _tile_stored(0, y, 64);
    if constexpr (kHalves > 1) _tile_stored(1, y + 256, 64);
    if constexpr (kHalves > 2) _tile_stored(2, y + 512, 64);
    if constexpr (kHalves > 3) _tile_stored(3, y + 768, 64);
}

// 16 * kHalves rows of a matrix from `row` on, steps [first, last) of its inputs, times so many tiles of tokens.
template <typename T, typename W, int kInputPieces, int kHalves>
void multiply_rows(const Matrix<T>& m, const ColumnOutput& out, const ColumnInput& input, int64_t row, Range tiles, Range steps,
                   char* split) {
    constexpr int kPieces = kWeightPieces<W>, kRows = kHalves * 16;
    const W* const weights = static_cast<const W*>(m.data) + row * m.cols;
    for (int64_t step = steps.begin; step < steps.end; step += kTileSteps<kPieces>) {
        const int64_t some = std::min(kTileSteps<kPieces>, steps.end - step);
        // What is split next, the rows' next inputs or other rows' first ones, is fetched meanwhile, a row at a time: a core
        // waits where it asks for too many lines at once. Of few tiles half of the time goes into splitting.
        const bool ends = step + some >= steps.end;
        const W* const next = weights + (ends ? kRows * m.cols + steps.begin * 32 : (step + some) * 32);
        const auto fetch = [&](int64_t row) {
            for (int64_t byte = 0; byte < some * 32 * static_cast<int64_t>(sizeof(W)); byte += 64)
                __builtin_prefetch(reinterpret_cast<const char*>(next + row * m.cols) + byte, 0, 2);
        };
        const int64_t count = tiles.end - tiles.begin, early = count <= 2 ? kRows / 2 : 0, late = kRows - early;
        for (int i = 0; i < kRows; ++i) {
            if (early && i % 2) fetch(i / 2);
            for (int64_t k = 0; k < some; ++k)
                split_weights<kInputPieces>(weights + i * m.cols + (step + k) * 32, m.cols - (step + k) * 32,
                                            split + k * kPieces * kHalves * 1024 + i * 64, kHalves * 1024);
        }
        for (int64_t tile = tiles.begin; tile < tiles.end; ++tile) {
            const int64_t done = (tile - tiles.begin) * some;
            const auto fetch_some = [&](int64_t k) {
                for (int64_t i = (done + k) * late / (count * some); i < (done + k + 1) * late / (count * some); ++i) fetch(early + i);
            };
            multiply_pieces<kPieces, kInputPieces, kHalves>(split, input.at(tile, step), some, out.to.at(tile, out.feature + row), step == 0,
                                                            fetch_some);
        }
    }
}

// Rows [begin, end) of a matrix, a multiple of 16, times tiles [first, last).
template <typename T, typename W, int kInputPieces>
void multiply_by_tiles(const Matrix<T>& m, const ColumnOutput& out, const ColumnInput& input, int64_t begin, int64_t end,
                       int64_t first, int64_t last, ProductScratch& scratch) {
    constexpr int kPieces = kWeightPieces<W>;
    char* const split = scratch.weights.get<char>(kTileSteps<kPieces> * kPieces * 4096);
    const int64_t steps = input.steps();
    for (int64_t tiles = first; tiles < last; tiles += kTogetherTiles)
        for (int64_t part = 0; part < steps; part += kPartSteps) {
            const Range some{tiles, std::min(tiles + kTogetherTiles, last)}, of{part, std::min(part + kPartSteps, steps)};
            for (int64_t row = begin; row < end; row += kUnitRows) {
                const int64_t rows = std::min(kUnitRows, end - row);
                with_count<4>(rows / 16, [&](auto halves) {
                    multiply_rows<T, W, kInputPieces, decltype(halves)::value>(m, out, input, row, some, of, split);
                });
                if (of.end == steps) finish_columns(m, out, row, row + rows, some.begin, some.end);
            }
        }
}

#else
inline void split_tile(const ColumnInput&, int64_t) {}
#endif

// Pieces of an input of networks of T, where tiles multiply.
template <typename T>
constexpr int input_pieces_of = std::is_same_v<T, float> ? 3 : 1;

// The same, 0 where vectors multiply. Float16 has more bits than bfloat16 and is rare on processors with tiles.
template <typename T>
int input_pieces() {
    return !tiles_granted || std::is_same_v<T, Float16> ? 0 : input_pieces_of<T>;
}

template <typename T, typename W>
void multiply_by_vectors(const Matrix<T>& m, const ColumnOutput& out, const Columns& x, int64_t begin, int64_t end, int64_t first,
                         int64_t last, ProductScratch& scratch) {
    for (int64_t row = begin; row < end; row += kWidenedRows) {
        const int64_t rows = std::min(kWidenedRows, end - row);
        const W* const from = static_cast<const W*>(m.data) + row * m.cols;
        const float* weights;
        if constexpr (std::is_same_v<W, float>) {
            weights = from;
        } else {
            float* const widened = scratch.weights.get<float>(kWidenedRows * m.cols);
            for (int64_t i = 0; i < rows * m.cols; i += kLanes)
                store_some(widened + i, load_some(from + i, rows * m.cols - i), rows * m.cols - i);
            weights = widened;
        }
        for (int64_t tile = first; tile < last; tile += kColumnTiles)
            with_count<kColumnTiles>(std::min<int64_t>(kColumnTiles, last - tile), [&](auto tiles) {
                constexpr int kTiles = decltype(tiles)::value;
                multiply_columns<kTiles>(weights, m.cols, rows, x.at(tile, 0), x.features * kLanes, m.cols,
                                         out.to.at(tile, out.feature + row), out.to.features * kLanes);
                finish_columns(m, out, row, row + rows, tile, tile + kTiles);
            });
    }
}

// The team's share of all outputs for all tiles [first, last). Wait before results are read.
template <typename T>
void multiply(const ColumnProduct<T>& product, const ColumnInput& input, int64_t first, int64_t last, const Team& team,
              ProductScratch& scratch) {
    product.each(team.share(product.units()), [&](int i, int64_t begin, int64_t end) {
        const Matrix<T>& m = product.matrices[i];
        const ColumnOutput& out = product.outputs[i];
        if (input.bytes.data) return multiply_by_bytes(m, out, input.bytes, begin, end, first, last);
        const bool whole = m.format == WeightFormat::int8;
        int64_t row = begin;
#ifdef QUIRE_AMX
        if constexpr (!std::is_same_v<T, Float16>) {
            // Outputs that fill no tile are left to vectors, whoever asks.
            const int64_t tiled = input.pieces ? begin + (end - begin) / kTile * kTile : begin;
            constexpr int kPieces = input_pieces_of<T>;
            const auto multiply = whole ? multiply_by_tiles<T, int8_t, kPieces> : multiply_by_tiles<T, T, kPieces>;
            if (tiled > begin) multiply(m, out, input, begin, tiled, first, last, scratch);
            row = tiled;
        }
#endif
        if (row == end) return;
        const auto multiply = whole ? multiply_by_vectors<T, int8_t> : multiply_by_vectors<T, T>;
        multiply(m, out, input.columns, row, end, first, last, scratch);
    });
}

}  // namespace quire
