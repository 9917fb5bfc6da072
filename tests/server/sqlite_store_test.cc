#include "server/oomd/sqlite_store.h"

#include <gtest/gtest.h>
#include <sqlite3.h>

#include <filesystem>
#include <fstream>

#include "tests/server/folder_test.h"

namespace oom {
namespace {

class SqliteStoreTest : public testing::FolderTest {
 protected:
  SqliteStoreTest() { options_.path = folder_ + "/oomd.sqlite"; }

  std::unique_ptr<SqliteStore> Open() {
    auto store = SqliteStore::Open(options_);
    EXPECT_TRUE(store.ok()) << store.status().ToString();
    return store.ok() ? std::move(store.value()) : nullptr;
  }
  static JobRecord Record(const std::string& id, int64_t order, int64_t sequence) {
    JobRecord record;
    record.job.set_name("jobs/" + id);
    record.job.set_uid("uid-" + id);
    record.job.set_state(v1::JOB_STATE_RUNNING);
    record.job.set_sequence(sequence);
    record.submit_order = order;
    record.last_transition = 3;
    record.last_failure_durable_step = 20;
    record.stop_state = v1::JOB_STATE_CANCELLED;
    record.stop_with_checkpoint = true;
    record.stop_grace_seconds = 2.5;
    internal::v1::Pool pool;
    pool.set_bytes(4096);
    record.pools = {pool, pool};
    record.devices = {3, 1};
    return record;
  }
  static StoreBatch Batch(const std::string& id, int64_t order, int64_t sequence,
                          double time = 1000) {
    StoreBatch batch;
    batch.jobs.push_back(Record(id, order, sequence));
    batch.events.push_back({.sequence = sequence,
                            .unix_seconds = time,
                            .job_name = "jobs/" + id,
                            .job = batch.jobs[0].job});
    batch.requests.push_back({.owner = 1,
                              .request_id = "r-" + id,
                              .payload_hash = 0xFFFFFFFFFFFFFFFF,
                              .unix_seconds = time,
                              .answer = batch.jobs[0].job});
    return batch;
  }
  void Execute(const std::string& sql) {
    sqlite3* database = nullptr;
    ASSERT_EQ(sqlite3_open(options_.path.c_str(), &database), SQLITE_OK);
    EXPECT_EQ(sqlite3_exec(database, sql.c_str(), nullptr, nullptr, nullptr), SQLITE_OK)
        << sqlite3_errmsg(database);
    sqlite3_close(database);
  }

