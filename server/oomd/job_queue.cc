#include "server/oomd/job_queue.h"

#include "runtime/base/check.h"

namespace oom {

void JobQueue::Add(const Entry& entry) {
  OOM_CHECK(!keys_.contains(entry.id));
  const std::pair<int64_t, int64_t> key(-int64_t{entry.priority}, entry.submit_order);
  entries_[key] = entry;
  keys_[entry.id] = key;
}

void JobQueue::Remove(const std::string& id) {
  const auto it = keys_.find(id);
  if (it == keys_.end()) return;
  entries_.erase(it->second);
  keys_.erase(it);
}

std::string JobQueue::NextToStart(const NodeResources& resources) const {
  for (const auto& [key, entry] : entries_) {
    if (!resources.NeverFits(entry.need).empty()) continue;
    return resources.Blocker(entry.need).empty() ? entry.id : "";
  }
  return "";
}

std::vector<JobQueue::Waiting> JobQueue::Explain(const NodeResources& resources) const {
  std::vector<Waiting> waiting;
  std::string head;
  int ahead = 0;
  for (const auto& [key, entry] : entries_) {
    Waiting why{.id = entry.id,
                .jobs_ahead = ahead,
                .reason = "WAITING_RESOURCES",
                .blocked_by = "",
                .head = ""};
    if (const std::string never = resources.NeverFits(entry.need); !never.empty()) {
      why.blocked_by = never + " (more than this node has; it does not hold up other jobs)";
    } else if (head.empty()) {
      why.blocked_by = resources.Blocker(entry.need);
      head = entry.id;
      ++ahead;
    } else {
      why.reason = "WAITING_PRIORITY";
      why.head = head;
      ++ahead;
    }
    waiting.push_back(std::move(why));
  }
  return waiting;
}

}  // namespace oom
