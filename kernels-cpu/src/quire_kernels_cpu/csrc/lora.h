// Low-rank adapters on top of linear layers, each for tokens of its own: op `lora_linear`.
//
// Two parts with a barrier between them. Shrink: each token's inputs against the rows of its adapter's a, dot products.
// Expand: to each token's outputs the rows of b, weighted. Both run in one order of additions, whatever the token's
// neighbours, and the numbers between them stay in float32. Narrow matrices are widened piece by piece, to the bits that
// they would have if they were kept in the activations' type.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "dots.h"
#include "team.h"
#include "vectors.h"

namespace quire {

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

// What a and b are kept in: the activations' type, or numbers of one byte that are multiplied with scales.
enum class LoraForm { network, int8, fp8 };

inline LoraForm form_of(const LoraTable& table) { return static_cast<LoraForm>(table.form); }
template <typename T>
inline int64_t lora_bytes(const LoraTable& table) {
    return form_of(table) == LoraForm::network ? sizeof(T) : 1;
}

// `count` numbers times their scales, one for all or one for each, in the activations' type.
template <typename T, typename Narrow>
inline void lora_widen_row(const Narrow* from, const float* scale, bool for_each, int64_t count, T* to) {
    const Floats same = splat(*scale);
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i) * (for_each ? load(scale + i) : same));
    const int rest = static_cast<int>(count - i);
    if (rest) store_first(to + i, load_first(from + i, rest) * (for_each ? load_first(scale + i, rest) : same), rest);
}

// `count` numbers of each of some rows of a narrow matrix, `stride` apart; they lie side by side in memory of the thread.
// The scales are those of the rows, or of the columns.
template <typename T>
inline const T* lora_widen(LoraForm form, const void* matrix, int64_t first, int64_t stride, int rows, int64_t count,
                           const float* scale, bool of_columns) {
    static thread_local Buffer buffer;
    T* const to = buffer.get<T>(rows * count);
    for (int row = 0; row < rows; ++row) {
        const int64_t at = first + row * stride;
        const float* const scales = of_columns ? scale : scale + row;
        if (form == LoraForm::int8) {
            lora_widen_row(static_cast<const int8_t*>(matrix) + at, scales, of_columns, count, to + row * count);
        } else {
            lora_widen_row(static_cast<const Float8*>(matrix) + at, scales, of_columns, count, to + row * count);
        }
    }
    return to;
}

// Rows of a, and tokens, that meet in registers: counts are constants all the way, or sums would live in memory.
constexpr int kLoraRows = 4, kLoraTokens = kLanes == 8 ? 3 : 4;
// Vectors of outputs, and tokens, of the expansion.
constexpr int kLoraVectors = 2, kLoraAdded = 6;

// Memory that is used next.
inline void lora_fetch(const void* from, int64_t bytes) {
    const char* at = static_cast<const char*>(from);
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i);
}

// A step of the dot products, `kStep` inputs in `kParts` vectors of any order: both sides have the same.
template <typename T>
struct LoraDot {
    static constexpr int kStep = kLanes, kParts = 1;
    using Operand = Floats;
    static Operand read(const T* from, int) { return load(from); }
    static Floats add(Floats sum, Operand a, Operand b) { return fused(a, b, sum); }
};
#if defined(__AVX512BF16__)
template <>
struct LoraDot<BFloat16> {
    static constexpr int kStep = 2 * kLanes, kParts = 1;
    using Operand = __m512bh;
    static Operand read(const BFloat16* from, int) { return (__m512bh)_mm512_loadu_si512(from); }
    static Floats add(Floats sum, Operand a, Operand b) { return (Floats)_mm512_dpbf16_ps((__m512)sum, a, b); }
};
#else
template <>
struct LoraDot<BFloat16> {
    static constexpr int kStep = 2 * kLanes, kParts = 2;
    using Operand = Floats;
    static Operand read(const BFloat16* from, int part) { return part ? odd_numbers(from) : even_numbers(from); }
    static Floats add(Floats sum, Operand a, Operand b) { return fused(a, b, sum); }
};
#endif

