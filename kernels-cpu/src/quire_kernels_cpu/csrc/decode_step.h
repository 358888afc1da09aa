// A decode step in one call: op `decode_step`. Gathers, runs the stack, takes the most likely tokens or samples, and writes
// them behind the known ones.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "argmax.h"
#include "decoder.h"
#include "group_collectives.h"
#include "matrix_rows.h"
#include "sample.h"
#include "step_inputs.h"

namespace quire {

// Whether every row has the token it begins with, and room for its keys and values.
inline bool is_possible(const DecodeArguments& a) {
    for (int64_t s = 0; s < a.count; ++s) {
        const int64_t row = a.rows[s], end = a.starts[s] + 1;
        if (end > a.num_tokens[row]) return false;
        for (int64_t g = 0; g < a.num_groups; ++g)
            if (end > a.num_blocks[g][row] * a.tables[g].block_size) return false;
    }
    return true;
}

// Whether logits are what the head gives.
inline bool are_plain(const DecodeArguments& a) { return a.logits_factor == 1.0 && a.soft_cap == 0.0; }

// The LM head. Where ranks share its tokens out, each multiplies with its own.
template <typename T>
struct DecodeHead {
    Matrix<T> matrix;
    SharedGroup* group;  // or none
    int64_t vocab_size;

