// The inputs of a step, gathered from what is kept of each row: op `step_inputs`.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels.h"

namespace quire {

// Sequence s computes positions starts[s] to ends[s] - 1 of row rows[s].
struct Entries {
    const int64_t *rows, *starts, *ends;
    int64_t count;
};

inline void gather_tokens(const int32_t* token_ids, int64_t row_len, const Entries& entries, int64_t* input_ids,
                          int64_t* positions, int32_t* query_start_loc, int32_t* seq_lens) {
    int64_t token = 0;
    for (int64_t s = 0; s < entries.count; ++s) {
        query_start_loc[s] = static_cast<int32_t>(token);
        seq_lens[s] = static_cast<int32_t>(entries.ends[s]);
        const int32_t* row = token_ids + entries.rows[s] * row_len;
        for (int64_t p = entries.starts[s]; p < entries.ends[s]; ++p, ++token) {
            input_ids[token] = row[p];
            positions[token] = p;
        }
    }
    query_start_loc[entries.count] = static_cast<int32_t>(token);
}

inline void gather_blocks(const RowTable& group, const Entries& entries) {
    const int64_t size = group.block_size;
    int64_t* slot = group.slot_mapping;
    for (int64_t s = 0; s < entries.count; ++s) {
        const int64_t start = entries.starts[s], end = entries.ends[s];
        const int32_t* row = group.table + entries.rows[s] * group.width;
        const int64_t first = group.window ? std::max<int64_t>(start - group.window + 1, 0) / size : 0;
        const int64_t last = (end + size - 1) / size;
        int32_t* to = group.block_table + s * group.num_blocks;
        std::fill(to, to + first, 0);
        std::copy(row + first, row + last, to + first);
        std::fill(to + last, to + group.num_blocks, 0);
        for (int64_t p = start; p < end; ++p) *slot++ = row[p / size] * size + p % size;
    }
}

}  // namespace quire
