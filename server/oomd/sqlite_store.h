// The Store on SQLite: WAL, synchronous=FULL, STRICT tables, one connection that writes and
// checkpoints (the thread that calls it), and one read-only connection for ReadEvents. Not
// thread-safe but for ReadEvents.

#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "server/oomd/store.h"

namespace oom {

class SqliteStore : public Store {
 public:
  struct Options {
    std::string path;  // In a folder that exists.
    double event_retention_seconds = 7 * 86400.0;
    int64_t event_retention_count = 1'000'000;
    double request_retention_seconds = 86400.0;
  };
  static constexpr int kSchemaVersion = 1;

  // Opens or creates. Migrates an older schema, after a copy beside it. Fails with
  // kFailedPrecondition on a network file system or a newer schema, kDataLoss if the quick check
  // fails (the message says what to do), else kInternal.
  static Result<std::unique_ptr<SqliteStore>> Open(const Options& options);
  ~SqliteStore() override;

  Result<StoreContent> Load() override;
  Status Commit(const StoreBatch& batch) override;
  Result<std::optional<StoredRequest>> FindRequest(uint32_t owner,
                                                   const std::string& request_id) override;
  Result<std::vector<StoredEvent>> ReadEvents(int64_t after, int limit) override;
  Status Compact(double now_unix_seconds) override;

 private:
  struct Impl;
  explicit SqliteStore(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

// Fails with kFailedPrecondition if `directory` is on NFS, SMB, or another file system whose locks
// and syncs SQLite cannot trust. `magic` overrides statfs, for tests; 0: ask.
Status CheckLocalFileSystem(const std::string& directory, int64_t magic = 0);

}  // namespace oom
