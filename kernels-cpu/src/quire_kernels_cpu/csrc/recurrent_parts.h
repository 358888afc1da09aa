// Mixers that keep a state of each sequence as parts of a fused decoder: Mamba-2, the gated delta net, the short convolution.
//
// Between their matrices they round where the ops of `recurrent.h` do when each is called alone, and give the same bits.
#pragma once

#include <array>
#include <vector>

#include "workspace.h"

namespace quire {

// run(i) for i below count; the team takes them as it gets to them. A barrier must follow.
template <typename Run>
void share_out(QueueWorker& worker, int64_t count, Run&& run) {
    for (int64_t i = worker.first(count); i < count; i = worker.next()) run(i);
}

// A convolution over all channels of all sequences; with a barrier behind.
template <typename T>
void convolve(const Pass<T>& pass, const Convolution<T>& convolution) {
    constexpr int64_t kRun = 8 * kLanes;
    const int64_t parts = (convolution.channels + kRun - 1) / kRun;
    share_out(pass.worker, pass.sequences.count * parts, [&](int64_t i) {
        const int64_t begin = i % parts * kRun, end = std::min(begin + kRun, convolution.channels);
        for (int64_t c = begin; c < end; c += kLanes)
            convolution.run(pass.sequences, i / parts, c, static_cast<int>(std::min<int64_t>(kLanes, end - c)));
    });
    barrier();
}

// An RMS norm over groups of numbers with a SiLU gate before or behind it (Mamba-2, arXiv:2405.21060, sec. 7).
struct GatedNorm {
    const float* weight;  // [size]; of a group where there is one, of all of them where there are several
    int64_t size;
    int32_t groups;  // 0: only the gate
    bool before_gate;
    float eps;
    std::vector<float> ones = std::vector<float>(groups > 1 ? size / groups : 0, 1.0f);

    template <typename T>
    void run(T* x, const T* gate) const {
        const T* const nothing = nullptr;
        const auto apply_gate = [&] {
            activate([](Floats v) { return silu(v); }, x, gate, static_cast<const T*>(x), size);
        };
        if (!before_gate) apply_gate();
        if (groups == 1) rms_norm(x, x, nothing, weight, size, eps);
        for (int64_t g = 0, width = groups > 1 ? size / groups : 0; groups > 1 && g < groups; ++g) {
            rms_norm(x + g * width, x + g * width, nothing, ones.data(), width, eps);
            weigh_row(x + g * width, 1.0f, weight + g * width, width);
        }
        if (before_gate) apply_gate();
    }
};

template <typename T>
struct Mamba2Part {
    Mamba2Argument a;
    Matrix<T> in, out;
    GatedNorm norm;
    int normed, scanned;

    Mamba2Part(const Mamba2Argument& from, Workspace<T>& work)
        : a(from), in(work.matrix(from.in_proj, in_size(), work.hidden)),
          out(work.matrix(from.out_proj, work.hidden, inner())),
          norm{from.norm, inner(), from.norm_groups, from.norm_before_gate != 0, from.eps},
          normed(work.activations.add(Stage::first, work.hidden, in.format)), scanned(work.activations.add(Stage::last, inner(), out.format)) {
        work.need(kProjected, in_size());
        work.need(kMixed, conv());
        work.need(kAttended, inner());
    }

    Strips<T> entry() const { return {&in, 1, false}; }
    int input() const { return normed; }
    int64_t inner() const { return static_cast<int64_t>(a.heads) * a.head_dim; }
    int64_t conv() const { return inner() + 2 * static_cast<int64_t>(a.groups) * a.state_size; }
    int64_t in_size() const { return inner() + conv() + a.heads; }

