// Low-rank adapters on top of linear layers, each for tokens of its own: op `lora_linear`.
//
// Two parts with a barrier between them. Shrink: each token's inputs against the rows of its adapter's a, dot products.
// Expand: to each token's outputs the rows of b, weighted. Both run in one order of additions, whatever the token's
// neighbours, and the numbers between them stay in float32.
#pragma once

#include <algorithm>

#include "team.h"
#include "vectors.h"

namespace quire {

// `_Table` of `lora.py`: the adapters of one layer by slot. No ranks: the layer never has any.
struct LoraTable {
    const void *a, *b;     // [slots, max_rank, inputs], [slots, max_rank, outputs]
    const int32_t* ranks;        // [slots]
    const int32_t* adjusted;     // [slots] whether the next two are in use
    const float *scale, *shift;  // [slots, outputs]
};

struct LoraGroup {
    int32_t slot, begin, end;
};

// The tokens of a step that have adapters.
struct LoraTokens {
    const int32_t* order;  // tokens, slot by slot
    const LoraGroup* groups;
    int64_t num_groups;
    int64_t max_rank;

    int64_t count() const { return num_groups ? groups[num_groups - 1].end : 0; }
};

// Where a layer's outputs are: rows, or [heads][tokens][width].
template <typename Out>
struct LoraOutputs {
    Out* data;
    int64_t token_stride, head_stride, width;  // width 0: rows

    Out* at(int64_t token, int64_t col) const {
        if (width == 0) return data + token * token_stride + col;
        return data + col / width * head_stride + token * token_stride + col % width;
    }
    int64_t run() const { return width ? width : 256; }  // outputs that lie side by side and are done at once
};

constexpr int kLoraRows = 4, kLoraTokens = kLanes == 8 ? 2 : 4;

#if defined(__AVX512F__)
// Lane i: the sum of the lanes of v[i].
inline __m512 sums_of(const __m512 v[16]) {
    __m512 pairs[8], quads[4];
    for (int i = 0; i < 8; ++i)
        pairs[i] = _mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]) + _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]);
    for (int i = 0; i < 4; ++i) {
        const __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
        quads[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)) + _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
    const auto halves = [](__m512 a, __m512 b) {
        return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
    };
    return halves(halves(quads[0], quads[1]), halves(quads[2], quads[3]));
}
#endif

// Memory that is used next.
inline void lora_fetch(const void* from, int64_t bytes) {
    const char* at = static_cast<const char*>(from);
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i);
}

// A step of the dot products, `kStep` inputs, and how far it gets.
template <typename T>
struct LoraDot {
    static constexpr int kStep = kLanes;
    using Operand = Floats;
    static Operand read(const T* from) { return load(from); }
    static Floats add(Floats sum, Operand a, Operand b) { return fused(a, b, sum); }
};
#if defined(__AVX512BF16__)
template <>
struct LoraDot<BFloat16> {
    static constexpr int kStep = 2 * kLanes;
    using Operand = __m512bh;
    static Operand read(const BFloat16* from) { return (__m512bh)_mm512_loadu_si512(from); }
    static Floats add(Floats sum, Operand a, Operand b) { return (Floats)_mm512_dpbf16_ps((__m512)sum, a, b); }
};
#endif

// Up to 4 rows of a against up to 4 tokens.
template <typename T>
inline void lora_dots(const T* const w[kLoraRows], const T* const x[kLoraTokens], int64_t cols, float* const to[kLoraTokens],
                      int num_rows, int num_tokens) {
    using Dot = LoraDot<T>;
    const int64_t whole = cols / Dot::kStep * Dot::kStep;
    Floats acc[kLoraTokens][kLoraRows] = {};
    for (int64_t k = 0; k < whole; k += Dot::kStep) {
        typename Dot::Operand xs[kLoraTokens];
        for (int j = 0; j < kLoraTokens; ++j) xs[j] = Dot::read(x[j] + k);
        for (int i = 0; i < kLoraRows; ++i) {
            const typename Dot::Operand ws = Dot::read(w[i] + k);
            for (int j = 0; j < kLoraTokens; ++j) acc[j][i] = Dot::add(acc[j][i], ws, xs[j]);
        }
    }
    for (int64_t k = whole; k < cols; k += kLanes) {
        const int rest = static_cast<int>(std::min<int64_t>(kLanes, cols - k));
        for (int j = 0; j < num_tokens; ++j)
            for (int i = 0; i < num_rows; ++i) acc[j][i] = fused(load_first(w[i] + k, rest), load_first(x[j] + k, rest), acc[j][i]);
    }
#if defined(__AVX512F__)
    alignas(64) float sums[kLoraTokens][kLoraRows];
    _mm512_store_ps(sums[0], sums_of(reinterpret_cast<const __m512*>(acc[0])));
    for (int j = 0; j < num_tokens; ++j)
        for (int i = 0; i < num_rows; ++i) to[j][i] = sums[j][i];
#else
    for (int j = 0; j < num_tokens; ++j)
        for (int i = 0; i < num_rows; ++i) to[j][i] = sum(acc[j][i]);
#endif
}

