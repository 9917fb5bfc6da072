// The job's state transitions that oomd has not recorded yet, in a synced file: a transition is on
// disk before anybody is told of it, and stays there until it is acknowledged (service decisions,
// D2). Numbers are consecutive over restarts of the job host. File: the line "oom-transitions 1\n",
// then records {uint32 bytes, uint32 CRC32C, kind, payload}, all little-endian; kind 'A' is the
// last acknowledged number (8 bytes), kind 'T' a Transition message. Thread-safe.

#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "oom/internal/v1/control.pb.h"
#include "runtime/base/mutex.h"
#include "runtime/base/status.h"
#include "runtime/base/unique_fd.h"

namespace oom {

class TransitionJournal {
 public:
  // Opens or creates the journal. A record that a crash has cut at the end is dropped; anything
  // else that is not as written fails with kDataLoss. The next number is the journal's, or
  // `first_number` if that is higher. Also fails with codes of ErrnoStatus.
  static Result<std::unique_ptr<TransitionJournal>> Open(const std::string& path,
                                                         int64_t first_number);

  // Numbers the transition, makes it durable and returns it. On failure (codes of ErrnoStatus)
  // nothing was recorded and the journal takes no more: what is on disk is not known.
  Result<internal::v1::Transition> Append(internal::v1::Transition transition);

  // Forgets every transition up to `number` and rewrites the file. Numbers that were never given
  // are ignored.
  Status Acknowledge(int64_t number);

  std::vector<internal::v1::Transition> pending() const;
  int64_t next_number() const;

 private:
  explicit TransitionJournal(std::string path) : path_(std::move(path)) {}

  Status Load() OOM_REQUIRES(mutex_);
  Status ParseRecord(char kind, std::string_view payload) OOM_REQUIRES(mutex_);
  Status Rewrite() OOM_REQUIRES(mutex_);

  const std::string path_;

  mutable Mutex mutex_;
  UniqueFd file_ OOM_GUARDED_BY(mutex_);
  bool broken_ OOM_GUARDED_BY(mutex_) = false;
  int64_t acknowledged_ OOM_GUARDED_BY(mutex_) = -1;
  int64_t next_number_ OOM_GUARDED_BY(mutex_) = 0;
  std::vector<internal::v1::Transition> pending_ OOM_GUARDED_BY(mutex_);
};

}  // namespace oom
