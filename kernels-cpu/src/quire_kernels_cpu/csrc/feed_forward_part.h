// Feed-forward networks as parts of a fused decoder: gated, plain, and experts with or without what all tokens share.
#pragma once

#include <optional>

#include "routing.h"
#include "workspace.h"

namespace quire {

// Epilogue of gate and up side by side: both as they are, for adapters to be added before the activation.
template <typename T>
struct ToGateAndUp {
    const Matrix<T>* gate_up;
    float* to[2];  // [tokens, cols]
    int64_t tokens;

    void operator()(int, int64_t row, int64_t tile, const Sums& sums) const {
        const int64_t cols = gate_up[0].rows, first = tile * kTile, num_tokens = std::min<int64_t>(kTile, tokens - first);
        const int count = static_cast<int>(std::min<int64_t>(kTile, cols - row));
        Sums room;
        const Sums& of_tokens = ordered(sums, true, room);
        for (int half = 0; half < 2; ++half)
            for (int64_t t = 0; t < num_tokens; ++t) {
                float* const out = to[half] + (first + t) * cols + row;
                for_outputs(gate_up[half], row, of_tokens.at[half][t], count,
                            [&](int n, int left, Floats values) { store_some(out + n, values, left); });
            }
    }
};

// down(act(gate(x)) * up(x)).
template <typename T>
struct GatedPart {
    Matrix<T> gate_up[2], down;
    Activation activation;
    const int64_t* rank_widths;  // of the inner numbers, where ranks share them out
    bool rounds_steps;  // gate and up are rounded before they meet
    int normed, activated;

    GatedPart(const GatedArgument& from, Workspace<T>& work)
        : gate_up{make_matrix<T>(from.gate, work.ranks.own(from.rank_widths, from.inner), work.hidden),
                  make_matrix<T>(from.up, work.ranks.own(from.rank_widths, from.inner), work.hidden)},
          down(work.matrix(from.down, work.hidden, from.inner)), activation(static_cast<Activation>(from.activation)),
          rank_widths(from.rank_widths), rounds_steps(from.rounds_steps), normed(work.activations.add(Stage::first, work.hidden, common_format(gate_up, 2))),
          activated(work.activations.add(Stage::last, from.inner, down.format)) {
        work.need(kInner, from.inner);
        work.need(kGateUp, 2 * from.inner);
        work.need(kOwn, rank_widths ? gate_up[0].rows : 0);
    }

    Strips<T> entry() const { return {gate_up, 2, true}; }
    int input() const { return normed; }

    void run(const Pass<T>& pass) const {
        run(pass, pass.work.at(kAdded), pass.following);
    }

    // Results to `to` [tokens, hidden]; with a barrier behind.
    void run(const Pass<T>& pass, T* to, const Strips<T>* following) const {
        Workspace<T>& work = pass.work;
        const Strips<T> behind{&down, 1, false};
        const Activations& inner = work.activations[activated];
        T* const rows = pass.adapters || rank_widths || inner.takes_whole_tokens() ? work.at(kInner) : nullptr;
        T* const own = rank_widths ? work.at(kOwn) : rows;
        if (pass.adapters) {
            run_adapted(pass, own, behind);
        } else {
            linear(entry(), work.activations[normed], pass.mine.linear, pass.worker,
                   ToActivated<T>{.gate_up = gate_up, .kind = activation, .to = inner, .rows = own, .rounds = rounds_steps,
                                  .stride = rank_widths ? gate_up[0].rows : 0},
                   &behind);
        }
        barrier();
        if (rank_widths) pass.gather(own, rank_widths, rows, inner.cols);
        if (rows) {
            if (pass.adapters) work.shrink(pass.adapters + 2, 1, rows, inner.cols);
            pass.set(activated, rows, inner.cols);
        }
        pass.project_last(down, activated, to, following, pass.adapters ? pass.adapters + 2 : nullptr);
    }

private:
    void run_adapted(const Pass<T>& pass, T* rows, const Strips<T>& behind) const {
        Workspace<T>& work = pass.work;
        const int64_t size = gate_up[0].rows, count = work.tokens() * size;
        float *const gate = work.at(kGateUp), *const up = gate + count;
        work.shrink(pass.adapters, 2, work.at(kNormed), work.hidden);
        linear(entry(), work.activations[normed], pass.mine.linear, pass.worker,
               ToGateAndUp<T>{gate_up, {gate, up}, work.tokens()}, &behind);
        barrier();
        const LoraExpansion<float> added[] = {{pass.adapters, work.inner_of(0), size, {gate, size, 0, 0}},
                                              {pass.adapters + 1, work.inner_of(1), size, {up, size, 0, 0}}};
        lora_expand<T>(added, 2, work.step->lora);
        barrier();
        const Range share = my_share((count + kLanes - 1) / kLanes);
        for (int64_t k = share.begin * kLanes; k < std::min(share.end * kLanes, count); k += kLanes)
            store_some(rows + k, gated(activation, load_some(gate + k, count - k), load_some(up + k, count - k), 0.0f), count - k);
    }
};

// down(act(up(x))).
template <typename T>
struct MlpPart {
    Matrix<T> up, down;
    Activation activation;
    const int64_t* rank_widths;  // of the inner numbers, where ranks share them out
    int normed, activated;

    MlpPart(const MlpArgument& from, Workspace<T>& work)
        : up(make_matrix<T>(from.up, work.ranks.own(from.rank_widths, from.inner), work.hidden)),
          down(work.matrix(from.down, work.hidden, from.inner)), activation(static_cast<Activation>(from.activation)),
          rank_widths(from.rank_widths), normed(work.activations.add(Stage::first, work.hidden, up.format)),
          activated(work.activations.add(Stage::last, from.inner, down.format)) {
        work.need(kInner, from.inner);
        work.need(kOwn, rank_widths ? up.rows : 0);
    }

