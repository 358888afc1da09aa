// Op `sample`: one token of each row of logits. `sampling.py` of quire-ops says which one, to the bit: here is a fast way
// to it. Weights are integers, so that no sum depends on its order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels.h"
#include "team.h"
#include "vectors.h"

namespace quire {

constexpr int kSampleBlock = 64;  // tokens that are looked at together
constexpr float kLowest = -42.0f;
constexpr int kBinsPerOctave = 64, kBins = 42 * kBinsPerOctave + 1;

// Keeps the compiler from joining a product with a sum into one operation, which would round once instead of twice.
inline Floats apart(Floats v) {
    in_register(v);
    return v;
}

inline float log2_weight(float x, float max_logit, float inv_temperature) { return (x - max_logit) * inv_temperature; }
inline Floats log2_weight(Floats x, float max_logit, float inv_temperature) { return apart((x - max_logit) * inv_temperature); }

inline void integer_weights(Floats log2, int64_t* to) {
    const Floats y = log2 < kLowest ? splat(kLowest) : log2;
    const Floats whole = (y + 12582912.0f) - 12582912.0f;  // to the nearest integer
    const Floats rest = y - whole;
    Floats power = apart(rest * 0x1.41fbbcp-13f);
    power = apart((power + 0x1.5f3e52p-10f) * rest);
    power = apart((power + 0x1.3b2d4cp-7f) * rest);
    power = apart((power + 0x1.c6aee8p-5f) * rest);
    power = apart((power + 0x1.ebfbdcp-3f) * rest);
    power = apart((power + 0x1.62e43p-1f) * rest);
    const Ints fraction = __builtin_convertvector((power + 1.0f) * 0x1p24f, Ints);
    const Ints shift = __builtin_convertvector(-whole, Ints);
    int32_t fractions[kLanes], shifts[kLanes];
    std::memcpy(fractions, &fraction, sizeof fraction);
    std::memcpy(shifts, &shift, sizeof shift);
    for (int i = 0; i < kLanes; ++i) to[i] = (static_cast<int64_t>(fractions[i]) << 16) >> shifts[i];
}

// SplitMix64 (see `rng.py`): a multiple of 2^-53 in [0, 1).
inline double uniform(int64_t seed, int64_t output_position) {
    constexpr uint64_t kGamma = 0x9E3779B97F4A7C15;
    const auto mix = [](uint64_t x) {
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
        return x ^ (x >> 31);
    };
    const uint64_t start = mix(static_cast<uint64_t>(seed) + kGamma);
    return static_cast<double>(mix(start + (static_cast<uint64_t>(output_position) + 1) * kGamma) >> 11) * 0x1p-53;
}

inline int64_t share_of(double top_p, int64_t total) {
    return top_p < 1 ? static_cast<int64_t>(std::ceil(top_p * static_cast<double>(total))) : total;
}

inline int64_t target_of(double u, int64_t total) {
    return std::min(static_cast<int64_t>(u * static_cast<double>(total)), total - 1);
}

// A token that may be sampled.
struct Candidate {
    float logit;
    int32_t id;
    int64_t weight;
};

inline int64_t weight_of(const Candidate& each) { return each.weight; }

inline bool comes_first(const Candidate& a, const Candidate& b) {
    return (a.logit > b.logit) | ((a.logit == b.logit) & (a.id < b.id));
}

// One row of logits, looked at by one thread.
class RowSampler {
public:
    // Finds the largest logit of each block. Vectors of the last block are filled up with -inf. With a mask (a bit per
    // token, in words of 32), tokens without a bit become -inf: in blocks without any bit only their maximum does, as
    // these are never looked at again.
    void begin(float* logits, int64_t vocab, const uint32_t* mask = nullptr) {
        logits_ = logits;
        vocab_ = vocab;
        num_blocks_ = (vocab + kSampleBlock - 1) / kSampleBlock;
        maxima_ = maxima_buffer_.get<float>(num_blocks_);
        const int64_t rest = vocab % kSampleBlock;
        std::fill_n(tail_, kSampleBlock, -std::numeric_limits<float>::infinity());
        std::copy_n(logits + vocab - rest, rest, tail_);
        Ints odd{};
        Floats highest = splat(-std::numeric_limits<float>::infinity());
        for (int64_t b = 0; b < num_blocks_; ++b) {
            float* const x = (b + 1) * kSampleBlock <= vocab ? logits + b * kSampleBlock : tail_;
            if (mask != nullptr) {
                const int64_t words = std::min<int64_t>(2, (vocab + 31) / 32 - 2 * b);
                const uint64_t bits = mask[2 * b] | (words > 1 ? static_cast<uint64_t>(mask[2 * b + 1]) << 32 : 0);
                if (bits == 0) {
                    maxima_[b] = -std::numeric_limits<float>::infinity();
                    continue;
                }
                if (~bits != 0) exclude(x, bits);
            }
            Floats best = load(x);
            odd |= best != best;
            for (int i = kLanes; i < kSampleBlock; i += kLanes) {
                const Floats v = load(x + i);
                odd |= v != v;
                best = max(v, best);
            }
            highest = max(best, highest);
            maxima_[b] = largest_lane(best);
        }
        max_logit_ = largest_lane(highest);
        int32_t lanes[kLanes];
        std::memcpy(lanes, &odd, sizeof lanes);
        if (std::any_of(lanes, lanes + kLanes, [](int32_t lane) { return lane != 0; }))
            max_logit_ = std::numeric_limits<float>::quiet_NaN();
    }
    float max_logit() const { return max_logit_; }

