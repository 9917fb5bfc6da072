#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "runtime/base/clock.h"
#include "runtime/device/stream.h"

namespace oom {

void Event::Raise(uint64_t ticket) {
  ticket_.store(ticket, std::memory_order_release);
  ticket_.notify_all();
}

double Event::Await(uint64_t ticket) const {
  uint64_t seen = ticket_.load(std::memory_order_acquire);
  if (seen >= ticket) return 0.0;
  const double start = MonotonicSeconds();
  while (seen < ticket) {
    ticket_.wait(seen, std::memory_order_acquire);
    seen = ticket_.load(std::memory_order_acquire);
  }
  return MonotonicSeconds() - start;
}

class CpuStream : public Stream {
 public:
  CpuStream(const std::string& name, std::function<void()> start)
      : thread_([this, name, start = std::move(start)] {
          ::pthread_setname_np(::pthread_self(), name.substr(0, 15).c_str());
          if (start) start();
          Run();
        }) {}

  ~CpuStream() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }

  void Launch(std::function<void()> work, Done done) override {
    if (done) {
      work = [work = std::move(work), done = std::move(done)] {
        const double start = MonotonicSeconds();
        work();
        done(start, MonotonicSeconds());
      };
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back(std::move(work));
    }
    changed_.notify_one();
  }

  void Record(Event* event, uint64_t ticket) override {
    Launch([event, ticket] { event->Raise(ticket); }, nullptr);
  }

  void Wait(const Event* event, uint64_t ticket) override {
    Launch(
        [this, event, ticket] {
          waited_nanoseconds_ += static_cast<int64_t>(event->Await(ticket) * 1e9);
        },
        nullptr);
  }

  double wait_seconds() const override { return static_cast<double>(waited_nanoseconds_) * 1e-9; }

 private:
  void Run() {
    while (true) {
      std::function<void()> work;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return closed_ || !queue_.empty(); });
        if (queue_.empty()) return;
        work = std::move(queue_.front());
        queue_.pop_front();
      }
      work();
    }
  }

  std::atomic<int64_t> waited_nanoseconds_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool closed_ = false;
  std::thread thread_;  // Last: it uses everything above.
};

std::unique_ptr<Stream> MakeCpuStream(const std::string& name, std::function<void()> start) {
  return std::make_unique<CpuStream>(name, std::move(start));
}

}  // namespace oom