// Things that each thread should find at least two of: otherwise the tokens of an adapter are cut into parts, too.
inline int64_t lora_cuts(const LoraTokens& tokens, int64_t things) {
    const int64_t wanted = 2 * omp_get_num_threads();
    if (things >= wanted || omp_get_num_threads() == 1) return 1;
    int64_t most = 0;
    for (int64_t g = 0; g < tokens.num_groups; ++g) most = std::max<int64_t>(most, tokens.groups[g].end - tokens.groups[g].begin);
    return std::min((wanted + things - 1) / things, (most + kLoraTokens - 1) / kLoraTokens);
}

// Part `cut` of `cuts` of an adapter's tokens.
inline LoraGroup lora_part(const LoraGroup& group, int64_t cut, int64_t cuts) {
    const int64_t count = group.end - group.begin;
    return {group.slot, static_cast<int32_t>(group.begin + count * cut / cuts),
            static_cast<int32_t>(group.begin + count * (cut + 1) / cuts)};
}

// Rows [row, row + kLoraRows) of an adapter's a against its tokens.
template <typename T>
inline void lora_shrink_rows(const LoraTable& table, const LoraTokens& tokens, const LoraGroup& group, int row, const T* x,
                             int64_t stride, int64_t cols, float* inner) {
    const int num_rows = std::min(kLoraRows, table.ranks[group.slot] - row);
    if (num_rows <= 0) return;
    const T* a = static_cast<const T*>(table.a) + group.slot * tokens.max_rank * cols;
    const T* w[kLoraRows];
    for (int i = 0; i < kLoraRows; ++i) w[i] = a + (row + std::min(i, num_rows - 1)) * cols;
    for (int t = group.begin; t < group.end; t += kLoraTokens) {
        const int num_tokens = std::min(kLoraTokens, group.end - t);
        const T* from[kLoraTokens];
        float* to[kLoraTokens];
        for (int j = 0; j < kLoraTokens; ++j) {
            const int at = t + std::min(j, num_tokens - 1);
            from[j] = x + tokens.order[at] * stride;
            to[j] = inner + at * tokens.max_rank + row;
        }
        lora_dots(w, from, cols, to, num_rows, num_tokens);
    }
}

// inner [tables][count, max_rank] = x a^T for `num_tables` layers of the same inputs, in the order of `tokens.order`; the
// team shares the work of all of them.
template <typename T>
void lora_shrink(const LoraTable* tables, int num_tables, const LoraTokens& tokens, const T* x, int64_t stride, int64_t cols,
                 float* inner) {
    const int64_t blocks = (tokens.max_rank + kLoraRows - 1) / kLoraRows, per_table = tokens.num_groups * blocks;
    const int64_t cuts = lora_cuts(tokens, num_tables * per_table);
    const Range mine = my_share(num_tables * per_table * cuts);
    for (int64_t item = mine.begin; item < mine.end; ++item) {
        const int64_t thing = item / cuts, which = thing / per_table, row = thing % blocks * kLoraRows;
        const LoraTable& table = tables[which];
        if (!table.ranks) continue;
        const LoraGroup& group = tokens.groups[thing % per_table / blocks];
        const int64_t next = (item + 1) / cuts;
        if (item + 1 < mine.end && next != thing && tables[next / per_table].ranks) {
            const int64_t slot = tokens.groups[next % per_table / blocks].slot;
            const int64_t first = slot * tokens.max_rank + next % blocks * kLoraRows;
            lora_fetch(static_cast<const T*>(tables[next / per_table].a) + first * cols, kLoraRows * cols * sizeof(T));
        }
        lora_shrink_rows(table, tokens, lora_part(group, item % cuts, cuts), static_cast<int>(row), x, stride, cols,
                         inner + which * tokens.count() * tokens.max_rank);
    }
}

