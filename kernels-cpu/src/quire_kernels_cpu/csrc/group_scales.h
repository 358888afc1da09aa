// Scales and zero points of groups of inputs: value = scale * (element - zero).
#pragma once

#include "tiles.h"
#include "vectors.h"
#include "weights.h"

namespace quire {

// Those of one half of a strip.
struct GroupScales {
    const void* scale;    // [groups][16]
    const int16_t* zero;  // [groups][16] or none
    bool wide;

    template <typename T>
    float scale_of(int64_t group, int row) const {
        const int64_t i = group * kTile + row;
        return wide ? static_cast<const float*>(scale)[i] : to_float(static_cast<const T*>(scale)[i]);
    }
    float zero_of(int64_t group, int row) const { return zero ? zero[group * kTile + row] : 0.0f; }

    // Of kLanes outputs from `begin` on.
    template <typename T>
    Floats scales_of(int64_t group, int begin) const {
        const int64_t i = group * kTile + begin;
        return wide ? load(static_cast<const float*>(scale) + i) : load(static_cast<const T*>(scale) + i);
    }
    Floats zeros_of(int64_t group, int begin) const {
        Floats zeros = {};
        for (int i = 0; zero && i < kLanes; ++i) zeros[i] = zero[group * kTile + begin + i];
        return zeros;
    }
};

template <typename T>
GroupScales scales_of(const Matrix<T>& m, int64_t row) {
    const int64_t at = row / kTile * m.num_groups() * kTile;
    const char* scale = static_cast<const char*>(m.group_scale) + at * (m.wide_scale ? 4 : sizeof(T));
    return {scale, m.group_zero ? m.group_zero + at : nullptr, m.wide_scale};
}

}  // namespace quire
