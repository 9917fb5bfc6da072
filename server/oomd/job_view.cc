#include "server/oomd/job_view.h"

#include <algorithm>

namespace oom {

void JobView::Put(int64_t submit_order, const v1::Job& job) {
  auto copy = std::make_shared<const v1::Job>(job);
  const MutexLock lock(mutex_);
  order_[job.name()] = submit_order;
  by_order_[submit_order] = std::move(copy);
}

JobView::JobPointer JobView::Get(const std::string& name) const {
  const MutexLock lock(mutex_);
  const auto it = order_.find(name);
  return it == order_.end() ? nullptr : by_order_.at(it->second);
}

std::vector<std::pair<int64_t, JobView::JobPointer>> JobView::List(
    int64_t after, size_t limit, const std::vector<v1::JobState>& states) const {
  std::vector<std::pair<int64_t, JobPointer>> jobs;
  const MutexLock lock(mutex_);
  for (auto it = by_order_.upper_bound(after); it != by_order_.end() && jobs.size() < limit; ++it) {
    if (!states.empty() &&
        std::find(states.begin(), states.end(), it->second->state()) == states.end())
      continue;
    jobs.push_back(*it);
  }
  return jobs;
}

std::map<v1::JobState, int> JobView::CountByState() const {
  std::map<v1::JobState, int> counts;
  const MutexLock lock(mutex_);
  for (const auto& [order, job] : by_order_) ++counts[job->state()];
  return counts;
}

}  // namespace oom
