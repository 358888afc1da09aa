// y = x W^T for weights as a checkpoint has them: row-major [outputs, inputs], mapped, never repacked.
//
// Work is cut into strips of two times 16 outputs. A strip against 16 tokens gives two blocks of sums, [16 outputs][16
// tokens] in float32, which go to an epilogue that knows what becomes of them. Each sum runs over the inputs in one
// order that depends neither on the number of tokens nor on the place of a token among them.
//
// With AMX and bfloat16 the weight is the first operand, whose rows are read where they are; the tokens, which are few,
// are the second, which has to be interleaved. Otherwise tokens are float32 rows and a sum is a vectorised dot product.
#pragma once

#include <algorithm>
#include <type_traits>

#include "team.h"
#include "tiles.h"
#include "vectors.h"

namespace quire {

// A weight [rows, cols] with row-major elements of type W.
template <typename W>
struct Matrix {
    const W* data = nullptr;
    int64_t rows = 0, cols = 0;
    const W* bias = nullptr;  // [rows] or none
};

// The tokens of a step as the kernels read them.
struct Activations {
    void* data = nullptr;
    int64_t tokens = 0, cols = 0;
    bool paired = false;  // bfloat16 pairs [tokens / 16][cols / 2][16] for AMX; otherwise float32 [tokens][cols]

