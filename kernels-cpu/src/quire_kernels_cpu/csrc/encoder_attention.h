// Attention of encoders in columns: every token of a text over all of its text, or over a window of it.
//
// Queries are in the lanes. Keys are rows and values columns of weights to products as in `columns.h`: a piece of keys
// after the other, whose softmax is put together as it comes (Milakov & Gimelshein 2018, arXiv:1805.02867; Dao et al.
// 2022, arXiv:2205.14135). Pieces begin where the text begins, so that nothing depends on what else is read.
#pragma once

#include <vector>

#include "columns.h"

namespace quire {

constexpr int64_t kKeyPiece = 128;

// Biases of scores by distance, as lanes read them, which are queries: of a head [kLanes + 2 * max_distance + 1 + kLanes], from keys
// furthest behind the query to those furthest before it, and at either end the last bias again.
class DistanceBiases {
public:
    // from: [heads, 2 * max_distance + 1], from keys furthest before the query to those furthest behind it; or none.
    DistanceBiases(const float* from, int64_t heads, int64_t max_distance) : row_(2 * (kLanes + max_distance) + 1) {
        if (!from) return;
        numbers_.resize(heads * row_);
        for (int64_t head = 0; head < heads; ++head)
            for (int64_t i = 0; i < row_; ++i) {
                const int64_t behind = std::clamp<int64_t>(max_distance + kLanes - i, -max_distance, max_distance);
                numbers_[head * row_ + i] = from[head * (2 * max_distance + 1) + max_distance + behind];
            }
    }
    const float* of(int64_t head) const { return numbers_.empty() ? nullptr : numbers_.data() + head * row_; }

private:
    int64_t row_;
    std::vector<float> numbers_;
};

struct EncoderAttentionScratch {
    Buffer keys, values, queries, scores, sums;
};

// One head of a text: queries, keys and values are features of the same columns.
struct EncoderHead {
    Columns qkv;
    int64_t query, key, value;  // first features
    Columns out;
    int64_t out_feature;
    int64_t head_dim;
    float scale;
    int64_t window;        // tokens see those at most so far away; negative: all
    const float* bias;     // see `DistanceBiases`; null for none
    int64_t max_distance;
    int64_t begin, count;  // tokens of the text
};

class EncoderAttention {
public:
    EncoderAttention(const EncoderHead& head, EncoderAttentionScratch& scratch)
        : h_(head), dim_(head.head_dim), padded_((head.count + kLanes - 1) / kLanes * kLanes),
          keys_(scratch.keys.get<float>(padded_ * dim_)), values_(scratch.values.get<float>(dim_ * padded_)),
          queries_(scratch.queries.get<float>(kColumnTiles * dim_ * kLanes)),
          scores_(scratch.scores.get<float>(kColumnTiles * kKeyPiece * kLanes)),
          sums_(scratch.sums.get<float>(kColumnTiles * dim_ * kLanes)) {
        for (int64_t token = 0; token < h_.count; token += kLanes) {
            for (int64_t d = 0; d < dim_; ++d)
                store(values_ + d * padded_ + token, load_tokens(h_.qkv, h_.value + d, h_.begin + token, h_.count - token));
            for (int64_t d = 0; d < dim_; d += kLanes) {
                Floats v[kLanes];
                for (int64_t i = 0; i < kLanes; ++i)
                    v[i] = d + i < dim_ ? load_tokens(h_.qkv, h_.key + d + i, h_.begin + token, h_.count - token) : Floats{};
                turn_lanes(v);
                for (int64_t i = 0; i < kLanes; ++i) store_some(keys_ + (token + i) * dim_ + d, v[i], dim_ - d);
            }
        }
    }

