// What happens to a token between the matrices: norms, rotation, activation. float32 inside, rounded once at the end.
#pragma once

#include <cmath>

#include "linear.h"
#include "vectors.h"

namespace quire {

constexpr int kMostHeadDim = 256;

// Root-mean-square norm of a row (Zhang & Sennrich 2019, eq. 4). With `added`, the row becomes row + added first.
// to may be the row itself. The weight may be wider.
template <typename T, typename W>
inline void rms_norm(T* to, T* row, const T* added, const W* weight, int64_t size, float eps) {
    Floats squares{};
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        Floats x = load(row + i);
        if (added) {
            x = rounded(x + load(added + i), T{});
            store(row + i, x);
        }
        squares += x * x;
    }
    float total = sum(squares);
    for (int64_t j = i; j < size; ++j) {
        float x = to_float(row[j]);
        if (added) {
            x = rounded(splat(x + to_float(added[j])), T{})[0];
            store_one(row + j, x);
        }
        total += x * x;
    }
    const float inverse = 1.0f / std::sqrt(total / static_cast<float>(size) + eps);
    for (i = 0; i + kLanes <= size; i += kLanes) store(to + i, load(row + i) * inverse * load(weight + i));
    for (; i < size; ++i) store_one(to + i, to_float(row[i]) * inverse * to_float(weight[i]));
}

// row += added.
template <typename T>
inline void add_row(T* row, const T* added, int64_t size) {
    for (int64_t i = 0; i < size; i += kLanes)
        store_some(row + i, load_some(row + i, size - i) + load_some(added + i, size - i), size - i);
}

// Layer norm of a row (Ba et al. 2016). Weight and bias are there or not.
template <typename T>
inline void layer_norm(T* to, const T* row, const float* weight, const float* bias, int64_t size, float eps) {
    Floats total{}, squares{};
    for (int64_t i = 0; i < size; i += kLanes) total += load_some(row + i, size - i);
    const float mean = sum(total) / static_cast<float>(size);
    for (int64_t i = 0; i < size; i += kLanes) {
        Floats x = load_some(row + i, size - i) - mean;
        if (size - i < kLanes)
            for (int64_t lane = size - i; lane < kLanes; ++lane) x[lane] = 0.0f;
        squares += x * x;
    }
    const float inverse = 1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps);
    for (int64_t i = 0; i < size; i += kLanes) {
        Floats y = (load_some(row + i, size - i) - mean) * inverse;
        if (weight) y *= load_some(weight + i, size - i);
        if (bias) y += load_some(bias + i, size - i);
        store_some(to + i, y, size - i);
    }
}

// Of a row, whose sum of squares is then added up with those of others in this order.
template <typename T>
inline float sum_of_squares(const T* row, int64_t size) {
    Floats squares{};
    for (int64_t i = 0; i < size; i += kLanes) {
        const Floats x = load_some(row + i, size - i);
        squares += x * x;
    }
    return sum(squares);
}

template <typename T>
inline float dot_product(const T* a, const T* b, int64_t size) {
    Floats total{};
    for (int64_t i = 0; i < size; i += kLanes) total += load_some(a + i, size - i) * load_some(b + i, size - i);
    return sum(total);
}

// row *= factor * weight.
template <typename T>
inline void weigh_row(T* row, float factor, const float* weight, int64_t size) {
    for (int64_t i = 0; i < size; i += kLanes)
        store_some(row + i, load_some(row + i, size - i) * factor * load_some(weight + i, size - i), size - i);
}

template <typename T>
inline void scale_row(T* row, float factor, int64_t size) {
    for (int64_t i = 0; i < size; i += kLanes) store_some(row + i, load_some(row + i, size - i) * factor, size - i);
}

// Neighbours of a head apart: those at even places, then those at odd ones.
template <typename T>
inline void deinterleave(T* head, int dim) {
    T parted[kMostHeadDim];
    for (int i = 0; i < dim / 2; ++i) {
        parted[i] = head[2 * i];
        parted[dim / 2 + i] = head[2 * i + 1];
    }
    std::memcpy(head, parted, dim * sizeof(T));
}

// Rotate the pairs (i, i + D/2) of a head. cos holds each cosine twice, sin the negated sines and then the sines.
template <typename T>
inline void rotate(T* to, const T* head, const T* cos, const T* sin, int dim) {
    const int half = dim / 2;
    int i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        const Floats a = load(head + i), b = load(head + half + i);
        store(to + i, a * load(cos + i) + b * load(sin + i));
        store(to + half + i, b * load(cos + half + i) + a * load(sin + half + i));
    }
    for (; i < half; ++i) {
        const float a = to_float(head[i]), b = to_float(head[half + i]);
        store_one(to + i, a * to_float(cos[i]) + b * to_float(sin[i]));
        store_one(to + half + i, b * to_float(cos[half + i]) + a * to_float(sin[half + i]));
    }
}

enum class NormKind : int32_t { none, rms, layer };

