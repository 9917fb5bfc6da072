#include "server/oomd/sqlite_store.h"

#include <sqlite3.h>
#include <sys/random.h>
#include <sys/vfs.h>

#include <cerrno>
#include <cstdio>
#include <set>

#include "runtime/base/mutex.h"

namespace oom {
namespace {

constexpr const char* kSchema = R"sql(
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE jobs (
  uid TEXT PRIMARY KEY,
  name TEXT NOT NULL UNIQUE,
  submit_order INTEGER NOT NULL UNIQUE,
  state INTEGER NOT NULL,
  sequence INTEGER NOT NULL,
  last_transition INTEGER NOT NULL,
  last_failure_durable_step INTEGER NOT NULL,
  stop_state INTEGER NOT NULL,
  stop_with_checkpoint INTEGER NOT NULL,
  stop_grace_seconds REAL NOT NULL,
  job BLOB NOT NULL,
  pools BLOB NOT NULL
) STRICT;
CREATE TABLE events (
  sequence INTEGER PRIMARY KEY,
  unix_seconds REAL NOT NULL,
  job_name TEXT NOT NULL,
  job BLOB NOT NULL
) STRICT;
CREATE TABLE requests (
  owner INTEGER NOT NULL,
  request_id TEXT NOT NULL,
  payload_hash INTEGER NOT NULL,
  unix_seconds REAL NOT NULL,
  answer BLOB NOT NULL,
  PRIMARY KEY (owner, request_id)
) STRICT;
CREATE INDEX requests_by_time ON requests (unix_seconds);
)sql";

// A prepared statement that lives for one use of it.
class Statement {
 public:
  Statement(sqlite3* database, const char* sql) {
    rc_ = sqlite3_prepare_v2(database, sql, -1, &raw_, nullptr);
  }
  ~Statement() { sqlite3_finalize(raw_); }
  Statement(const Statement&) = delete;
  Statement& operator=(const Statement&) = delete;

  Statement& Int(int64_t value) { return Check(sqlite3_bind_int64(raw_, ++next_, value)); }
  Statement& Real(double value) { return Check(sqlite3_bind_double(raw_, ++next_, value)); }
  Statement& Text(const std::string& value) {
    return Check(sqlite3_bind_text(raw_, ++next_, value.data(), static_cast<int>(value.size()),
                                   SQLITE_TRANSIENT));
  }
  Statement& Blob(const std::string& value) {
    return Check(sqlite3_bind_blob(raw_, ++next_, value.data(), static_cast<int>(value.size()),
                                   SQLITE_TRANSIENT));
  }
  // true: a row; false: done or failed (see ok()).
  bool Step() {
    if (rc_ != SQLITE_OK && rc_ != SQLITE_ROW) return false;
    rc_ = sqlite3_step(raw_);
    return rc_ == SQLITE_ROW;
  }
  bool ok() const { return rc_ == SQLITE_OK || rc_ == SQLITE_ROW || rc_ == SQLITE_DONE; }

  int64_t IntAt(int column) { return sqlite3_column_int64(raw_, column); }
  double RealAt(int column) { return sqlite3_column_double(raw_, column); }
  std::string BytesAt(int column) {
    const void* data = sqlite3_column_blob(raw_, column);
    return std::string(static_cast<const char*>(data),
                       data == nullptr ? 0 : sqlite3_column_bytes(raw_, column));
  }

 private:
  Statement& Check(int rc) {
    if (rc_ == SQLITE_OK) rc_ = rc;
    return *this;
  }
  sqlite3_stmt* raw_ = nullptr;
  int rc_ = SQLITE_OK;
  int next_ = 0;
};

Status SqliteStatus(sqlite3* database, const std::string& what) {
  return Status(Code::kInternal,
                what + ": " + (database != nullptr ? sqlite3_errmsg(database) : "out of memory"))
      .WithReason("STORE_FAILED");
}

Status Execute(sqlite3* database, const std::string& sql) {
  if (sqlite3_exec(database, sql.c_str(), nullptr, nullptr, nullptr) == SQLITE_OK)
    return Status::Ok();
  return SqliteStatus(database, "store: " + sql.substr(0, 60));
}

Result<int64_t> QueryInt(sqlite3* database, const char* sql) {
  Statement statement(database, sql);
  if (statement.Step()) return statement.IntAt(0);
  if (!statement.ok()) return SqliteStatus(database, std::string("store: ") + sql);
  return int64_t{0};
}

std::string PackHoldings(const JobRecord& record) {
  internal::v1::JobStart holder;
  for (const internal::v1::Pool& pool : record.pools) *holder.add_pools() = pool;
  holder.mutable_devices()->Assign(record.devices.begin(), record.devices.end());
  return holder.SerializeAsString();
}

}  // namespace