    int64_t argmax() const {
        const float* x = block(std::find(maxima_, maxima_ + num_blocks_, max_logit_) - maxima_);
        return first_id(x) + (std::find(x, x + kSampleBlock, max_logit_) - x);
    }

    int64_t sample(const SampleTable& table, int64_t row, int64_t position) {
        sharpness_ = table.inv_temperature[row];
        const double u = uniform(table.seeds[row], position + 1 - table.num_prompt_tokens[row]);
        const int64_t top_k = std::min(table.top_k[row], vocab_);
        const double top_p = table.top_p[row];
        const float min_log2 = table.min_log2[row];
        if (top_k == vocab_ && min_log2 < kLowest) {
            const int64_t total = sum_blocks();
            if (!(top_p < 1)) return sample_any(u, total);
            if (keep_among_few(top_p, total)) return sample_kept(u);
        }
        find_candidates(top_k < num_blocks_ / 2 ? bound(top_k) : -std::numeric_limits<float>::infinity(), min_log2);
        if (top_k < count_) keep_first(top_k, [](const Candidate&) { return int64_t{1}; });
        const int64_t total = total_weight(), share = share_of(top_p, total);
        if (share < total) keep_first(share, weight_of);
        return sample_kept(u);
    }

private:
    const float* block(int64_t b) const { return (b + 1) * kSampleBlock <= vocab_ ? logits_ + b * kSampleBlock : tail_; }
    int64_t first_id(const float* x) const { return x == tail_ ? vocab_ - vocab_ % kSampleBlock : x - logits_; }

    static void exclude(float* x, uint64_t bits) {
        Words place;
        uint32_t places[kLanes];
        for (int i = 0; i < kLanes; ++i) places[i] = i;
        std::memcpy(&place, places, sizeof place);
        for (int i = 0; i < kSampleBlock; i += kLanes) {
            const Words set = ((Words{} + static_cast<uint32_t>(bits >> i)) >> place) & 1u;
            const Floats v = set != 0u ? load(x + i) : splat(-std::numeric_limits<float>::infinity());
            std::memcpy(x + i, &v, sizeof v);
        }
    }

    static float largest_lane(Floats v) {
        float lanes[kLanes];
        std::memcpy(lanes, &v, sizeof v);
        return *std::max_element(lanes, lanes + kLanes);
    }

    void weigh(const float* x, int64_t* weights) const {
        for (int i = 0; i < kSampleBlock; i += kLanes)
            integer_weights(log2_weight(load(x + i), max_logit_, sharpness_), weights + i);
    }

    int64_t sum_blocks() {
        sums_ = sums_buffer_.get<int64_t>(num_blocks_);
        int64_t weights[kSampleBlock], total = 0;
        for (int64_t b = 0; b < num_blocks_; ++b) {
            int64_t sum = 0;
            if (!(log2_weight(maxima_[b], max_logit_, sharpness_) < kLowest)) {
                weigh(block(b), weights);
                for (const int64_t weight : weights) sum += weight;
            }
            sums_[b] = sum;
            total += sum;
        }
        return total;
    }

    int64_t sample_any(double u, int64_t total) const {
        int64_t weights[kSampleBlock], rest = target_of(u, total), b = 0;
        while (rest >= sums_[b]) rest -= sums_[b++];
        weigh(block(b), weights);
        int64_t place = 0;
        while (rest >= weights[place]) rest -= weights[place++];
        return b * kSampleBlock + place;
    }

    // Usually a few tokens hold most of the weight. Whether these few hold the share of all; then it is what is kept.
    bool keep_among_few(double top_p, int64_t total) {
        constexpr int64_t kFew = 64;
        if (num_blocks_ < 4 * kFew) return false;
        find_candidates(bound(kFew), kLowest);
        const int64_t share = share_of(top_p, total);
        if (total_weight() < share) return false;
        keep_first(share, weight_of);
        return true;
    }

    int64_t sample_kept(double u) const {
        int64_t rest = target_of(u, total_weight());
        const Candidate* each = candidates_;
        while (rest >= each->weight) rest -= (each++)->weight;
        return each->id;
    }

