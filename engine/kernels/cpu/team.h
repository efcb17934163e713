// The threads of a parallel region, and how they share the jobs that they all walk through in the same order.
//
// Each job is cut into one lot a thread. A thread works through its own lot first, so that on a quiet machine the split is
// the same every time and nobody meets, and then helps with what is left of the others'. Nobody waits for a thread that is
// not working: where other programs take a core away, the rest of the team does its lots.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace pagemill {

struct Range {
    std::int64_t begin, end;
};

// The contiguous share `index` of `num_shares` of `count` things, even to one.
inline Range share_of(std::int64_t count, std::int64_t index, std::int64_t num_shares) {
    return {count * index / num_shares, count * (index + 1) / num_shares};
}

// How far the jobs of one region are; seen by all its threads.
class Progress {
public:
    Progress(int num_jobs, int num_threads) : num_threads_(num_threads), counters_(std::size_t(num_jobs) * (num_threads + 1)) {}

    // Before a region begins.
    void reset() {
        for (Counter& counter : counters_) counter.value.store(0, std::memory_order_relaxed);
    }

    int num_lots() const { return num_threads_; }
    std::atomic<std::int64_t>& claimed(int job, int lot) { return counters_[std::size_t(job) * (num_threads_ + 1) + lot].value; }
    std::atomic<std::int64_t>& finished(int job) { return claimed(job, num_threads_); }

private:
    struct alignas(64) Counter {
        std::atomic<std::int64_t> value{0};
    };
    int num_threads_;
    std::vector<Counter> counters_;
};

// One thread of the region that it was made in.
class Team {
public:
    explicit Team(Progress& progress) : progress_(progress), thread_(omp_get_thread_num()) {}

    int thread() const { return thread_; }

    // Do the next job: `work(range)` for all of 0 .. count - 1, at most `grain` at a time, by whichever thread. Returns
    // when all is done, and what was written is seen. Lots are even.
    template <class Work>
    void run(std::int64_t count, std::int64_t grain, const Work& work) {
        run_lots([&](int index) { return share_of(count, index, progress_.num_lots()); }, grain, work);
    }

    // The same with lots of one's own, which lie one behind the other from 0 on.
    template <class LotOf, class Work>
    void run_lots(const LotOf& lot_of, std::int64_t grain, const Work& work) {
        const int job = next_job_++, num_lots = progress_.num_lots();
        std::int64_t num_done = 0;
        for (int turn = 0; turn < num_lots; ++turn) {
            const int index = (thread_ + turn) % num_lots;
            const Range lot = lot_of(index);
            std::atomic<std::int64_t>& claimed = progress_.claimed(job, index);
            while (claimed.load(std::memory_order_relaxed) < lot.end - lot.begin) {
                const std::int64_t begin = lot.begin + claimed.fetch_add(grain, std::memory_order_relaxed);
                if (begin >= lot.end) break;
                const Range piece{begin, std::min(begin + grain, lot.end)};
                work(piece);
                num_done += piece.end - piece.begin;
            }
        }
        std::atomic<std::int64_t>& finished = progress_.finished(job);
        finished.fetch_add(num_done, std::memory_order_release);
        const std::int64_t count = lot_of(num_lots - 1).end;
        for (int tries = 0; finished.load(std::memory_order_acquire) < count; ++tries)
            if (tries > kTriesBeforeYield) std::this_thread::yield();
    }

private:
    // Some microseconds: longer than the rest of a tile, shorter than the system's time slice.
    static constexpr int kTriesBeforeYield = 2000;

    Progress& progress_;
    const int thread_;
    int next_job_ = 0;
};

}  // namespace pagemill
