// What happens to a token between the matrices: norms, rotation, activation. float32 inside, rounded once at the end.
#pragma once

#include <cmath>

#include "linear.h"
#include "vectors.h"

namespace quire {

// Root-mean-square norm of a row (Zhang & Sennrich 2019, eq. 4). With `added`, the row becomes row + added first.
// to may be the row itself.
template <typename T>
inline void rms_norm(T* to, T* row, const T* added, const T* weight, int64_t size, float eps) {
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

enum class Activation { silu, gelu, swigluoai, sigmoid, tanh, gelu_erf, expm1 };

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

    static Floats finished(const Matrix<T>& m, int64_t row, Floats sum) {
        if (m.scale && m.bias) return fused(sum, splat(to_float(m.scale[row])), splat(to_float(m.bias[row])));
        if (m.scale) return sum * to_float(m.scale[row]);
        return m.bias ? sum + to_float(m.bias[row]) : sum;
    }

    void operator()(int, int64_t row, int64_t tile, const Sums& sums) const {
        const int count = static_cast<int>(std::min<int64_t>(kTile, gate_up[0].rows - row));
        alignas(64) float value[kTile][kTile];
        for (int i = 0; i < count; ++i) {
            for (int t = 0; t < kTile; t += kLanes) {
                const Floats gate = finished(gate_up[0], row + i, load(&sums.at[0][i][t]));
                const Floats up = finished(gate_up[1], row + i, load(&sums.at[1][i][t]));
                store(&value[i][t], rounded(gated(kind, gate, up, limit), T{}));
            }
        }
        const int64_t tokens = std::min<int64_t>(kTile, to.tokens - tile * kTile);
#if defined(__AVX2__)
        if (count == kTile && !(to.tiled() && !to.takes_whole_tokens())) {
            store_transposed(value, row, tile, tokens);
            return;
        }
#endif
        if (to.takes_whole_tokens()) {  // `set_all` follows
            for (int64_t t = 0; t < tokens; ++t)
                for (int i = 0; i < count; ++i) store_one(rows + (tile * kTile + t) * to.cols + row + i, value[i][t]);
            return;
        }
#if defined(__AVX512BF16__)
        if (to.form == Form::pairs) {  // then rows come in whole tiles
            uint32_t* pairs = to.pairs(tile) + row / 2 * kTile;
            for (int i = 0; i < count; i += 2) {
                const __m512i pair = pair_up(_mm512_load_ps(value[i]), _mm512_load_ps(value[i + 1]));
                _mm512_storeu_si512(pairs + i / 2 * kTile, pair);
            }
            return;
        }
#endif
        for (int64_t t = 0; t < tokens; ++t) {
            if (to.form == Form::bf16_rows) {
                for (int i = 0; i < count; ++i) store_one(to.bf16_row(tile * kTile + t) + row + i, value[i][t]);
                continue;
            }
            float* const token = to.row(tile * kTile + t);
            for (int i = 0; i < count; ++i) token[to.place(row + i)] = value[i][t];
        }
    }

#if defined(__AVX512F__)
    void store_transposed(const float value[kTile][kTile], int64_t row, int64_t tile, int64_t tokens) const {
        const bool split = to.form == Form::split_rows;
        __m512i r[kTile];
        for (int i = 0; i < kTile; ++i) r[i] = _mm512_load_si512(value[split ? i % 8 * 2 + i / 8 : i]);
        transpose(r);
        for (int64_t t = 0; t < tokens; ++t) {
            const int64_t token = tile * kTile + t;
            const Floats of_token = (Floats)r[t];
            if (to.takes_whole_tokens()) {
                store(rows + token * to.cols + row, of_token);
            } else if (to.form == Form::bf16_rows) {
                store(to.bf16_row(token) + row, of_token);
            } else if (split) {
                _mm256_storeu_ps(to.row(token) + to.place(row), _mm512_castps512_ps256((__m512)of_token));
                _mm256_storeu_ps(to.row(token) + to.place(row + 1), _mm512_extractf32x8_ps((__m512)of_token, 1));
            } else {
                store(to.row(token) + row, of_token);
            }
        }
    }
#elif defined(__AVX2__)
    void store_transposed(const float value[kTile][kTile], int64_t row, int64_t tile, int64_t tokens) const {
        const bool split = to.form == Form::split_rows;
        for (int part = 0; part < 2; ++part)
            for (int64_t first = 0; first < tokens; first += kLanes) {
                Floats r[kLanes];
                for (int i = 0; i < kLanes; ++i) r[i] = load(&value[split ? 2 * i + part : part * kLanes + i][first]);
                transpose(r);
                for (int64_t t = first; t < std::min(tokens, first + kLanes); ++t) {
                    const int64_t token = tile * kTile + t, col = row + part * kLanes;
                    if (to.takes_whole_tokens()) {
                        store(rows + token * to.cols + col, r[t - first]);
                    } else {
                        store(to.row(token) + col, r[t - first]);
                    }
                }
            }
    }
#endif
};

}  // namespace quire