    void run(const Pass<T>& pass) const {
        Workspace<T>& work = pass.work;
        T *const projected = work.at(kProjected), *const mixed = work.at(kMixed), *const y = work.at(kAttended);
        const Strips<T> behind{&out, 1, false};
        pass.project_whole(entry(), normed, &projected, in_size(), &behind);
        convolve(pass, Convolution<T>{.x = {projected + inner(), in_size()},
                                      .taps_by_channel = static_cast<const T*>(a.taps),
                                      .bias = static_cast<const T*>(a.conv_bias),
                                      .state = {pass.cache->conv_state, pass.cache->conv_stride},
                                      .out = mixed,
                                      .channels = conv(),
                                      .taps = a.num_taps,
                                      .silu = true});
        const int64_t group = static_cast<int64_t>(a.groups) * a.state_size;
        const Mamba2Scan<T> scan{.x = {mixed, conv()},
                                 .dt = {projected + inner() + conv(), in_size()},
                                 .b = {mixed + inner(), conv()},
                                 .c = {mixed + inner() + group, conv()},
                                 .a = a.a,
                                 .d = a.d,
                                 .dt_bias = a.dt_bias,
                                 .state = {pass.cache->state, pass.cache->state_stride},
                                 .out = y,
                                 .heads = a.heads,
                                 .size = a.head_dim,
                                 .groups = a.groups,
                                 .numbers = a.state_size,
                                 .dt_min = a.dt_min,
                                 .dt_max = a.dt_max};
        share_out(pass.worker, static_cast<int64_t>(pass.sequences.count) * a.heads, [&](int64_t i) {
            scan.run(pass.sequences, i / a.heads, static_cast<int>(i % a.heads), pass.mine.states);
        });
        barrier();
        const Range share = my_share(work.tokens());
        for (int64_t t = share.begin; t < share.end; ++t)
            norm.run(y + t * inner(), static_cast<const T*>(projected) + t * in_size());
        barrier();
        pass.set(scanned, y, inner());
        pass.project_added(out, scanned);
    }
};

template <typename T>
struct GatedDeltaPart {
    GatedDeltaArgument a;
    std::array<Matrix<T>, 4> in;  // the first `num_in` are there
    int num_in;
    Matrix<T> out;
    GatedNorm norm;
    int normed, scanned;

    GatedDeltaPart(const GatedDeltaArgument& from, Workspace<T>& work)
        : a(from), out(work.matrix(from.out_proj, work.hidden, value_size())),
          norm{from.norm, from.value_dim, 1, true, from.eps} {
        const int64_t hidden = work.hidden;
        const MatrixArgument matrices[] = {a.in_qkv, a.by_key_head ? a.in_a : a.in_z, a.in_a, a.in_b};
        num_in = a.by_key_head ? 2 : 4;
        int64_t own = 0;
        bool shared = false;
        for (int i = 0; i < num_in; ++i) {
            in[i] = work.matrix(matrices[i], sizes()[i], hidden);
            own += in[i].rows;
            shared = shared || in[i].rank_sizes;
        }
        work.need(kOwn, shared ? own : 0);
        normed = work.activations.add(Stage::first, hidden, common_format(in.data(), num_in));
        scanned = work.activations.add(Stage::last, value_size(), out.format);
        work.need(kProjected, width());
        work.need(kMixed, conv());
        work.need(kAttended, value_size());
        work.need(kInner, a.by_key_head ? conv() + 2 * a.value_heads : 0);
    }

    Strips<T> entry() const { return {in.data(), num_in, false}; }
    int input() const { return normed; }
    int64_t key_size() const { return static_cast<int64_t>(a.key_heads) * a.key_dim; }
    int64_t value_size() const { return static_cast<int64_t>(a.value_heads) * a.value_dim; }
    int64_t conv() const { return 2 * key_size() + value_size(); }
    // Outputs of each projection, of all ranks.
    std::array<int64_t, 4> sizes() const {
        if (a.by_key_head) return {conv() + value_size(), 2 * a.value_heads};
        return {conv(), value_size(), a.value_heads, a.value_heads};
    }
    int64_t width() const { return conv() + value_size() + 2 * a.value_heads; }

