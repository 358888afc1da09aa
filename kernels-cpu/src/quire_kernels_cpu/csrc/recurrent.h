// Recurrent layers: short convolution, state space scans, the gated delta rule (`quire_ops.recurrent`).
//
// Every number of a state goes through the tokens one by one, in float32, in one order of operations: what comes out does
// not depend on how a sequence was cut into steps. Work is shared by sequences and by heads or channels.
#pragma once

#include <algorithm>
#include <cmath>

#include "kv_cache.h"
#include "team.h"
#include "vectors.h"

namespace quire {

constexpr int kTokens = 16;    // tokens whose vectors are prepared at once
constexpr int kMaxTaps = 8;    // of a convolution
constexpr int kChannels = 64;  // channels of a selective scan that are taken at once
constexpr int kMaxKey = 256;   // numbers of a key of the delta rule
constexpr int kColumns = 2;    // vectors of values that the delta rule takes at once

// Rows of a tensor that may be apart.
template <typename T>
struct TokenView {
    const T* data;
    int64_t stride;
    const T* operator[](int64_t row) const { return data + row * stride; }
};

// States [num_blocks, size] in float32, blocks `stride` numbers apart.
struct States {
    float* data;
    int64_t stride;
    const float* read(int64_t block) const { return block < 0 ? nullptr : data + block * stride; }
    // Nobody has the null block, and several threads come to it at once: each gets a place of its own.
    float* write(int64_t block) const {
        static thread_local Buffer nowhere;
        return block ? data + block * stride : nowhere.get<float>(stride);
    }
};

// log(1 + u) for u in [0, 1], by the series of 2 atanh(u / (2 + u)).
inline Floats log1p_to_one(Floats u) {
    const Floats s = u / (u + 2.0f), q = s * s;
    Floats p = splat(1.0f / 13.0f);
    p = p * q + 1.0f / 11.0f;
    p = p * q + 1.0f / 9.0f;
    p = p * q + 1.0f / 7.0f;
    p = p * q + 1.0f / 5.0f;
    p = p * q + 1.0f / 3.0f;
    return 2.0f * s * (p * q + 1.0f);
}
// log(1 + e^x); what is no number stays none.
inline Floats softplus(Floats x) { return (x > 0.0f ? x : x - x) + log1p_to_one(exp(x > 0.0f ? -x : x)); }

// Depthwise convolution. Taps [taps, channels]; a state is the last taps - 1 inputs [taps - 1, channels].
template <typename T>
struct Convolution {
    TokenView<T> x;
    const T* taps_by_channel;
    const T* bias;
    States state;
    T* out;
    int64_t channels;
    int taps;
    bool silu;

