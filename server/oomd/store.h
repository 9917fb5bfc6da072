// Store keeps jobs, the events about them and request ids. Every commit is one transaction that is
// on the disk when Commit returns. The SQLite implementation is in sqlite_store.h; tests have one
// in memory.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/base/status.h"
#include "server/oomd/job_record.h"

namespace oom {

struct StoredEvent {
  int64_t sequence = 0;
  double unix_seconds = 0;
  std::string job_name;
  v1::Job job;  // Brief().
};

struct StoredRequest {
  uint32_t owner = 0;
  std::string request_id;
  uint64_t payload_hash = 0;
  double unix_seconds = 0;
  v1::Job answer;
};

struct StoreBatch {
  std::vector<JobRecord> jobs;
  std::vector<StoredEvent> events;
  std::vector<StoredRequest> requests;
  bool empty() const { return jobs.empty() && events.empty() && requests.empty(); }
};

struct StoreContent {
  std::string store_id;  // Random, of this database: tokens of another one are refused.
  std::vector<JobRecord> jobs;
  int64_t last_sequence = 0;
};

class Store {
 public:
  virtual ~Store() = default;

  virtual Result<StoreContent> Load() = 0;
  // All or nothing, durable on return. After a failure the store refuses every later commit with
  // kUnavailable: what reached the disk is unknown until the database is opened again.
  virtual Status Commit(const StoreBatch& batch) = 0;
  virtual Result<std::optional<StoredRequest>> FindRequest(uint32_t owner,
                                                           const std::string& request_id) = 0;
  // At most `limit` events with sequence > `after`, in order. Thread-safe, unlike the others. Fails
  // with kOutOfRange if some of them have been compacted away.
  virtual Result<std::vector<StoredEvent>> ReadEvents(int64_t after, int limit) = 0;
  // Forgets events and requests past their time, and moves the log into the database.
  virtual Status Compact(double now_unix_seconds) = 0;
};

}  // namespace oom
