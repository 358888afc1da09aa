// The experts of a mixture-of-experts layer: each one's tokens are gathered, multiplied, and added to where they belong.
//
// Weights are read once for each expert that has tokens. First every expert's gate and up, strip by strip, then down:
// there a thread keeps its outputs of all tokens and goes through the experts in the order of their numbers, so that a
// token's sum has one order, whatever else is in the step, and no expert's result is ever written out.
#pragma once

#include <algorithm>
#include <vector>

#include "elementwise.h"
#include "linear.h"

namespace quire {

template <typename T>
struct Expert {
    Matrix<T> gate_up[2], down;
};

// An expert's tokens in a step.
struct ExpertGroup {
    int expert;
    int64_t begin, count;  // its pairs of token and weight
    Activations x, inner;
};

// Gives `linear` one strip of its work, and afterwards names the strip that comes next.
struct OneStrip {
    int64_t strip, num_strips, following;
    int64_t first(int64_t) { return strip; }
    int64_t next() { return strip += num_strips; }
    int64_t first_of(int64_t) const { return following; }
};

// Epilogue: sums times scale plus bias, times the token's weight, added to the strip's outputs [tokens][32].
template <typename T>
struct AddWeighted {
    const Matrix<T>* down;
    const int32_t* tokens;
    const float* weights;
    int64_t count;
    float (*to)[2 * kTile];

    void operator()(int, int64_t row, int64_t tile, const Sums& sums) const {
        const int num_tokens = static_cast<int>(std::min<int64_t>(kTile, count - tile * kTile));
        Sums room;
        const Sums& of_tokens = ordered(sums, true, room);
        for (int h = 0; h < 2; ++h) {
            const int64_t begin = row + h * kTile;
            const int outputs = static_cast<int>(std::clamp<int64_t>(down->rows - begin, 0, kTile));
            for (int t = 0; t < num_tokens; ++t) {
                const int64_t pair = tile * kTile + t;
                float* const out = to[tokens[pair]] + h * kTile;
                for_outputs(*down, begin, of_tokens.at[h][t], outputs, [&](int n, int left, Floats values) {
                    store_some(out + n, fused(values, splat(weights[pair]), load(out + n)), left);
                });
            }
        }
    }
};

template <typename T>
struct Moe {
    Activation activation;
    float limit;
    std::vector<Expert<T>> experts;
};

// What a thread needs for experts.
struct MoeScratch {
    LinearScratch linear;
    Buffer outputs;
};

// One step's way through the experts of a layer. Its memory serves the next layer's, too.
template <typename T>
class MoeStep {
public:
    // One thread: x [tokens, width], ids and weights [tokens, k]. A barrier must follow.
    void begin(const Moe<T>& moe, const T* x, const int64_t* ids, const float* weights, int64_t tokens, int k) {
        moe_ = &moe;
        x_ = x;
        num_tokens_ = tokens;
        group(ids, weights, tokens, k);
    }

    // The whole team: out [tokens, width], of T or as wide as summed; a barrier must follow. behind: strips that are
    // multiplied next, or none.
    template <typename Out>
    void run(MoeScratch& mine, QueueWorker& worker, Out* out, const Strips<T>* behind) {
        gather();
        barrier();
        gate_and_up(mine, worker);
        barrier();
        if (rows_) {
            pack_inner();
            barrier();
        }
        down(mine, worker, out, behind);
    }

private:
    // Pairs of token and weight, expert by expert, tokens in order; and room for each expert's activations.
    void group(const int64_t* ids, const float* weights, int64_t tokens, int k) {
        const int64_t pairs = tokens * k;
        std::vector<int64_t>& begins = begins_;
        begins.assign(moe_->experts.size() + 1, 0);
        for (int64_t i = 0; i < pairs; ++i) ++begins[ids[i] + 1];
        groups_.clear();
        for (size_t e = 0; e < moe_->experts.size(); ++e) {
            if (begins[e + 1]) groups_.push_back({static_cast<int>(e), begins[e], begins[e + 1], {}, {}});
            begins[e + 1] += begins[e];
        }
        tokens_ = token_buffer_.get<int32_t>(pairs);
        weights_ = weight_buffer_.get<float>(pairs);
        for (int64_t i = 0; i < pairs; ++i) {
            const int64_t at = begins[ids[i]]++;
            tokens_[at] = static_cast<int32_t>(i / k);
            weights_[at] = weights[i];
        }
        make_room();
    }

