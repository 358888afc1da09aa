// Weights as a checkpoint or a linear method has them, cut into strips of two times 16 outputs.
#pragma once

#include <algorithm>
#include <cstdint>

#include "blocks.h"
#include "kernels.h"
#include "team.h"
#include "tiles.h"
#include "vectors.h"

namespace quire {

// How the elements of a matrix are kept. int8 and w8a8 have a scale per output; for w8a8 tokens are rounded to int8, too.
// Of the last three each group of inputs has a scale, see `groups.h`. `blocks`, which callers do not name, is plain ones in
// blocks that are multiplied as they are (`block_dots.h`); else those are decoded.
enum class WeightFormat : int32_t { blocks = -1, plain, int8, w8a8, group_int4, group_int8, group_fp8 };

// Inputs of a piece: the largest group, and the inputs whose int4 share 64 bytes.
constexpr int64_t kGroupPiece = 128;
// Inputs of a piece in `lane_sums.h`, and of a group where an output has one scale: int32 holds what they sum to.
constexpr int64_t kBytePiece = 256;
// Inputs of a piece in `block_dots.h`: whole blocks of each format.
constexpr int64_t kBlockInputs = 256;

struct GroupTotals;

// [rows, cols], row-major: elements of T, or a format of them.
template <typename T>
struct Matrix {
    const void* data = nullptr;
    int64_t rows = 0, cols = 0;
    const T* bias = nullptr;  // [rows] or none
    WeightFormat format = WeightFormat::plain;
    const T* scale = nullptr;  // int8 and w8a8: [rows]
    float input_scale = 0.0f;  // w8a8: the step of the tokens' int8; 0: each token has its own
    // Of groups, [blocks of 16 rows][groups][16]:
    const void* group_scale = nullptr;  // T, or float32 if `wide_scale`
    const int16_t* group_zero = nullptr;  // or none: value = scale * (element - zero)
    bool wide_scale = false;
    int64_t group = 0;  // inputs of a group: 32, 64 or 128
    const GroupTotals* totals = nullptr;  // where inputs are bytes, see `column_bytes.h`
    const int64_t* rank_sizes = nullptr;  // outputs of each rank, where ranks share them out
    BlockFormat blocks = BlockFormat::none;  // what its rows are decoded from, or multiplied as
    const float* block_constants = nullptr;

    bool grouped() const { return format >= WeightFormat::group_int4; }
    int64_t num_groups() const { return (cols + group - 1) / group; }
    int64_t row_bytes() const {
        if (format <= WeightFormat::plain) return cols * static_cast<int64_t>(sizeof(T));
        return format == WeightFormat::group_int4 ? (cols + kGroupPiece - 1) / kGroupPiece * (kGroupPiece / 2) : cols;
    }
    // Of a row as it is in memory.
    int64_t stored_row_bytes() const {
        if (blocks == BlockFormat::none) return row_bytes();
        const BlockShape shape = block_shape(blocks);
        return cols / shape.inputs * shape.bytes;
    }
};

// Whether blocks are multiplied as they are: tiles have the decoded weights that they need for many tokens.
template <typename T>
bool multiplies_blocks() {
#ifdef QUIRE_VNNI
    return std::is_same_v<T, BFloat16> && !tiles_granted;
#else
    return false;
#endif
}

// The format of matrices that have the same inputs: blocks that are beside others are decoded, to be multiplied as those. Sets
// it in all that are there.
template <typename T>
WeightFormat common_format(Matrix<T>* matrices, int count) {
    bool all = true;
    for (int i = 0; i < count; ++i) all = all && (!matrices[i].data || matrices[i].format == WeightFormat::blocks);
    for (int i = 0; i < count; ++i)
        if (!all && matrices[i].format == WeightFormat::blocks) matrices[i].format = WeightFormat::plain;
    return matrices[0].format;
}

// A matrix of the C interface, [rows, cols] of this rank.
template <typename T>
Matrix<T> make_matrix(const MatrixArgument& from, int64_t rows, int64_t cols) {
    const auto format = static_cast<WeightFormat>(from.format);
    Matrix<T> m{.data = from.data,
                .rows = rows,
                .cols = cols,
                .bias = static_cast<const T*>(from.bias),
                .format = format,
                .input_scale = from.input_scale,
                .rank_sizes = from.rank_sizes,
                .blocks = static_cast<BlockFormat>(from.block_format),
                .block_constants = from.block_constants};
    if (m.blocks != BlockFormat::none && multiplies_blocks<T>()) m.format = WeightFormat::blocks;
    if (format == WeightFormat::int8 || format == WeightFormat::w8a8) m.scale = static_cast<const T*>(from.scale);
    if (!m.grouped()) return m;
    m.group_scale = from.scale;
    m.group_zero = static_cast<const int16_t*>(from.zero);
    m.group = from.group;
    m.wide_scale = from.wide_scale;
    return m;
}

// 16 outputs of a strip. Rows beyond `count` are not there.
struct Half {
    const char* data;
    int count;
};

// The rows of a half; one that is not whole is copied with zeros behind: never read past a weight's end.
inline const char* whole_rows(const Half& half, int64_t row_bytes, Buffer& padding) {
    if (half.count == kTile) return half.data;
    char* const copy = padding.get<char>(kTile * row_bytes);
    std::memset(copy, 0, kTile * row_bytes);
    if (half.count > 0) std::memcpy(copy, half.data, half.count * row_bytes);
    return copy;
}

// Memory that will be needed next, read into the second-level cache meanwhile, a few lines with each step.
struct Ahead {
    const char *at[2] = {}, *end[2] = {};
    int64_t lines = 0;