template <typename T, int kTokens>
__attribute__((always_inline)) inline void lora_dot_step(const T* const w[kLoraRows], const T* const x[kTokens], int64_t k,
                                                         Floats acc[kTokens][kLoraRows]) {
    using Dot = LoraDot<T>;
#pragma GCC unroll 2
    for (int part = 0; part < Dot::kParts; ++part) {
        typename Dot::Operand xs[kTokens];
#pragma GCC unroll 4
        for (int j = 0; j < kTokens; ++j) xs[j] = Dot::read(x[j] + k, part);
#pragma GCC unroll 4
        for (int i = 0; i < kLoraRows; ++i) {
            const typename Dot::Operand ws = Dot::read(w[i] + k, part);
#pragma GCC unroll 4
            for (int j = 0; j < kTokens; ++j) acc[j][i] = Dot::add(acc[j][i], ws, xs[j]);
        }
    }
}

// kLoraRows rows of a against some tokens: to[j] gets as many numbers as there are rows.
template <typename T, int kTokens>
inline void lora_dots(const T* const w[kLoraRows], const T* const x[kTokens], int64_t cols, float* const to[kTokens],
                      int num_rows) {
    constexpr int kStep = LoraDot<T>::kStep;
    const int64_t whole = cols / kStep * kStep;
    Floats acc[kTokens][kLoraRows] = {};
    for (int64_t k = 0; k < whole; k += kStep) lora_dot_step<T, kTokens>(w, x, k, acc);
    if (whole < cols) {  // zeros behind
        T ends[kLoraRows + kTokens][kStep] = {};
        const T *rows[kLoraRows], *tokens[kTokens];
        for (int i = 0; i < kLoraRows + kTokens; ++i) {
            (i < kLoraRows ? rows[i] : tokens[i - kLoraRows]) = ends[i];
            std::memcpy(ends[i], (i < kLoraRows ? w[i] : x[i - kLoraRows]) + whole, (cols - whole) * sizeof(T));
        }
        lora_dot_step<T, kTokens>(rows, tokens, 0, acc);
    }
#pragma GCC unroll 4
    for (int j = 0; j < kTokens; ++j) {
        float sums[kLoraRows];
        sum_four(acc[j], sums);
        for (int i = 0; i < num_rows; ++i) to[j][i] = sums[i];
    }
}

// Things that each thread should find at least two of: otherwise the tokens of an adapter are cut into parts, too.
inline int64_t lora_cuts(const LoraTokens& tokens, int64_t things) {
    const int64_t wanted = 2 * omp_get_num_threads();
    if (things >= wanted || omp_get_num_threads() == 1) return 1;
    int64_t most = 0;
    for (int64_t g = 0; g < tokens.num_groups; ++g) most = std::max<int64_t>(most, tokens.groups[g].end - tokens.groups[g].begin);
    return std::min((wanted + things - 1) / things, (most + kLoraAdded - 1) / kLoraAdded);
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
    const int64_t first = group.slot * tokens.max_rank + row;
    const T* const a = form_of(table) == LoraForm::network
                           ? static_cast<const T*>(table.a) + first * cols
                           : lora_widen<T>(form_of(table), table.a, first * cols, cols, num_rows, cols,
                                           table.a_scale + first, false);
    const T* w[kLoraRows];
    for (int i = 0; i < kLoraRows; ++i) w[i] = a + std::min(i, num_rows - 1) * cols;
    for_tokens<kLoraTokens>(group.end - group.begin, [&](int64_t first, auto together) {
        constexpr int kTokens = decltype(together)::value;
        const T* from[kTokens];
        float* to[kTokens];
        for (int j = 0; j < kTokens; ++j) {
            const int64_t at = group.begin + first + j;
            from[j] = x + tokens.order[at] * stride;
            to[j] = inner + at * tokens.max_rank + row;
        }
        lora_dots<T, kTokens>(w, from, cols, to, num_rows);
    });
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
            const int64_t row_bytes = cols * lora_bytes<T>(tables[next / per_table]);
            lora_fetch(static_cast<const char*>(tables[next / per_table].a) + first * row_bytes, kLoraRows * row_bytes);
        }
        lora_shrink_rows(table, tokens, lora_part(group, item % cuts, cuts), static_cast<int>(row), x, stride, cols,
                         inner + which * tokens.count() * tokens.max_rank);
    }
}