    void make_room() {
        const Matrix<T>& first = moe_->experts[0].down;
        const int64_t width = first.rows, inner = first.cols;
        const WeightFormat format = first.format;
        int64_t bytes = 0, inner_bytes = 0, pairs = 0, num_sums = 0;
        num_tiles_ = 0;
        for (ExpertGroup& g : groups_) {
            g.x = Activations{nullptr, g.count, width, layout_for<T>(g.count, width, format), nullptr};
            g.inner = Activations{nullptr, g.count, inner, layout_for<T>(g.count, inner, format), nullptr};
            g.x.int8 = g.inner.int8 = format == WeightFormat::w8a8;
            bytes += padded(g.x.bytes());
            inner_bytes += padded(g.inner.bytes());
            pairs += g.count;
            num_sums += g.x.num_sums(format) + g.inner.num_sums(format);
            num_tiles_ += g.x.tiles();
        }
        Room room{format, x_buffer_.get<char>(bytes + inner_bytes), scale_buffer_.get<float>(2 * num_tiles_ * kTile),
                  sum_buffer_.get<float>(num_sums)};
        tile_groups_ = tile_buffer_.get<TileOf>(num_tiles_);
        int64_t tile = 0;
        for (size_t i = 0; i < groups_.size(); ++i) {
            room.take(groups_[i].x);
            room.take(groups_[i].inner);
            for (int64_t t = 0; t < groups_[i].x.tiles(); ++t) tile_groups_[tile++] = {static_cast<int>(i), t};
        }
        rows_ = groups_[0].inner.takes_whole_tokens() ? row_buffer_.get<T>(pairs * inner) : nullptr;
    }

    static int64_t padded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

    // Memory that activations take their parts of, see `make_activations`.
    struct Room {
        WeightFormat format;
        char* data;
        float *scales, *sums;

        void take(Activations& x) {
            x.data = data;
            data += padded(x.bytes());
            x.clear_ends();
            if (!x.takes_whole_tokens()) return;
            x.scales = scales;
            scales += x.tiles() * kTile;
            const int64_t count = x.num_sums(format);
            if (count) x.set_sums(sums);
            sums += count;
        }
    };

    void gather() {
        const int64_t width = moe_->experts[0].down.rows;
        const Range mine = my_share(num_tiles_);
        for (int64_t i = mine.begin; i < mine.end; ++i) {
            const ExpertGroup& g = groups_[tile_groups_[i].group];
            const int64_t tile = tile_groups_[i].tile;
            const T* rows[kTile] = {};
            for (int64_t t = 0; t < kTile && tile * kTile + t < g.count; ++t)
                rows[t] = x_ + tokens_[g.begin + tile * kTile + t] * width;
            set_tile(g.x, tile, rows, 0, width);
        }
    }

    void pack_inner() {
        const Range mine = my_share(num_tiles_);
        for (int64_t i = mine.begin; i < mine.end; ++i) {
            const ExpertGroup& g = groups_[tile_groups_[i].group];
            const int64_t tile = tile_groups_[i].tile, cols = g.inner.cols;
            const T* rows[kTile] = {};
            for (int64_t t = 0; t < kTile && tile * kTile + t < g.count; ++t)
                rows[t] = rows_ + (g.begin + tile * kTile + t) * cols;
            set_tile(g.inner, tile, rows, 0, cols);
        }
    }

    void gate_and_up(MoeScratch& mine, QueueWorker& worker) {
        const std::vector<Expert<T>>& experts = moe_->experts;
        const int64_t strips = Strips<T>{experts[0].gate_up, 2, true}.count();
        const int64_t count = static_cast<int64_t>(groups_.size()) * strips;
        const int64_t after_all = worker.first_of(Strips<T>{&experts[0].down, 1, false}.count());
        int64_t next = worker.first(count);
        while (next < count) {
            const int64_t item = next;
            next = worker.next();
            const ExpertGroup& g = groups_[item / strips];
            const Expert<T>& expert = experts[g.expert];
            const Expert<T>& after = next < count ? experts[groups_[next / strips].expert] : expert;
            // Behind the last strip comes the first one of down.
            const Strips<T> following = next < count ? Strips<T>{after.gate_up, 2, true}
                                                     : Strips<T>{&experts[groups_[0].expert].down, 1, false};
            OneStrip strip{item % strips, strips, next < count ? next % strips : after_all};
            const ToActivated<T> epilogue{expert.gate_up, moe_->activation, g.inner,
                                          rows_ ? rows_ + g.begin * g.inner.cols : nullptr, moe_->limit};
            linear(Strips<T>{expert.gate_up, 2, true}, g.x, mine.linear, strip, epilogue, &following);
        }
    }

