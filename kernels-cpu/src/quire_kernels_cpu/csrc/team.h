// How threads share work. Kernels run inside a parallel region: every thread of the team calls the same function.
#pragma once

#include <omp.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace quire {

struct Range {
    int64_t begin, end;
};

// This thread's share of `count` things: consecutive ones, so that memory is read in order.
inline Range my_share(int64_t count) {
    const int64_t rank = omp_get_thread_num(), size = omp_get_num_threads();
    return {count * rank / size, count * (rank + 1) / size};
}

inline void wait_for_team() {
#pragma omp barrier
}

// Work that threads take as they get to it, so that one whose core is busy elsewhere holds nobody up. The first thing of
// each part is known beforehand (the thread's rank), so that its memory can be read ahead.
//
// A team shares one `Claims`; each thread makes its own `Claimer`. Between two parts there must be a barrier: three
// counters then suffice, because nobody can be more than one part behind.
class Claims {
public:
    std::atomic<int64_t>& of_part(int64_t part) { return counters_[part % 3].value; }

private:
    struct alignas(64) Counter {
        std::atomic<int64_t> value{0};
    };
    Counter counters_[3];
};

class Claimer {
public:
    explicit Claimer(Claims& claims) : claims_(claims), rank_(omp_get_thread_num()), size_(omp_get_num_threads()) {}

    // Begins a part: its first thing.
    int64_t first() {
        ++part_;
        claims_.of_part(part_ + 1).store(0, std::memory_order_relaxed);
        return rank_;
    }
    int64_t next() { return size_ + claims_.of_part(part_).fetch_add(1, std::memory_order_relaxed); }
    int64_t rank() const { return rank_; }

private:
    Claims& claims_;
    const int64_t rank_, size_;
    int64_t part_ = -1;
};

// Memory that grows and is kept: one per purpose and owner, so that a step allocates nothing.
class Buffer {
public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { std::free(data_); }

    template <typename T>
    T* get(int64_t count) {
        const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
        if (bytes > size_) {
            std::free(data_);
            data_ = std::aligned_alloc(64, bytes);
            size_ = data_ ? bytes : 0;
            if (!data_) throw std::bad_alloc();
        }
        return static_cast<T*>(data_);
    }

private:
    void* data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace quire
