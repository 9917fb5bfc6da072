// What a job host knows of its job's progress, over all of its attempts. Several threads write it
// (training loop, snapshot writer), the control server is told after each change. Thread-safe.

#pragma once

#include <algorithm>
#include <functional>

#include "oom/internal/v1/control.pb.h"
#include "runtime/base/mutex.h"

namespace oom {

class JobStatus {
 public:
  explicit JobStatus(std::function<void(const internal::v1::Progress&)> publish)
      : publish_(std::move(publish)) {}

  template <class Change>
  void Update(Change change) {
    internal::v1::Progress copy;
    {
      MutexLock lock(mutex_);
      change(progress_);
      copy = progress_;
    }
    publish_(copy);
  }

  internal::v1::Progress progress() const {
    MutexLock lock(mutex_);
    return progress_;
  }

 private:
  const std::function<void(const internal::v1::Progress&)> publish_;
  mutable Mutex mutex_;
  internal::v1::Progress progress_ OOM_GUARDED_BY(mutex_);
};

}  // namespace oom