    template <typename Out>
    void down(MoeScratch& mine, QueueWorker& worker, Out* out, const Strips<T>* behind) {
        const std::vector<Expert<T>>& experts = moe_->experts;
        const int64_t tokens = num_tokens_;
        const int64_t width = experts[0].down.rows, strips = Strips<T>{&experts[0].down, 1, false}.count();
        const int64_t after_all = behind ? worker.first_of(behind->count()) : 0;
        auto* outputs = reinterpret_cast<float(*)[2 * kTile]>(mine.outputs.template get<float>(tokens * 2 * kTile));
        int64_t next = worker.first(strips);
        while (next < strips) {
            const int64_t item = next;
            next = worker.next();
            std::memset(outputs, 0, tokens * sizeof *outputs);
            for (size_t i = 0; i < groups_.size(); ++i) {
                const ExpertGroup& g = groups_[i];
                const Matrix<T>* matrix = &experts[g.expert].down;
                const bool last = i + 1 == groups_.size(), ends = last && next >= strips;
                const Strips<T> following{&experts[groups_[last ? 0 : i + 1].expert].down, 1, false};
                OneStrip strip{item, strips, ends ? after_all : last ? next : item};
                const AddWeighted<T> epilogue{matrix, tokens_ + g.begin, weights_ + g.begin, g.count, outputs};
                linear(Strips<T>{matrix, 1, false}, g.inner, mine.linear, strip, epilogue, ends ? behind : &following);
            }
            const int64_t row = item * 2 * kTile;
            const int count = static_cast<int>(std::min<int64_t>(2 * kTile, width - row));
            for (int64_t t = 0; t < tokens; ++t) {
                Out* to = out + t * width + row;
                int i = 0;
                for (; i + kLanes <= count; i += kLanes) store(to + i, load(outputs[t] + i));
                for (; i < count; ++i) store_one(to + i, outputs[t][i]);
            }
        }
    }

    struct TileOf {
        int group;
        int64_t tile;
    };

    const Moe<T>* moe_ = nullptr;
    const T* x_ = nullptr;
    int64_t num_tokens_ = 0;
    std::vector<int64_t> begins_;
    std::vector<ExpertGroup> groups_;
    int32_t* tokens_ = nullptr;
    float* weights_ = nullptr;
    TileOf* tile_groups_ = nullptr;
    T* rows_ = nullptr;  // what the experts have inside, for quads
    int64_t num_tiles_ = 0;
    Buffer token_buffer_, weight_buffer_, x_buffer_, scale_buffer_, sum_buffer_, tile_buffer_, row_buffer_;
};

// x [tokens, width], ids and weights [tokens, k] -> out [tokens, width], by a team of its own.
template <typename T, typename Out>
void moe_op(const Moe<T>& moe, const T* x, const int64_t* ids, const float* weights, int64_t tokens, int k, Out* out) {
    static thread_local MoeStep<T> steps;
    MoeStep<T>& step = steps;  // the caller's, for all threads
    step.begin(moe, x, ids, weights, tokens, k);
    WorkQueue queue;
#pragma omp parallel
    {
        static thread_local MoeScratch mine;
        const HeldTiles tiles(layout_for<T>(kTile, 64, WeightFormat::plain) == ActLayout::pairs);
        QueueWorker worker(queue);
        step.run(mine, worker, out, nullptr);
    }
}

// values [tokens, k, width], weights [tokens, k], order [tokens, k] of k -> out [tokens, width]: the weighted sum as
// `AddWeighted` makes it.
template <typename T>
void moe_sum(const float* values, const float* weights, const int64_t* order, int64_t tokens, int k, int64_t width,
             T* out) {
    const auto add = [&](int64_t t, int64_t begin, int count) {
        Floats sum = splat(0.0f);
        for (int i = 0; i < k; ++i) {
            const int64_t pair = t * k + order[t * k + i];
            const float* const row = values + pair * width + begin;
            sum = fused(count < kLanes ? load_some(row, count) : load(row), splat(weights[pair]), sum);
        }
        return sum;
    };
#pragma omp parallel for schedule(static) if (tokens * k * width > 16384)
    for (int64_t t = 0; t < tokens; ++t) {
        int64_t i = 0;
        for (; i + kLanes <= width; i += kLanes) store(out + t * width + i, add(t, i, kLanes));
        if (i < width) store_some(out + t * width + i, add(t, i, static_cast<int>(width - i)), static_cast<int>(width - i));
    }
}

}  // namespace quire
