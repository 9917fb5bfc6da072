// What becomes of a submission: refused with a reason, checked only, named, or the answer that its
// request id has had before.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "runtime/base/units.h"
#include "tests/server/controller_fixture.h"

namespace oom {
namespace {

TEST_F(ControllerTest, AJobThatCanNeverFitIsRefusedWithTheNumbers) {
  const Result<v1::Job> created = Create(NewJob("big", 5_GiB));
  ASSERT_FALSE(created.ok());
  EXPECT_EQ(created.status().code(), Code::kResourceExhausted);
  EXPECT_EQ(created.status().reason(), "OUT_OF_HOST_MEMORY");
  EXPECT_NE(created.status().message().find("5.00 GiB"), std::string::npos)
      << created.status().message();
  EXPECT_TRUE(store_.jobs.empty());
}

TEST_F(ControllerTest, ARepeatedRequestIdGivesTheFirstAnswerAlsoAfterARestart) {
  Controller::NewJob job = NewJob("");
  job.request_id = "r1";
  job.payload_hash = 11;
  const Result<v1::Job> first = Create(job);
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(first->name(), "jobs/some-name");
  // Twice within one commit, too.
  Controller::NewJob other = NewJob("");
  other.request_id = "r2";
  std::vector<std::string> uids;
  for (int i = 0; i < 2; ++i) {
    controller_->CreateJob(other, [&](Result<v1::Job> reply) { uids.push_back(reply->uid()); });
  }
  controller_->Flush();
  ASSERT_EQ(uids.size(), 2U);
  EXPECT_EQ(uids[0], uids[1]);
  Restart();
  const Result<v1::Job> again = Create(job);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again->SerializeAsString(), first->SerializeAsString());
  job.payload_hash = 12;
  const Result<v1::Job> changed = Create(job);
  EXPECT_EQ(changed.status().code(), Code::kInvalidArgument);
  EXPECT_EQ(changed.status().reason(), "REQUEST_ID_REUSED");
  EXPECT_EQ(store_.jobs.size(), 2U);
}

TEST_F(ControllerTest, ValidateOnlyWritesNothing) {
  Controller::NewJob job = NewJob("a");
  job.validate_only = true;
  job.request_id = "r";
  const int commits = store_.commit_count;
  const Result<v1::Job> answer = Create(job);
  ASSERT_TRUE(answer.ok());
  EXPECT_EQ(answer->name(), "jobs/a");
  EXPECT_EQ(answer->uid(), "");
  EXPECT_EQ(store_.commit_count, commits);
  EXPECT_TRUE(store_.jobs.empty() && store_.requests.empty());
}

TEST_F(ControllerTest, NamesAreCheckedAndMadeUnique) {
  EXPECT_EQ(Create(NewJob("Bad_Name")).status().code(), Code::kInvalidArgument);
  ASSERT_TRUE(Create(NewJob("a", 1_MiB)).ok());
  EXPECT_EQ(Create(NewJob("a", 1_MiB)).status().code(), Code::kAlreadyExists);
  EXPECT_EQ(Create(NewJob("", 1_MiB))->name(), "jobs/some-name");
  EXPECT_EQ(Create(NewJob("", 1_MiB))->name(), "jobs/some-name-2");
}

}  // namespace
}  // namespace oom
