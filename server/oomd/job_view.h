// JobView is what readers see of the jobs: what is committed, and the newest progress. The control
// thread writes it; reads come from any thread and never wait for the disk. Thread-safe.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "oom/v1/job.pb.h"
#include "runtime/base/mutex.h"

namespace oom {

class JobView {
 public:
  using JobPointer = std::shared_ptr<const v1::Job>;

  void Put(int64_t submit_order, const v1::Job& job);
  // nullptr if there is none of that name ("jobs/...").
  JobPointer Get(const std::string& name) const;
  // Jobs with submit order > `after`, in that order, that `states` holds (empty: all); at most
  // `limit`.
  std::vector<std::pair<int64_t, JobPointer>> List(int64_t after, size_t limit,
                                                   const std::vector<v1::JobState>& states) const;
  std::map<v1::JobState, int> CountByState() const;

 private:
  mutable Mutex mutex_;
  std::map<int64_t, JobPointer> by_order_ OOM_GUARDED_BY(mutex_);
  std::map<std::string, int64_t> order_ OOM_GUARDED_BY(mutex_);
};

}  // namespace oom
