// A fused encoder: all layers of some texts in one call, with activations in columns (`columns.h`).
//
// Texts stand one behind the other, without padding. Where there are enough of them each thread takes whole texts through
// all layers by itself, and nobody waits; else all threads share each product. What a text becomes is the same to the bit.
// Activations stay in float32 between the layers, whatever the weights are.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "column_products.h"
#include "encoder_attention.h"
#include "kernels.h"

namespace quire {

constexpr int64_t kOwnTokens = 256;                // of which a thread takes as many texts as there are through all layers
constexpr int64_t kChunkTiles = 512 / kLanes;      // whose pieces and inner numbers are there at a time
constexpr int64_t kQueryPart = 512;                // queries of a head that are a thread's at a time

// to = norm of a tile of columns [size]; to may be from.
inline void norm_tile(const NormArgument& norm, const float* from, float* to, int64_t size) {
    const bool is_layer = static_cast<NormKind>(norm.kind) == NormKind::layer;
    const auto total = [&](const auto& term) {
        Floats sums[4] = {};
        for (int64_t i = 0; i < size; ++i) sums[i % 4] += term(load(from + i * kLanes));
        return (sums[0] + sums[1]) + (sums[2] + sums[3]);
    };
    const float count = static_cast<float>(size);
    const Floats mean = is_layer ? total([](Floats x) { return x; }) / count : Floats{};
    Floats factor = total([&](Floats x) { return (x - mean) * (x - mean); }) / count + norm.eps;
    for (int i = 0; i < kLanes; ++i) factor[i] = 1.0f / std::sqrt(factor[i]);
    for (int64_t i = 0; i < size; ++i) {
        const Floats y = (load(from + i * kLanes) - mean) * factor * (norm.weight ? norm.weight[i] : 1.0f);
        store(to + i * kLanes, norm.bias ? y + norm.bias[i] : y);
    }
}

// What one thread needs, or all for what they compute together, while texts pass through the layers.
struct EncoderBuffers {
    Buffer x, normed, wide, up, attended, projected, pieces, bytes, angles;
};

struct EncoderThread {
    EncoderBuffers own;
    ProductScratch products;
    EncoderAttentionScratch attention;
};

// Texts [first, end), and their tokens.
struct EncoderBlock {
    int64_t first, end, begin, tokens;
};

template <typename T>
class Encoder {
public:
    explicit Encoder(const EncoderArgument& from)
        : hidden_(from.hidden), rotary_dim_(from.rotary_dim), rounds_(from.rounds_inputs), final_norm_(from.final_norm) {
        for (int64_t i = 0; i < from.num_layers; ++i) layers_.emplace_back(from.layers[i], hidden_, rounds_);
        for (const Layer& each : layers_) {
            wide_ = std::max({wide_, each.width + 2 * each.kv_width, each.inner()});
            attended_ = std::max(attended_, each.width);
            most_inputs_ = std::max({most_inputs_, hidden_, each.width, each.inner()});
        }
    }

    void run(const EncoderStep& step) {
        const int64_t threads = omp_get_max_threads();
        std::vector<EncoderBlock> blocks = own_blocks(step, threads);
        const bool together = blocks.empty();
        if (together) blocks = blocks_of(step, kChunkTiles * kLanes);
        std::atomic<int64_t> next{0};
#pragma omp parallel
        {
            static thread_local EncoderThread mine;
            const HeldTiles tiles(rounds_ || num_pieces() > 0);
            if (together) {
                const Team team{omp_get_thread_num(), omp_get_num_threads()};
                for (const EncoderBlock& block : blocks) Pass(*this, step, block, team, shared_, mine).run();
            } else {
                for (int64_t i = next++; i < static_cast<int64_t>(blocks.size()); i = next++)
                    Pass(*this, step, blocks[i], Team{}, mine.own, mine).run();
            }
        }
    }

private:
    struct Layer {
        EncoderLayerArgument a;
        int64_t width, kv_width;  // of queries, and of keys or values
        DistanceBiases biases;
        Matrix<T> qkv[3], out, gate_up[2], down;
        std::vector<std::unique_ptr<GroupTotals>> totals;  // of the matrices whose inputs are bytes

