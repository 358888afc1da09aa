// The largest output of a linear layer per token, and which one it is; the outputs are written nowhere.
#pragma once

#include <limits>

#include "linear.h"

namespace quire {

// What one thread has found so far, per token: [tiles * 16].
struct Largest {
    float* values;
    int32_t* ids;
};

// A value that is not a number wins and stays; among equals the first one does, though a thread may see it last.
template <typename T>
struct ToLargest {
    Largest found;
    int64_t rows;
    const T* scale;  // per output, or none

    void operator()(int, int64_t row, int64_t tile, const Sums& sums) const {
        for (int t = 0; t < kTile; t += kLanes) {
            Floats best = load(found.values + tile * kTile + t);
            Ints ids;
            std::memcpy(&ids, found.ids + tile * kTile + t, sizeof ids);
            for (int h = 0; h < 2; ++h) {
                const int64_t begin = row + h * kTile;
                const int count = static_cast<int>(std::min<int64_t>(kTile, rows - begin));
                for (int n = 0; n < count; ++n) {
                    const float factor = scale ? to_float(scale[begin + n]) : 1.0f;
                    const Floats v = load(&sums.at[h][n][t]) * factor;
                    const Ints id = Ints{} + static_cast<int32_t>(begin + n), odd = v != v, best_odd = best != best;
                    const Ints first = id < ids;
                    const Ints wins = (odd & (~best_odd | first)) | (~best_odd & ((v > best) | ((v == best) & first)));
                    best = wins ? v : best;
                    ids = wins ? id : ids;
                }
            }
            store(found.values + tile * kTile + t, best);
            std::memcpy(found.ids + tile * kTile + t, &ids, sizeof ids);
        }
    }
};

// Whether (value, id) comes before what was found: values that are not numbers first, then the larger, then the lower id.
inline bool comes_before(float value, int32_t id, float best, int32_t best_id) {
    const bool odd = value != value, best_odd = best != best;
    if (odd || best_odd) return odd && (!best_odd || id < best_id);
    return value > best || (value == best && id < best_id);
}

template <typename T>
void largest_op(const T* x, const Matrix<T>& matrix, int64_t* ids, float* peaks, int64_t tokens) {
    static thread_local ActivationBuffers buffers;
    static thread_local Buffer values, places;
    const Activations packed = make_activations<T>(tokens, matrix.cols, matrix.coding, buffers, matrix.input_scale);
    const int64_t width = (tokens + kTile - 1) / kTile * kTile, most = omp_get_max_threads();
    float* const all_values = values.get<float>(most * width);
    int32_t* const all_ids = places.get<int32_t>(most * width);
    int team = 1;
    Claims claims;
#pragma omp parallel
    {
        static thread_local LinearScratch scratch;
        const HeldTiles tiles(packed.tiled());
        Claimer claimer(claims);
        const int64_t begin = omp_get_thread_num() * width;
        std::fill_n(all_values + begin, width, -std::numeric_limits<float>::infinity());
        std::fill_n(all_ids + begin, width, 0);
        if (omp_get_thread_num() == 0) team = omp_get_num_threads();
        set_all(packed, x, matrix.cols);
        wait_for_team();
        linear(Strips<T>{&matrix, 1, false}, packed, scratch, claimer,
               ToLargest<T>{{all_values + begin, all_ids + begin}, matrix.rows, matrix.scale});
    }
    for (int64_t t = 0; t < tokens; ++t) {
        float best = all_values[t];
        int32_t id = all_ids[t];
        for (int thread = 1; thread < team; ++thread) {
            const int64_t at = thread * width + t;
            if (comes_before(all_values[at], all_ids[at], best, id)) {
                best = all_values[at];
                id = all_ids[at];
            }
        }
        peaks[t] = best;
        ids[t] = id;
    }
}

}  // namespace quire
