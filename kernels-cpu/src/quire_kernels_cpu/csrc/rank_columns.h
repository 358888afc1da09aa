// The ranks that share a decoder, as they meet inside its one call: each has some columns of an array, and all get the whole.
//
// Every output is one dot product over all inputs on one rank, and only copied here: what ranks share has the bits of one.
#pragma once

#include "shared_group.h"
#include "team.h"

namespace quire {

// Of one of the matrices that are multiplied together: how its outputs are shared out, and where all of them go.
template <typename T>
struct RankColumns {
    const int64_t* sizes;  // [ranks], or none: each rank has all `columns`
    int64_t columns;       // of all ranks
    T* whole;              // [rows, columns], rows `stride` apart
    int64_t stride;

    int64_t of(int rank) const { return sizes ? sizes[rank] : columns; }
};

// One rank's end. Without a group there is one rank, and nothing to do.
class DecoderRanks {
public:
    explicit DecoderRanks(void* group = nullptr) : group_(static_cast<SharedGroup*>(group)) {}

    SharedGroup* group() const { return group_; }
    int rank() const { return group_ ? group_->rank() : 0; }
    int size() const { return group_ ? group_->size() : 1; }
    // Whether a rank is gone, so that nothing that was gathered can be used. Alike for all threads between two meetings.
    bool lost() const { return lost_; }

    // Outputs of this rank, of `total`.
    int64_t own(const int64_t* sizes, int64_t total) const { return sizes && group_ ? sizes[group_->rank()] : total; }

    // own [rows, the rank's columns of all matrices side by side] of every rank -> each matrix whole. By all threads of the
    // team, with a barrier before and behind. More than a slice goes in pieces, one meeting each.
    template <typename T>
    void gather(const T* own, const RankColumns<T>* matrices, int count, int64_t rows) {
        const int64_t room = group_->capacity() / static_cast<int64_t>(sizeof(T));
        int64_t most = 0;
        for (int rank = 0; rank < size(); ++rank) most = std::max(most, rows * width(matrices, count, rank));
        for (int64_t begin = 0; begin < most && !lost_; begin += room) exchange(own, matrices, count, rows, begin, room);
    }

private:
    template <typename T>
    static int64_t width(const RankColumns<T>* matrices, int count, int rank) {
        int64_t total = 0;
        for (int i = 0; i < count; ++i) total += matrices[i].of(rank);
        return total;
    }

    // Numbers [begin, begin + room) of what each rank has.
    template <typename T>
    void exchange(const T* own, const RankColumns<T>* matrices, int count, int64_t rows, int64_t begin, int64_t room) {
        constexpr int64_t kLine = 64 / sizeof(T);
        const auto share_of = [&](int rank) {  // this thread's part of a rank's piece, in whole cache lines
            const int64_t numbers = std::clamp<int64_t>(rows * width(matrices, count, rank) - begin, 0, room);
            const Range lines = my_share((numbers + kLine - 1) / kLine);
            return Range{std::min(lines.begin * kLine, numbers), std::min(lines.end * kLine, numbers)};
        };
        const Range mine = share_of(rank());
        T* const slice = reinterpret_cast<T*>(group_->next_slice());
        std::memcpy(slice + mine.begin, own + begin + mine.begin, (mine.end - mine.begin) * sizeof(T));
        barrier();
        if (omp_get_thread_num() == 0 && !group_->meet()) lost_ = true;
        barrier();
        for (int rank = 0; rank < size() && !lost_; ++rank) {
            const Range share = share_of(rank);
            const T* const from = rank == group_->rank() ? own + begin : reinterpret_cast<const T*>(group_->slice(rank));
            place(from, matrices, count, rank, begin, share);
        }
        barrier();
    }

    // Numbers [begin + share.begin, begin + share.end) of a rank's rows to where they belong. from: its number `begin`.
    template <typename T>
    void place(const T* from, const RankColumns<T>* matrices, int count, int rank, int64_t begin, Range share) const {
        const int64_t all = width(matrices, count, rank);
        for (int64_t at = share.begin; at < share.end;) {
            const int64_t row = (begin + at) / all, column = (begin + at) % all;
            const int64_t end = std::min(all, column + share.end - at);
            int64_t first = 0;  // column of the matrix in the rank's row
            for (int i = 0; i < count; ++i) {
                const RankColumns<T>& matrix = matrices[i];
                const int64_t last = first + matrix.of(rank), left = std::max(column, first), right = std::min(end, last);
                if (left < right && (matrix.sizes || rank == group_->rank())) {
                    int64_t before = 0;  // columns of the ranks before it
                    for (int other = 0; matrix.sizes && other < rank; ++other) before += matrix.sizes[other];
                    std::memcpy(matrix.whole + row * matrix.stride + before + left - first, from + at + left - column,
                                (right - left) * sizeof(T));
                }
                first = last;
            }
            at += end - column;
        }
    }

    SharedGroup* group_;
    bool lost_ = false;
};

}  // namespace quire