        Layer(const EncoderLayerArgument& from, int64_t hidden, bool rounds)
            : a(from), width(from.num_heads * from.head_dim), kv_width(from.num_kv_heads * from.head_dim),
              biases(from.bias, from.num_heads, from.max_distance) {
            qkv[0] = make_matrix<T>(a.q, width, hidden);
            qkv[1] = make_matrix<T>(a.k, kv_width, hidden);
            qkv[2] = make_matrix<T>(a.v, kv_width, hidden);
            out = make_matrix<T>(a.o, hidden, width);
            gate_up[0] = make_matrix<T>(a.gate, a.inner, hidden);
            gate_up[1] = make_matrix<T>(a.up, a.inner, hidden);
            down = make_matrix<T>(a.down, hidden, a.inner);
            for (Matrix<T>* each : {&qkv[0], &qkv[1], &qkv[2], &out, &gate_up[0], &gate_up[1], &down}) {
                if (!rounds || !each->data) continue;
                totals.push_back(std::make_unique<GroupTotals>(group_totals(*each)));
                each->totals = totals.back().get();
            }
        }
        int64_t inner() const { return a.inner; }
        bool gated() const { return gate_up[0].data != nullptr; }
    };

    // Texts one after the other, in blocks that end with the text with which they have `tokens` tokens.
    static std::vector<EncoderBlock> blocks_of(const EncoderStep& step, int64_t tokens) {
        std::vector<EncoderBlock> blocks;
        EncoderBlock block{0, 0, 0, 0};
        for (int64_t i = 0; i < step.num_texts; ++i) {
            block.tokens += step.lens[i];
            block.end = i + 1;
            if (block.tokens < tokens && i + 1 < step.num_texts) continue;
            if (block.tokens > 0) blocks.push_back(block);
            block = {i + 1, i + 1, block.begin + block.tokens, 0};
        }
        return blocks;
    }

    // Blocks of which each thread takes some; none where threads would wait for each other at the end.
    static std::vector<EncoderBlock> own_blocks(const EncoderStep& step, int64_t threads) {
        const int64_t each = (step.tokens + threads - 1) / threads;
        if (threads > 1 && each < kOwnTokens / 4) return {};
        const int64_t rounds = (each + kOwnTokens - 1) / kOwnTokens;
        std::vector<EncoderBlock> blocks = blocks_of(step, (each + rounds - 1) / rounds);
        int64_t largest = 0;
        for (const EncoderBlock& block : blocks) largest = std::max(largest, block.tokens);
        // The last block taken may be the largest.
        const int64_t count = static_cast<int64_t>(blocks.size());
        const bool even = count >= threads && (count == threads ? largest * 8 <= each * 9 : largest * 4 <= each * 3 || count >= 4 * threads);
        if (threads > 1 && !even) return {};
        return blocks;
    }

    // The layers for one block; every thread of the team makes its own.
    class Pass {
    public:
        Pass(const Encoder& encoder, const EncoderStep& step, const EncoderBlock& block, const Team& team, EncoderBuffers& buffers,
             EncoderThread& mine)
            : e_(encoder), step_(step), block_(block), team_(team), mine_(mine), tiles_((block.tokens + kLanes - 1) / kLanes) {
            if (team.rank == 0) make_room(buffers);
            team.wait();
            x_ = columns(buffers.x, e_.hidden_);
            normed_ = columns(buffers.normed, e_.hidden_);
            attended_ = buffers.attended.get<float>(0);
            projected_ = columns(buffers.projected, e_.hidden_);
            wide_ = buffers.wide.get<float>(0);
            up_ = buffers.up.get<float>(0);
            pieces_ = buffers.pieces.get<uint32_t>(0);
            bytes_ = e_.rounds_ ? buffers.bytes.get<uint32_t>(0) : nullptr;
            angles_ = buffers.angles.get<float>(0);
        }

        void run() {
            const T* const rows = static_cast<const T*>(step_.x) + block_.begin * e_.hidden_;
            each_tile(0, tiles_, [&](int64_t tile) {
                rows_to_tile(rows + tile * kLanes * e_.hidden_, e_.hidden_, lanes(tile), e_.hidden_, x_.at(tile, 0));
                for (int64_t r = 0; r < 2 * step_.num_rotations; ++r) {
                    const void* const table = r % 2 ? step_.sin[r / 2] : step_.cos[r / 2];
                    const T* const from = static_cast<const T*>(table) + (block_.begin + tile * kLanes) * e_.rotary_dim_;
                    rows_to_tile(from, e_.rotary_dim_, lanes(tile), e_.rotary_dim_, angles(r).at(tile, 0));
                }
            });
            team_.wait();
            for (const Layer& layer : e_.layers_) {
                attend(layer);
                for (int64_t first = 0; first < tiles_; first += kChunkTiles) finish(layer, first, std::min(first + kChunkTiles, tiles_));
            }
            team_.wait();  // the tiles of a thread are others now
            T* const out = static_cast<T*>(step_.hidden) + block_.begin * e_.hidden_;
            each_tile(0, tiles_, [&](int64_t tile) {
                float* const x = x_.at(tile, 0);
                if (has(e_.final_norm_)) norm_tile(e_.final_norm_, x, x, e_.hidden_);
                tile_to_rows(x, lanes(tile), e_.hidden_, out + tile * kLanes * e_.hidden_, e_.hidden_);
            });
            team_.wait();
        }