    DecodeHead(const DecodeArguments& a, const DecoderRanks& ranks, int64_t hidden)
        : matrix(make_matrix<T>(*a.head, ranks.own(a.head->rank_sizes, a.vocab_size), hidden)),
          group(matrix.rank_sizes ? ranks.group() : nullptr), vocab_size(a.vocab_size) {}
};

// Logits of all tokens [count, vocab_size]. False: a rank is gone.
template <typename T>
bool multiply_head(const T* hidden, const DecodeHead<T>& head, int64_t count, float* logits) {
    static thread_local Buffer buffer;
    if (!head.group) {
        linear_op(hidden, head.matrix, logits, count);
        return true;
    }
    float* const own = buffer.get<float>(count * head.matrix.rows);
    linear_op(hidden, head.matrix, own, count);
    int64_t widths[kMaxRanks];
    for (int rank = 0; rank < head.group->size(); ++rank) widths[rank] = head.matrix.rank_sizes[rank] * sizeof(float);
    return all_gather(*head.group, reinterpret_cast<const uint8_t*>(own), reinterpret_cast<uint8_t*>(logits), count, widths) ==
           GroupResult::kDone;
}

// The tokens of the largest logits, and these. False: a rank is gone.
template <typename T>
bool find_largest(const T* hidden, const DecodeHead<T>& head, const DecodeArguments& a) {
    argmax_op(hidden, head.matrix, a.ids, a.max_logits, a.count);
    if (!head.group) return true;
    static thread_local Buffer buffer;
    struct Found {
        float logit;
        int32_t id;
    };
    SharedGroup& group = *head.group;
    const int size = group.size();
    Found* const found = buffer.get<Found>(a.count * (size + 1));
    Found* const own = found + a.count * size;
    int32_t first = 0;
    for (int rank = 0; rank < group.rank(); ++rank) first += static_cast<int32_t>(head.matrix.rank_sizes[rank]);
    for (int64_t i = 0; i < a.count; ++i) own[i] = {a.max_logits[i], first + static_cast<int32_t>(a.ids[i])};
    std::vector<int64_t> widths(size, sizeof(Found));
    if (all_gather(group, reinterpret_cast<const uint8_t*>(own), reinterpret_cast<uint8_t*>(found), a.count, widths.data()) !=
        GroupResult::kDone)
        return false;
    for (int64_t i = 0; i < a.count; ++i) {
        Found best = found[i * size];
        for (int rank = 1; rank < size; ++rank) {
            const Found& other = found[i * size + rank];
            if (comes_before(other.logit, other.id, best.logit, best.id)) best = other;
        }
        a.max_logits[i] = best.logit;
        a.ids[i] = best.id;
    }
    return true;
}

template <typename T>
bool write_logits(const T* hidden, const DecodeHead<T>& head, const DecodeArguments& a, float* logits) {
    if (!multiply_head(hidden, head, a.count, logits)) return false;
    if (are_plain(a)) return true;
    const int64_t size = a.count * head.vocab_size;
    const float factor = static_cast<float>(a.logits_factor), cap = static_cast<float>(a.soft_cap);
    for (int64_t i = 0; i < size; i += kLanes) {
        const Floats x = load_some(logits + i, size - i) * factor;
        store_some(logits + i, cap == 0.0f ? x : tanh(x / cap) * cap, size - i);
    }
    return true;
}

// The next token of each row, and its largest logit. Logits are written only if one is sampled, or may not
// be any token, or is more than the head gives. False: a rank is gone.
template <typename T>
bool choose_tokens(const T* hidden, const DecodeHead<T>& head, const DecodeArguments& a) {
    static thread_local Buffer buffer;
    const auto do_sample = [&](int64_t row) { return a.sample_table->do_sample[row]; };
    if (are_plain(a) && a.mask_of == nullptr && std::none_of(a.rows, a.rows + a.count, do_sample))
        return find_largest(hidden, head, a);
    float* const logits = buffer.get<float>(a.count * head.vocab_size);
    if (!write_logits(hidden, head, a, logits)) return false;
    sample_op(logits, head.vocab_size, a.rows, a.starts, a.count, *a.sample_table, a.ids, a.max_logits, {a.mask_of, a.mask_bits});
    return true;
}

template <typename T>
void take_rows(const void* table, const int64_t* which, int64_t count, int64_t width, T* to) {
    for (int64_t i = 0; i < count; ++i)
        std::memcpy(to + i * width, static_cast<const T*>(table) + which[i] * width, width * sizeof(T));
}

// As `read_rows`, of a table whose rows ranks share out: each brings those that it has. False: a rank is gone.
template <typename T>
bool read_shared_rows(const DecodeArguments& a, const Matrix<T>& table, SharedGroup& group, const int64_t* which, T* to) {
    const int64_t width = table.cols;
    static thread_local Buffer buffer, order_buffer;
    T *const own = buffer.get<T>(2 * a.count * width), *const all = own + a.count * width;
    int64_t *const order = order_buffer.get<int64_t>(a.count), widths[kMaxRanks];
    int64_t first = 0, taken = 0;
    for (int rank = 0; rank < group.size(); ++rank) {
        const int64_t end = first + a.embedding_rows[rank], before = taken;
        for (int64_t i = 0; i < a.count; ++i) {
            if (which[i] < first || which[i] >= end) continue;
            if (rank == group.rank()) read_row(table, which[i] - first, own + (taken - before) * width);
            order[taken++] = i;
        }
        widths[rank] = (taken - before) * width * sizeof(T);
        first = end;
    }
    if (all_gather(group, reinterpret_cast<const uint8_t*>(own), reinterpret_cast<uint8_t*>(all), 1, widths) != GroupResult::kDone)
        return false;
    for (int64_t i = 0; i < taken; ++i) std::memcpy(to + order[i] * width, all + i * width, width * sizeof(T));
    return true;
}

// The entries whose rows have adapters, slot by slot.
inline LoraTokens gather_adapters(const DecodeArguments& a, Buffer& orders, Buffer& groups) {
    if (a.max_lora_rank == 0) return {};
    const auto slot_of = [&](int32_t entry) { return a.lora_slots[a.rows[entry]]; };
    int32_t* const order = orders.get<int32_t>(a.count);
    int32_t count = 0;
    for (int32_t i = 0; i < a.count; ++i)
        if (slot_of(i) >= 0) order[count++] = i;
    std::sort(order, order + count, [&](int32_t one, int32_t other) {
        return slot_of(one) != slot_of(other) ? slot_of(one) < slot_of(other) : one < other;
    });
    LoraGroup* const found = groups.get<LoraGroup>(count);
    int64_t num_groups = 0;
    for (int32_t i = 0; i < count; ++i) {
        if (i == 0 || slot_of(order[i]) != slot_of(order[i - 1])) found[num_groups++] = {slot_of(order[i]), i, i};
        found[num_groups - 1].end = i + 1;
    }
    return {order, found, num_groups, a.max_lora_rank};
}

// False, and nothing changed but keys and values of this step: something is out of the ordinary, or a rank is gone.
template <typename T>
bool decode_step(Decoder<T>& decoder, const DecodeArguments& a) {
    static thread_local Buffer numbers, small, steps, blocks, embedded, turns, pointers, normed, orders, adapters;
    if (!is_possible(a)) return false;
    const int64_t n = a.count, groups = a.num_groups;
    int64_t* const ends = numbers.get<int64_t>((3 + groups) * n);
    int64_t *const ids = ends + n, *const positions = ids + n, *const slots = positions + n;
    int32_t *const query_start_loc = small.get<int32_t>(2 * n + 1), *const seq_lens = query_start_loc + n + 1;
    int64_t longest = 0;
    for (int64_t s = 0; s < n; ++s) {
        ends[s] = a.starts[s] + 1;
        longest = std::max(longest, ends[s]);
    }
    const Entries entries{a.rows, a.starts, ends, n};
    gather_tokens(a.token_ids, a.row_len, entries, ids, positions, query_start_loc, seq_lens);
    for (int64_t s = 0; s < n; ++s) positions[s] += a.position_deltas[a.rows[s]];

    const auto num_blocks = [&](int64_t g) { return (longest + a.tables[g].block_size - 1) / a.tables[g].block_size; };
    int64_t total = 0;
    for (int64_t g = 0; g < groups; ++g) total += n * num_blocks(g);
    int32_t* table = blocks.get<int32_t>(total);
    StepGroup* const step_groups = steps.get<StepGroup>(groups);
    for (int64_t g = 0; g < groups; ++g) {
        RowTable group = a.tables[g];
        group.num_blocks = num_blocks(g);
        group.block_table = table;
        group.slot_mapping = slots + g * n;
        gather_blocks(group, entries);
        step_groups[g] = {table, group.num_blocks, group.slot_mapping, group.block_size};
        table += n * group.num_blocks;
    }

    T* const x = embedded.get<T>(n * decoder.hidden());
    T* const hidden = normed.get<T>(n * decoder.hidden());
    SharedGroup* const group = a.embedding_rows ? decoder.ranks().group() : nullptr;
    const Matrix<T> embedding = make_matrix<T>(*a.embedding, a.num_embeddings, decoder.hidden());
    if (!group) read_rows(embedding, ids, n, x);
    if (group && !read_shared_rows(a, embedding, *group, ids, x)) return false;
    if (a.embedding_factor != 1.0) scale_row(x, static_cast<float>(a.embedding_factor), n * decoder.hidden());
    const int64_t dim = decoder.rotary_dim;
    T* const angles = turns.get<T>(2 * a.num_rotations * n * dim);
    const void** const cos = pointers.get<const void*>(2 * a.num_rotations);
    const void** const sin = cos + a.num_rotations;
    for (int64_t r = 0; r < a.num_rotations; ++r) {
        cos[r] = angles + 2 * r * n * dim;
        sin[r] = angles + (2 * r + 1) * n * dim;
        take_rows(a.cos[r], positions, n, dim, angles + 2 * r * n * dim);
        take_rows(a.sin[r], positions, n, dim, angles + (2 * r + 1) * n * dim);
    }
    decoder.run(Step<T>{.x = x,
                        .hidden = hidden,
                        .cos = cos,
                        .sin = sin,
                        .tokens = n,
                        .num_sequences = static_cast<int>(n),
                        .query_start_loc = query_start_loc,
                        .kv_lens = seq_lens,
                        .groups = step_groups,
                        .caches = a.caches,
                        .cache_format = static_cast<CacheFormat>(a.cache_format),
                        .lora = gather_adapters(a, orders, adapters)});
    if (decoder.ranks().lost()) return false;
    const DecodeHead<T> head(a, decoder.ranks(), decoder.hidden());
    if (a.logits != nullptr) return write_logits(hidden, head, a, a.logits);
    if (!choose_tokens(hidden, head, a)) return false;
    for (int64_t s = 0; s < n; ++s)
        if (!std::isfinite(a.max_logits[s])) return false;
    for (int64_t s = 0; s < n; ++s) {
        a.token_ids[a.rows[s] * a.row_len + ends[s]] = static_cast<int32_t>(a.ids[s]);
        a.num_tokens[a.rows[s]] = ends[s] + 1;
    }
    return true;
}

}  // namespace quire
