// A folder, a fake oomd and a job file for tests that run the built `oom`.

#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "tests/client/fake_oomd.h"
#include "tests/client/run_oom.h"

namespace oom {

class CommandTest : public ::testing::Test {
 protected:
  CommandTest() {
    char pattern[] = "/tmp/oom-test-XXXXXX";
    folder_ = ::mkdtemp(pattern);
    socket_ = folder_ + "/oomd.sock";
    fake_ = std::make_unique<FakeOomd>(socket_);
    options_.environment["OOM_HOST"] = socket_;
    options_.environment["TERM"] = "xterm";
    options_.folder = folder_;
    WriteFile(
        "job.yaml",
        "name: tiny\nmodel: {path: m}\ndata: {train: d}\nsequence_length: 8\nglobal_batch: 2\n"
        "steps: 20\noutput: runs/tiny\n");
  }
  ~CommandTest() override {
    fake_.reset();
    std::filesystem::remove_all(folder_);
  }

  void WriteFile(const std::string& name, const std::string& text) {
    const std::filesystem::path path = std::filesystem::path(folder_) / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }

  v1::Job MakeJob(const std::string& id, v1::JobState state, int64_t step = 0) {
    v1::Job job;
    job.set_name("jobs/" + id);
    job.set_uid("0190-" + id);
    job.set_state(state);
    job.set_step(step);
    job.set_loss(2.5);
    job.set_tokens_per_second(1000);
    job.set_durable_step(step / 10 * 10);
    job.mutable_spec()->set_name(id);
    job.mutable_spec()->set_steps(20);
    job.mutable_spec()->set_output(folder_ + "/runs/" + id);
    return job;
  }

  OomResult Run(const std::vector<std::string>& arguments) { return RunOom(arguments, options_); }

  std::string folder_;
  std::string socket_;
  std::unique_ptr<FakeOomd> fake_;
  OomOptions options_;
};

}  // namespace oom