    private:
        static bool has(const NormArgument& norm) { return static_cast<NormKind>(norm.kind) != NormKind::none; }
        static Columns columns(Buffer& buffer, int64_t features) { return {buffer.get<float>(0), features}; }
        static Columns part(const Columns& of, int64_t tile) { return {of.at(tile, 0), of.features}; }
        int64_t lanes(int64_t tile) const { return std::min<int64_t>(kLanes, block_.tokens - tile * kLanes); }
        Columns angles(int64_t number) const { return {angles_ + number * tiles_ * e_.rotary_dim_ * kLanes, e_.rotary_dim_}; }

        void make_room(EncoderBuffers& buffers) const {
            const int64_t lanes = tiles_ * kLanes, chunk = std::min(tiles_, kChunkTiles) * kLanes;
            for (Buffer* each : {&buffers.x, &buffers.normed, &buffers.projected}) each->get<float>(lanes * e_.hidden_);
            float* const attended = buffers.attended.get<float>(lanes * e_.attended_);
            // Lanes without a token are zeros, not what was there before: numbers too small are slow.
            std::memset(attended + (tiles_ - 1) * e_.attended_ * kLanes, 0, e_.attended_ * kLanes * sizeof(float));
            buffers.wide.get<float>(lanes * e_.wide_);
            buffers.up.get<float>(chunk * e_.most_inputs_);
            buffers.pieces.get<uint32_t>(chunk * ((e_.most_inputs_ + 31) / 32 * 16) * e_.num_pieces());
            if (e_.rounds_) buffers.bytes.get<uint32_t>(chunk / kLanes * ByteColumns::words_of(e_.most_inputs_));
            buffers.angles.get<float>(2 * step_.num_rotations * lanes * e_.rotary_dim_);
        }

        template <typename Run>
        void each_tile(int64_t first, int64_t last, const Run& run) const {
            const Range share = team_.share(last - first);
            for (int64_t tile = first + share.begin; tile < first + share.end; ++tile) run(tile);
        }

        // Products of a chunk: an input of which each thread has its tiles, which `at` begins; waits before and behind.
        ColumnInput input(const Columns& at) const {
            return {at, e_.num_pieces() ? pieces_ : nullptr, e_.num_pieces(), {bytes_, at.features}};
        }
        void split(const ColumnInput& from, int64_t tile) const {
            if (from.bytes.data) round_tile(from.columns, tile, from.bytes, tile);
            if (from.pieces) split_tile(from, tile);
        }
        void multiply_all(const Matrix<T>* matrices, const ColumnOutput* outputs, int count, const ColumnInput& from, int64_t tiles) const {
            team_.wait();
            multiply(ColumnProduct<T>{matrices, outputs, count}, from, 0, tiles, team_, mine_.products);
            team_.wait();
        }

        // Queries, keys and values, and what they attend to.
        void attend(const Layer& layer) {
            const int64_t width = layer.width, kv_width = layer.kv_width;
            const Columns qkv{wide_, width + 2 * kv_width};
            const NormArgument& norm = layer.a.attention_norm;
            const bool normed = !layer.a.post_ln && has(norm);
            for (int64_t first = 0; first < tiles_; first += kChunkTiles) {
                const int64_t last = std::min(first + kChunkTiles, tiles_);
                const ColumnInput from = input(part(normed ? normed_ : x_, first));
                each_tile(first, last, [&](int64_t tile) {
                    if (normed) norm_tile(norm, x_.at(tile, 0), normed_.at(tile, 0), e_.hidden_);
                    split(from, tile - first);
                });
                const Columns to = part(qkv, first);
                const ColumnOutput outputs[3] = {{to, 0}, {to, width}, {to, width + kv_width}};
                multiply_all(layer.qkv, outputs, 3, from, last - first);
            }
            if (layer.a.rotation >= 0) {
                each_tile(0, tiles_, [&](int64_t tile) { rotate_tile(layer, qkv, tile); });
                team_.wait();
            }
            attend_texts(layer, qkv);
            team_.wait();
        }

        void rotate_tile(const Layer& layer, const Columns& qkv, int64_t tile) const {
            const int64_t half = e_.rotary_dim_ / 2;
            const float *const cos = angles(2 * layer.a.rotation).at(tile, 0), *const sin = angles(2 * layer.a.rotation + 1).at(tile, 0);
            for (int64_t head = 0; head < layer.a.num_heads + layer.a.num_kv_heads; ++head) {  // of queries, then of keys
                float* const at = qkv.at(tile, head * layer.a.head_dim);
                for (int64_t i = 0; i < half; ++i) {
                    float *const low = at + i * kLanes, *const high = low + half * kLanes;
                    const Floats a = load(low), b = load(high);
                    store(low, fused(a, load(cos + i * kLanes), b * load(sin + i * kLanes)));
                    store(high, fused(b, load(cos + (half + i) * kLanes), a * load(sin + (half + i) * kLanes)));
                }
            }
        }

