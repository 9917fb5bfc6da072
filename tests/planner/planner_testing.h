// A tiny job on disk for the tests of the planner: config.json, a packed dataset, an output folder.
// And what the tests ask of its plans. Single-threaded.

#pragma once

#include <gtest/gtest.h>

#include <string>

#include "oom/v1/job.pb.h"
#include "planner/plan_job.h"

namespace oom::testing {

class JobDirectory {
 public:
  JobDirectory();
  ~JobDirectory();
  JobDirectory(const JobDirectory&) = delete;
  JobDirectory& operator=(const JobDirectory&) = delete;

  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  // A job of random initialisation on this directory's files, with nothing else set.
  v1::JobSpec Spec() const;

 private:
  std::string path_;
};

void WriteText(const std::string& path, const std::string& content);
// A dataset of `token_count` tokens below `vocabulary_size` in one document.
void WriteDataset(const std::string& directory, int64_t token_count, int64_t vocabulary_size);
// Of a Qwen3-MoE of this geometry.
std::string ConfigText(int hidden, int layers, int vocabulary, int experts, int expert_width);
NodeLimits LargeNode();

int ResidentUnits(const v1::Plan& plan);
// Whether the job was refused with exactly these.
::testing::AssertionResult Refused(const Result<PlannedJob>& result, Code code,
                                   const std::string& reason, const std::string& field);

}  // namespace oom::testing
