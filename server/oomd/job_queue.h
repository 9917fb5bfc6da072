// JobQueue orders the jobs that wait: by priority (higher first), then by order of submission. The
// order is strict: nothing starts before the head unless the head can never start on this node.
// There is no backfill, so a large job is never starved by small ones. Not thread-safe: the control
// thread owns it.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "server/oomd/node_resources.h"

namespace oom {

class JobQueue {
 public:
  struct Entry {
    std::string id;
    int priority = 0;
    int64_t submit_order = 0;
    ResourceNeed need;
  };
  struct Waiting {
    std::string id;
    int jobs_ahead = 0;
    // WAITING_RESOURCES (this job is next, or never fits) or WAITING_PRIORITY (another is before
    // it).
    std::string reason;
    std::string blocked_by;  // Of WAITING_RESOURCES.
    std::string head;        // Of WAITING_PRIORITY: the id of the job that starts first.
  };

  // REQUIRES: `entry.id` is not in the queue.
  void Add(const Entry& entry);
  // Does nothing if it is not there.
  void Remove(const std::string& id);
  bool empty() const { return entries_.empty(); }
  size_t size() const { return entries_.size(); }

  // The head, if it fits beside what `resources` holds now; "" if nothing can start. Does not
  // remove it.
  std::string NextToStart(const NodeResources& resources) const;
  // Why each job waits, in queue order.
  std::vector<Waiting> Explain(const NodeResources& resources) const;

 private:
  std::map<std::pair<int64_t, int64_t>, Entry> entries_;  // By (-priority, submit_order).
  std::map<std::string, std::pair<int64_t, int64_t>> keys_;
};

}  // namespace oom
