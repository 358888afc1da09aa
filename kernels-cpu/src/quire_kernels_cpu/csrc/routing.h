// How tokens choose their experts: op `route_experts` (`quire_ops/routing.py`). A token's choice follows from its own
// logits alone, by the same instructions wherever it stands.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels.h"
#include "team.h"
#include "vectors.h"

namespace quire {

enum class Scoring : int32_t { softmax, sigmoid, softmax_of_chosen };

// A number that grows with x, which is the largest where x is none. Both zeros are one.
inline int32_t order_of(float x) {
    if (x != x) return std::numeric_limits<int32_t>::max();
    x += 0.0f;
    int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

constexpr int32_t kShutOut = std::numeric_limits<int32_t>::min();  // below what any number gives

// The first of the largest.
inline int32_t best_of(const int32_t* order, int32_t count) {
    int32_t largest = kShutOut;
    for (int32_t i = 0; i < count; ++i) largest = std::max(largest, order[i]);
    return static_cast<int32_t>(std::find(order, order + count, largest) - order);
}

// Numbers of scratch that `choose_experts` needs.
constexpr int64_t routing_scratch(int64_t num_experts) { return 4 * (num_experts + kLanes); }

// What experts are scored with [num_experts], behind which scratch may be written.
inline void score_experts(Scoring scoring, const float* logits, int32_t num_experts, float* scores) {
    float largest = logits[0];
    for (int32_t i = 1; i < num_experts; ++i) largest = std::max(largest, logits[i]);
    Floats total{};
    for (int32_t i = 0; i < num_experts; i += kLanes) {
        const Floats x = load_some(logits + i, num_experts - i);
        store(scores + i, scoring == Scoring::softmax ? exp(x - largest) : scoring == Scoring::sigmoid ? sigmoid(x) : x);
    }
    if (scoring != Scoring::softmax) return;
    std::fill(scores + num_experts, scores + num_experts + kLanes, 0.0f);
    for (int32_t i = 0; i < num_experts; i += kLanes) total += load(scores + i);
    const float inverse = 1.0f / sum(total);
    for (int32_t i = 0; i < num_experts; i += kLanes) store(scores + i, load(scores + i) * inverse);
}

// Shuts out the experts of all groups but the best.
inline void keep_best_groups(const RoutingRule& rule, const float* choice, int32_t num_experts, int32_t* order,
                             int32_t* of_groups) {
    const int32_t size = num_experts / rule.num_groups;
    for (int32_t g = 0; g < rule.num_groups; ++g) {
        int32_t* const mine = order + g * size;
        const int32_t best = best_of(mine, size);
        float goodness = choice[g * size + best];
        if (rule.group_best == 2) {
            const int32_t kept = mine[best];
            mine[best] = kShutOut;
            goodness += choice[g * size + best_of(mine, size)];
            mine[best] = kept;
        }
        of_groups[g] = order_of(goodness);
    }
    for (int32_t taken = 0; taken < rule.topk_groups; ++taken) of_groups[best_of(of_groups, rule.num_groups)] = kShutOut;
    for (int32_t g = 0; g < rule.num_groups; ++g)
        if (of_groups[g] != kShutOut) std::fill(order + g * size, order + (g + 1) * size, kShutOut);
}

// logits, bias [num_experts], the bias or none -> ids, weights [top_k], the best expert first.
inline void choose_experts(const RoutingRule& rule, const float* logits, const float* bias, int32_t num_experts,
                           int64_t* ids, float* weights, float* scratch) {
    const int64_t room = num_experts + kLanes;
    float *const scores = scratch, *const biased = scratch + room;
    int32_t *const order = reinterpret_cast<int32_t*>(scratch + 2 * room), *const of_groups = order + room;
    const auto scoring = static_cast<Scoring>(rule.scoring);
    score_experts(scoring, logits, num_experts, scores);
    // Scores grow with logits, which tell apart what rounding makes equal.
    const bool by_score = bias || rule.group_best == 2;
    for (int32_t i = 0; i < num_experts; ++i) biased[i] = by_score ? scores[i] + (bias ? bias[i] : 0.0f) : logits[i];
    for (int32_t i = 0; i < num_experts; ++i) order[i] = order_of(biased[i]);
    if (rule.topk_groups < rule.num_groups) keep_best_groups(rule, biased, num_experts, order, of_groups);
    for (int32_t k = 0; k < rule.top_k; ++k) {
        const int32_t expert = best_of(order, num_experts);
        ids[k] = expert;
        weights[k] = scores[expert];
        order[expert] = kShutOut;
    }
    float total = 0.0f;
    if (scoring == Scoring::softmax_of_chosen) {
        const float largest = weights[0];
        for (int32_t k = 0; k < rule.top_k; ++k) total += weights[k] = exp(splat(weights[k] - largest))[0];
        for (int32_t k = 0; k < rule.top_k; ++k) weights[k] /= total;
    }
    float divisor = 1.0f;
    if (rule.renormalize) {
        divisor = 0.0f;
        for (int32_t k = 0; k < rule.top_k; ++k) divisor += weights[k];
        divisor = divisor < rule.minimum ? rule.minimum : divisor;
    }
    for (int32_t k = 0; k < rule.top_k; ++k) weights[k] = weights[k] / divisor * rule.scale;
}

// Of a step: rows of logits are `stride` numbers apart; ids and weights [tokens, top_k].
struct Routing {
    const RoutingRule& rule;
    const float* logits;
    int64_t stride;
    const float* bias;
    int32_t num_experts;
    int64_t* ids;
    float* weights;

    // Those of some tokens.
    void choose(Range tokens, Buffer& buffer) const {
        float* const scratch = buffer.get<float>(routing_scratch(num_experts));
        for (int64_t t = tokens.begin; t < tokens.end; ++t)
            choose_experts(rule, logits + t * stride, bias, num_experts, ids + t * rule.top_k, weights + t * rule.top_k,
                           scratch);
    }
};

inline void route_op(const Routing& routing, int64_t tokens) {
#pragma omp parallel if (tokens * routing.num_experts > 4096)
    {
        static thread_local Buffer scratch;
        routing.choose(my_share(tokens), scratch);
    }
}

}  // namespace quire