    // Channels [channel, channel + count) of a sequence.
    void run(const Sequences& sequences, int64_t sequence, int64_t channel, int count) const {
        Floats weight[kMaxTaps], past[kMaxTaps];
        for (int k = 0; k < taps; ++k) weight[k] = load_some(taps_by_channel + k * channels + channel, count);
        const Floats offset = bias ? load_some(bias + channel, count) : Floats{};
        sequences.for_runs(sequence, [&](int64_t begin, int64_t end, int64_t read, int64_t write) {
            const float* from = state.read(read);
            for (int k = 0; k + 1 < taps; ++k)
                past[k] = from ? load_some(from + k * channels + channel, count) : Floats{};
            for (int64_t t = begin; t < end; ++t) {
                past[taps - 1] = load_some(x[t] + channel, count);
                Floats y = offset;
                for (int k = 0; k < taps; ++k) y += weight[k] * past[k];
                store_some(out + t * channels + channel, silu ? quire::silu(y) : y, count);
                for (int k = 0; k + 1 < taps; ++k) past[k] = past[k + 1];
            }
            float* to = state.write(write);
            for (int k = 0; k + 1 < taps; ++k) store_some(to + k * channels + channel, past[k], count);
        });
    }
};

// What a scan does to the rows of a state [rows, numbers] at up to kTokens tokens: row = decay * row + input * b, and
// out = row . c. kVectors vectors of a row stay in registers.
template <int kVectors, typename Decay>
inline void scan_row(const float* from, float* to, int numbers, int tokens, const float* input, const float* b,
                     const float* c, int64_t padded, float* out, const Decay& decay) {
    constexpr int kRun = kVectors * kLanes;
    for (int t = 0; t < tokens; ++t) out[t] = 0.0f;
    for (int n = 0; n < numbers; n += kRun) {
        Floats h[kVectors];
        for (int i = 0; i < kVectors; ++i)
            h[i] = from ? load_some(from + n + i * kLanes, numbers - n - i * kLanes) : Floats{};
        for (int t = 0; t < tokens; ++t) {
            const Floats u = splat(input[t]);
            const float* bt = b + t * padded + n;
            const float* ct = c + t * padded + n;
            Floats y{};
            for (int i = 0; i < kVectors; ++i) {
                h[i] = h[i] * decay(t, n + i * kLanes) + u * load(bt + i * kLanes);
                y += h[i] * load(ct + i * kLanes);
            }
            out[t] += sum(y);
        }
        for (int i = 0; i < kVectors; ++i) store_some(to + n + i * kLanes, h[i], numbers - n - i * kLanes);
    }
}

// Numbers of a row, rounded up so that whole runs of vectors (see `for_vectors`) can be read.
inline int64_t padded_numbers(int numbers) {
    int64_t run = kLanes;
    while (run < numbers && run < 8 * kLanes) run *= 2;
    return (numbers + run - 1) / run * run;
}

template <typename T>
inline void widen(const T* from, float* to, int count, int64_t padded) {
    for (int64_t n = 0; n < padded; n += kLanes) store(to + n, load_some(from + n, static_cast<int>(count - n)));
}

// function(vectors) with the number of vectors of a row as a constant, at most 8.
template <typename Function>
inline void for_vectors(int numbers, Function&& function) {
    if (numbers <= kLanes) return function(std::integral_constant<int, 1>{});
    if (numbers <= 2 * kLanes) return function(std::integral_constant<int, 2>{});
    if (numbers <= 4 * kLanes) return function(std::integral_constant<int, 4>{});
    function(std::integral_constant<int, 8>{});
}

// A state space with a scalar decay per head: x [tokens, heads, size], b and c [tokens, groups, numbers].
template <typename T>
struct Mamba2Scan {
    TokenView<T> x, dt, b, c;
    const float *a, *d, *dt_bias;
    States state;
    T* out;
    int heads, size, groups, numbers;
    float dt_min, dt_max;

    void run(const Sequences& sequences, int64_t sequence, int head, Buffer& buffer) const {
        const int64_t padded = padded_numbers(numbers);
        float* scratch = buffer.get<float>(2 * kTokens * padded);
        const int64_t offset = static_cast<int64_t>(head) * size * numbers;
        for_vectors(numbers, [&](auto vectors) {
            sequences.for_runs(sequence, [&](int64_t begin, int64_t end, int64_t read, int64_t write) {
                const float* from = state.read(read);
                float* to = state.write(write) + offset;
                if (from) from += offset;
                for (int64_t t = begin; t < end; t += kTokens, from = to)
                    tile<vectors()>(t, static_cast<int>(std::min<int64_t>(kTokens, end - t)), head, from, to, scratch);
            });
        });
    }

    template <int kVectors>
    void tile(int64_t first, int tokens, int head, const float* from, float* to, float* scratch) const {
        const int64_t padded = padded_numbers(numbers);
        const int64_t group = static_cast<int64_t>(head / (heads / groups)) * numbers;
        float* bs = scratch;
        float* cs = scratch + kTokens * padded;
        alignas(64) float step[kTokens] = {}, decay[kTokens], input[kTokens], y[kTokens];
        for (int t = 0; t < tokens; ++t) {
            widen(b[first + t] + group, bs + t * padded, numbers, padded);
            widen(c[first + t] + group, cs + t * padded, numbers, padded);
            step[t] = to_float(dt[first + t][head]) + dt_bias[head];
        }
        for (int t = 0; t < kTokens; t += kLanes) {
            Floats s = softplus(load(step + t));
            s = s < dt_min ? splat(dt_min) : (s > dt_max ? splat(dt_max) : s);
            store(step + t, s);
            store(decay + t, exp(s * a[head]));
        }
        for (int p = 0; p < size; ++p) {
            const int64_t column = static_cast<int64_t>(head) * size + p;
            for (int t = 0; t < tokens; ++t) input[t] = step[t] * to_float(x[first + t][column]);
            scan_row<kVectors>(from ? from + p * numbers : nullptr, to + p * numbers, numbers, tokens, input, bs, cs,
                               padded, y, [&](int t, int) { return splat(decay[t]); });
            for (int t = 0; t < tokens; ++t)
                store_one(out + (first + t) * heads * size + column, y[t] + d[head] * to_float(x[first + t][column]));
        }
    }
};

// A state space with a decay per channel and number: x and dt [tokens, channels], b and c [tokens, numbers].
template <typename T>
struct SelectiveScan {
    TokenView<T> x, dt, b, c;
    const float *a, *d, *dt_bias;
    States state;
    T* out;
    int64_t channels;
    int numbers;