    Ahead() = default;
    // `steps`: over how many steps to spread it.
    Ahead(const Half half[2], const int64_t row_bytes[2], int64_t steps) {
        for (int h = 0; h < 2; ++h) {
            at[h] = half[h].data;
            end[h] = at[h] + half[h].count * row_bytes[h];
        }
        lines = std::max<int64_t>(1, (kTile * std::max(row_bytes[0], row_bytes[1]) / 64 + steps - 1) / steps);
    }
    bool done() const { return at[0] >= end[0] && at[1] >= end[1]; }
#if defined(__x86_64__)
    void fetch(int half) {
        const char* stop = std::min(at[half] + lines * 64, end[half]);
        for (; at[half] < stop; at[half] += 64) _mm_prefetch(at[half], _MM_HINT_T1);
    }
#endif
};

// The strips of several matrices, one after the other, or of two matrices side by side (gate and up).
template <typename T>
struct Strips {
    const Matrix<T>* matrices;
    int num_matrices;
    bool side_by_side;

    int64_t cols() const { return matrices[0].cols; }
    int64_t row_bytes() const { return matrices[0].row_bytes(); }
    WeightFormat format() const { return matrices[0].format; }
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
    void halves(int matrix, int64_t row, Half half[2]) const {
        for (int h = 0; h < 2; ++h) {
            const Matrix<T>& m = matrix_of(matrix, h);
            const int64_t begin = row_of(row, h);
            half[h] = {static_cast<const char*>(m.data) + std::min(begin, m.rows) * m.stored_row_bytes(),
                       static_cast<int>(std::clamp<int64_t>(m.rows - begin, 0, kTile))};
        }
    }
    // The same to be read ahead; nothing of those in blocks, which are read in order while they are decoded.
    void plain_halves(int64_t strip, Half half[2]) const {
        int matrix;
        int64_t row;
        locate(strip, matrix, row);
        if (!in_blocks(matrix)) halves(matrix, row, half);
    }
    const Matrix<T>& matrix_of(int matrix, int half) const { return matrices[side_by_side ? half : matrix]; }
    int64_t row_of(int64_t row, int half) const { return row + (side_by_side ? 0 : half * kTile); }
    Ahead ahead(int64_t strip, int64_t steps) const {
        int matrix;
        int64_t row;
        Half half[2];
        locate(strip, matrix, row);
        halves(matrix, row, half);
        fetch_scales(matrix, row, half);
        const int64_t bytes[2] = {matrix_of(matrix, 0).stored_row_bytes(), matrix_of(matrix, 1).stored_row_bytes()};
        return Ahead(half, bytes, steps);
    }
    bool in_blocks(int matrix) const {
        return matrix_of(matrix, 0).blocks != BlockFormat::none || matrix_of(matrix, 1).blocks != BlockFormat::none;
    }
    // Rows of halves that are in blocks become plain ones.
    void decode(int matrix, Half half[2], Buffer room[2]) const {
        for (int h = 0; h < 2; ++h) {
            const Matrix<T>& m = matrix_of(matrix, h);
            if (m.blocks == BlockFormat::none || half[h].count == 0) continue;
            T* const rows = room[h].get<T>(kTile * m.cols);
            const int64_t count = m.cols / block_shape(m.blocks).inputs * half[h].count;
            block_decoder<T>(m.blocks)(reinterpret_cast<const uint8_t*>(half[h].data), count, m.block_constants, rows);
            half[h].data = reinterpret_cast<const char*>(rows);
        }
    }
    void fetch_scales(int matrix, int64_t row, const Half half[2]) const {
        for (int h = 0; h < 2; ++h) {
            const Matrix<T>& m = matrix_of(matrix, h);
            if (!m.grouped() || half[h].count == 0) continue;
            const int64_t at = row_of(row, h) * m.num_groups(), count = m.num_groups() * kTile;
            const int64_t size = m.wide_scale ? 4 : sizeof(T);
            const char* scale = static_cast<const char*>(m.group_scale) + at * size;
            for (int64_t i = 0; i < count * size; i += 64) __builtin_prefetch(scale + i, 0, 3);
            for (int64_t i = 0; m.group_zero && i < count; i += 32) __builtin_prefetch(m.group_zero + at + i, 0, 3);
        }
    }
};

}  // namespace quire