    // The k largest tokens have at least this logit, because k blocks have such a token.
    float bound(int64_t k) {
        float* const sorted = sorted_buffer_.get<float>(num_blocks_);
        std::copy_n(maxima_, num_blocks_, sorted);
        std::nth_element(sorted, sorted + k - 1, sorted + num_blocks_, std::greater<float>());
        return sorted[k - 1];
    }

    // In the order of ids, the tokens of weight whose logit is at least `least` and that min_log2 lets pass.
    void find_candidates(float least, float min_log2) {
        Candidate* const found = candidates_buffer_.get<Candidate>(num_blocks_ * kSampleBlock);
        int64_t count = 0, weights[kSampleBlock];
        const float lowest = std::max(min_log2, kLowest);
        for (int64_t b = 0; b < num_blocks_; ++b) {
            if (maxima_[b] < least || log2_weight(maxima_[b], max_logit_, sharpness_) < lowest) continue;
            const float* const x = block(b);
            weigh(x, weights);
            for (int i = 0; i < kSampleBlock; ++i) {
                found[count] = {x[i], static_cast<int32_t>(b * kSampleBlock + i), weights[i]};
                count += (x[i] >= least) & (weights[i] > 0) & (log2_weight(x[i], max_logit_, sharpness_) >= min_log2);
            }
        }
        candidates_ = found;
        count_ = count;
    }

    int bin_of(const Candidate& each) const {
        const float log2 = log2_weight(each.logit, max_logit_, sharpness_);
        return static_cast<int>(std::max(log2, kLowest) * -kBinsPerOctave);
    }

    // Keeps the shortest prefix, in the order of `comes_first`, whose amounts add up to `share`: a histogram finds the
    // narrow range in which it ends, and only this is sorted.
    template <typename Amount>
    void keep_first(int64_t share, Amount amount) {
        int64_t* const histogram = bins_buffer_.get<int64_t>(kBins);
        std::fill_n(histogram, kBins, 0);
        Candidate* const all = candidates_;
        const int64_t count = count_;
        for (int64_t i = 0; i < count; ++i) histogram[bin_of(all[i])] += amount(all[i]);
        int crossing = 0;
        for (; histogram[crossing] < share; ++crossing) share -= histogram[crossing];
        Candidate* const edge = edge_buffer_.get<Candidate>(count);
        int64_t num_edge = 0;
        for (int64_t i = 0; i < count; ++i) {
            edge[num_edge] = all[i];
            num_edge += bin_of(all[i]) == crossing;
        }
        std::sort(edge, edge + num_edge, comes_first);
        const Candidate* last = edge;
        for (; share > amount(*last); ++last) share -= amount(*last);
        int64_t kept = 0;
        for (int64_t i = 0; i < count; ++i) {
            all[kept] = all[i];
            kept += !comes_first(*last, all[kept]);
        }
        count_ = kept;
    }

    int64_t total_weight() const {
        int64_t total = 0;
        for (int64_t i = 0; i < count_; ++i) total += candidates_[i].weight;
        return total;
    }

    Buffer maxima_buffer_, sorted_buffer_, sums_buffer_, candidates_buffer_, edge_buffer_, bins_buffer_;
    const float* logits_ = nullptr;
    int64_t vocab_ = 0, num_blocks_ = 0, count_ = 0;
    float* maxima_ = nullptr;
    int64_t* sums_ = nullptr;
    Candidate* candidates_ = nullptr;
    float max_logit_ = 0, sharpness_ = 0;
    float tail_[kSampleBlock];
};

// Masks of some rows: mask_of [count] is the row of bits [.., ceil(vocab / 32)], or -1 for none.
struct SampleMasks {
    const int64_t* mask_of = nullptr;
    const uint32_t* bits = nullptr;

    const uint32_t* of(int64_t i, int64_t vocab) const {
        return mask_of == nullptr || mask_of[i] < 0 ? nullptr : bits + mask_of[i] * ((vocab + 31) / 32);
    }
};

// logits [count, vocab], of which rows with masks are written to; rows, positions, ids, max_logits [count]. Where one is not
// finite, the token is 0.
inline void sample_op(float* logits, int64_t vocab, const int64_t* rows, const int64_t* positions, int64_t count,
                    const SampleTable& table, int64_t* ids, float* max_logits, SampleMasks masks = {}) {
#pragma omp parallel for schedule(dynamic) if (count > 1 && count * vocab > 16384)
    for (int64_t i = 0; i < count; ++i) {
        static thread_local RowSampler row;
        row.begin(logits + i * vocab, vocab, masks.of(i, vocab));
        max_logits[i] = row.max_logit();
        ids[i] = 0;
        if (!std::isfinite(row.max_logit())) continue;
        ids[i] = table.do_sample[rows[i]] ? row.sample(table, rows[i], positions[i]) : row.argmax();
    }
}

}  // namespace quire
