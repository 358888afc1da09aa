// Which tokens of its past a token attends to: those that the small heads of an index score highest (op `index_topk`).
//
// A score is the sum over heads, in one order, of weight * max(0, query . key), in float32: it depends on nothing but its own
// query and key. What is found is in the order of positions, so that attention over it has
// one order of sums; of equal scores the earlier positions are found.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "kv_cache.h"
#include "team.h"
#include "vectors.h"

namespace quire {

template <typename T>
struct IndexSearch {
    const T* query;       // [T, heads, D]
    const float* weights; // [T, heads]
    PagedCache cache;     // of keys of D numbers, see `make_latent_cache`
    Sequences sequences;
    int heads;
    int64_t* out;  // [T, k]
    int k;
};

constexpr int kIndexRun = 256;                   // keys that a thread scores at a time
constexpr int64_t kIndexScores = int64_t{1} << 22;  // that are kept at a time

// Scores of one token for keys of its sequence. The lanes of a vector are heads: their sums never meet but once for a key.
template <typename T>
class IndexScores {
public:
    IndexScores(const IndexSearch<T>& a, Buffer& buffer)
        : a_(a), dim_(a.cache.head_dim), padded_((dim_ + kLanes - 1) / kLanes * kLanes),
          groups_((a.heads + kLanes - 1) / kLanes) {
        keys_ = buffer.get<float>(kIndexRun * (padded_ + kLanes) + groups_ * kLanes * (dim_ + 1));
        totals_ = keys_ + kIndexRun * padded_;
        queries_ = totals_ + kIndexRun * kLanes;
        weights_ = queries_ + groups_ * kLanes * dim_;
    }

    // Those of the keys [begin, end).
    void compute(int64_t token, int sequence, int begin, int end, float* to) {
        if (token != token_) set_token(token);
        CacheRows rows(a_.cache, a_.sequences.table(sequence), 0);
        for (int t = begin; t < end; ++t) widen_row<T>(a_.cache, rows.at(t), keys_ + (t - begin) * padded_, padded_);
        std::fill(totals_, totals_ + (end - begin) * kLanes, 0.0f);
        for (int g = 0; g < groups_; g += kGroups)
            with_count<kGroups>(groups_ - g, [&](auto groups) {
                for (int t = 0; t < end - begin; t += kKeys)
                    with_count<kKeys>(end - begin - t, [&](auto keys) {
                        add<decltype(groups)::value, decltype(keys)::value>(g, t);
                    });
            });
        for (int t = 0; t < end - begin; ++t) to[t] = sum(load(totals_ + t * kLanes));
    }

private:
    static constexpr int kGroups = 4, kKeys = 3;  // whose sums fit the registers, beside an operand of each key

    // [groups][dim][lanes], zeros in the lanes of no head.
    void set_token(int64_t token) {
        token_ = token;
        std::fill(queries_, weights_ + groups_ * kLanes, 0.0f);
        for (int h = 0; h < a_.heads; ++h) {
            const T* const from = a_.query + (token * a_.heads + h) * dim_;
            float* const lane = queries_ + h / kLanes * kLanes * dim_ + h % kLanes;
            for (int d = 0; d < dim_; ++d) lane[d * kLanes] = to_float(from[d]);
            weights_[h] = a_.weights[token * a_.heads + h];
        }
    }