struct SqliteStore::Impl {
  Options options;
  sqlite3* writer = nullptr;
  bool failed = false;
  int commits_since_checkpoint = 0;

  Mutex reader_mutex;
  sqlite3* reader OOM_GUARDED_BY(reader_mutex) = nullptr;

  ~Impl() {
    sqlite3_close(reader);
    sqlite3_close(writer);
  }
  Status Migrate();
  Status Write(const StoreBatch& batch);
};

SqliteStore::SqliteStore(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SqliteStore::~SqliteStore() = default;

Status CheckLocalFileSystem(const std::string& directory, int64_t magic) {
  if (magic == 0) {
    struct statfs info = {};
    if (statfs(directory.c_str(), &info) != 0) return ErrnoStatus(errno, "statfs " + directory);
    magic = static_cast<int64_t>(static_cast<uint32_t>(info.f_type));
  }
  // NFS, SMB 1, CIFS, SMB 2, AFS, Coda, NCP, 9p, Ceph, Lustre.
  static const std::set<int64_t> remote = {0x6969,     0x517B, 0xFF534D42, 0xFE534D42, 0x5346414F,
                                           0x73757245, 0x564C, 0x01021997, 0x00C36400, 0x0BD00BD0};
  if (!remote.contains(magic)) return Status::Ok();
  return Status(Code::kFailedPrecondition, "the state directory " + directory +
                                               " is on a network file system, on which "
                                               "acknowledged jobs could be lost; give a local "
                                               "one with --state-dir")
      .WithField("state_dir");
}

Result<std::unique_ptr<SqliteStore>> SqliteStore::Open(const Options& options) {
  const size_t slash = options.path.rfind('/');
  OOM_RETURN_IF_ERROR(
      CheckLocalFileSystem(slash == std::string::npos ? "." : options.path.substr(0, slash + 1)));
  auto impl = std::make_unique<Impl>();
  impl->options = options;
  const int flags = SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_NOMUTEX;
  if (sqlite3_open_v2(options.path.c_str(), &impl->writer, flags, nullptr) != SQLITE_OK) {
    return SqliteStatus(impl->writer, "opening " + options.path);
  }
  sqlite3_busy_timeout(impl->writer, 5000);
  const Status opened = Execute(impl->writer,
                                "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;"
                                "PRAGMA foreign_keys=ON; PRAGMA trusted_schema=OFF;"
                                "PRAGMA wal_autocheckpoint=0");
  const std::string advice =
      "; move " + options.path +
      "* aside to start with an empty queue, or restore a copy (docs/OPERATIONS.md)";
  if (!opened.ok())
    return Status(Code::kDataLoss, opened.message() + advice).WithReason("STORE_CORRUPT");
  {
    Statement check(impl->writer, "PRAGMA quick_check(1)");
    const std::string answer = check.Step() ? check.BytesAt(0) : sqlite3_errmsg(impl->writer);
    if (answer != "ok") {
      return Status(Code::kDataLoss, "the job database fails its check: " + answer + advice)
          .WithReason("STORE_CORRUPT");
    }
  }
  OOM_RETURN_IF_ERROR(impl->Migrate());
  {
    const MutexLock lock(impl->reader_mutex);
    if (sqlite3_open_v2(options.path.c_str(), &impl->reader,
                        SQLITE_OPEN_READONLY | SQLITE_OPEN_NOMUTEX, nullptr) != SQLITE_OK) {
      return SqliteStatus(impl->reader, "opening " + options.path + " to read");
    }
    sqlite3_busy_timeout(impl->reader, 5000);
  }
  return std::unique_ptr<SqliteStore>(new SqliteStore(std::move(impl)));
}

Status SqliteStore::Impl::Migrate() {
  OOM_ASSIGN_OR_RETURN(const int64_t version, QueryInt(writer, "PRAGMA user_version"));
  if (version > kSchemaVersion) {
    return Status(Code::kFailedPrecondition,
                  options.path + " has schema " + std::to_string(version) +
                      ", this oomd knows up to " + std::to_string(kSchemaVersion) +
                      ": a newer oomd wrote it; start that one");
  }
  if (version == kSchemaVersion) return Status::Ok();
  if (version > 0) {
    const std::string copy = options.path + ".schema-" + std::to_string(version);
    std::remove(copy.c_str());
    OOM_RETURN_IF_ERROR(Execute(writer, "VACUUM INTO '" + copy + "'"));
  }
  // One step for each version; a new database is version 0.
  OOM_RETURN_IF_ERROR(Execute(writer, "BEGIN IMMEDIATE"));
  uint64_t random = 0;
  OOM_CHECK(getrandom(&random, sizeof(random), 0) == sizeof(random));
  char id[20];
  std::snprintf(id, sizeof(id), "%016llx", static_cast<unsigned long long>(random));
  OOM_RETURN_IF_ERROR(Execute(writer, kSchema));
  OOM_RETURN_IF_ERROR(
      Execute(writer, std::string("INSERT INTO meta VALUES ('store_id', '") + id + "')"));
  OOM_RETURN_IF_ERROR(Execute(writer, "PRAGMA user_version=" + std::to_string(kSchemaVersion)));
  return Execute(writer, "COMMIT");
}

Result<StoreContent> SqliteStore::Load() {
  StoreContent content;
  Statement id(impl_->writer, "SELECT value FROM meta WHERE key='store_id'");
  if (!id.Step()) return SqliteStatus(impl_->writer, "reading the store's id");
  content.store_id = id.BytesAt(0);
  OOM_ASSIGN_OR_RETURN(content.last_sequence,
                       QueryInt(impl_->writer, "SELECT max(sequence) FROM events"));
  Statement jobs(
      impl_->writer,
      "SELECT submit_order, last_transition, last_failure_durable_step, stop_state, "
      "stop_with_checkpoint, stop_grace_seconds, job, pools FROM jobs ORDER BY submit_order");
  while (jobs.Step()) {
    JobRecord record;
    internal::v1::JobStart holder;
    record.submit_order = jobs.IntAt(0);
    record.last_transition = jobs.IntAt(1);
    record.last_failure_durable_step = jobs.IntAt(2);
    record.stop_state = static_cast<v1::JobState>(jobs.IntAt(3));
    record.stop_with_checkpoint = jobs.IntAt(4) != 0;
    record.stop_grace_seconds = jobs.RealAt(5);
    if (!record.job.ParseFromString(jobs.BytesAt(6)) || !holder.ParseFromString(jobs.BytesAt(7))) {
      return Status(Code::kDataLoss, "a job row of " + impl_->options.path + " does not parse");
    }
    record.pools.assign(holder.pools().begin(), holder.pools().end());
    record.devices.assign(holder.devices().begin(), holder.devices().end());
    content.last_sequence = std::max(content.last_sequence, record.job.sequence());
    content.jobs.push_back(std::move(record));
  }
  if (!jobs.ok()) return SqliteStatus(impl_->writer, "reading the jobs");
  return content;
}

Status SqliteStore::Impl::Write(const StoreBatch& batch) {
  OOM_RETURN_IF_ERROR(Execute(writer, "BEGIN IMMEDIATE"));
  for (const JobRecord& record : batch.jobs) {
    Statement row(
        writer,
        "INSERT INTO jobs VALUES (?,?,?,?,?,?,?,?,?,?,?,?) ON CONFLICT(uid) DO UPDATE SET "
        "state=excluded.state, sequence=excluded.sequence, "
        "last_transition=excluded.last_transition, "
        "last_failure_durable_step=excluded.last_failure_durable_step, "
        "stop_state=excluded.stop_state, "
        "stop_with_checkpoint=excluded.stop_with_checkpoint, "
        "stop_grace_seconds=excluded.stop_grace_seconds, job=excluded.job, pools=excluded.pools");
    row.Text(record.job.uid())
        .Text(record.job.name())
        .Int(record.submit_order)
        .Int(record.job.state());
    row.Int(record.job.sequence())
        .Int(record.last_transition)
        .Int(record.last_failure_durable_step);
    row.Int(record.stop_state)
        .Int(record.stop_with_checkpoint ? 1 : 0)
        .Real(record.stop_grace_seconds);
    row.Blob(record.job.SerializeAsString()).Blob(PackHoldings(record)).Step();
    if (!row.ok()) return SqliteStatus(writer, "writing job " + record.job.name());
  }
  for (const StoredEvent& event : batch.events) {
    Statement row(writer, "INSERT INTO events VALUES (?,?,?,?)");
    row.Int(event.sequence)
        .Real(event.unix_seconds)
        .Text(event.job_name)
        .Blob(event.job.SerializeAsString())
        .Step();
    if (!row.ok()) return SqliteStatus(writer, "writing an event");
  }
  for (const StoredRequest& request : batch.requests) {
    Statement row(writer, "INSERT OR REPLACE INTO requests VALUES (?,?,?,?,?)");
    row.Int(request.owner).Text(request.request_id).Int(static_cast<int64_t>(request.payload_hash));
    row.Real(request.unix_seconds).Blob(request.answer.SerializeAsString()).Step();
    if (!row.ok()) return SqliteStatus(writer, "writing a request id");
  }
  return Execute(writer, "COMMIT");
}

Status SqliteStore::Commit(const StoreBatch& batch) {
  if (impl_->failed) {
    return Status(Code::kUnavailable,
                  "the job store failed earlier; restart oomd after the disk is repaired")
        .WithReason("STORE_FAILED");
  }
  const Status written = impl_->Write(batch);
  if (written.ok()) {
    // The log is moved into the database from here only, so that the two never happen at the same
    // time.
    if (++impl_->commits_since_checkpoint >= 1000) {
      impl_->commits_since_checkpoint = 0;
      sqlite3_exec(impl_->writer, "PRAGMA wal_checkpoint(PASSIVE)", nullptr, nullptr, nullptr);
    }
    return written;
  }
  // Never retried: a failed fsync may have dropped the pages. The next start reads what is really
  // there.
  impl_->failed = true;
  sqlite3_exec(impl_->writer, "ROLLBACK", nullptr, nullptr, nullptr);
  return Status(Code::kUnavailable, written.message()).WithReason("STORE_FAILED");
}

Result<std::optional<StoredRequest>> SqliteStore::FindRequest(uint32_t owner,
                                                              const std::string& request_id) {
  Statement row(
      impl_->writer,
      "SELECT payload_hash, unix_seconds, answer FROM requests WHERE owner=? AND request_id=?");
  row.Int(owner).Text(request_id);
  if (!row.Step()) {
    if (!row.ok()) return SqliteStatus(impl_->writer, "looking up a request id");
    return std::optional<StoredRequest>();
  }
  StoredRequest request{.owner = owner, .request_id = request_id};
  request.payload_hash = static_cast<uint64_t>(row.IntAt(0));
  request.unix_seconds = row.RealAt(1);
  if (!request.answer.ParseFromString(row.BytesAt(2)))
    return Status(Code::kDataLoss, "a request row does not parse");
  return std::optional<StoredRequest>(std::move(request));
}

Result<std::vector<StoredEvent>> SqliteStore::ReadEvents(int64_t after, int limit) {
  const MutexLock lock(impl_->reader_mutex);
  // One read transaction, so that compaction cannot slip between the two queries.
  Statement begin(impl_->reader, "BEGIN");
  begin.Step();
  std::vector<StoredEvent> events;
  const Status status = [&]() -> Status {
    OOM_ASSIGN_OR_RETURN(const int64_t oldest,
                         QueryInt(impl_->reader, "SELECT min(sequence) FROM events"));
    if (oldest > after + 1) {
      return Status(Code::kOutOfRange, "events up to " + std::to_string(oldest - 1) +
                                           " are no longer kept; watch again without a token")
          .WithReason("RESUME_TOKEN_COMPACTED");
    }
    Statement rows(impl_->reader,
                   "SELECT sequence, unix_seconds, job_name, job FROM events WHERE sequence>? "
                   "ORDER BY sequence LIMIT ?");
    rows.Int(after).Int(limit);
    while (rows.Step()) {
      StoredEvent event{
          .sequence = rows.IntAt(0), .unix_seconds = rows.RealAt(1), .job_name = rows.BytesAt(2)};
      if (!event.job.ParseFromString(rows.BytesAt(3)))
        return Status(Code::kDataLoss, "an event row does not parse");
      events.push_back(std::move(event));
    }
    return rows.ok() ? Status::Ok() : SqliteStatus(impl_->reader, "reading events");
  }();
  Statement end(impl_->reader, "COMMIT");
  end.Step();
  if (!status.ok()) return status;
  return events;
}

Status SqliteStore::Compact(double now) {
  if (impl_->failed)
    return Status(Code::kUnavailable, "the job store failed earlier").WithReason("STORE_FAILED");
  const Options& options = impl_->options;
  OOM_RETURN_IF_ERROR(Execute(impl_->writer, "BEGIN IMMEDIATE"));
  const Status status = [&]() -> Status {
    // The newest event stays: it is how far the numbering has come. A prefix goes, never one in
    // between, also when the wall clock was moved.
    Statement events(
        impl_->writer,
        "DELETE FROM events WHERE sequence < max((SELECT max(sequence) FROM events) - ? + 1, "
        "coalesce((SELECT min(sequence) FROM events WHERE unix_seconds >= ?), "
        "(SELECT max(sequence) FROM events)))");
    events.Int(options.event_retention_count).Real(now - options.event_retention_seconds).Step();
    if (!events.ok()) return SqliteStatus(impl_->writer, "compacting events");
    Statement requests(impl_->writer, "DELETE FROM requests WHERE unix_seconds < ?");
    requests.Real(now - options.request_retention_seconds).Step();
    if (!requests.ok()) return SqliteStatus(impl_->writer, "compacting request ids");
    return Status::Ok();
  }();
  OOM_RETURN_IF_ERROR(Execute(impl_->writer, status.ok() ? "COMMIT" : "ROLLBACK"));
  OOM_RETURN_IF_ERROR(status);
  return Execute(impl_->writer, "PRAGMA wal_checkpoint(TRUNCATE)");
}

}  // namespace oom