    void run(const Pass<T>& pass) const {
        Workspace<T>& work = pass.work;
        T *const projected = work.at(kProjected), *const mixed = work.at(kMixed), *const y = work.at(kAttended);
        std::array<T*, 4> to;
        int64_t at = 0;
        for (int i = 0; i < num_in; ++i) {
            to[i] = projected + at;
            at += sizes()[i];
        }
        const Strips<T> behind{&out, 1, false};
        pass.project_whole(entry(), normed, to.data(), width(), &behind);
        TokenView<T> qkv{projected, width()}, decay{projected + conv() + value_size(), width()},
            strength{projected + conv() + value_size() + a.value_heads, width()};
        if (a.by_key_head) {
            T* const apart = work.at(kInner);
            const int64_t stride = conv() + 2 * a.value_heads;
            const Range share = my_share(work.tokens());
            for (int64_t t = share.begin; t < share.end; ++t) take_apart(projected + t * width(), apart + t * stride);
            barrier();
            qkv = {apart, stride};
            decay = {apart + conv(), stride};
            strength = {apart + conv() + a.value_heads, stride};
        }
        convolve(pass, Convolution<T>{.x = qkv,
                                      .taps_by_channel = static_cast<const T*>(a.taps),
                                      .bias = nullptr,
                                      .state = {pass.cache->conv_state, pass.cache->conv_stride},
                                      .out = mixed,
                                      .channels = conv(),
                                      .taps = a.num_taps,
                                      .silu = true});
        const DeltaRule<T> rule{.query = {mixed, conv()},
                                .key = {mixed + key_size(), conv()},
                                .value = {mixed + 2 * key_size(), conv()},
                                .a = decay,
                                .b = strength,
                                .a_log = a.a_log,
                                .dt_bias = a.dt_bias,
                                .state = {pass.cache->state, pass.cache->state_stride},
                                .out = y,
                                .keys = a.key_heads,
                                .values = a.value_heads,
                                .key_size = a.key_dim,
                                .value_size = a.value_dim};
        const int64_t columns = (a.value_dim + rule.kWidth - 1) / rule.kWidth, parts = a.value_heads * columns;
        share_out(pass.worker, pass.sequences.count * parts, [&](int64_t i) {
            const int64_t part = i % parts;
            rule.run(pass.sequences, i / parts, static_cast<int>(part / columns),
                     static_cast<int>(part % columns) * rule.kWidth, pass.mine.states);
        });
        barrier();
        const Range share = my_share(work.tokens() * a.value_heads);
        for (int64_t i = share.begin; i < share.end; ++i) {
            const int64_t t = i / a.value_heads, head = i % a.value_heads;
            norm.run(y + i * a.value_dim, static_cast<const T*>(projected) + t * width() + gate_of(head));
        }
        barrier();
        pass.set(scanned, y, value_size());
        pass.project_added(out, scanned);
    }

private:
    int64_t values_per_key() const { return a.value_heads / a.key_heads; }
    // Numbers of a key head in the projection by key heads: its query, its key, its values and their gates.
    int64_t per_key() const { return 2 * a.key_dim + 2 * values_per_key() * a.value_dim; }
    // Where in a token's projection the gate of a value head is.
    int64_t gate_of(int64_t head) const {
        if (!a.by_key_head) return conv() + head * a.value_dim;
        const int64_t values = values_per_key();
        return head / values * per_key() + 2 * a.key_dim + (values + head % values) * a.value_dim;
    }
    // A token's projection by key heads -> queries, keys and values; what decays; what is written with which strength.
    void take_apart(const T* from, T* to) const {
        const int64_t values = values_per_key(), value = values * a.value_dim;
        const T* const gates = from + conv() + value_size();  // of each key head its strengths, then its decays
        for (int64_t k = 0; k < a.key_heads; ++k) {
            const T* const head = from + k * per_key();
            std::copy_n(head, a.key_dim, to + k * a.key_dim);
            std::copy_n(head + a.key_dim, a.key_dim, to + key_size() + k * a.key_dim);
            std::copy_n(head + 2 * a.key_dim, value, to + 2 * key_size() + k * value);
            std::copy_n(gates + (2 * k + 1) * values, values, to + conv() + k * values);
            std::copy_n(gates + 2 * k * values, values, to + conv() + a.value_heads + k * values);
        }
    }
};

// out(c * conv(b * x)) with b, c and x projected.
template <typename T>
struct ShortConvPart {
    ShortConvArgument a;
    Matrix<T> in, out;
    int normed, convolved;

    ShortConvPart(const ShortConvArgument& from, Workspace<T>& work)
        : a(from), in(work.matrix(from.in_proj, 3 * work.hidden, work.hidden)),
          out(work.matrix(from.out_proj, work.hidden, work.hidden)),
          normed(work.activations.add(Stage::first, work.hidden, in.format)), convolved(work.activations.add(Stage::last, work.hidden, out.format)) {
        work.need(kProjected, 3 * work.hidden);
        work.need(kMixed, work.hidden);
        work.need(kAttended, work.hidden);
    }

    Strips<T> entry() const { return {&in, 1, false}; }
    int input() const { return normed; }

    void run(const Pass<T>& pass) const {
        Workspace<T>& work = pass.work;
        const int64_t size = work.hidden;
        T *const projected = work.at(kProjected), *const mixed = work.at(kMixed), *const y = work.at(kAttended);
        const Strips<T> behind{&out, 1, false};
        pass.project_whole(entry(), normed, &projected, 3 * size, &behind);
        const auto multiply = [&](T* to, int64_t factor, const T* x, int64_t stride) {
            const Range share = my_share(work.tokens());
            for (int64_t t = share.begin; t < share.end; ++t)
                activate([](Floats v) { return v; }, to + t * size, projected + t * 3 * size + factor * size, x + t * stride, size);
            barrier();
        };
        multiply(mixed, 0, projected + 2 * size, 3 * size);
        convolve(pass, Convolution<T>{.x = {mixed, size},
                                      .taps_by_channel = static_cast<const T*>(a.taps),
                                      .bias = static_cast<const T*>(a.conv_bias),
                                      .state = {pass.cache->conv_state, pass.cache->conv_stride},
                                      .out = y,
                                      .channels = size,
                                      .taps = a.num_taps,
                                      .silu = false});
        multiply(y, 1, y, size);
        pass.set(convolved, y, size);
        pass.project_added(out, convolved);
    }
};

}  // namespace quire