        // Each head of each text, long ones in parts.
        void attend_texts(const Layer& layer, const Columns& qkv) {
            const int64_t heads = layer.a.num_heads, kv_heads = layer.a.num_kv_heads, dim = layer.a.head_dim;
            const auto parts_of = [](int64_t count) { return (count + kQueryPart - 1) / kQueryPart; };
            int64_t items = 0;
            for (int64_t text = block_.first; text < block_.end; ++text) items += heads * parts_of(step_.lens[text]);
            const Range share = team_.share(items);
            int64_t item = 0, begin = 0;
            for (int64_t text = block_.first; text < block_.end; begin += step_.lens[text++]) {
                const int64_t count = step_.lens[text], parts = parts_of(count);
                for (int64_t head = 0; head < heads; ++head, item += parts) {
                    const int64_t from = std::max(share.begin - item, int64_t{0}), to = std::min(share.end - item, parts);
                    if (from >= to) continue;
                    const int64_t kv_head = heads + head * kv_heads / heads;
                    const EncoderHead one{qkv, head * dim, kv_head * dim, (kv_head + kv_heads) * dim, {attended_, layer.width}, head * dim, dim,
                                          layer.a.scale, layer.a.window, layer.biases.of(head), layer.a.max_distance, begin, count};
                    EncoderAttention(one, mine_.attention).run(from * kQueryPart, std::min(to * kQueryPart, count));
                }
            }
        }

        // Everything behind the attention, of tiles [first, last).
        void finish(const Layer& layer, int64_t first, int64_t last) {
            const int64_t tiles = last - first;
            const EncoderLayerArgument& a = layer.a;
            const ColumnInput attended = input(part({attended_, layer.width}, first)), normed = input(part(a.post_ln ? x_ : normed_, first));
            const Columns projected = part(projected_, first), gate{wide_, a.inner}, up{up_, a.inner};
            each_tile(0, tiles, [&](int64_t tile) { split(attended, tile); });
            const ColumnOutput to_projected{projected};
            multiply_all(&layer.out, &to_projected, 1, attended, tiles);
            each_tile(first, last, [&](int64_t tile) {
                add(tile);
                float* const x = x_.at(tile, 0);
                if (a.post_ln && has(a.attention_norm)) norm_tile(a.attention_norm, x, x, e_.hidden_);
                if (!a.post_ln) norm_tile(a.feed_forward_norm, x, normed_.at(tile, 0), e_.hidden_);
                split(normed, tile - first);
            });
            const bool gated = layer.gated();
            const ColumnOutput to_inner[2] = {{gate, 0, a.activation}, {up, 0}}, to_gate{gate, 0, a.activation};
            multiply_all(gated ? layer.gate_up : layer.gate_up + 1, gated ? to_inner : &to_gate, gated ? 2 : 1, normed, tiles);
            const ColumnInput inner = input(gate);
            each_tile(0, tiles, [&](int64_t tile) {
                for (int64_t i = 0; gated && i < a.inner; ++i) store(gate.at(tile, i), load(gate.at(tile, i)) * load(up.at(tile, i)));
                split(inner, tile);
            });
            multiply_all(&layer.down, &to_projected, 1, inner, tiles);
            each_tile(first, last, [&](int64_t tile) {
                add(tile);
                if (a.post_ln) norm_tile(a.feed_forward_norm, x_.at(tile, 0), x_.at(tile, 0), e_.hidden_);
            });
        }

        void add(int64_t tile) const {
            float *const x = x_.at(tile, 0), *const added = projected_.at(tile, 0);
            for (int64_t i = 0; i < e_.hidden_ * kLanes; i += kLanes) store(x + i, load(x + i) + load(added + i));
        }

        const Encoder& e_;
        const EncoderStep& step_;
        const EncoderBlock block_;
        const Team team_;
        EncoderThread& mine_;
        const int64_t tiles_;
        Columns x_, normed_, projected_;
        float *attended_, *wide_, *up_, *angles_;
        uint32_t *pieces_, *bytes_;
    };

    int num_pieces() const { return rounds_ ? 0 : input_pieces<T>(); }

    const int64_t hidden_, rotary_dim_;
    const bool rounds_;
    const NormArgument final_norm_;
    std::vector<Layer> layers_;
    int64_t wide_ = 0, attended_ = 0, most_inputs_ = 0;
    EncoderBuffers shared_;
};

}  // namespace quire
