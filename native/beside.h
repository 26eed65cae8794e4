#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "stage.h"

namespace meshnode {

constexpr size_t kMostBeside = 16;  // texts that wait: at 2 s each nobody waits for more

// A thread that does one thing after the other, so that the computing need not wait for them.
class Beside {
  public:
    void add(std::function<void()> work) {
        std::lock_guard lock(mutex_);
        if (work_.size() >= kMostBeside) {
            throw StageError("busy", "too many long texts wait to be tokenized");
        }
        work_.push_back(std::move(work));
        if (!thread_.joinable()) {
            thread_ = std::thread([this] { run(); });
        }
        more_.notify_one();
    }

    void finish() {  // once all of it is done
        {
            std::lock_guard lock(mutex_);
            finished_ = true;
            more_.notify_one();
        }
        if (thread_.joinable()) {
            thread_.join();
        }
    }

  private:
    void run() {
        std::unique_lock lock(mutex_);
        while (true) {
            more_.wait(lock, [&] { return finished_ || !work_.empty(); });
            if (work_.empty()) {
                return;
            }
            const std::function<void()> work = std::move(work_.front());
            work_.pop_front();
            lock.unlock();
            work();
            lock.lock();
        }
    }

    std::mutex mutex_;
    std::condition_variable more_;
    std::deque<std::function<void()>> work_;
    bool finished_ = false;
    std::thread thread_;
};

}  // namespace meshnode
