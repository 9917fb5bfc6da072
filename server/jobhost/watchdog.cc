#include "server/jobhost/watchdog.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdio>
#include <utility>

#include "runtime/base/check.h"

namespace oom {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kTurnMilliseconds = 20;
// For the rest of a frame whose beginning is there.
constexpr auto kFrameTime = std::chrono::seconds(10);

Status WorkerStatus(const internal::v1::WorkerFailed& failed, int rank) {
  const Code code = failed.code() == 0 ? Code::kInternal : static_cast<Code>(failed.code());
  std::string reason = failed.reason();
  if (reason.empty()) reason = code == Code::kInvalidArgument ? "INVALID_INPUT" : "INTERNAL";
  return Status(code, "rank " + std::to_string(rank) + ": " + failed.message())
      .WithReason(std::move(reason))
      .WithField(failed.field());
}

}  // namespace

Watchdog::Watchdog(Options options)
    : options_(std::move(options)),
      end_event_(::eventfd(0, EFD_CLOEXEC)),
      ranks_(options_.workers.size()),
      stream_ended_(options_.workers.size(), 0) {
  OOM_CHECK(end_event_.valid());
  for (Rank& rank : ranks_) rank.moved_at = Clock::now();
  thread_ = std::thread([this] { Run(); });
}

Watchdog::~Watchdog() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t count = ::write(end_event_.get(), &one, sizeof(one));
  thread_.join();
}

void Watchdog::Run() {
  while (true) {
    std::vector<struct pollfd> entries = {{.fd = end_event_.get(), .events = POLLIN, .revents = 0}};
    const auto worker_count = static_cast<int>(options_.workers.size());
    for (int rank = 0; rank < worker_count; ++rank) {
      WorkerProcess& worker = *options_.workers[rank];
      bool exited = false;
      {
        MutexLock lock(mutex_);
        exited = ranks_[rank].exited;
      }
      entries.push_back(
          {.fd = stream_ended_[rank] ? -1 : worker.channel().fd(), .events = POLLIN, .revents = 0});
      entries.push_back({.fd = exited ? -1 : worker.pidfd(), .events = POLLIN, .revents = 0});
    }
    ::poll(entries.data(), entries.size(), kTurnMilliseconds);
    if ((entries[0].revents & POLLIN) != 0) return;
    for (int rank = 0; rank < worker_count; ++rank) {
      // Frames first: what a worker said before it ended is why it ended.
      if (entries[1 + 2 * rank].revents != 0) TakeFrame(rank);
      if (entries[2 + 2 * rank].revents != 0) TakeExit(rank);
    }
    if (options_.must_abort && options_.must_abort()) {
      Fail(Status(Code::kCancelled, "the job was stopped at once"));
    }
    CheckHeartbeats();
  }
}

void Watchdog::TakeFrame(int rank) {
  internal::v1::WorkerFrame frame;
  const Status status =
      options_.workers[rank]->channel().Receive(&frame, nullptr, Clock::now() + kFrameTime);
  if (!status.ok()) {
    // An end of stream is told by the exit that follows; anything else is a broken worker.
    stream_ended_[rank] = 1;
    if (status.code() != Code::kUnavailable) {
      FailRank(rank,
               Status(Code::kInternal, "rank " + std::to_string(rank) + ": " + status.message())
                   .WithReason("WORKER_CRASHED"),
               false);
    }
    return;
  }
  if (frame.has_failed()) return FailRank(rank, WorkerStatus(frame.failed(), rank), false);
  MutexLock lock(mutex_);
  if (frame.has_ready()) {
    ranks_[rank].ready = frame.ready();
    ranks_[rank].moved_at = Clock::now();
  }
  if (frame.has_done()) ranks_[rank].done = frame.done();
  changed_.NotifyAll();
}

