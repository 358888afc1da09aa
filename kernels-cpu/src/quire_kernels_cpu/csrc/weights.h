// Weights as a checkpoint or a linear method has them, cut into strips of two times 16 outputs.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tiles.h"

namespace quire {

// [rows, cols], row-major: elements of T, or of int8 with one scale per row.
template <typename T>
struct Matrix {
    const void* data = nullptr;
    int64_t rows = 0, cols = 0;
    const T* bias = nullptr;   // [rows] or none
    const T* scale = nullptr;  // [rows], then the elements are int8

    bool int8() const { return scale != nullptr; }
    int64_t row_bytes() const { return cols * (int8() ? 1 : static_cast<int64_t>(sizeof(T))); }
};

// 16 outputs of a strip. Rows beyond `count` are not there.
struct Half {
    const char* data;
    int count;
};

// Memory that will be needed next, read into the second-level cache meanwhile, a few lines with each step.
struct Ahead {
    const char *at[2] = {}, *end[2] = {};
    int64_t lines = 0;

    Ahead() = default;
    // `steps`: over how many steps to spread it.
    Ahead(const Half half[2], int64_t row_bytes, int64_t steps) {
        for (int h = 0; h < 2; ++h) {
            at[h] = half[h].data;
            end[h] = at[h] + half[h].count * row_bytes;
        }
        lines = std::max<int64_t>(1, (kTile * row_bytes / 64 + steps - 1) / steps);
    }
    bool done() const { return at[0] >= end[0] && at[1] >= end[1]; }
};

// The strips of several matrices, one after the other, or of two matrices side by side (gate and up).
template <typename T>
struct Strips {
    const Matrix<T>* matrices;
    int num_matrices;
    bool side_by_side;

    int64_t cols() const { return matrices[0].cols; }
    int64_t row_bytes() const { return matrices[0].row_bytes(); }
    bool int8() const { return matrices[0].int8(); }
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
            const Matrix<T>& m = matrices[side_by_side ? h : matrix];
            const int64_t begin = row + (side_by_side ? 0 : h * kTile);
            half[h] = {static_cast<const char*>(m.data) + std::min(begin, m.rows) * m.row_bytes(),
                       static_cast<int>(std::clamp<int64_t>(m.rows - begin, 0, kTile))};
        }
    }
    Ahead ahead(int64_t strip, int64_t steps) const {
        int matrix;
        int64_t row;
        Half half[2];
        locate(strip, matrix, row);
        halves(matrix, row, half);
        return Ahead(half, row_bytes(), steps);
    }
};

}  // namespace quire