    Strips<T> entry() const { return {&up, 1, false}; }
    int input() const { return normed; }

    void run(const Pass<T>& pass) const {
        Workspace<T>& work = pass.work;
        T *const whole = work.at(kInner), *const rows = rank_widths ? work.at(kOwn) : whole;
        const int64_t size = up.rows, count = work.tokens() * size;
        const Strips<T> behind{&down, 1, false};
        if (pass.adapters) work.shrink(pass.adapters, 1, work.at(kNormed), work.hidden);
        pass.project(entry(), normed, &rows, size, &behind);
        barrier();
        if (pass.adapters) {
            const LoraExpansion<T> added{pass.adapters, work.inner_of(0), size, {rows, size, 0, 0}};
            lora_expand<T>(&added, 1, work.step->lora);
            barrier();
        }
        const Range share = my_share((count + kLanes - 1) / kLanes);
        const int64_t begin = share.begin * kLanes, end = std::min(share.end * kLanes, count);
        if (begin < end)
            with_function(activation, [&](const auto& function) {
                activate(function, rows + begin, rows + begin, static_cast<const T*>(nullptr), end - begin);
            });
        barrier();
        if (rank_widths) pass.gather(rows, rank_widths, whole, down.cols);
        if (pass.adapters) work.shrink(pass.adapters + 1, 1, whole, down.cols);
        pass.set(activated, whole, down.cols);
        pass.project_added(down, activated, pass.adapters ? pass.adapters + 1 : nullptr);
    }
};

// What the router's experts make of each token, and the network that every token uses beside them. Without adapters.
template <typename T>
struct ExpertsPart {
    const Moe<T>* moe;
    Matrix<T> router[2];  // [E, hidden], and the gate of what is shared [1, hidden] where it is multiplied beside it
    const float *router_bias, *choice_bias;
    const T* shared_gate;  // [hidden] of what all tokens share, or none
    RoutingRule rule;
    std::optional<GatedPart<T>> shared;
    bool rounds_steps;
    int normed, routed;  // activations of the experts' neighbours, and of the router

    ExpertsPart(const ExpertsArgument& from, Workspace<T>& work)
        : moe(static_cast<const Moe<T>*>(from.experts)),
          router{make_matrix<T>(from.router, from.num_experts, work.hidden), {from.shared_gate, 1, work.hidden}},
          router_bias(from.router_bias), choice_bias(from.choice_bias), shared_gate(static_cast<const T*>(from.shared_gate)),
          rule(from.rule), rounds_steps(from.shared.rounds_steps), routed(work.activations.add(Stage::first, work.hidden, common_format(router, 2))) {
        if (from.shared.inner) shared.emplace(from.shared, work);
        normed = shared ? shared->normed : routed;
        work.need(kLogits, router[0].rows + 1);
        work.need(kExpertWeights, rule.top_k);
        work.need(kShared, shared ? work.hidden : 0);
        work.most_experts = std::max<int64_t>(work.most_experts, rule.top_k);
    }

    Strips<T> entry() const { return {router, 1, false}; }
    int input() const { return normed; }
    bool gate_is_multiplied() const { return shared_gate && rounds_steps; }

    void run(const Pass<T>& pass) const {
        Workspace<T>& work = pass.work;
        const int64_t num_experts = router[0].rows, tokens = work.tokens();
        float* const logits = work.at(kLogits);
        float* const to[] = {logits, logits + tokens * num_experts};
        route(pass, to);
        barrier();
        if (omp_get_thread_num() == 0)
            work.experts.begin(*moe, work.at(kNormed), work.expert_ids(), work.at(kExpertWeights), tokens, rule.top_k);
        if (shared) {
            shared->run(pass, work.at(kShared), nullptr);
        } else {
            barrier();
        }
        work.experts.run(pass.mine.experts, pass.worker, work.at(kAdded), pass.following);
        barrier();
        if (!shared) return;
        const Range share = my_share(tokens);
        for (int64_t t = share.begin; t < share.end; ++t) add_shared(work, t, to[1]);
        barrier();
    }

private:
    void route(const Pass<T>& pass, float* const to[2]) const {
        Workspace<T>& work = pass.work;
        const int64_t num_experts = router[0].rows;
        const Activations& x = work.activations[routed];
        linear(Strips<T>{router, 1, false}, x, pass.mine.linear, pass.worker, ToRows<T, float>{router, to, num_experts, work.tokens()});
        barrier();
        if (gate_is_multiplied()) {
            linear(Strips<T>{router + 1, 1, false}, x, pass.mine.linear, pass.worker, ToRows<T, float>{router + 1, to + 1, 1, work.tokens()});
            barrier();
        }
        const Range share = my_share(work.tokens());
        for (int64_t i = share.begin * num_experts; router_bias && i < share.end * num_experts; ++i)
            to[0][i] += router_bias[i % num_experts];
        Routing{rule, to[0], num_experts, choice_bias, static_cast<int32_t>(num_experts), work.expert_ids(),
                work.at(kExpertWeights)}.choose(share, pass.mine.routing);
    }

    // A token's part of what is shared, counted as much as its gate says, beside what its experts gave.
    void add_shared(Workspace<T>& work, int64_t token, const float* gates) const {
        const int64_t hidden = work.hidden, at = token * hidden;
        T *const x = work.at(kAdded) + at, *const part = work.at(kShared) + at;
        if (shared_gate) {
            const float product = gate_is_multiplied() ? gates[token] : dot_product(work.at(kNormed) + at, shared_gate, hidden);
            scale_row(part, sigmoid(rounded(splat(product), T{}))[0], hidden);
        }
        add_row(x, part, hidden);
    }
};

}  // namespace quire
