// Rows of a matrix in any form as numbers of T, as a table of embeddings gives them.
#pragma once

#include <algorithm>
#include <cstring>

#include "group_scales.h"
#include "int4.h"
#include "vectors.h"
#include "weights.h"

namespace quire {

// The number at `i` of a row as it is kept, before scale and zero point.
template <typename T>
float element_of(const Matrix<T>& m, int64_t row, int64_t i) {
    const auto* const data = static_cast<const uint8_t*>(m.data);
    if (m.format == WeightFormat::group_int4) {  // 16 outputs lie side by side, fewer where the last ones are fewer
        const int64_t first = row / kTile * kTile, count = std::min<int64_t>(kTile, m.rows - first);
        const int64_t step = i / kGroupPiece * kPieceSteps + i % 64 / 4;
        const uint8_t both = data[first * m.row_bytes() + (step * count + row - first) * 4 + i % 4];
        return static_cast<float>((i % kGroupPiece < 64 ? both & 15 : both >> 4) - kInt4Middle);
    }
    const uint8_t* const at = data + row * m.row_bytes() + i;
    if (m.format == WeightFormat::group_fp8) return load_first(reinterpret_cast<const Float8*>(at), 1)[0];
    return static_cast<int8_t>(*at);
}

// to [cols].
template <typename T>
void read_row(const Matrix<T>& m, int64_t row, T* to) {
    const auto* const from = static_cast<const uint8_t*>(m.data) + row * m.stored_row_bytes();
    if (m.blocks != BlockFormat::none) {
        block_decoder<T>(m.blocks)(from, m.cols / block_shape(m.blocks).inputs, m.block_constants, to);
    } else if (m.format == WeightFormat::plain) {
        std::memcpy(to, from, m.cols * sizeof(T));
    } else if (!m.grouped()) {
        const float scale = to_float(m.scale[row]);
        for (int64_t i = 0; i < m.cols; ++i) store_one(to + i, element_of(m, row, i) * scale);
    } else {
        const GroupScales scales = scales_of(m, row);
        const int at = static_cast<int>(row % kTile);
        for (int64_t i = 0; i < m.cols; ++i) {
            const int64_t group = i / m.group;
            store_one(to + i, (element_of(m, row, i) - scales.zero_of(group, at)) * scales.template scale_of<T>(group, at));
        }
    }
}

// to [count, cols].
template <typename T>
void read_rows(const Matrix<T>& m, const int64_t* rows, int64_t count, T* to) {
#pragma omp parallel for schedule(static) if (count > 16)
    for (int64_t i = 0; i < count; ++i) read_row(m, rows[i], to + i * m.cols);
}

}  // namespace quire