void Watchdog::TakeExit(int rank) {
  const std::optional<ProcessExit> exit = options_.workers[rank]->Peek();
  if (!exit) return;
  // Frames that came between the poll and the end.
  struct pollfd entry = {
      .fd = options_.workers[rank]->channel().fd(), .events = POLLIN, .revents = 0};
  while (!stream_ended_[rank] && ::poll(&entry, 1, 0) > 0) TakeFrame(rank);
  bool done = false;
  {
    MutexLock lock(mutex_);
    ranks_[rank].exited = true;
    done = ranks_[rank].done.has_value();
    changed_.NotifyAll();
  }
  if (done && exit->signal == 0 && exit->exit_code == 0) return;
  FailRank(
      rank,
      Status(Code::kAborted, "the worker of rank " + std::to_string(rank) + " " + exit->Describe())
          .WithReason("WORKER_CRASHED"),
      false);
}

bool Watchdog::HasWork(int rank, const Rank& state) const {
  if (state.exited) return false;
  if (!state.ready || expect_end_.load()) return true;
  return options_.page->step_done(rank).Load() < options_.page->step_limit().Load();
}

void Watchdog::CheckHeartbeats() {
  const bool host_is_busy = options_.host_is_busy && options_.host_is_busy();
  const Clock::time_point now = Clock::now();
  int longest_silent = -1;
  {
    MutexLock lock(mutex_);
    if (failure_) return;
    for (size_t index = 0; index < ranks_.size(); ++index) {
      Rank& state = ranks_[index];
      const int rank = static_cast<int>(index);
      const uint64_t heartbeat = options_.page->heartbeat(rank).Load();
      if (heartbeat != state.heartbeat || host_is_busy || !HasWork(rank, state)) {
        state.heartbeat = heartbeat;
        state.moved_at = now;
      } else if (now - state.moved_at > options_.silence_limit &&
                 (longest_silent < 0 || state.moved_at < ranks_[longest_silent].moved_at)) {
        // Its peers stand still because they wait for it: it went silent first.
        longest_silent = rank;
      }
    }
  }
  if (longest_silent < 0) return;
  char seconds[32];
  std::snprintf(seconds, sizeof(seconds), "%g", options_.silence_limit.count());
  FailRank(longest_silent,
           Status(Code::kDeadlineExceeded, "the worker of rank " + std::to_string(longest_silent) +
                                               " has shown no sign of life for " + seconds + " s")
               .WithReason("WORKER_HUNG"),
           true);
}

void Watchdog::FailRank(int rank, Status status, bool hung) {
  {
    MutexLock lock(mutex_);
    if (failure_) return;  // What comes after the first failure is its consequence.
    failure_ = Failure{.status = std::move(status), .rank = rank, .hung = hung};
  }
  options_.page->Abort();
  MutexLock lock(mutex_);
  changed_.NotifyAll();
}

void Watchdog::Fail(Status status) { FailRank(-1, std::move(status), false); }

std::optional<Watchdog::Failure> Watchdog::failure() const {
  MutexLock lock(mutex_);
  return failure_;
}

void Watchdog::ExpectEnd() {
  MutexLock lock(mutex_);
  for (Rank& rank : ranks_) rank.moved_at = Clock::now();
  expect_end_.store(true);
}

Result<std::vector<internal::v1::WorkerReady>> Watchdog::WaitReady() {
  MutexLock lock(mutex_);
  while (true) {
    if (failure_) return failure_->status;
    std::vector<internal::v1::WorkerReady> said;
    for (const Rank& rank : ranks_) {
      if (rank.ready) said.push_back(*rank.ready);
    }
    if (said.size() == ranks_.size()) return said;
    changed_.Wait(mutex_);
  }
}

Result<std::vector<internal::v1::WorkerDone>> Watchdog::WaitDone() {
  MutexLock lock(mutex_);
  while (true) {
    if (failure_) return failure_->status;
    std::vector<internal::v1::WorkerDone> said;
    for (const Rank& rank : ranks_) {
      if (rank.done && rank.exited) said.push_back(*rank.done);
    }
    if (said.size() == ranks_.size()) return said;
    changed_.Wait(mutex_);
  }
}

}  // namespace oom