    int64_t tiles() const { return (tokens + kTile - 1) / kTile; }
    int64_t bytes() const { return paired ? tiles() * kTile * cols * 2 : tokens * cols * 4; }
    uint32_t* pairs(int64_t tile) const { return static_cast<uint32_t*>(data) + tile * (cols / 2) * kTile; }
    float* row(int64_t token) const { return static_cast<float*>(data) + token * cols; }
};

template <typename T>
constexpr bool takes_pairs(int64_t) {
    return false;
}
#ifdef QUIRE_AMX
template <>
inline bool takes_pairs<BFloat16>(int64_t cols) {
    return tiles_granted && cols % 32 == 0;
}
#endif

// Activations of this shape; memory comes from `buffer`. By one thread.
template <typename T>
Activations make_activations(int64_t tokens, int64_t cols, Buffer& buffer) {
    Activations x{nullptr, tokens, cols, takes_pairs<T>(cols)};
    x.data = buffer.get<char>(x.bytes());
    return x;
}

// Tokens [16 tile, 16 tile + 16) into their place. rows: where each token is, of at least cols elements.
template <typename T>
void set_tile(const Activations& x, int64_t tile, const T* const rows[kTile], int64_t first_col, int64_t num_cols) {
#ifdef QUIRE_AMX
    if constexpr (std::is_same_v<T, BFloat16>) {
        if (x.paired) {
            const BFloat16* shifted[kTile];
            for (int i = 0; i < kTile; ++i) shifted[i] = rows[i] ? rows[i] + first_col : nullptr;
            interleave_pairs(shifted, num_cols, x.pairs(tile) + first_col * 8);
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
    constexpr int64_t kCols = 512;
    const int64_t cuts = (x.cols + kCols - 1) / kCols;
    const Range mine = my_share(x.tiles() * cuts);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
        const int64_t tile = i / cuts, first_col = i % cuts * kCols;
        const T* rows[kTile];
        for (int t = 0; t < kTile; ++t) {
            const int64_t token = tile * kTile + t;
            rows[t] = token < x.tokens ? from + token * stride : nullptr;
        }
        set_tile(x, tile, rows, first_col, std::min(kCols, x.cols - first_col));
    }
}

// Sums of one strip against one tile of tokens: [2][16 outputs][16 tokens].
struct alignas(64) Sums {
    float at[2][kTile][kTile];
};

// The two times 16 outputs of a strip. Rows beyond `count` are not there.
template <typename W>
struct Half {
    const W* data;
    int count;
};

// Token blocks whose sums wait while a strip's weights are in the core's cache.
constexpr int64_t kBlockTiles = 32;

template <typename W>
void dot_strip(const Half<W> half[2], int64_t cols, const Activations& x, int64_t tile, Sums& sums) {
    constexpr int kRows = 4, kTokens = kLanes == 16 ? 4 : 2;
    const int64_t whole = cols / kLanes * kLanes;
    const int rest = static_cast<int>(cols - whole);
    const int num_tokens = static_cast<int>(std::min<int64_t>(kTile, x.tokens - tile * kTile));
    for (int h = 0; h < 2; ++h) {
        for (int n = 0; n < half[h].count; n += kRows) {
            const W* w[kRows];
            for (int i = 0; i < kRows; ++i) w[i] = half[h].data + std::min(n + i, half[h].count - 1) * cols;
            for (int t = 0; t < num_tokens; t += kTokens) {
                const float* token[kTokens];
                for (int j = 0; j < kTokens; ++j) token[j] = x.row(tile * kTile + std::min(t + j, num_tokens - 1));
                Floats acc[kRows][kTokens] = {};
                for (int64_t k = 0; k < whole; k += kLanes) {
                    Floats xs[kTokens];
                    for (int j = 0; j < kTokens; ++j) xs[j] = load(token[j] + k);
                    for (int i = 0; i < kRows; ++i) {
                        const Floats ws = load(w[i] + k);
                        for (int j = 0; j < kTokens; ++j) acc[i][j] += ws * xs[j];
                    }
                }
                for (int i = 0; i < kRows; ++i)
                    for (int j = 0; j < kTokens; ++j) {
                        if (rest) acc[i][j] += load_first(w[i] + whole, rest) * load_first(token[j] + whole, rest);
                        if (n + i < kTile && t + j < kTile) sums.at[h][n + i][t + j] = sum(acc[i][j]);
                    }
            }
        }
    }
}

#ifdef QUIRE_AMX

// A strip's weights for the tile registers: two times 16 rows of 64 bytes, for each 32 inputs.
struct TileRows {
    const char* rows[2];
    int64_t stride, step_bytes;
};

// Memory that will be needed next, read into the second-level cache meanwhile, a few lines with each step.
struct Ahead {
    const char *at[2] = {}, *end[2] = {};
    int64_t lines = 0;

    Ahead() = default;
    // `steps`: over how many steps to spread it.
    Ahead(const Half<BFloat16> half[2], int64_t cols, int64_t steps) {
        for (int h = 0; h < 2; ++h) {
            at[h] = reinterpret_cast<const char*>(half[h].data);
            end[h] = at[h] + half[h].count * cols * 2;
        }
        lines = std::max<int64_t>(1, (kTile * cols * 2 / 64 + steps - 1) / steps);
    }
    bool done() const { return at[0] >= end[0] && at[1] >= end[1]; }
};

// sums (+)= strip x tokens over `steps` times 32 inputs, for one or two tiles of tokens.
template <bool kTwo, bool kFetch>
inline void multiply_tiles(Sums* sums, bool first, const TileRows& w, const uint32_t* x0, const uint32_t* x1,
                           int64_t steps, Ahead& ahead) {
    const char *w0 = w.rows[0], *w1 = w.rows[1], *ahead0 = ahead.at[0], *ahead1 = ahead.at[1];
    const int64_t stride = w.stride, step_bytes = w.step_bytes, ahead_bytes = ahead.lines * 64;
    if (first) {
        _tile_zero(0);
        _tile_zero(1);
        if (kTwo) {
            _tile_zero(2);
            _tile_zero(3);
        }
    } else {
        _tile_loadd(0, sums[0].at[0], 64);
        _tile_loadd(1, sums[0].at[1], 64);
        if (kTwo) {
            _tile_loadd(2, sums[1].at[0], 64);
            _tile_loadd(3, sums[1].at[1], 64);
        }
    }
    for (int64_t k = 0; k < steps; ++k) {
        if (kFetch) {
            const char *stop0 = std::min(ahead0 + ahead_bytes, ahead.end[0]);
            const char *stop1 = std::min(ahead1 + ahead_bytes, ahead.end[1]);
            for (; ahead0 < stop0; ahead0 += 64) _mm_prefetch(ahead0, _MM_HINT_T1);
            for (; ahead1 < stop1; ahead1 += 64) _mm_prefetch(ahead1, _MM_HINT_T1);
        }
        _tile_loadd(4, w0, stride);
        _tile_loadd(6, x0, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, w1, stride);
        _tile_dpbf16ps(1, 5, 6);
        if (kTwo) {
            _tile_loadd(7, x1, 64);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
            x1 += 256;
        }
        x0 += 256;
        w0 += step_bytes;
        w1 += step_bytes;
    }
    if (kFetch) {
        ahead.at[0] = ahead0;
        ahead.at[1] = ahead1;
    }
    _tile_stored(0, sums[0].at[0], 64);
    _tile_stored(1, sums[0].at[1], 64);
    if (kTwo) {
        _tile_stored(2, sums[1].at[0], 64);
        _tile_stored(3, sums[1].at[1], 64);
    }
}

// Inputs [k, k + cols) of a strip, side by side as the tile registers take them: rows far apart in memory would push
// each other out of the first-level cache.
inline TileRows gather_rows(const BFloat16* const rows[2], int64_t stride, int64_t k, int64_t cols, BFloat16* to) {
    for (int h = 0; h < 2; ++h)
        for (int i = 0; i < kTile; ++i) {
            const BFloat16* from = rows[h] + i * stride + k;
            for (int64_t c = 0; c < cols; c += 32)
                _mm512_store_si512(to + c * 32 + h * 512 + i * 32, _mm512_loadu_si512(from + c));
        }
    const char* begin = reinterpret_cast<const char*>(to);
    return {{begin, begin + 1024}, 64, 2048};
}

constexpr int64_t kGatheredCols = 256;

// Tiles [first, last) of the tokens against one strip; sums[0] belongs to tile `first`.
inline void tile_strip(const Half<BFloat16> half[2], int64_t cols, const Activations& x, int64_t first, int64_t last,
                       Sums* sums, BFloat16* gathered, BFloat16* padding, Ahead& ahead) {
    const BFloat16* rows[2];
    for (int h = 0; h < 2; ++h) {
        rows[h] = half[h].data;
        if (half[h].count < kTile) {  // never read behind the end of a weight
            BFloat16* copy = padding + h * kTile * cols;
            std::memset(copy, 0, kTile * cols * 2);
            if (half[h].count > 0) std::memcpy(copy, half[h].data, half[h].count * cols * 2);
            rows[h] = copy;
        }
    }
    // With many tokens, a piece of the strip that fits the first-level cache meets all of them before the next piece.
    const bool many = last - first > 2;
    const int64_t piece = many ? kGatheredCols : cols;
    for (int64_t k = 0; k < cols; k += piece) {
        const int64_t width = std::min(piece, cols - k);
        TileRows w{{reinterpret_cast<const char*>(rows[0] + k), reinterpret_cast<const char*>(rows[1] + k)}, cols * 2, 64};
        if (many) w = gather_rows(rows, cols, k, width, gathered);
        for (int64_t tile = first; tile < last; tile += 2) {
            const uint32_t* x0 = x.pairs(tile) + k * 8;
            Sums* to = sums + (tile - first);
            const uint32_t* x1 = tile + 1 < last ? x.pairs(tile + 1) + k * 8 : nullptr;
            const auto multiply = x1 ? (ahead.done() ? multiply_tiles<true, false> : multiply_tiles<true, true>)
                                     : (ahead.done() ? multiply_tiles<false, false> : multiply_tiles<false, true>);
            multiply(to, k == 0, w, x0, x1, width / 32, ahead);
        }
    }
}

#endif

// The strips of several matrices, one after the other, or of two matrices side by side (gate and up).
template <typename W>
struct Strips {
    const Matrix<W>* matrices;
    int num_matrices;
    bool side_by_side;

    int64_t cols() const { return matrices[0].cols; }
    int64_t count() const {
        if (side_by_side) return (matrices[0].rows + kTile - 1) / kTile;
        int64_t total = 0;
        for (int i = 0; i < num_matrices; ++i) total += (matrices[i].rows + 2 * kTile - 1) / (2 * kTile);
        return total;
    }
    // Which matrix and which first output the strip has.
    void locate(int64_t strip, int& matrix, int64_t& row) const {
        matrix = 0;
        if (side_by_side) {
            row = strip * kTile;
            return;
        }
        for (;; ++matrix) {
            const int64_t strips = (matrices[matrix].rows + 2 * kTile - 1) / (2 * kTile);
            if (strip < strips) break;
            strip -= strips;
        }
        row = strip * 2 * kTile;
    }
    void halves(int matrix, int64_t row, Half<W> half[2]) const {
        for (int h = 0; h < 2; ++h) {
            const Matrix<W>& m = matrices[side_by_side ? h : matrix];
            const int64_t begin = row + (side_by_side ? 0 : h * kTile);
            half[h] = {m.data + std::min(begin, m.rows) * m.cols,
                       static_cast<int>(std::clamp<int64_t>(m.rows - begin, 0, kTile))};
        }
    }
#ifdef QUIRE_AMX
    Ahead ahead(int64_t strip, int64_t steps) const {
        int matrix;
        int64_t row;
        Half<BFloat16> half[2];
        locate(strip, matrix, row);
        halves(matrix, row, half);
        return Ahead(half, cols(), steps);
    }
#endif
};

// What a thread needs beside the stack.
struct LinearScratch {
    Buffer sums, gathered, padding;
};

// All strips against all tokens; the team shares the strips. Epilogue: (matrix, first output, tile, sums).
// following: the strips that are multiplied after these, read ahead at the end; or none.
// The caller's threads hold tiles where the activations are paired. A barrier must follow before results are read.
template <typename W, typename Epilogue>
void linear(const Strips<W>& strips, const Activations& x, LinearScratch& scratch, Claimer& claimer,
            Epilogue&& epilogue, const Strips<W>* following = nullptr) {
    const int64_t cols = strips.cols(), num_tiles = x.tiles(), num_strips = strips.count();
    // Tokens whose interleaved form stays in the second-level cache.
    const int64_t block = std::clamp<int64_t>((1 << 20) / (cols * 2 * kTile) / 2 * 2, 2, kBlockTiles);
    const int64_t count = (num_tiles + block - 1) / block * num_strips;
    Sums* sums = scratch.sums.get<Sums>(std::min(num_tiles, block));
    int64_t item, next = claimer.first();
    while (next < count) {
        item = next;
        next = claimer.next();
        const int64_t first = item / num_strips * block, last = std::min(first + block, num_tiles);
        int matrix;
        int64_t row;
        Half<W> half[2];
        strips.locate(item % num_strips, matrix, row);
        strips.halves(matrix, row, half);
#ifdef QUIRE_AMX
        if constexpr (std::is_same_v<W, BFloat16>) {
            if (x.paired) {
                const int64_t steps = cols / 32 * ((last - first + 1) / 2);
                Ahead ahead;
                if (next < count) {
                    ahead = strips.ahead(next % num_strips, steps);
                } else if (following && claimer.rank() < following->count()) {
                    ahead = following->ahead(claimer.rank(), steps);
                }
                const bool short_half = half[0].count < kTile || half[1].count < kTile;
                tile_strip(half, cols, x, first, last, sums, scratch.gathered.get<BFloat16>(kGatheredCols * 2 * kTile),
                           short_half ? scratch.padding.get<BFloat16>(2 * kTile * cols) : nullptr, ahead);
                for (int64_t tile = first; tile < last; ++tile) epilogue(matrix, row, tile, sums[tile - first]);
                continue;
            }
        }
#endif
        for (int64_t tile = first; tile < last; ++tile) {
            dot_strip(half, cols, x, tile, sums[0]);
            epilogue(matrix, row, tile, sums[0]);
        }
    }
    (void)following;
}

#if defined(__AVX512BF16__)
// A whole strip, its 32 outputs side by side: pairs are transposed, half as many numbers.
template <typename W>
inline void store_strip(const Sums& sums, const W* bias, BFloat16* to, int64_t stride, int num_tokens) {
    __m512i r[kTile];
    const __m512* at = reinterpret_cast<const __m512*>(sums.at[0][0]);
    for (int i = 0; i < kTile; ++i) {
        __m512 low = at[2 * i], high = at[2 * i + 1];
        if (bias) {
            low += to_float(bias[2 * i]);
            high += to_float(bias[2 * i + 1]);
        }
        r[i] = pair_up(low, high);
    }
    transpose(r);
    for (int t = 0; t < num_tokens; ++t) _mm512_storeu_si512(to + t * stride, r[t]);
}
#endif

// Epilogue: sums + bias into rows of a tensor.
template <typename W, typename T>
struct ToRows {
    const Matrix<W>* matrices;
    T* const* to;  // per matrix: where token 0's outputs begin
    int64_t stride;  // from one token to the next
    int64_t tokens;
    int64_t width = 0;  // outputs [heads][tokens][width] instead, for matrices of heads of this width (a multiple of 32)

    // Where the tile's outputs from `row` on begin.
    T* at(int matrix, int64_t tile, int64_t row) const {
        if (width == 0) return to[matrix] + tile * kTile * stride + row;
        return to[matrix] + (row / width * tokens + tile * kTile) * width + row % width;
    }

    void operator()(int matrix, int64_t row, int64_t tile, const Sums& sums) const {
        const Matrix<W>& m = matrices[matrix];
        const int num_tokens = static_cast<int>(std::min<int64_t>(kTile, tokens - tile * kTile));
#if defined(__AVX512BF16__)
        if constexpr (std::is_same_v<T, BFloat16>) {
            if (row + 2 * kTile <= m.rows) {
                store_strip(sums, m.bias ? m.bias + row : nullptr, at(matrix, tile, row), stride, num_tokens);
                return;
            }
        }
#endif
        for (int h = 0; h < 2; ++h) {
            const int64_t begin = row + h * kTile;
            const int count = static_cast<int>(std::min<int64_t>(kTile, m.rows - begin));
            if (count <= 0) return;
            T* out = at(matrix, tile, begin);
            const W* bias = m.bias ? m.bias + begin : nullptr;
#if defined(__AVX512F__)
            if (count == kTile) {
                __m512i r[kTile];
                for (int i = 0; i < kTile; ++i) r[i] = _mm512_load_si512(sums.at[h][i]);
                transpose(r);
                const Floats added = bias ? load(bias) : Floats{};
                for (int t = 0; t < num_tokens; ++t) store(out + t * stride, (Floats)r[t] + added);
                continue;
            }
#endif
            for (int t = 0; t < num_tokens; ++t)
                for (int n = 0; n < count; ++n)
                    store_one(out + t * stride + n, sums.at[h][n][t] + (bias ? to_float(bias[n]) : 0.0f));
        }
    }
};

}  // namespace quire
