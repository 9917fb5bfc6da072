#include "server/jobhost/stop_control.h"

#include <algorithm>
#include <utility>

namespace oom {
namespace {

constexpr double kDefaultGraceSeconds = 60.0;
constexpr double kLongestGraceSeconds = 7 * 24 * 3600.0;

}  // namespace

void StopControl::Stop(const internal::v1::Stop& stop) {
  const double grace_seconds = stop.grace_seconds() > 0.0
                                   ? std::min(stop.grace_seconds(), kLongestGraceSeconds)
                                   : kDefaultGraceSeconds;
  Request next = {
      .final_state = stop.final_state() == v1::JOB_STATE_SUSPENDED ? v1::JOB_STATE_SUSPENDED
                                                                   : v1::JOB_STATE_CANCELLED,
      .reason = stop.reason(),
      .checkpoint = stop.checkpoint(),
      .deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                     std::chrono::duration<double>(grace_seconds)),
  };
  MutexLock lock(mutex_);
  if (request_) {
    next.checkpoint = next.checkpoint && request_->checkpoint;
    next.deadline = std::min(next.deadline, request_->deadline);
  }
  request_ = std::move(next);
  changed_.NotifyAll();
}

std::optional<StopControl::Request> StopControl::request() const {
  MutexLock lock(mutex_);
  return request_;
}

bool StopControl::must_abort() const {
  MutexLock lock(mutex_);
  return request_ && (!request_->checkpoint || Clock::now() >= request_->deadline);
}

void StopControl::CheckpointIsDurable() {
  MutexLock lock(mutex_);
  if (request_) request_->deadline = Clock::time_point::max();
}

void StopControl::AddCheckpoint(int64_t request) {
  MutexLock lock(mutex_);
  checkpoints_.push_back(request);
}

std::vector<int64_t> StopControl::TakeCheckpoints() {
  MutexLock lock(mutex_);
  return std::exchange(checkpoints_, {});
}

bool StopControl::has_checkpoints() const {
  MutexLock lock(mutex_);
  return !checkpoints_.empty();
}

bool StopControl::WaitForStop(std::chrono::duration<double> timeout) const {
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(timeout);
  MutexLock lock(mutex_);
  while (!request_) {
    const auto left = deadline - Clock::now();
    if (left <= Clock::duration::zero()) return false;
    changed_.WaitFor(mutex_, left);
  }
  return true;
}

}  // namespace oom
