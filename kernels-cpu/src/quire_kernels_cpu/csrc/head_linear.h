// A matrix of its own for each head: y[t, h] = x[t, h] W[h]^T, as `linear.h` multiplies, whose sums it has to the bit.
#pragma once

#include <algorithm>

#include "linear.h"

namespace quire {

template <typename T>
struct HeadLinear {
    const T* x;                // [tokens, heads, inputs]
    int64_t token_stride;      // of x, from one token to the next
    int64_t x_head_stride;
    const T* weight;           // [heads, outputs, inputs], the matrix of a head without gaps
    int64_t weight_head_stride;
    T* out;                    // [tokens, heads, outputs]
    int64_t out_token_stride, out_head_stride;
    int64_t tokens, heads, inputs, outputs;
};

// Gives `linear` all of its work.
struct AllStrips {
    int64_t at = 0;
    int64_t first(int64_t) { return at = 0; }
    int64_t next() { return ++at; }
    int64_t first_of(int64_t) const { return 0; }
};

constexpr int64_t kHeadTokens = 512;  // at a time: what they become stays in the second-level cache

// By the team: a thread multiplies some tokens with some strips of a head. A barrier must follow.
template <typename T>
void head_linear(const HeadLinear<T>& a, ActivationBuffers& buffers, LinearScratch& scratch, QueueWorker& worker) {
    const int64_t chunks = (a.tokens + kHeadTokens - 1) / kHeadTokens, strips = (a.outputs + 2 * kTile - 1) / (2 * kTile);
    const int64_t wanted = 2 * omp_get_num_threads();
    const int64_t parts = std::clamp<int64_t>(wanted / (a.heads * chunks), 1, strips), count = a.heads * chunks * parts;
    const auto matrix = [&](int64_t item) {
        const int64_t head = item / (chunks * parts), part = item % parts;
        const int64_t begin = strips * part / parts * 2 * kTile, end = strips * (part + 1) / parts * 2 * kTile;
        const T* weight = a.weight + head * a.weight_head_stride + begin * a.inputs;
        return Matrix<T>{.data = weight, .rows = std::min(end, a.outputs) - begin, .cols = a.inputs};
    };
    int64_t next = worker.first(count);
    while (next < count) {
        const int64_t item = next;
        next = worker.next();
        const int64_t head = item / (chunks * parts), chunk = item / parts % chunks, part = item % parts;
        const int64_t first = a.tokens * chunk / chunks, tokens = a.tokens * (chunk + 1) / chunks - first;
        const Activations x = make_activations<T>(tokens, a.inputs, WeightFormat::plain, buffers);
        for (int64_t tile = 0; tile < x.tiles(); ++tile) {
            const T* rows[kTile];
            for (int64_t i = 0; i < kTile; ++i) {
                const int64_t t = tile * kTile + i;
                rows[i] = t < tokens ? a.x + (first + t) * a.token_stride + head * a.x_head_stride : nullptr;
            }
            set_tile(x, tile, rows, 0, a.inputs);
        }
        const Matrix<T> weight = matrix(item), after = matrix(next < count ? next : item);
        const Strips<T> following{&after, 1, false};
        T* to = a.out + first * a.out_token_stride + head * a.out_head_stride + strips * part / parts * 2 * kTile;
        AllStrips work;
        linear(Strips<T>{&weight, 1, false}, x, scratch, work, ToRows<T, T>{&weight, &to, a.out_token_stride, tokens},
               next < count ? &following : nullptr);
    }
}

// By a team of its own.
template <typename T>
void head_linear_op(const HeadLinear<T>& a) {
    WorkQueue queue;
#pragma omp parallel
    {
        static thread_local ActivationBuffers buffers;
        static thread_local LinearScratch scratch;
        const HeldTiles tiles(layout_for<T>(kTile, a.inputs, WeightFormat::plain) == ActLayout::pairs);
        QueueWorker worker(queue);
        head_linear(a, buffers, scratch, worker);
    }
}

}  // namespace quire