    // Queries [begin, end) of the text.
    void run(int64_t begin, int64_t end) {
        for (int64_t query = begin; query < end; query += kColumnTiles * kLanes)
            with_count<kColumnTiles>((std::min(kColumnTiles * kLanes + int64_t{0}, end - query) + kLanes - 1) / kLanes,
                                     [&](auto tiles) { attend<decltype(tiles)::value>(query); });
    }

private:
    template <int kTiles>
    void attend(int64_t query) {
        for (int v = 0; v < kTiles; ++v)
            for (int64_t d = 0; d < dim_; ++d)
                store(queries_ + (v * dim_ + d) * kLanes,
                      load_tokens(h_.qkv, h_.query + d, h_.begin + query + v * kLanes, h_.count - query - v * kLanes));
        Floats most[kTiles], weights[kTiles] = {};
        for (Floats& each : most) each = splat(-1e30f);
        const bool all = h_.window < 0;
        const int64_t first = all ? 0 : std::max<int64_t>(query - h_.window, 0) / kKeyPiece * kKeyPiece;
        const int64_t last = all ? h_.count : std::min(query + kTiles * kLanes + h_.window, h_.count);
        for (int64_t key = first; key < last; key += kKeyPiece) {
            const int64_t keys = std::min(kKeyPiece, h_.count - key);
            multiply_columns<kTiles>(keys_ + key * dim_, dim_, keys, queries_, dim_ * kLanes, dim_, scores_, kKeyPiece * kLanes);
            for (int v = 0; v < kTiles; ++v) {
                const Floats factor = soften(scores_ + v * kKeyPiece * kLanes, key, keys, query + v * kLanes, most[v], weights[v]);
                float* const sums = sums_ + v * dim_ * kLanes;
                for (int64_t d = 0; key > first && d < dim_; ++d) store(sums + d * kLanes, load(sums + d * kLanes) * factor);
            }
            multiply_columns<kTiles>(values_ + key, padded_, dim_, scores_, kKeyPiece * kLanes, keys, sums_, dim_ * kLanes, key > first);
        }
        for (int v = 0; v < kTiles; ++v) {
            const int64_t token = query + v * kLanes;
            const Floats share = 1.0f / weights[v];
            for (int64_t d = 0; d < dim_; ++d)
                store_tokens(h_.out, h_.out_feature + d, h_.begin + token, h_.count - token, load(sums_ + (v * dim_ + d) * kLanes) * share);
        }
    }

    // Scores [keys] of kLanes queries from `query` on become weights. Returns what earlier sums have to be multiplied with.
    Floats soften(float* scores, int64_t key, int64_t keys, int64_t query, Floats& most, Floats& weights) const {
        if (h_.window >= 0) mask(scores, key, keys, query);
        if (h_.bias) add_bias(scores, key, keys, query);
        const float scale = h_.bias ? 1.0f : h_.scale;
        Floats largest = splat(-INFINITY);
        for (int64_t i = 0; i < keys; ++i) largest = max(load(scores + i * kLanes), largest);
        const Floats next = max(largest * scale, most), factor = exp(most - next);
        Floats sum = {};
        for (int64_t i = 0; i < keys; ++i) {
            const Floats weight = exp(fused(load(scores + i * kLanes), splat(scale), -next));
            store(scores + i * kLanes, weight);
            sum += weight;
        }
        weights = fused(weights, factor, sum);
        most = next;
        return factor;
    }

    // Scores times their scale, plus the biases of their distances.
    void add_bias(float* scores, int64_t key, int64_t keys, int64_t query) const {
        for (int64_t i = 0; i < keys; ++i) {
            const int64_t before = std::clamp<int64_t>(query - key - i, -h_.max_distance - kLanes, h_.max_distance + 1);
            const Floats bias = load(h_.bias + before + h_.max_distance + kLanes);
            store(scores + i * kLanes, fused(load(scores + i * kLanes), splat(h_.scale), bias));
        }
    }

    void mask(float* scores, int64_t key, int64_t keys, int64_t query) const {
        const int window = static_cast<int>(h_.window);
        Ints place;
        for (int i = 0; i < kLanes; ++i) place[i] = static_cast<int>(query) + i;
        for (int64_t i = 0; i < keys; ++i) {
            const Ints distance = static_cast<int>(key + i) - place;
            const Floats score = load(scores + i * kLanes);
            store(scores + i * kLanes, (distance <= window) & (distance >= -window) ? score : splat(-INFINITY));
        }
    }

    const EncoderHead& h_;
    const int64_t dim_, padded_;
    float *const keys_, *const values_, *const queries_, *const scores_, *const sums_;
};

}  // namespace quire
