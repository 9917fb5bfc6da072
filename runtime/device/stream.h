// A Stream runs work in order; an Event orders work between streams (architecture, "Streams on every
// device"). Each stream is a thread that takes its work in order: on the CPU device the work itself runs there, so
// that overlap and races are real; on a GPU it enqueues on a CUDA stream, and may wait there for the host's words.
// Events carry tickets that only grow (the step's number): waiting for a ticket never confuses two steps.
// Launch, Record and Wait are called by one thread, the executor's; the work runs elsewhere.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace oom {

// What a device's stream records beside an event's ticket.
class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
};

// Holds the highest ticket recorded. Must outlive the streams that use it.
class Event {
 public:
  uint64_t ticket() const { return ticket_.load(std::memory_order_acquire); }

  // Of the recording stream's thread. Wakes whoever awaits it.
  void Raise(uint64_t ticket);
  // Blocks the calling thread until the ticket is reached; returns the seconds that it stood still.
  double Await(uint64_t ticket) const;

  // Made by the first device stream that records the event, before it raises the ticket.
  std::unique_ptr<DeviceEvent> device;

 private:
  std::atomic<uint64_t> ticket_{0};
};

class Stream {
 public:
  // When work ran: seconds of steady_clock.
  using Done = std::function<void(double start_seconds, double end_seconds)>;

  virtual ~Stream() = default;
  // Runs `work` after everything enqueued before. `done` is called once what the work did is complete; those of one
  // stream in order, on any thread.
  virtual void Launch(std::function<void()> work, Done done) = 0;
  void Launch(std::function<void()> work) { Launch(std::move(work), nullptr); }
  // Raises `event` to `ticket` once everything enqueued before is done (on a device: what is enqueued after the
  // event's Wait runs after it).
  virtual void Record(Event* event, uint64_t ticket) = 0;
  // What is enqueued later runs after `event` has reached `ticket`.
  virtual void Wait(const Event* event, uint64_t ticket) = 0;
  // Seconds that the stream has stood still for other streams with work enqueued behind it.
  virtual double wait_seconds() const = 0;
};

// A stream that is a thread of its own; `start` is called on it first (thread name, affinity, LibTorch's
// thread settings). The destructor runs what is enqueued, then joins.
std::unique_ptr<Stream> MakeCpuStream(const std::string& name, std::function<void()> start);

}  // namespace oom