  SqliteStore::Options options_;
};

TEST_F(SqliteStoreTest, WhatIsCommittedIsThereAfterItIsOpenedAgain) {
  std::string id;
  {
    const auto store = Open();
    ASSERT_TRUE(store->Commit(Batch("a", 1, 1)).ok());
    ASSERT_TRUE(store->Commit(Batch("b", 2, 2)).ok());
    StoreBatch change;
    change.jobs.push_back(Record("a", 1, 3));
    change.jobs[0].job.set_state(v1::JOB_STATE_FAILED);
    ASSERT_TRUE(store->Commit(change).ok());
    id = store->Load()->store_id;
  }
  const auto store = Open();
  const Result<StoreContent> content = store->Load();
  ASSERT_TRUE(content.ok());
  EXPECT_EQ(content->store_id, id);
  EXPECT_EQ(content->last_sequence, 3);
  ASSERT_EQ(content->jobs.size(), 2U);
  EXPECT_EQ(content->jobs[0].job.state(), v1::JOB_STATE_FAILED);
  EXPECT_EQ(content->jobs[1].last_transition, 3);
  EXPECT_EQ(content->jobs[1].last_failure_durable_step, 20);
  EXPECT_EQ(content->jobs[1].stop_state, v1::JOB_STATE_CANCELLED);
  EXPECT_TRUE(content->jobs[1].stop_with_checkpoint);
  EXPECT_EQ(content->jobs[1].stop_grace_seconds, 2.5);
  EXPECT_EQ(content->jobs[1].pools.size(), 2U);
  EXPECT_EQ(content->jobs[1].devices, (std::vector<int>{3, 1}));
  const auto request = store->FindRequest(1, "r-b");
  ASSERT_TRUE(request.ok() && request->has_value());
  EXPECT_EQ((*request)->payload_hash, 0xFFFFFFFFFFFFFFFF);
  EXPECT_EQ((*request)->answer.name(), "jobs/b");
  EXPECT_FALSE(store->FindRequest(2, "r-b")->has_value()) << "request ids belong to their owner";
}

TEST_F(SqliteStoreTest, ACommitIsAllOrNothingAndAFailureIsTheLastWord) {
  const auto store = Open();
  ASSERT_TRUE(store->Commit(Batch("a", 1, 1)).ok());
  StoreBatch clash = Batch("b", 2, 2);
  clash.events.push_back(clash.events[0]);  // The same number twice: the second row is refused.
  const Status failed = store->Commit(clash);
  EXPECT_EQ(failed.code(), Code::kUnavailable);
  EXPECT_EQ(store->Load()->jobs.size(), 1U);
  EXPECT_EQ(store->Commit(Batch("c", 3, 3)).code(), Code::kUnavailable);
  EXPECT_EQ(Open()->Load()->jobs.size(), 1U);
}

TEST_F(SqliteStoreTest, EventsAreReadInOrderByPage) {
  const auto store = Open();
  for (int i = 1; i <= 10; ++i)
    ASSERT_TRUE(store->Commit(Batch("j" + std::to_string(i), i, i)).ok());
  int64_t after = 2;
  std::vector<int64_t> seen;
  while (true) {
    const auto events = store->ReadEvents(after, 3);
    ASSERT_TRUE(events.ok());
    if (events->empty()) break;
    for (const StoredEvent& event : *events) seen.push_back(after = event.sequence);
  }
  EXPECT_EQ(seen, (std::vector<int64_t>{3, 4, 5, 6, 7, 8, 9, 10}));
}

TEST_F(SqliteStoreTest, CompactionForgetsAPrefixAndSaysSo) {
  options_.event_retention_seconds = 100;
  options_.event_retention_count = 4;
  options_.request_retention_seconds = 100;
  const auto store = Open();
  for (int i = 1; i <= 10; ++i)
    ASSERT_TRUE(store->Commit(Batch("j" + std::to_string(i), i, i, 1000 + 10 * i)).ok());
  ASSERT_TRUE(store->Compact(1105).ok());
  EXPECT_EQ(store->ReadEvents(5, 10).status().code(), Code::kOutOfRange);
  EXPECT_EQ(store->ReadEvents(6, 10)->size(), 4U);
  EXPECT_TRUE(store->FindRequest(1, "r-j1")->has_value());
  ASSERT_TRUE(store->Compact(5000).ok());
  EXPECT_EQ(store->ReadEvents(9, 10)->size(), 1U)
      << "the newest event stays: numbers go on from it";
  EXPECT_FALSE(store->FindRequest(1, "r-j1")->has_value());
  EXPECT_EQ(store->Load()->jobs.size(), 10U);
  EXPECT_EQ(store->Load()->last_sequence, 10);
}

TEST_F(SqliteStoreTest, ANewerSchemaIsRefusedAndLeftAlone) {
  ASSERT_TRUE(Open()->Commit(Batch("a", 1, 1)).ok());
  Execute("PRAGMA user_version=2");
  const auto store = SqliteStore::Open(options_);
  ASSERT_FALSE(store.ok());
  EXPECT_EQ(store.status().code(), Code::kFailedPrecondition);
  EXPECT_NE(store.status().message().find("schema 2"), std::string::npos);
  Execute("PRAGMA user_version=1");
  EXPECT_EQ(Open()->Load()->jobs.size(), 1U);
}

TEST_F(SqliteStoreTest, ADamagedDatabaseIsFoundAtStart) {
  {
    const auto store = Open();
    for (int i = 1; i <= 200; ++i)
      ASSERT_TRUE(store->Commit(Batch("j" + std::to_string(i), i, i)).ok());
    ASSERT_TRUE(store->Compact(1000).ok());
  }
  {
    std::fstream file(options_.path, std::ios::in | std::ios::out | std::ios::binary);
    for (int page = 2; page < 12; ++page) {
      file.seekp(page * 4096);
      file.write("garbage garbage garbage", 23);
    }
  }
  const auto store = SqliteStore::Open(options_);
  ASSERT_FALSE(store.ok());
  EXPECT_EQ(store.status().code(), Code::kDataLoss) << store.status().ToString();
  EXPECT_NE(store.status().message().find(options_.path), std::string::npos);
}

TEST_F(SqliteStoreTest, NetworkFileSystemsAreRefused) {
  EXPECT_EQ(CheckLocalFileSystem("/tmp", 0x6969).code(), Code::kFailedPrecondition);
  EXPECT_EQ(CheckLocalFileSystem("/tmp", 0xFF534D42).field(), "state_dir");
  EXPECT_TRUE(CheckLocalFileSystem("/tmp", 0xEF53).ok());
  EXPECT_TRUE(CheckLocalFileSystem("/tmp").ok());
}

TEST_F(SqliteStoreTest, TheFileIsInWalModeWithStrictTables) {
  Open();
  sqlite3* database = nullptr;
  ASSERT_EQ(sqlite3_open(options_.path.c_str(), &database), SQLITE_OK);
  std::string mode;
  sqlite3_exec(
      database, "PRAGMA journal_mode",
      [](void* out, int, char** values, char**) {
        *static_cast<std::string*>(out) = values[0];
        return 0;
      },
      &mode, nullptr);
  std::string strict;
  sqlite3_exec(
      database, "SELECT count(*) FROM pragma_table_list WHERE strict=1",
      [](void* out, int, char** values, char**) {
        *static_cast<std::string*>(out) = values[0];
        return 0;
      },
      &strict, nullptr);
  sqlite3_close(database);
  EXPECT_EQ(mode, "wal");
  EXPECT_EQ(strict, "4");
}

}  // namespace
}  // namespace oom