// kVectors times kLanes outputs from `n` on, `lanes` of them in each vector, of up to 4 tokens: out * scale + shift +
// inner b.
template <int kVectors, typename T, typename Out>
inline void lora_add(const LoraTable& table, const T* b, int64_t at, int rank, int64_t outputs, int64_t n, int lanes,
                     bool adjusted, Out* const out[kLoraTokens], const float* const inner[kLoraTokens], int num_tokens) {
    const auto read = [&](const auto* from) { return lanes == kLanes ? load(from) : load_first(from, lanes); };
    Floats acc[kLoraTokens][kVectors] = {};
    for (int j = 0; j < num_tokens; ++j)
        for (int v = 0; v < kVectors; ++v) {
            acc[j][v] = read(out[j] + v * kLanes);
            if (adjusted) {
                const int64_t place = at + n + v * kLanes;
                acc[j][v] = fused(acc[j][v], read(table.scale + place), read(table.shift + place));
            }
        }
    for (int r = 0; r < rank; ++r) {
        Floats row[kVectors];
        for (int v = 0; v < kVectors; ++v) row[v] = read(b + r * outputs + n + v * kLanes);
        if (kVectors > 1) lora_fetch(b + r * outputs + n + kVectors * kLanes, kVectors * kLanes * sizeof(T));
        for (int j = 0; j < kLoraTokens; ++j)
            for (int v = 0; v < kVectors; ++v) acc[j][v] = fused(row[v], splat(inner[j][r]), acc[j][v]);
    }
    for (int j = 0; j < num_tokens; ++j)
        for (int v = 0; v < kVectors; ++v) {
            if (lanes == kLanes) {
                store(out[j] + v * kLanes, acc[j][v]);
            } else {
                store_first(out[j] + v * kLanes, acc[j][v], lanes);
            }
        }
}

// What is added to one layer's outputs: inner [count, max_rank] b.
template <typename Out>
struct LoraExpansion {
    const LoraTable* table;
    const float* inner;
    int64_t outputs;
    LoraOutputs<Out> out;

    int64_t pieces() const { return (outputs + out.run() - 1) / out.run(); }
};

// Piece `piece` of an adapter's outputs for its tokens.
template <typename T, typename Out>
inline void lora_expand_piece(const LoraExpansion<Out>& x, const LoraTokens& tokens, const LoraGroup& group, int64_t piece) {
    constexpr int kVectors = 4;
    const LoraTable& table = *x.table;
    const int rank = table.ranks[group.slot];
    const bool adjusted = table.adjusted[group.slot];
    if (rank == 0 && !adjusted) return;
    const T* b = static_cast<const T*>(table.b) + group.slot * tokens.max_rank * x.outputs;
    const int64_t begin = piece * x.out.run(), end = std::min(begin + x.out.run(), x.outputs);
    for (int t = group.begin; t < group.end; t += kLoraTokens) {
        const int num_tokens = std::min(kLoraTokens, group.end - t);
        Out* to[kLoraTokens];
        const float* from[kLoraTokens];
        for (int j = 0; j < kLoraTokens; ++j) {
            const int at = t + std::min(j, num_tokens - 1);
            to[j] = x.out.at(tokens.order[at], begin);
            from[j] = x.inner + at * tokens.max_rank;
        }
        for (int64_t n = begin; n < end;) {
            const bool whole = n + kVectors * kLanes <= end;
            const int lanes = static_cast<int>(std::min<int64_t>(kLanes, end - n)), done = whole ? kVectors * kLanes : lanes;
            const auto add = whole ? lora_add<kVectors, T, Out> : lora_add<1, T, Out>;
            add(table, b, group.slot * x.outputs, rank, x.outputs, n, lanes, adjusted, to, from, num_tokens);
            n += done;
            for (int j = 0; j < kLoraTokens; ++j) to[j] += done;
        }
    }
}

// Outputs of the tokens in place, of some layers; the team shares the work of all of them. A barrier must stand between
// this and the shrinking.
template <typename T, typename Out>
void lora_expand(const LoraExpansion<Out>* layers, int num_layers, const LoraTokens& tokens) {
    int64_t pieces = 0;
    for (int i = 0; i < num_layers; ++i) pieces += layers[i].table->ranks ? layers[i].pieces() : 0;
    if (pieces == 0) return;
    const int64_t cuts = lora_cuts(tokens, pieces * tokens.num_groups);
    const Range mine = my_share(pieces * tokens.num_groups * cuts);
    for (int64_t item = mine.begin; item < mine.end; ++item) {
        const LoraExpansion<Out>* layer = layers;
        int64_t rest = item / cuts;
        for (;; ++layer) {
            const int64_t of_layer = layer->table->ranks ? layer->pieces() * tokens.num_groups : 0;
            if (rest < of_layer) break;
            rest -= of_layer;
        }
        const LoraGroup& group = tokens.groups[rest / layer->pieces()];
        lora_expand_piece<T>(*layer, tokens, lora_part(group, item % cuts, cuts), rest % layer->pieces());
    }
}

}  // namespace quire
