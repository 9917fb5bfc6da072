// What changes on a terminal: colour, the progress bar, escaping.

#include <gtest/gtest.h>

#include "tests/client/command_fixture.h"

namespace oom {
namespace {

class TerminalTest : public CommandTest {
 protected:
  TerminalTest() { options_.terminal = true; }
};

TEST_F(TerminalTest, StatesHaveColourUnlessNoColorOrADumbTerminal) {
  fake_->Publish(MakeJob("a", v1::JOB_STATE_RUNNING));
  EXPECT_NE(Run({"ls"}).data.find("\x1b[32mRUNNING\x1b[0m"), std::string::npos);
  options_.environment["NO_COLOR"] = "1";
  EXPECT_EQ(Run({"ls"}).data.find('\x1b'), std::string::npos);
  options_.environment["NO_COLOR"] = "";
  options_.environment["TERM"] = "dumb";
  EXPECT_EQ(Run({"ls"}).data.find('\x1b'), std::string::npos);
}

TEST_F(TerminalTest, TheBarRedrawsItselfAndShowsStepLossSpeedTimeLeftAndDurableStep) {
  v1::Job job = MakeJob("tiny", v1::JOB_STATE_RUNNING, 10);
  job.set_eta_seconds(90);
  fake_->Publish(job);
  OomProcess process({"watch", "tiny"}, options_);
  ASSERT_TRUE(
      process.WaitFor("\r[############............] 50%  step 10/20  loss 2.5000  1000 tokens/s  "
                      "left 1m 30s  durable 10"));
  job.set_step(20);
  job.set_state(v1::JOB_STATE_SUCCEEDED);
  fake_->Publish(job);
  const OomResult result = process.Finish();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_NE(result.data.find("\r[########################] 100%"), std::string::npos)
      << result.data;
}

TEST_F(TerminalTest, TextFromTheServerCannotSteerTheTerminal) {
  v1::Job job = MakeJob("a", v1::JOB_STATE_QUEUED);
  job.set_message("\x1b]0;owned\x07\r\x1b[2J");
  job.set_blocked_by("\x1b[8mhidden");
  job.mutable_spec()->set_output("/tmp/\x1b[31mx");
  fake_->Publish(job);
  v1::LogChunk chunk;
  chunk.set_offset_bytes(1);
  chunk.set_line("log \x1b]0;owned\x07");
  fake_->AddLog(chunk);
  options_.environment["NO_COLOR"] = "1";
  for (const std::vector<std::string>& words :
       std::vector<std::vector<std::string>>{{"ls", "-o", "wide"},
                                             {"describe", "a"},
                                             {"get", "a", "-o", "yaml"},
                                             {"get", "a", "-o", "json"},
                                             {"logs", "a"}}) {
    const OomResult result = Run(words);
    EXPECT_EQ(result.exit_code, 0) << words[0];
    EXPECT_EQ(result.data.find('\x1b'), std::string::npos) << words[0] << result.data;
    EXPECT_EQ(result.data.find('\x07'), std::string::npos) << words[0];
  }
  EXPECT_NE(Run({"logs", "a", "--raw"}).data.find("\x1b]0;owned"), std::string::npos);
  fake_->FailNext({grpc::Status(grpc::StatusCode::INTERNAL, "bad \x1b[2J")});
  EXPECT_EQ(Run({"get", "a"}).data.find('\x1b'), std::string::npos);
}

}  // namespace
}  // namespace oom