    template <int kSome, int kFew>
    void add(int group, int key) {
        const float* const queries = queries_ + group * kLanes * dim_;
        const float* const keys = keys_ + key * padded_;
        Floats sums[kFew][kSome] = {};
        for (int d = 0; d < dim_; ++d) {
            Floats k[kFew];
#pragma GCC unroll 4
            for (int i = 0; i < kFew; ++i) {
                k[i] = splat(keys[i * padded_ + d]);
                in_register(k[i]);
            }
#pragma GCC unroll 4
            for (int g = 0; g < kSome; ++g) {
                Floats q = load(queries + (g * dim_ + d) * kLanes);
                in_register(q);
#pragma GCC unroll 4
                for (int i = 0; i < kFew; ++i) sums[i][g] = accumulated(sums[i][g], q, k[i]);
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < kFew; ++i) {
            Floats total = load(totals_ + (key + i) * kLanes);
#pragma GCC unroll 4
            for (int g = 0; g < kSome; ++g) {
                const Floats product = sums[i][g];
                const Floats weight = load(weights_ + (group + g) * kLanes);
                total = fused(weight, product < 0.0f ? splat(0.0f) : product, total);
            }
            store(totals_ + (key + i) * kLanes, total);
        }
    }

    const IndexSearch<T>& a_;
    const int dim_, padded_, groups_;
    int64_t token_ = -1;
    float *keys_, *totals_, *queries_, *weights_;
};

// The positions of the k highest of `count` scores, in their order; what is no number is the lowest.
inline void highest(const float* scores, int count, int k, std::vector<uint64_t>& ranks, int64_t* to) {
    ranks.resize(count);
    for (int i = 0; i < count; ++i) {
        uint32_t bits;
        const float score = scores[i] + 0.0f;  // zero has one sign
        std::memcpy(&bits, &score, 4);
        const uint32_t rank = score != score ? 0 : bits >> 31 ? ~bits : bits | 0x80000000u;
        ranks[i] = static_cast<uint64_t>(rank) << 32 | (0xffffffffu - static_cast<uint32_t>(i));
    }
    std::nth_element(ranks.begin(), ranks.begin() + k, ranks.end(), std::greater<uint64_t>());
    for (int i = 0; i < k; ++i) to[i] = 0xffffffffu - static_cast<uint32_t>(ranks[i]);
    std::sort(to, to + k);
}

// A token: its number, its sequence, and how many tokens it sees.
struct IndexToken {
    int64_t token;
    int sequence, seen;
};

template <typename T>
void index_topk(const IndexSearch<T>& a) {
    std::vector<IndexToken> searching;
    int64_t longest = 0;
    for (int s = 0; s < a.sequences.count; ++s)
        for (int64_t t = a.sequences.query_start_loc[s]; t < a.sequences.query_start_loc[s + 1]; ++t) {
            const int seen = a.sequences.kv_lens[s] - static_cast<int>(a.sequences.query_start_loc[s + 1] - 1 - t);
            if (seen > a.k) {
                searching.push_back({t, s, seen});
                longest = std::max<int64_t>(longest, seen);
                continue;
            }
            for (int i = 0; i < a.k; ++i) a.out[t * a.k + i] = i < seen ? i : -1;  // all of them
        }
    if (searching.empty()) return;
    static thread_local Buffer kept;
    const int64_t runs = (longest + kIndexRun - 1) / kIndexRun;
    const int64_t together = std::clamp<int64_t>(kIndexScores / longest, 1, searching.size());
    float* const scores = kept.get<float>(together * longest);
    WorkQueue queue;
#pragma omp parallel
    {
        static thread_local Buffer buffer;
        static thread_local std::vector<uint64_t> ranks;
        IndexScores<T> of_token(a, buffer);
        QueueWorker worker(queue);
        for (int64_t first = 0; first < static_cast<int64_t>(searching.size()); first += together) {
            const int64_t count = std::min<int64_t>(together, searching.size() - first);
            for (int64_t i = worker.first(count * runs); i < count * runs; i = worker.next()) {
                const IndexToken& of = searching[first + i / runs];
                const int begin = static_cast<int>(i % runs) * kIndexRun, end = std::min(begin + kIndexRun, of.seen);
                if (begin < end) of_token.compute(of.token, of.sequence, begin, end, scores + i / runs * longest + begin);
            }
            barrier();
            for (int64_t i = worker.first(count); i < count; i = worker.next()) {
                const IndexToken& of = searching[first + i];
                highest(scores + i * longest, of.seen, a.k, ranks, a.out + of.token * a.k);
            }
            barrier();
        }
    }
}

}  // namespace quire