// kVectors times kLanes outputs, or the first `lanes` of one vector, of some tokens: out * scale + shift + inner b. b, scale
// and shift: where these outputs begin in them, rows of b `stride` apart; without a scale nothing is adjusted.
template <int kVectors, int kTokens, bool kWhole, typename T, typename Out>
__attribute__((always_inline)) inline void lora_add(const T* b, int64_t stride, int rank, const float* scale,
                                                    const float* shift, int lanes, Out* const out[kTokens],
                                                    const float* const inner[kTokens]) {
    const auto read = [&](const auto* from) { return kWhole ? load(from) : load_first(from, lanes); };
    Floats acc[kTokens][kVectors];
#pragma GCC unroll 8
    for (int j = 0; j < kTokens; ++j)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            acc[j][v] = read(out[j] + v * kLanes);
            if (scale) acc[j][v] = fused(acc[j][v], read(scale + v * kLanes), read(shift + v * kLanes));
        }
    for (int r = 0; r < rank; ++r) {
        Floats row[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            row[v] = read(b + r * stride + v * kLanes);
            in_register(row[v]);
        }
        if (kWhole) __builtin_prefetch(b + r * stride + 2 * kVectors * kLanes);
#pragma GCC unroll 8
        for (int j = 0; j < kTokens; ++j) {
            const Floats factor = splat(inner[j][r]);
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) acc[j][v] = fused(row[v], factor, acc[j][v]);
        }
    }
#pragma GCC unroll 8
    for (int j = 0; j < kTokens; ++j)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            if (kWhole) {
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
    const LoraTable& table = *x.table;
    const int rank = table.ranks[group.slot];
    const bool adjusted = table.adjusted[group.slot];
    if (rank == 0 && !adjusted) return;
    const int64_t begin = piece * x.out.run(), count = std::min(x.out.run(), x.outputs - begin);
    const int64_t first_b = group.slot * tokens.max_rank * x.outputs + begin;
    const bool narrow = form_of(table) != LoraForm::network;
    const int64_t stride = narrow ? count : x.outputs;
    const T* const b = narrow ? lora_widen<T>(form_of(table), table.b, first_b, x.outputs, rank, count,
                                              table.b_scale + group.slot * x.outputs + begin, true)
                              : static_cast<const T*>(table.b) + first_b;
    const float* scale = adjusted ? table.scale + group.slot * x.outputs + begin : nullptr;
    const float* shift = adjusted ? table.shift + group.slot * x.outputs + begin : nullptr;
    for_tokens<kLoraAdded>(group.end - group.begin, [&](int64_t first, auto together) {
        constexpr int kTokens = decltype(together)::value;
        Out* to[kTokens];
        const float* from[kTokens];
        for (int j = 0; j < kTokens; ++j) {
            const int64_t at = group.begin + first + j;
            to[j] = x.out.at(tokens.order[at], begin);
            from[j] = x.inner + at * tokens.max_rank;
        }
        for (int64_t n = 0; n < count;) {
            const int64_t rest = count - n, whole = kLoraVectors * kLanes;
            const int64_t done = rest >= whole ? whole : std::min<int64_t>(kLanes, rest);
            const float *scales = scale ? scale + n : nullptr, *shifts = shift ? shift + n : nullptr;
            if (done == whole) {
                lora_add<kLoraVectors, kTokens, true>(b + n, stride, rank, scales, shifts, kLanes, to, from);
            } else {
                lora_add<1, kTokens, false>(b + n, stride, rank, scales, shifts, static_cast<int>(done), to, from);
            }
            n += done;
            for (int j = 0; j < kTokens; ++j) to[j] += done;
        }
    });
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
