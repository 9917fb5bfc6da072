#include "client/output.h"

#include <gtest/gtest.h>

#include <sstream>

#include "client/command_line.h"
#include "client/exit_code.h"
#include "client/progress.h"

namespace oom {
namespace {

TEST(PrintableTest, NothingThatMovesATerminalPasses) {
  EXPECT_EQ(Printable("plain text, \xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\ttab"),
            "plain text, \xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\ttab");
  EXPECT_EQ(Printable("\x1b]0;title\x07"), "\\x1b]0;title\\x07");
  EXPECT_EQ(Printable("a\rb\nc"), "a\\x0db\\x0ac");
  EXPECT_EQ(Printable("a\nb", true), "a\nb");
  EXPECT_EQ(Printable("\x7f"), "\\x7f");
  EXPECT_EQ(Printable("\xc2\x9b"
                      "31m"),
            "\\xc2\\x9b31m");  // C1: a one-character CSI.
  EXPECT_EQ(Printable("\xe2\x80\xae"
                      "x"),
            "\\xe2\\x80\\xaex");                   // Right-to-left override.
  EXPECT_EQ(Printable("\xff\xc3"), "\\xff\\xc3");  // Broken UTF-8.
  EXPECT_EQ(Printable("\xc0\x9b"), "\\xc0\\x9b");  // Overlong.
}

TEST(PrintableTest, EverySingleByteAndPairIsPrintableAfterwards) {
  for (int a = 0; a < 256; ++a) {
    for (int b = 0; b < 256; ++b) {
      const std::string text = {static_cast<char>(a), static_cast<char>(b)};
      for (const char c : Printable(text)) {
        const auto byte = static_cast<unsigned char>(c);
        ASSERT_TRUE(byte >= 0x20 || byte == '\t') << a << " " << b;
        ASSERT_NE(byte, 0x7f);
      }
    }
  }
}

TEST(TableTest, ColumnsLineUpAndColourStaysOffAPipe) {
  std::ostringstream data, messages;
  Output output({}, &data, &messages);
  Table table({"NAME", "STATE"});
  table.AddRow({"a-long-name", "RUNNING"});
  table.PaintLastRow(1, Colour::kGreen);
  table.AddRow({"b", "\x1b[31mx"});
  table.Write(&output);
  EXPECT_EQ(data.str(), "NAME         STATE\na-long-name  RUNNING\nb            \\x1b[31mx\n");
  EXPECT_EQ(messages.str(), "");
}

TEST(ExitCodeTest, EveryCodeOfTheApiHasItsExitCode) {
  const auto code = [](Code code, const std::string& reason = "") {
    return ExitCodeOf(Status(code, "m").WithReason(reason));
  };
  EXPECT_EQ(ExitCodeOf(Status::Ok()), 0);
  EXPECT_EQ(code(Code::kInternal), 1);
  EXPECT_EQ(code(Code::kDataLoss), 1);
  EXPECT_EQ(code(Code::kOutOfRange), 1);
  EXPECT_EQ(code(Code::kUnavailable), 3);
  EXPECT_EQ(code(Code::kNotFound), 4);
  EXPECT_EQ(code(Code::kNotFound, "INVALID_INPUT"), 6);
  EXPECT_EQ(code(Code::kPermissionDenied), 5);
  EXPECT_EQ(code(Code::kUnauthenticated), 5);
  EXPECT_EQ(code(Code::kInvalidArgument), 6);
  EXPECT_EQ(code(Code::kResourceExhausted, "OUT_OF_HOST_MEMORY"), 6);
  EXPECT_EQ(code(Code::kResourceExhausted, "STORAGE_FULL"), 6);
  EXPECT_EQ(code(Code::kFailedPrecondition), 7);
  EXPECT_EQ(code(Code::kAlreadyExists), 7);
  EXPECT_EQ(code(Code::kAborted), 7);
  EXPECT_EQ(code(Code::kResourceExhausted, "QUOTA"), 8);
  EXPECT_EQ(code(Code::kDeadlineExceeded), 124);
  EXPECT_EQ(ExitCodeOf(v1::JOB_STATE_SUCCEEDED), 0);
  EXPECT_EQ(ExitCodeOf(v1::JOB_STATE_FAILED), 10);
  EXPECT_EQ(ExitCodeOf(v1::JOB_STATE_CANCELLED), 11);
}

v1::Job RunningJob(int64_t step) {
  v1::Job job;
  job.set_name("jobs/tiny");
  job.set_state(v1::JOB_STATE_RUNNING);
  job.set_step(step);
  job.mutable_spec()->set_steps(200);
  job.set_loss(3.25);
  job.set_tokens_per_second(12345);
  job.set_eta_seconds(200);
  job.set_durable_step(step / 10 * 10);
  return job;
}

// Goal: off a terminal a line comes at once with the first step, then one each interval.
// Method: a clock that the test moves.
TEST(ProgressTest, OffATerminalTheFirstStepIsPrintedAtOnceThenOneLineEachInterval) {
  std::ostringstream data, messages;
  Output output({}, &data, &messages);
  double now = 1000.0;
  ProgressPrinter printer({.interval_seconds = 10.0, .clock = [&] { return now; }}, &output);
  printer.Update(RunningJob(0));
  EXPECT_EQ(messages.str(), "tiny: RUNNING\n");
  messages.str("");
  printer.Update(RunningJob(1));
  EXPECT_EQ(messages.str(), "step 1/200  loss 3.2500  12.3k tokens/s  left 3m 20s  durable 0\n");
  messages.str("");
  for (int64_t step = 2; step <= 100; ++step) {
    now += 0.25;
    printer.Update(RunningJob(step));
  }
  EXPECT_EQ(messages.str(),
            "step 41/200  loss 3.2500  12.3k tokens/s  left 3m 20s  durable 40\n"
            "step 81/200  loss 3.2500  12.3k tokens/s  left 3m 20s  durable 80\n");
  messages.str("");
  printer.Finish();
  EXPECT_EQ(messages.str(),
            "step 100/200  loss 3.2500  12.3k tokens/s  left 3m 20s  durable 100\n");
  messages.str("");
  printer.Finish();
  EXPECT_EQ(data.str(), "");
}

TEST(ProgressTest, TheBarNeverReachesTheEdgeOfTheTerminal) {
  for (int columns = 1; columns < 200; ++columns) {
    EXPECT_LT(static_cast<int>(ProgressBar(RunningJob(90), columns).size()), std::max(columns, 1));
  }
  EXPECT_EQ(
      ProgressBar(RunningJob(90), 200),
      "[###########.............] 45%  step 90/200  loss 3.2500  12.3k tokens/s  left 3m 20s  "
      "durable 90");
}

std::string UsageError(std::vector<const char*> words) {
  words.insert(words.begin(), "oom");
  const auto parsed = ParseCommandLine(static_cast<int>(words.size()), words.data());
  const auto* text = std::get_if<CommandLineText>(&parsed);
  return text != nullptr && text->is_error ? text->text : "parsed";
}

TEST(CommandLineTest, MistakesAreUsageErrorsThatSayWhat) {
  EXPECT_NE(UsageError({"trian", "x"}).find("did you mean 'train'?"), std::string::npos);
  EXPECT_NE(UsageError({"--host", "/s", "lss"}).find("did you mean 'ls'?"), std::string::npos);
  EXPECT_NE(UsageError({"get"}), "parsed");
  EXPECT_NE(UsageError({"wait", "a", "b"}), "parsed");
  EXPECT_NE(UsageError({"ls", "--nothing"}), "parsed");
  EXPECT_NE(UsageError({"ls", "-o", "xml"}).find("not one of table|wide|json"), std::string::npos);
  EXPECT_NE(UsageError({"logs", "x", "--tail", "-3"}).find("not a whole number"),
            std::string::npos);
  EXPECT_NE(UsageError({"ls", "--timeout", "soon"}).find("not a duration"), std::string::npos);
  EXPECT_NE(UsageError({"completion", "tcsh"}), "parsed");
  EXPECT_NE(UsageError({}), "parsed");
}

TEST(CommandLineTest, OptionsMayStandBeforeOrAfterTheCommand) {
  for (const std::vector<const char*>& words :
       {std::vector<const char*>{"oom", "--timeout", "5s", "-o", "json", "run", "job.yaml"},
        std::vector<const char*>{"oom", "run", "-o", "json", "--timeout", "5s", "job.yaml"},
        std::vector<const char*>{"oom", "run", "job.yaml", "-o", "json", "--timeout", "5s"}}) {
    const auto parsed = ParseCommandLine(static_cast<int>(words.size()), words.data());
    const auto* line = std::get_if<CommandLine>(&parsed);
    ASSERT_NE(line, nullptr);
    EXPECT_EQ(line->command->name, "train");
    EXPECT_EQ(line->arguments, std::vector<std::string>{"job.yaml"});
    EXPECT_EQ(line->Text("output-form"), "json");
    EXPECT_EQ(line->Seconds("timeout"), 5.0);
  }
}

}  // namespace
}  // namespace oom
