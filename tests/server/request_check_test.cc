#include "server/oomd/request_check.h"

#include <gtest/gtest.h>

#include "server/oomd/job_record.h"

namespace oom {
namespace {

v1::CreateJobRequest Good() {
  v1::CreateJobRequest request;
  v1::JobSpec& spec = *request.mutable_job()->mutable_spec();
  spec.set_name("tiny");
  spec.mutable_model()->set_path("/models/tiny");
  spec.mutable_data()->set_train("/data/train");
  spec.set_output("/runs/tiny");
  spec.set_plan("auto");
  spec.set_resume("auto");
  return request;
}

TEST(RequestCheckTest, EachBadFieldIsNamed) {
  EXPECT_TRUE(CheckCreate(Good()).ok());
  const auto field_of = [](auto change) {
    v1::CreateJobRequest request = Good();
    change(request, *request.mutable_job()->mutable_spec());
    const Status status = CheckCreate(request);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    return status.field();
  };
  using Request = v1::CreateJobRequest;
  using Spec = v1::JobSpec;
  EXPECT_EQ(field_of([](Request& r, Spec&) { r.clear_job(); }), "job.spec");
  EXPECT_EQ(field_of([](Request& r, Spec&) { r.set_request_id(std::string(129, 'x')); }),
            "request_id");
  EXPECT_EQ(field_of([](Request&, Spec& s) { s.set_name("a\nb"); }), "name");
  EXPECT_EQ(field_of([](Request&, Spec& s) {
              for (int i = 0; i < 65; ++i) (*s.mutable_labels())["k" + std::to_string(i)] = "v";
            }),
            "labels");
  EXPECT_EQ(field_of([](Request&, Spec& s) {
              for (int i = 0; i < 300000; ++i) s.mutable_optimizer()->add_betas(0.5);
            }),
            "job.spec");
}

TEST(RequestCheckTest, AModelWithoutDataAndOutputIsPlannedAndNeverSubmitted) {
  v1::CreateJobRequest request;
  v1::JobSpec& spec = *request.mutable_job()->mutable_spec();
  spec.mutable_model()->set_config("/models/tiny/config.json");
  EXPECT_EQ(CheckCreate(request).field(), "data.train");
  request.set_validate_only(true);
  EXPECT_TRUE(CheckCreate(request).ok());
  // With either of them it is a job, which the planner looks at.
  request.set_validate_only(false);
  spec.set_output("/runs/tiny");
  EXPECT_TRUE(CheckCreate(request).ok());
}

TEST(RequestCheckTest, ThePayloadHashSeesEverythingButTheRequestId) {
  v1::CreateJobRequest a = Good();
  v1::CreateJobRequest b = Good();
  for (int i = 0; i < 50; ++i) {
    (*a.mutable_job()->mutable_spec()->mutable_labels())["k" + std::to_string(i)] = "v";
    (*b.mutable_job()->mutable_spec()->mutable_labels())["k" + std::to_string(49 - i)] = "v";
  }
  b.set_request_id("other");
  EXPECT_EQ(PayloadHash(a), PayloadHash(b));
  b.set_job_id("x");
  EXPECT_NE(PayloadHash(a), PayloadHash(b));
}

TEST(RequestCheckTest, APageTokenIsBoundToItsFilterItsCallerAndItsStore) {
  v1::ListJobsRequest request;
  request.add_states(v1::JOB_STATE_QUEUED);
  request.set_page_token(MakePageToken(request, 7, "store", 42));
  EXPECT_EQ(ParsePage(request, 7, "store")->after, 42);
  EXPECT_EQ(ParsePage(request, 8, "store").status().field(), "page_token");
  EXPECT_FALSE(ParsePage(request, 7, "other").ok());
  v1::ListJobsRequest wider = request;
  wider.clear_states();
  EXPECT_FALSE(ParsePage(wider, 7, "store").ok());
  request.set_page_token("43" + request.page_token().substr(2));
  EXPECT_FALSE(ParsePage(request, 7, "store").ok());
}

TEST(RequestCheckTest, PageSizesAreCoercedButNotNegative) {
  v1::ListJobsRequest request;
  EXPECT_EQ(ParsePage(request, 0, "s")->size, 100);
  request.set_page_size(1000000);
  EXPECT_EQ(ParsePage(request, 0, "s")->size, 1000);
  request.set_page_size(-1);
  EXPECT_EQ(ParsePage(request, 0, "s").status().field(), "page_size");
}

TEST(JobIdTest, MadeIdsAreAlwaysValid) {
  EXPECT_EQ(MakeJobId("My Run_2"), "my-run-2");
  for (const std::string& name : std::vector<std::string>{"", "---", "9", "a", "ÄÖ", "\x1b]0;x\a",
                                                          "-a-", std::string(300, 'q')}) {
    EXPECT_TRUE(IsValidJobId(MakeJobId(name))) << name << " -> " << MakeJobId(name);
  }
  for (const std::string& bad :
       std::vector<std::string>{"", "A", "1a", "a-", "a_b", "a b", std::string(64, 'a')}) {
    EXPECT_FALSE(IsValidJobId(bad)) << bad;
  }
}

TEST(UuidTest, Version7UuidsAreOrderedByTime) {
  const std::string early = MakeUuid7(1.7e9, UINT64_MAX, UINT64_MAX);
  const std::string late = MakeUuid7(1.7e9 + 0.002, 0, 0);
  EXPECT_LT(early, late);
  EXPECT_EQ(early.size(), 36U);
  EXPECT_EQ(early[14], '7');
  EXPECT_NE(std::string("89ab").find(early[19]), std::string::npos);
}

}  // namespace
}  // namespace oom
