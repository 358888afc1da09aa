// A group of ranks, processes of one host or threads of one process, that meet in shared memory.
//
// Each rank has two slices of `capacity` bytes, which take turns from one meeting to the next: while the others may still read
// what a rank brought to the last meeting, it writes what it brings to the next, so that a gather is one meeting and not two.
//
// A fused kernel uses a group inside one call (`handle` is what `quire_group_join` gave):
//
//     auto& group = *static_cast<quire::SharedGroup*>(handle);
//     T* own = reinterpret_cast<T*>(group.next_slice());     // at most capacity() bytes
//     ... all threads of the team write `own` ...
//     barrier();                                            // of the team
//     #pragma omp master
//     met = group.meet();                                   // one thread; false: a rank is gone, leave the kernel
//     barrier();
//     if (!met) return;
//     ... all threads read group.slice(rank) of every rank, until one thread calls meet() again ...
//
// Where the parts of one array are to lie as in that array, ranks write into `next_region()`, size() * capacity() bytes that all
// share, each its own cache lines, and read `region()` after the meeting. A step that uses one uses the other nowhere else.
#pragma once

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <vector>

#include "shared_wait.h"

namespace quire {

constexpr int kMaxRanks = 64;
constexpr char kGroupFormat[16] = "quire group 1";

// What one rank says of what it brings to a meeting.
struct Offer {
    int64_t bytes;                   // of all pieces together
    int64_t offset[kMaxRanks + 1];  // of what is for each rank, where it is not one thing for all
};

struct alignas(64) RankState {
    SharedWord round;  // how many meetings this rank has come to
    std::atomic<int32_t> pid;
    Offer offer[2];
};

// Bytes from one rank to another, in a ring. Both numbers count bytes from the beginning, modulo 2^32.
struct Channel {
    SharedWord written, read;
};

struct GroupHeader {
    char format[16];  // kGroupFormat
    int64_t size, capacity, channel_bytes;
    SharedWord num_joined;
    alignas(64) std::atomic<uint32_t> failing;  // somebody says who is gone
    std::atomic<uint32_t> failed;               // the next two are said
    int32_t failed_rank;
    char cause[512];
    RankState ranks[kMaxRanks];
};

class SharedGroup {
public:
    // Makes an empty file the memory of a group. False and errno if that fails. capacity is a multiple of 64, channel_bytes a
    // power of two of at most 2^30.
    static bool create(int fd, int size, int64_t capacity, int64_t channel_bytes) {
        if (size < 1 || size > kMaxRanks || capacity < 64 || capacity % 64 != 0 || channel_bytes < 64 ||
            channel_bytes > 1 << 30 || (channel_bytes & (channel_bytes - 1)) != 0) {
            errno = EINVAL;
            return false;
        }
        if (ftruncate(fd, bytes(size, capacity, channel_bytes)) != 0) return false;
        GroupHeader* header = map_header(fd);
        if (header == nullptr) return false;
        header->size = size, header->capacity = capacity, header->channel_bytes = channel_bytes;
        std::memcpy(header->format, kGroupFormat, sizeof kGroupFormat);
        munmap(header, header_bytes());
        return true;
    }