enum class Activation { silu, gelu, swigluoai, sigmoid, tanh, gelu_erf, expm1, relu, relu2 };

// max(x, 0); what is no number stays none.
inline Floats relu(Floats x) { return x < 0.0f ? Floats{} : x; }

inline Floats activate(Activation kind, Floats x) { return kind == Activation::silu ? silu(x) : gelu(x); }

// act(gate) * up; swigluoai clips both by `limit` first, what is no number stays none.
inline Floats gated(Activation kind, Floats gate, Floats up, float limit) {
    if (kind != Activation::swigluoai) return activate(kind, gate) * up;
    gate = gate > limit ? splat(limit) : gate;
    up = up > limit ? splat(limit) : (up < -limit ? splat(-limit) : up);
    return gate / (1.0f + exp(gate * -1.702f)) * (up + 1.0f);
}

// run(function of a vector) for a kind that is a function of one number: all but swigluoai.
template <typename Run>
void with_function(Activation kind, const Run& run) {
    switch (kind) {
        case Activation::gelu: return run([](Floats x) { return gelu(x); });
        case Activation::sigmoid: return run([](Floats x) { return sigmoid(x); });
        case Activation::tanh: return run([](Floats x) { return tanh(x); });
        case Activation::gelu_erf: return run([](Floats x) { return gelu_erf(x); });
        case Activation::expm1: return run([](Floats x) { return expm1(x); });
        case Activation::relu: return run([](Floats x) { return relu(x); });
        case Activation::relu2: return run([](Floats x) { return relu(x) * relu(x); });
        default: return run([](Floats x) { return silu(x); });
    }
}

// to = function(from), times `up` where there is one. Wherever a number stands, it is computed by the same instructions.
template <typename T, typename Function>
inline void activate(const Function& function, T* to, const T* from, const T* up, int64_t size) {
    for (int64_t i = 0; i < size; i += kLanes) {
        const Floats y = function(load_some(from + i, size - i));
        store_some(to + i, up ? y * load_some(up + i, size - i) : y, size - i);
    }
}

// Epilogue of gate and up side by side: act(gate) * up, straight into the activations of the matrix that follows.
template <typename T>
struct ToActivated {
    const Matrix<T>* gate_up;
    Activation kind;
    Activations to;
    T* rows;  // [tokens, cols], for activations that take whole tokens
    float limit = 0.0f;
    bool rounds = false;  // gate and up are rounded before they meet
    int64_t stride = 0;   // into `rows` whatever the activations are, which are `stride` apart; 0: as `to` takes them

    void operator()(int, int64_t row, int64_t tile, const Sums& sums) const {
        const int count = static_cast<int>(std::min<int64_t>(kTile, gate_up[0].rows - row));
        const bool by_token = stride || to.layout != ActLayout::pairs;
        Sums room;
        const Sums& all = ordered(sums, by_token, room);
        const auto result = [&](int i, int n, const auto& of) {
            Floats gate = finished(gate_up[0], load(&all.at[0][i][n]), of), up = finished(gate_up[1], load(&all.at[1][i][n]), of);
            if (rounds) gate = rounded(gate, T{}), up = rounded(up, T{});
            return rounded(gated(kind, gate, up, limit), T{});
        };
        if (by_token) {
            for (int64_t token = tile * kTile; token < std::min(to.tokens, (tile + 1) * kTile); ++token)
                for (int n = 0; n < count; n += kLanes) {
                    const auto of = [&](const T* from) { return load_some(from + row + n, count - n); };
                    put(token, row + n, result(static_cast<int>(token % kTile), n, of), count - n);
                }
            return;
        }
#if defined(__AVX512BF16__)
        uint32_t* const pairs = to.pairs(tile) + row / 2 * kTile;  // rows come in whole tiles then
        const auto of_output = [&](int i) {
            return (__m512)result(i, 0, [&](const T* from) { return splat(to_float(from[row + i])); });
        };
        for (int i = 0; i < count; i += 2) _mm512_storeu_si512(pairs + i / 2 * kTile, pair_up(of_output(i), of_output(i + 1)));
#endif
    }

private:
    // The first `count` become inputs of a token from `col` on, a multiple of kLanes.
    void put(int64_t token, int64_t col, Floats values, int count) const {
        if (stride) {
            store_some(rows + token * stride + col, values, count);
        } else if (to.takes_whole_tokens()) {  // `set_all` follows
            store_some(rows + token * to.cols + col, values, count);
        } else if (to.layout == ActLayout::bf16_rows) {
            store_some(to.bf16_row(token) + col, values, count);
        } else if (to.layout == ActLayout::rows) {
            store_some(to.row(token) + col, values, count);
        } else {
            float *const even = to.row(token) + to.place(col), *const odd = to.row(token) + to.place(col + 1);
            for (int i = 0; i < std::min(count, kLanes); ++i) (i % 2 ? odd : even)[i / 2] = values[i];
        }
    }
};

}  // namespace quire