    void run(const Sequences& sequences, int64_t sequence, int64_t channel, int count, Buffer& buffer) const {
        const int64_t padded = padded_numbers(numbers);
        float* scratch = buffer.get<float>((2 * kTokens + 1) * padded);
        for_vectors(numbers, [&](auto vectors) {
            sequences.for_runs(sequence, [&](int64_t begin, int64_t end, int64_t read, int64_t write) {
                const float* from = state.read(read);
                float* to = state.write(write);
                for (int64_t t = begin; t < end; t += kTokens, from = to)
                    tile<vectors()>(t, static_cast<int>(std::min<int64_t>(kTokens, end - t)), channel, count, from, to,
                                    scratch);
            });
        });
    }

    template <int kVectors>
    void tile(int64_t first, int tokens, int64_t channel, int count, const float* from, float* to,
              float* scratch) const {
        const int64_t padded = padded_numbers(numbers);
        float* bs = scratch;
        float* cs = scratch + kTokens * padded;
        float* as = scratch + 2 * kTokens * padded;
        alignas(64) float steps[kTokens][kChannels];
        for (int t = 0; t < tokens; ++t) {
            widen(b[first + t], bs + t * padded, numbers, padded);
            widen(c[first + t], cs + t * padded, numbers, padded);
            for (int i = 0; i < count; i += kLanes)
                store(steps[t] + i, softplus(load_some(dt[first + t] + channel + i, count - i) +
                                             load_some(dt_bias + channel + i, count - i)));
        }
        for (int64_t i = channel; i < channel + count; ++i) {
            float step[kTokens], input[kTokens], y[kTokens];
            for (int t = 0; t < tokens; ++t) {
                step[t] = steps[t][i - channel];
                input[t] = step[t] * to_float(x[first + t][i]);
            }
            widen(a + i * numbers, as, numbers, padded);
            scan_row<kVectors>(from ? from + i * numbers : nullptr, to + i * numbers, numbers, tokens, input, bs, cs,
                               padded, y, [&](int t, int n) { return exp(load(as + n) * step[t]); });
            for (int t = 0; t < tokens; ++t)
                store_one(out + (first + t) * channels + i, y[t] + d[i] * to_float(x[first + t][i]));
        }
    }
};

// Linear attention with a decay and the delta rule: query and key [tokens, keys, key_size], value [tokens, values,
// value_size], a and b [tokens, values]; a state is [values, key_size, value_size].
template <typename T>
struct DeltaRule {
    TokenView<T> query, key, value, a, b;
    const float *a_log, *dt_bias;
    States state;
    T* out;
    int keys, values, key_size, value_size;

    static constexpr int kWidth = kColumns * kLanes;

    // Values [column, column + kWidth) of a head.
    void run(const Sequences& sequences, int64_t sequence, int head, int column, Buffer& buffer) const {
        float* held = buffer.get<float>(key_size * kWidth);
        const int count = std::min(kWidth, value_size - column);
        const int64_t offset = static_cast<int64_t>(head) * key_size * value_size + column;
        sequences.for_runs(sequence, [&](int64_t begin, int64_t end, int64_t read, int64_t write) {
            const float* from = state.read(read);
            for (int k = 0; k < key_size; ++k)
                for (int j = 0; j < kWidth; j += kLanes)
                    store(held + k * kWidth + j,
                          from ? load_some(from + offset + static_cast<int64_t>(k) * value_size + j, count - j)
                               : Floats{});
            for (int64_t t = begin; t < end; ++t) token(t, head, column, count, held);
            float* to = state.write(write) + offset;
            for (int k = 0; k < key_size; ++k)
                for (int j = 0; j < kWidth; j += kLanes)
                    store_some(to + static_cast<int64_t>(k) * value_size + j, load(held + k * kWidth + j), count - j);
        });
    }