    // Maps the memory of a group and takes part as one of its ranks. Null and errno if that fails.
    static SharedGroup* join(int fd, int rank, int size, int64_t spin_ns) {
        GroupHeader* header = map_header(fd);
        if (header == nullptr) return nullptr;
        const int64_t capacity = header->capacity, channel_bytes = header->channel_bytes;
        const bool is_known =
            std::memcmp(header->format, kGroupFormat, sizeof kGroupFormat) == 0 && header->size == size;
        munmap(header, header_bytes());
        if (!is_known || rank < 0 || rank >= size) {
            errno = EINVAL;
            return nullptr;
        }
        void* memory = mmap(nullptr, bytes(size, capacity, channel_bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (memory == MAP_FAILED) return nullptr;
        return new SharedGroup(static_cast<uint8_t*>(memory), rank, size, capacity, channel_bytes, spin_ns);
    }

    ~SharedGroup() {
        for (const int fd : pidfds_)
            if (fd >= 0) close(fd);
        munmap(memory_, bytes(size_, capacity_, channel_bytes_));
    }

    // Waits until all ranks have joined. False if one is gone, or has not come when some time has passed.
    bool wait_for_all(int64_t milliseconds) {
        const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
        for (;;) {
            const uint32_t joined = header().num_joined.value.load(std::memory_order_seq_cst);
            if (joined >= uint32_t(size_)) break;
            for (int peer = 0; peer < size_; ++peer)
                if (is_dead(peer)) fail(peer, "its process ended before all ranks had joined");
            if (std::chrono::steady_clock::now() > end)
                for (int peer = 0; peer < size_; ++peer)
                    if (header().ranks[peer].pid.load() == 0) fail(peer, "it did not join in time");
            if (has_failed()) return false;
            header().num_joined.sleep(joined, 50);
        }
        for (int peer = 0; peer < size_; ++peer) watch(peer);
        return true;
    }

    int rank() const { return rank_; }
    int size() const { return size_; }
    int64_t capacity() const { return capacity_; }

    // Memory of the next meeting, and of the last one.
    uint8_t* next_region() { return buffers_ + ((round_ + 1) & 1) * size_ * capacity_; }
    uint8_t* next_slice() { return next_region() + rank_ * capacity_; }
    const uint8_t* region() const { return buffers_ + (round_ & 1) * size_ * capacity_; }
    const uint8_t* slice(int of) const { return region() + of * capacity_; }
    Offer& next_offer() { return header().ranks[rank_].offer[(round_ + 1) & 1]; }
    const Offer& offer(int of) const { return header().ranks[of].offer[round_ & 1]; }

    // Waits until all ranks have come. False if one is gone: the group is of no use any more.
    bool meet() {
        header().ranks[rank_].round.set(++round_);
        for (int i = 1; i < size_; ++i)
            if (!wait_for_round((rank_ + i) % size_)) return false;
        return true;
    }

    bool has_failed() const { return header().failed.load(std::memory_order_acquire) != 0; }
    int failed_rank() const { return header().failed_rank; }
    const char* cause() const { return header().cause; }

    // Says that a rank is gone, and wakes whoever waits. Only the first one of a group is kept.
    void fail(int rank, const char* cause) {
        if (header().failing.exchange(1, std::memory_order_acq_rel) == 0) {
            header().failed_rank = rank;
            strncpy(header().cause, cause, sizeof header().cause - 1);
            header().failed.store(1, std::memory_order_seq_cst);
        }
        header().num_joined.wake();
        for (int i = 0; i < size_; ++i) header().ranks[i].round.wake();
        for (int i = 0; i < size_ * size_; ++i) {
            channels_[i].written.wake();
            channels_[i].read.wake();
        }
    }

    // Bytes that were put into the ring to a rank, without waiting.
    int64_t send_some(int to, const uint8_t* from, int64_t count) {
        Channel& channel = channels_[rank_ * size_ + to];
        const uint32_t written = channel.written.value.load(std::memory_order_relaxed);
        const int64_t used = uint32_t(written - channel.read.value.load(std::memory_order_acquire));
        count = std::min(count, channel_bytes_ - used);
        if (count == 0) return 0;
        uint8_t* ring = ring_of(rank_, to);
        const int64_t at = written % channel_bytes_, first = std::min(count, channel_bytes_ - at);
        std::memcpy(ring + at, from, first);
        std::memcpy(ring, from + first, count - first);
        channel.written.set(written + uint32_t(count));
        return count;
    }

    // Bytes that were taken out of the ring from a rank, without waiting.
    int64_t receive_some(int from, uint8_t* to, int64_t count) {
        Channel& channel = channels_[from * size_ + rank_];
        const uint32_t read = channel.read.value.load(std::memory_order_relaxed);
        const int64_t used = uint32_t(channel.written.value.load(std::memory_order_acquire) - read);
        count = std::min(count, used);
        if (count == 0) return 0;
        const uint8_t* ring = ring_of(from, rank_);
        const int64_t at = read % channel_bytes_, first = std::min(count, channel_bytes_ - at);
        std::memcpy(to, ring + at, first);
        std::memcpy(to + first, ring, count - first);
        channel.read.set(read + uint32_t(count));
        return count;
    }

    // Waits until bytes of a rank can be received, or sent to it, or some time has passed. False if a rank is gone.
    bool wait_for_channel(int peer, bool receives, int64_t milliseconds) {
        Channel& channel = channels_[receives ? peer * size_ + rank_ : rank_ * size_ + peer];
        SharedWord& changing = receives ? channel.written : channel.read;
        const uint32_t mine = (receives ? channel.read : channel.written).value.load(std::memory_order_relaxed);
        const uint32_t until = receives ? mine : mine - uint32_t(channel_bytes_);  // while it is this, nothing can be done
        if (spin(changing, spin_ns_, [&](uint32_t value) { return value != until; })) return true;
        changing.sleep(until, milliseconds);
        return changing.value.load(std::memory_order_acquire) != until || !is_broken(peer);
    }

private:
    SharedGroup(uint8_t* memory, int rank, int size, int64_t capacity, int64_t channel_bytes, int64_t spin_ns)
        : memory_(memory),
          buffers_(memory + header_bytes()),
          channels_(reinterpret_cast<Channel*>(buffers_ + 2 * size * capacity)),
          rank_(rank),
          size_(size),
          capacity_(capacity),
          channel_bytes_(channel_bytes),
          spin_ns_(spin_ns),
          pidfds_(size, -1) {
        for (int parity = 0; parity < 2; ++parity)  // so that the pages lie at this rank's node of memory
            std::memset(buffers_ + (parity * size + rank) * capacity, 0, capacity);
        header().ranks[rank].pid.store(getpid(), std::memory_order_seq_cst);
        header().num_joined.value.fetch_add(1, std::memory_order_seq_cst);
        header().num_joined.wake();
    }

    static int64_t bytes(int size, int64_t capacity, int64_t channel_bytes) {
        return header_bytes() + 2 * size * capacity + size * size * (int64_t(sizeof(Channel)) + channel_bytes);
    }
    static GroupHeader* map_header(int fd) {
        const off_t length = lseek(fd, 0, SEEK_END);  // fstat would need glibc 2.33
        if (length < 0) return nullptr;
        if (length < header_bytes()) {
            errno = EINVAL;
            return nullptr;
        }
        void* memory = mmap(nullptr, header_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        return memory == MAP_FAILED ? nullptr : static_cast<GroupHeader*>(memory);
    }
    static int64_t header_bytes() { return (int64_t(sizeof(GroupHeader)) + 4095) / 4096 * 4096; }
    GroupHeader& header() const { return *reinterpret_cast<GroupHeader*>(memory_); }
    uint8_t* ring_of(int from, int to) {
        return reinterpret_cast<uint8_t*>(channels_ + size_ * size_) + (from * size_ + to) * channel_bytes_;
    }

    bool wait_for_round(int peer) {
        SharedWord& word = header().ranks[peer].round;
        const auto has_come = [&](uint32_t value) { return int32_t(value - round_) >= 0; };
        if (spin(word, spin_ns_, has_come)) return true;
        for (;;) {
            const uint32_t seen = word.value.load(std::memory_order_seq_cst);
            if (has_come(seen)) return true;
            if (is_broken(peer)) return has_come(word.value.load(std::memory_order_seq_cst));
            word.sleep(seen, 100);
        }
    }

    // Whether a rank is gone; that of `peer` is noticed here.
    bool is_broken(int peer) {
        if (!has_failed() && is_dead(peer)) fail(peer, "its process ended");
        return has_failed();
    }

    void watch(int peer) {
        if (pidfds_[peer] >= 0) return;
        const int pid = header().ranks[peer].pid.load(std::memory_order_seq_cst);
        if (pid != 0) pidfds_[peer] = int(syscall(SYS_pidfd_open, pid, 0));
    }

    // Whether a rank's process has ended, be it waited for by its parent or not.
    bool is_dead(int peer) {
        watch(peer);
        if (pidfds_[peer] >= 0) {
            pollfd poll_fd{pidfds_[peer], POLLIN, 0};
            return poll(&poll_fd, 1, 0) == 1;
        }
        const int pid = header().ranks[peer].pid.load(std::memory_order_seq_cst);
        return pid != 0 && kill(pid, 0) != 0 && errno == ESRCH;  // a kernel before 5.3
    }

    uint8_t* const memory_;
    uint8_t* const buffers_;
    Channel* const channels_;
    const int rank_, size_;
    const int64_t capacity_, channel_bytes_, spin_ns_;
    std::vector<int> pidfds_;
    uint32_t round_ = 0;
};

}  // namespace quire
