// Interrupt turns Ctrl-C (SIGINT) into calls on a thread of its own. Make it before any other
// thread: it blocks the signal, and threads inherit that. Until OnInterrupt, Ctrl-C ends the
// process with 130. Thread-safe.

#pragma once

#include <functional>
#include <thread>

#include "runtime/base/mutex.h"

namespace oom {

class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  // From now on each Ctrl-C calls `callback`, which must not wait for the thread that calls this.
  // It is not called again once OnInterrupt(nullptr) has returned, which brings the default back.
  void OnInterrupt(std::function<void()> callback);
  // How many came since OnInterrupt.
  int count() const;
  // Waits until more than `count` came; false when that takes longer than `seconds`.
  bool WaitForMoreThan(int count, double seconds);

 private:
  void Loop();

  mutable Mutex mutex_;
  CondVar changed_;
  std::function<void()> callback_ OOM_GUARDED_BY(mutex_);
  int count_ OOM_GUARDED_BY(mutex_) = 0;
  bool stopping_ OOM_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace oom