    void token(int64_t t, int head, int column, int count, float* held) const {
        const int from_key = head / (values / keys) * key_size;
        alignas(64) float q[kMaxKey + kLanes], k[kMaxKey + kLanes];
        unit(query[t] + from_key, q, 1.0f / std::sqrt(static_cast<float>(key_size)));
        unit(key[t] + from_key, k, 1.0f);
        const float step = softplus(splat(to_float(a[t][head]) + dt_bias[head]))[0];
        const Floats decay = exp(splat(-exp(splat(a_log[head]))[0] * step));
        const Floats strength = sigmoid(splat(to_float(b[t][head])));
        Floats read[kColumns][2] = {}, change[kColumns], result[kColumns][2] = {};
        for (int i = 0; i < key_size; ++i)
            for (int j = 0; j < kColumns; ++j) {
                const Floats row = load(held + i * kWidth + j * kLanes) * decay;
                store(held + i * kWidth + j * kLanes, row);
                read[j][i % 2] += row * k[i];
            }
        const T* target = value[t] + static_cast<int64_t>(head) * value_size + column;
        for (int j = 0; j < kColumns; ++j)
            change[j] = (load_some(target + j * kLanes, count - j * kLanes) - (read[j][0] + read[j][1])) * strength;
        for (int i = 0; i < key_size; ++i)
            for (int j = 0; j < kColumns; ++j) {
                const Floats row = load(held + i * kWidth + j * kLanes) + change[j] * k[i];
                store(held + i * kWidth + j * kLanes, row);
                result[j][i % 2] += row * q[i];
            }
        T* to = out + (t * values + head) * value_size + column;
        for (int j = 0; j < kColumns; ++j)
            store_some(to + j * kLanes, result[j][0] + result[j][1], count - j * kLanes);
    }

    // A vector brought to length `scale`.
    void unit(const T* from, float* to, float scale) const {
        Floats squares{};
        for (int i = 0; i < key_size; i += kLanes) {
            const Floats x = load_some(from + i, key_size - i);
            store(to + i, x);
            squares += x * x;
        }
        const float factor = scale / std::sqrt(sum(squares) + 1e-6f);
        for (int i = 0; i < key_size; i += kLanes) store(to + i, load(to + i) * factor);
    }
};

// Averages of the values so far (RWKV): key and value [tokens, channels]; a state is [3, channels]: the weighted values, the
// weights, both divided by e^m, and m.
template <typename T>
struct Wkv {
    TokenView<T> key, value;
    const float *decay, *first;
    States state;
    T* out;
    int64_t channels;

    // Channels [channel, channel + count) of a sequence.
    void run(const Sequences& sequences, int64_t sequence, int64_t channel, int64_t count) const {
        sequences.for_runs(sequence, [&](int64_t begin, int64_t end, int64_t read, int64_t write) {
            const float* from = state.read(read);
            float* to = state.write(write);
            for (int64_t c = channel; c < channel + count; c += kLanes) {
                const int64_t some = channel + count - c;
                Floats held[3];
                for (int i = 0; i < 3; ++i) held[i] = from ? load_some(from + i * channels + c, some) : Floats{};
                const Floats fading = load_some(decay + c, some), newest = load_some(first + c, some);
                for (int64_t t = begin; t < end; ++t) {
                    const Floats k = load_some(key[t] + c, some), v = load_some(value[t] + c, some);
                    const Weights seen(held[2], k + newest);
                    store_some(out + t * channels + c, seen.sum(held[0], v) / seen.sum(held[1], splat(1.0f)), some);
                    const Weights kept(held[2] + fading, k);
                    held[0] = kept.sum(held[0], v);
                    held[1] = kept.sum(held[1], splat(1.0f));
                    held[2] = kept.top;
                }
                for (int i = 0; i < 3; ++i) store_some(to + i * channels + c, held[i], some);
            }
        });
    }

private:
    // What the past and a token count for, as powers of e, the larger one brought to 1.
    struct Weights {
        Floats top, past, token;
        Weights(Floats a, Floats b) : top(max(b, a)), past(exp(a - top)), token(exp(b - top)) {}
        Floats sum(Floats of_past, Floats of_token) const { return fused(past, of_past, token * of_token); }
    };
};

// work(sequence, part) for every sequence and part, by the team.
template <typename Work>
void for_parts(int64_t sequences, int64_t parts, int64_t cost, Work&& work) {
#pragma omp parallel for schedule(dynamic) if (sequences * parts > 1 && cost > 32768)
    for (int64_t i = 0; i < sequences * parts; ++i) work(i / parts, i % parts);
}

}  // namespace quire
