// How threads share work. Kernels run inside a parallel region: every thread of the team calls the same function.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <vector>

namespace quire {

struct Range {
    int64_t begin, end;
};

// This thread's share of `count` things: consecutive ones, so that memory is read in order.
inline Range my_share(int64_t count) {
    const int64_t rank = omp_get_thread_num(), size = omp_get_num_threads();
    return {count * rank / size, count * (rank + 1) / size};
}

inline void barrier() {
#pragma omp barrier
}

// Work that threads take as they get to it, so that one whose core is busy elsewhere holds nobody up. Each has a share of its
// own, in a row, so that it reads memory in order and not in turn with others; then it takes from the others' shares. The
// first thing of a share is its owner's, so that its memory can be read ahead.
//
// A team shares one `WorkQueue`; each thread makes its own `QueueWorker`. Between two parts there must be a barrier: three sets of
// counters then suffice, because nobody can be more than one part behind.
class WorkQueue {
public:
    WorkQueue() : threads_(omp_get_max_threads()), counters_(3 * threads_) {}

    // How many things behind the first one have been taken of a thread's share.
    std::atomic<int64_t>& taken(int64_t part, int64_t rank) { return counters_[part % 3 * threads_ + rank].value; }

private:
    struct alignas(64) Counter {
        std::atomic<int64_t> value{0};
    };
    const int64_t threads_;
    std::vector<Counter> counters_;
};

class QueueWorker {
public:
    explicit QueueWorker(WorkQueue& queue) : queue_(queue), rank_(omp_get_thread_num()), size_(omp_get_num_threads()) {}

    // Begins a part of `count` things: this thread's first one. `count` itself, here and below: none is left.
    int64_t first(int64_t count) {
        ++part_;
        count_ = count;
        ahead_ = 0;
        queue_.taken(part_ + 1, rank_).store(0, std::memory_order_relaxed);
        return begin(rank_) < begin(rank_ + 1) ? begin(rank_) : next();
    }
    int64_t next() {
        for (; ahead_ < size_; ++ahead_) {
            const int64_t rank = (rank_ + ahead_) % size_;
            const int64_t thing = begin(rank) + 1 + queue_.taken(part_, rank).fetch_add(1, std::memory_order_relaxed);
            if (thing < begin(rank + 1)) return thing;
        }
        return count_;
    }
    // What `first` would return of `count` things; `count` if it were not this thread's own.
    int64_t first_of(int64_t count) const {
        const int64_t thing = count * rank_ / size_;
        return thing < count * (rank_ + 1) / size_ ? thing : count;
    }

private:
    int64_t begin(int64_t rank) const { return count_ * rank / size_; }

    WorkQueue& queue_;
    const int64_t rank_, size_;
    int64_t part_ = -1, count_ = 0, ahead_ = 0;
};

// Memory that grows and is kept: one per purpose and owner, so that a step allocates nothing. It grows by half at least:
// the largest batch so far is surpassed by a little again and again while a server runs, and growing to fit each time
// would leave a hole in the heap each time.
class Buffer {
public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { std::free(data_); }

    template <typename T>
    T* get(int64_t count) {
        const size_t bytes = static_cast<size_t>(count) * sizeof(T);
        if (bytes > size_) {
            const size_t size = (std::max(bytes, size_ + size_ / 2) + 63) / 64 * 64;
            std::free(data_);
            data_ = std::aligned_alloc(64, size);
            size_ = data_ ? size : 0;
            if (!data_) throw std::bad_alloc();
        }
        return static_cast<T*>(data_);
    }

private:
    void* data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace quire
