// A Stream runs work in order; an Event orders work between streams (architecture, "Streams on every
// device"). On the CPU device a stream is a thread, so that overlap and races are real; on a GPU it is a CUDA
// stream and the same calls enqueue. Events carry tickets that only grow (the step's number): waiting for
// a ticket never confuses two steps.
// Launch, Record and Wait are called by one thread, the executor's; the work runs elsewhere.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace oom {

// Holds the highest ticket recorded. Must outlive the streams that use it.
class Event {
 public:
  uint64_t ticket() const { return ticket_.load(std::memory_order_acquire); }

 private:
  friend class CpuStream;
  std::atomic<uint64_t> ticket_{0};
};

class Stream {
 public:
  virtual ~Stream() = default;
  // Runs `work` after everything enqueued before.
  virtual void Launch(std::function<void()> work) = 0;
  // Raises `event` to `ticket` once everything enqueued before is done.
  virtual void Record(Event* event, uint64_t ticket) = 0;
  // What is enqueued later runs after `event` has reached `ticket`.
  virtual void Wait(const Event* event, uint64_t ticket) = 0;
  // Seconds that the stream has stood still in Wait with work enqueued behind it.
  virtual double wait_seconds() const = 0;
};

// A stream that is a thread of its own; `start` is called on it first (thread name, affinity, LibTorch's
// thread settings). The destructor runs what is enqueued, then joins.
std::unique_ptr<Stream> MakeCpuStream(const std::string& name, std::function<void()> start);

}  // namespace oom
