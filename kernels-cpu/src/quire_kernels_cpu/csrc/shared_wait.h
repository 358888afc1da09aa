// Waiting for a number in memory that processes share: a while by reading it, then asleep in the kernel (futex(2)).
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>

namespace quire {

inline void pause_thread() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");  // unlike `yield`, it takes some time on every processor
#endif
}

// A number that one thread changes and others wait for, alone in its cache line.
struct alignas(64) SharedWord {
    std::atomic<uint32_t> value;
    std::atomic<uint32_t> num_sleeping;

    // What was written before is seen by whoever sees the new value.
    void set(uint32_t to) {
        value.store(to, std::memory_order_seq_cst);
        if (num_sleeping.load(std::memory_order_seq_cst) != 0) wake();
    }
    void wake() { syscall(SYS_futex, &value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

    // Sleeps until the value is another one than `seen`, or some time has passed.
    void sleep(uint32_t seen, int64_t milliseconds) {
        const timespec time{milliseconds / 1000, milliseconds % 1000 * 1000000};
        num_sleeping.fetch_add(1, std::memory_order_seq_cst);
        if (value.load(std::memory_order_seq_cst) == seen)
            syscall(SYS_futex, &value, FUTEX_WAIT, seen, &time, nullptr, 0);
        num_sleeping.fetch_sub(1, std::memory_order_seq_cst);
    }
};
static_assert(sizeof(SharedWord) == 64 && std::atomic<uint32_t>::is_always_lock_free);

// Whether `reached(value)` came true while the word was read over and over for some time.
template <typename Reached>
bool spin(const SharedWord& word, int64_t nanoseconds, const Reached& reached) {
    if (reached(word.value.load(std::memory_order_acquire))) return true;
    if (nanoseconds <= 0) return false;
    const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(nanoseconds);
    do {
        for (int i = 0; i < 16; ++i) {
            pause_thread();
            if (reached(word.value.load(std::memory_order_acquire))) return true;
        }
    } while (std::chrono::steady_clock::now() < end);
    return false;
}

}  // namespace quire
