// The largest output of a linear layer per token, and which one it is; the outputs are written nowhere.
#pragma once

#include <limits>

#include "linear.h"

namespace quire {

// Whether (value, id) comes before what was found: values that are not numbers first, then the larger, then the lower id.
inline bool comes_before(float value, int32_t id, float best, int32_t best_id) {
    const bool odd = value != value, best_odd = best != best;
    if (odd || best_odd) return odd && (!best_odd || id < best_id);
    return value > best || (value == best && id < best_id);
}

// Epilogue: what one thread has found so far, per token. A value that is not a number wins and stays; among equals the first
// one does, though a thread may see it last.
template <typename T>
struct ToArgmax {
    const Matrix<T>* matrix;
    int64_t tokens;
    float* values;  // [tokens]
    int32_t* ids;

    void operator()(int, int64_t row, int64_t tile, const Sums& sums) const {
        Sums room;
        const Sums& of_tokens = ordered(sums, true, room);
        const int64_t first = tile * kTile, num_tokens = std::min<int64_t>(kTile, tokens - first);
        for (int64_t t = 0; t < num_tokens; ++t) {
            float& best = values[first + t];
            int32_t& best_id = ids[first + t];
            for (int h = 0; h < 2; ++h) {
                const int64_t begin = row + h * kTile;
                const int count = static_cast<int>(std::min<int64_t>(kTile, matrix->rows - begin));
                for_outputs(*matrix, begin, of_tokens.at[h][t], count, [&](int n, int left, Floats outputs) {
                    if (!any_not_below(outputs, best)) return;  // nearly always
                    for (int i = 0; i < std::min(kLanes, left); ++i) {
                        const int32_t id = static_cast<int32_t>(begin + n + i);
                        if (!comes_before(outputs[i], id, best, best_id)) continue;
                        best = outputs[i];
                        best_id = id;
                    }
                });
            }
        }
    }
};

template <typename T>
void argmax_op(const T* x, const Matrix<T>& matrix, int64_t* ids, float* max_logits, int64_t tokens) {
    static thread_local ActivationBuffers buffers;
    static thread_local Buffer values, places;
    const Activations packed = make_activations<T>(tokens, matrix.cols, matrix.format, buffers, matrix.input_scale);
    const int64_t width = (tokens + kTile - 1) / kTile * kTile, most = omp_get_max_threads();
    float* const all_values = values.get<float>(most * width);
    int32_t* const all_ids = places.get<int32_t>(most * width);
    int team = 1;
    WorkQueue queue;
#pragma omp parallel
    {
        static thread_local LinearScratch scratch;
        const HeldTiles tiles(packed.tiled());
        QueueWorker worker(queue);
        const int64_t begin = omp_get_thread_num() * width;
        std::fill_n(all_values + begin, width, -std::numeric_limits<float>::infinity());
        std::fill_n(all_ids + begin, width, 0);
        if (omp_get_thread_num() == 0) team = omp_get_num_threads();
        set_all(packed, x, matrix.cols);
        barrier();
        linear(Strips<T>{&matrix, 1, false}, packed, scratch, worker,
               ToArgmax<T>{&matrix, tokens, all_values + begin, all_ids + begin});
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
        max_logits[t] = best;
        ids[t] = id;
    }
}

}  // namespace quire
