// What waits for the worker's one compute loop, in the order in which it may be done.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include "frames.h"

namespace meshnode {

constexpr size_t kMaxJobs  = 1024;      // four for each of 256 sessions
constexpr size_t kMaxBytes = 64 << 20;  // of waiting frames; the pipe then holds the node back

// Sessions that were computed together ask again one after the other. Without a moment's wait the first would be
// computed alone, and every second batch be of one. A step takes some 5 ms, the answers' spread is below 1 ms.
constexpr std::chrono::microseconds kGather{1000};
constexpr uint32_t kMostSkips = 64;  // batches between tries while waiting brings nobody

// A request that is answered with an error and nothing else.
struct Refused {
    std::string code, message;
};

struct Job {
    uint64_t id = 0;
    Frame    frame;  // owns what a Push points into
    std::variant<Refused, Request> work;

    Push * push();
    // The sessions whose order this keeps: of a step or a truncation one, of a fork two, otherwise none.
    std::vector<uint64_t> handles();
};

// Two lanes. Requests that no running session waits in (open, close, tokenize, ...) go first, so that a cancel or
// a prompt to tokenize does not wait behind the steps of others; steps, truncations and forks of a session keep their
// order. Sessions take turns: the chunks of a long prompt do not come one after the other while others wait.
class Queue {
  public:
    // Waits while the queue is full. A Close cancels what waits for its handle.
    void push(Job && job);
    void finish();  // nothing more will come

    // What to do next: one job, or several steps that can be one batch: one effective range, one step a handle,
    // sizes that add up to at most most_positions. Empty when finished and drained.
    std::vector<Job> next(uint32_t most_positions, uint32_t n_embd);

  private:
    void gather(std::unique_lock<std::mutex> & lock);
    std::vector<Job> take_batch(uint32_t most_positions, uint32_t n_embd);

    std::unordered_set<uint64_t> last_, before_last_;  // handles of the last two batches
    uint32_t skip_ = 0, next_skip_ = 1;
    bool turned_ = false;  // the last batch let others go before the first that waits

    std::mutex mutex_;
    std::condition_variable not_empty_, not_full_;
    std::deque<Job> control_, steps_;
    size_t bytes_    = 0;
    bool   finished_ = false;
};

// ---- how

inline bool same(const Layers & a, const Layers & b) {
    return a.begin == b.begin && a.end == b.end;
}

template <class T> T * request(Job & job) {
    auto * any = std::get_if<Request>(&job.work);
    return any ? std::get_if<T>(any) : nullptr;
}

// Positions of a push; a residual is [n, n_embd].
inline size_t positions(const Push & push, uint32_t n_embd) {
    return push.tokens.empty() ? push.residual.size() / n_embd : push.tokens.size();
}

inline Push * Job::push() {
    return request<Push>(*this);
}

inline std::vector<uint64_t> Job::handles() {
    if (const auto * step = push()) {
        return {step->handle};
    }
    if (const auto * truncate = request<Truncate>(*this)) {
        return {truncate->handle};
    }
    if (const auto * fork = request<Fork>(*this)) {
        return {fork->handle, fork->from};
    }
    return {};
}

inline void Queue::push(Job && job) {
    std::unique_lock lock(mutex_);
    not_full_.wait(lock, [&] { return control_.size() + steps_.size() < kMaxJobs && bytes_ < kMaxBytes; });
    bytes_ += job.frame.length;
    if (const auto * close = request<Close>(job)) {
        std::deque<Job> others;
        for (Job & waiting : steps_) {
            const std::vector<uint64_t> handles = waiting.handles();
            if (std::ranges::find(handles, close->handle) != handles.end()) {
                waiting.work = Refused{"cancelled", "the session was closed"};
                control_.push_back(std::move(waiting));
            } else {
                others.push_back(std::move(waiting));
            }
        }
        steps_ = std::move(others);
    }
    (job.handles().empty() ? control_ : steps_).push_back(std::move(job));
    not_empty_.notify_one();
}

inline void Queue::finish() {
    std::lock_guard lock(mutex_);
    finished_ = true;
    not_empty_.notify_one();
}

inline std::vector<Job> Queue::next(uint32_t most_positions, uint32_t n_embd) {
    std::unique_lock lock(mutex_);
    not_empty_.wait(lock, [&] { return finished_ || !control_.empty() || !steps_.empty(); });
    if (control_.empty() && !finished_) {
        gather(lock);
    }
    std::vector<Job> jobs;
    if (!control_.empty()) {
        jobs.push_back(std::move(control_.front()));
        control_.pop_front();
    } else if (!steps_.empty()) {
        jobs = take_batch(most_positions, n_embd);
    }
    for (const Job & job : jobs) {
        bytes_ -= job.frame.length;
    }
    not_full_.notify_one();
    return jobs;
}

// Waits for the sessions of the last two batches, as long as such waits bring some.
inline void Queue::gather(std::unique_lock<std::mutex> & lock) {
    std::unordered_set<uint64_t> expected = before_last_;
    expected.insert(last_.begin(), last_.end());
    const size_t had = steps_.size();
    if (had >= expected.size() || expected.size() < 2 || (skip_ > 0 && skip_-- > 0)) {
        return;
    }
    not_empty_.wait_for(lock, kGather, [&] { return finished_ || !control_.empty() || steps_.size() >= expected.size(); });
    const bool paid = steps_.size() > had;
    skip_ = paid ? 0 : next_skip_;
    next_skip_ = paid ? 1 : std::min(2 * next_skip_, kMostSkips);
}

inline std::vector<Job> Queue::take_batch(uint32_t most_positions, uint32_t n_embd) {
    // The first whose session was not in the last batch, unless others went before it then: everybody's turn comes.
    auto due = steps_.begin();
    if (!turned_) {
        std::unordered_set<uint64_t> not_due = last_;
        due = std::find_if(steps_.begin(), steps_.end(), [&](Job & job) {
            const std::vector<uint64_t> handles = job.handles();
            const bool is_due = std::ranges::none_of(handles, [&](uint64_t handle) { return not_due.contains(handle); });
            not_due.insert(handles.begin(), handles.end());
            return is_due;
        });
        due = due == steps_.end() ? steps_.begin() : due;
    }
    turned_ = due != steps_.begin();
    std::vector<Job> jobs;
    jobs.push_back(std::move(*due));
    steps_.erase(due);
    const Push * first = jobs.front().push();
    if (!first) {
        return jobs;
    }
    const Layers effective = first->effective;
    size_t total = positions(*first, n_embd);
    std::unordered_set<uint64_t> passed{first->handle};  // later jobs of these have to wait for the next batch
    std::deque<Job> left;
    for (Job & job : steps_) {
        const Push * push = job.push();
        const size_t size = push ? positions(*push, n_embd) : 0;
        bool is_new = true;
        for (uint64_t handle : job.handles()) {
            is_new &= passed.insert(handle).second;
        }
        if (push && is_new && same(push->effective, effective) && total + size <= most_positions) {
            total += size;
            jobs.push_back(std::move(job));
        } else {
            left.push_back(std::move(job));
        }
    }
    steps_ = std::move(left);
    before_last_ = std::move(last_);
    last_.clear();
    for (Job & job : jobs) {
        last_.insert(job.push()->handle);
    }
    return jobs;
}

}  // namespace meshnode
