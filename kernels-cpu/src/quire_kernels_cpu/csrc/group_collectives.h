// Collectives of a `SharedGroup`. What is larger than a slice goes in pieces, one meeting each; all ranks read at the meeting
// how much each has, and so make the same number of pieces even where they expect different sizes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "shared_group.h"
#include "vectors.h"

namespace quire {

enum class GroupResult { kDone, kRankGone, kOtherSizes };

// Calls read(begin, count) after the meeting of each piece of what the ranks bring; `count` bytes of a piece from `begin` on are
// in the slices, as far as each rank has them. write(to, begin, count) puts bytes of this rank's own into its slice.
template <typename Write, typename Read>
bool meet_in_pieces(SharedGroup& group, int64_t own_bytes, const Write& write, const Read& read) {
    const int64_t capacity = group.capacity();
    int64_t total = own_bytes;
    for (int64_t begin = 0; begin == 0 || begin < total; begin += capacity) {
        if (begin < own_bytes) write(group.next_slice(), begin, std::min(capacity, own_bytes - begin));
        group.next_offer().bytes = own_bytes;
        if (!group.meet()) return false;
        if (begin == 0)
            for (int rank = 0; rank < group.size(); ++rank) total = std::max(total, group.offer(rank).bytes);
        read(begin, capacity);
    }
    return true;
}

// Copies bytes [begin, begin + count) of an array of rows, each of `width` bytes, into every row of an array that is wider.
inline void copy_into_rows(uint8_t* out, int64_t stride, int64_t width, const uint8_t* from, int64_t begin, int64_t count) {
    while (count > 0) {
        const int64_t row = begin / width, column = begin % width, part = std::min(width - column, count);
        std::memcpy(out + row * stride + column, from, part);
        from += part, begin += part, count -= part;
    }
}

// out = the ranks' arrays of `rows` rows side by side; widths: bytes of a row of each rank.
inline GroupResult all_gather(SharedGroup& group, const uint8_t* x, uint8_t* out, int64_t rows, const int64_t* widths) {
    if (group.has_failed()) return GroupResult::kRankGone;
    int64_t stride = 0;
    for (int rank = 0; rank < group.size(); ++rank) stride += widths[rank];
    bool fits = true;
    const auto write = [&](uint8_t* to, int64_t begin, int64_t count) { std::memcpy(to, x + begin, count); };
    const auto read = [&](int64_t begin, int64_t capacity) {
        int64_t column = 0;
        for (int rank = 0; rank < group.size(); column += widths[rank], ++rank) {
            const int64_t bytes = rows * widths[rank], count = std::min(capacity, bytes - begin);
            fits = fits && group.offer(rank).bytes == bytes;
            if (!fits || count <= 0) continue;
            const uint8_t* from = rank == group.rank() ? x + begin : group.slice(rank);
            copy_into_rows(out + column, stride, widths[rank], from, begin, count);
        }
    };
    if (!meet_in_pieces(group, rows * widths[group.rank()], write, read)) return GroupResult::kRankGone;
    return fits ? GroupResult::kDone : GroupResult::kOtherSizes;
}

// to = ((r0 + r1) + r2) ..., in float32 for numbers below 32 bits, of `count` numbers.
template <typename T>
void sum_in_rank_order(T* to, const T* const* slices, int ranks, int64_t count) {
    if constexpr (std::is_same_v<T, float> || std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>) {
        int64_t i = 0;
        for (; i + kLanes <= count; i += kLanes) {
            Floats sum = load(slices[0] + i);
            for (int rank = 1; rank < ranks; ++rank) sum += load(slices[rank] + i);
            store(to + i, sum);
        }
        if (i == count) return;
        T numbers[kLanes] = {};
        Floats sum{};
        for (int rank = 0; rank < ranks; ++rank) {
            std::memcpy(numbers, slices[rank] + i, (count - i) * sizeof(T));
            sum = rank == 0 ? load(numbers) : sum + load(numbers);
        }
        store(numbers, sum);
        std::memcpy(to + i, numbers, (count - i) * sizeof(T));
    } else {
        for (int64_t i = 0; i < count; ++i) {
            T sum = slices[0][i];
            for (int rank = 1; rank < ranks; ++rank) sum = std::is_same_v<T, bool> ? sum || slices[rank][i] : sum + slices[rank][i];
            to[i] = sum;
        }
    }
}

// out = the sum of the ranks' arrays of `count` numbers.
template <typename T>
GroupResult all_reduce(SharedGroup& group, const T* x, T* out, int64_t count) {
    if (group.has_failed()) return GroupResult::kRankGone;
    const int64_t bytes = count * sizeof(T);
    bool fits = true;
    const auto write = [&](uint8_t* to, int64_t begin, int64_t some) {
        std::memcpy(to, reinterpret_cast<const uint8_t*>(x) + begin, some);
    };
    const auto read = [&](int64_t begin, int64_t capacity) {
        const T* slices[kMaxRanks];
        for (int rank = 0; rank < group.size(); ++rank) {
            fits = fits && group.offer(rank).bytes == bytes;
            slices[rank] = reinterpret_cast<const T*>(group.slice(rank));
        }
        const int64_t first = begin / int64_t(sizeof(T));
        slices[group.rank()] = x + first;
        if (fits && begin < bytes)
            sum_in_rank_order(out + first, slices, group.size(), std::min(capacity, bytes - begin) / int64_t(sizeof(T)));
    };
    if (!meet_in_pieces(group, bytes, write, read)) return GroupResult::kRankGone;
    return fits ? GroupResult::kDone : GroupResult::kOtherSizes;
}

// Every rank has bytes for every other one: those for rank r are x[offset[r]:offset[r + 1]]. out: from rank r, `sizes[r]` bytes,
// one behind the other.
inline GroupResult all_to_all(SharedGroup& group, const uint8_t* x, const int64_t* offset, uint8_t* out,
                              const int64_t* sizes) {
    if (group.has_failed()) return GroupResult::kRankGone;
    const int size = group.size(), own = group.rank();
    bool fits = true;
    const auto write = [&](uint8_t* to, int64_t begin, int64_t count) {
        std::memcpy(to, x + begin, count);
        if (begin == 0) std::copy(offset, offset + size + 1, group.next_offer().offset);
    };
    if (offset[size] == 0) std::copy(offset, offset + size + 1, group.next_offer().offset);
    int64_t starts[kMaxRanks];  // where what is for this rank begins in what each rank brings
    const auto read = [&](int64_t begin, int64_t capacity) {
        int64_t column = 0;
        for (int rank = 0; rank < size; column += sizes[rank], ++rank) {
            if (begin == 0) {
                const Offer& offer = group.offer(rank);
                starts[rank] = offer.offset[own];
                fits = fits && offer.offset[own + 1] - offer.offset[own] == sizes[rank];
            }
            const int64_t first = std::max(begin, starts[rank]);
            const int64_t count = std::min(begin + capacity, starts[rank] + sizes[rank]) - first;
            if (!fits || count <= 0) continue;
            const uint8_t* from = rank == own ? x + first : group.slice(rank) + (first - begin);
            std::memcpy(out + column + first - starts[rank], from, count);
        }
    };
    if (!meet_in_pieces(group, offset[size], write, read)) return GroupResult::kRankGone;
    return fits ? GroupResult::kDone : GroupResult::kOtherSizes;
}

}  // namespace quire
