// A Store in memory, with commits that can be made to fail. Its content outlives the controllers
// over it, as a disk does.

#pragma once

#include <algorithm>
#include <map>
#include <utility>

#include "server/oomd/store.h"

namespace oom {

class MemoryStore : public Store {
 public:
  Result<StoreContent> Load() override {
    StoreContent content{.store_id = "0123456789abcdef", .jobs = {}, .last_sequence = 0};
    for (const auto& [uid, record] : jobs) content.jobs.push_back(record);
    std::sort(content.jobs.begin(), content.jobs.end(), [](const JobRecord& a, const JobRecord& b) {
      return a.submit_order < b.submit_order;
    });
    if (!events.empty()) content.last_sequence = events.back().sequence;
    return content;
  }
  Status Commit(const StoreBatch& batch) override {
    if (fail_from_now) return Status(Code::kUnavailable, "disk full").WithReason("STORE_FAILED");
    ++commit_count;
    for (const JobRecord& record : batch.jobs) jobs[record.job.uid()] = record;
    for (const StoredEvent& event : batch.events) events.push_back(event);
    for (const StoredRequest& request : batch.requests)
      requests[{request.owner, request.request_id}] = request;
    return Status::Ok();
  }
  Result<std::optional<StoredRequest>> FindRequest(uint32_t owner,
                                                   const std::string& request_id) override {
    const auto it = requests.find({owner, request_id});
    if (it == requests.end()) return std::optional<StoredRequest>();
    return std::optional<StoredRequest>(it->second);
  }
  Result<std::vector<StoredEvent>> ReadEvents(int64_t after, int limit) override {
    std::vector<StoredEvent> found;
    for (const StoredEvent& event : events) {
      if (event.sequence > after && static_cast<int>(found.size()) < limit) found.push_back(event);
    }
    return found;
  }
  Status Compact(double) override { return Status::Ok(); }

  std::map<std::string, JobRecord> jobs;
  std::vector<StoredEvent> events;
  std::map<std::pair<uint32_t, std::string>, StoredRequest> requests;
  bool fail_from_now = false;
  int commit_count = 0;
};

}  // namespace oom
