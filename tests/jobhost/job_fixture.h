// A small job (two ranks, a tiny Qwen3-MoE in float32, some units streamed, some resident) with its
// pools, run by the real oom-jobhost program with the fake worker. Everything lies in a temporary
// folder.

#pragma once

#include <gtest/gtest.h>
#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "oom/internal/v1/control.pb.h"
#include "runtime/base/unique_fd.h"
#include "runtime/memory/shm_layout.h"
#include "tests/jobhost/fake_daemon.h"

namespace oom {

// The lines of steps.jsonl that do not depend on time: "step loss norm evaluation".
std::vector<std::string> StepLines(const std::string& output);
// Whether a whole manifest lies there.
bool HasCheckpoint(const std::string& output, int64_t step);

class JobFixture : public ::testing::Test {
 protected:
  JobFixture();
  ~JobFixture() override;

  // Builds plan and pools from `spec`, writes job.pb and starts the host. `environment` as
  // "NAME=value".
  void StartHost(const std::vector<std::string>& environment = {},
                 const std::vector<std::string>& arguments = {});
  // Starts the host with a new daemon_, waits for the final transition and for the host's end,
  // which must be a clean one. The transitions of one RunToEnd follow those of the last.
  internal::v1::Transition RunToEnd(const std::vector<std::string>& environment = {});
  // Waits for the end of the host; its exit code, or -1 when it does not end or was killed.
  int WaitForHost();
  void KillHost();
  pid_t host_pid() const { return host_; }
  // The next StartHost makes new ones, for a changed plan.
  void DropPools() { pools_.clear(); }
  std::string output() const { return folder_ + "/out"; }
  std::string socket_path() const { return folder_ + "/job/host.sock"; }
  std::string HostOutput() const;
  // Processes that this test's job left behind, by the folder in their environment or arguments.
  std::vector<pid_t> Leftovers() const;
  std::string folder_;
  internal::v1::JobStart start_;
  std::unique_ptr<FakeDaemon> daemon_;

 private:
  void MakePools();

  std::vector<UniqueFd> pools_;
  pid_t host_ = -1;
};

// The job as the tests run it; a test may change it before StartHost.
v1::JobSpec TinySpec(const std::string& folder);
v1::Plan TinyPlan();

}  // namespace oom
