#include "runtime/trace/step_log.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>

#include "runtime/base/file.h"

namespace oom {
namespace {

class StepLogTest : public ::testing::Test {
 protected:
  void SetUp() override {
    // In memory where there is such a place: hundreds of synced opens are slow on a busy disk.
    std::string pattern = "/dev/shm/oom-test-XXXXXX";
    if (::mkdtemp(pattern.data()) == nullptr) {
      pattern = (std::filesystem::temp_directory_path() / "oom-test-XXXXXX").string();
      ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    }
    directory_ = pattern;
    path_ = directory_ + "/steps.jsonl";
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  static StepRecord Record(int64_t step) {
    return {.step = step, .loss = 1.0 / static_cast<double>(step), .tokens = 64 * step};
  }
  // Appends steps [first, last].
  void Append(StepLog* log, int64_t first, int64_t last) {
    for (int64_t step = first; step <= last; ++step) ASSERT_TRUE(log->Append(Record(step)).ok());
  }
  std::vector<int64_t> Steps() {
    std::vector<int64_t> steps;
    std::ifstream file(path_);
    for (std::string line; std::getline(file, line);) {
      const auto record = ParseStepRecord(line);
      steps.push_back(record.ok() ? record->step : -1);
    }
    return steps;
  }
  static std::vector<int64_t> UpTo(int64_t last) {
    std::vector<int64_t> steps;
    for (int64_t step = 1; step <= last; ++step) steps.push_back(step);
    return steps;
  }

  std::string directory_, path_;
};

TEST_F(StepLogTest, ALineHasExactlyTheFixedKeys) {
  StepRecord record = Record(3);
  const auto keys = [](const std::string& line) {
    std::vector<std::string> names;
    const auto json = nlohmann::ordered_json::parse(line);
    for (const auto& item : json.items()) names.push_back(item.key());
    return names;
  };
  std::vector<std::string> expected = {"step",
                                       "loss",
                                       "auxiliary_loss",
                                       "tokens",
                                       "gradient_norm",
                                       "learning_rate",
                                       "step_seconds",
                                       "tokens_per_second",
                                       "exposed_wait_seconds",
                                       "gpu_bytes_peak",
                                       "host_bytes_peak"};
  EXPECT_EQ(keys(FormatStepRecord(record)), expected);
  record.evaluation_loss = 2.5;
  expected.push_back("evaluation_loss");
  EXPECT_EQ(keys(FormatStepRecord(record)), expected);
}

// Goal: what is read is what was computed, bit for bit.
// Method: random bit patterns of doubles, and the corners.
TEST_F(StepLogTest, DoublesComeBackBitForBit) {
  std::mt19937_64 random(23);
  std::vector<double> values = {0.0,
                                -0.0,
                                0.1,
                                1e-300,
                                5e-324,
                                std::numeric_limits<double>::max(),
                                1.7976931348623155e308,
                                3.0,
                                1e22,
                                123456789.125};
  for (int i = 0; i < 2000; ++i) {
    const double value = std::bit_cast<double>(random());
    if (std::isfinite(value)) values.push_back(value);
  }
  for (const double value : values) {
    StepRecord record = Record(1);
    record.loss = value;
    record.evaluation_loss = -value;
    const auto parsed = ParseStepRecord(FormatStepRecord(record));
    ASSERT_TRUE(parsed.ok()) << FormatStepRecord(record);
    EXPECT_EQ(std::bit_cast<uint64_t>(parsed->loss), std::bit_cast<uint64_t>(value))
        << FormatStepRecord(record);
    EXPECT_EQ(std::bit_cast<uint64_t>(*parsed->evaluation_loss), std::bit_cast<uint64_t>(-value));
  }
}

TEST_F(StepLogTest, ANumberThatIsNotFiniteIsStillJson) {
  StepRecord record = Record(1);
  record.loss = std::nan("");
  record.gradient_norm = std::numeric_limits<double>::infinity();
  const auto json = nlohmann::json::parse(FormatStepRecord(record));
  EXPECT_TRUE(json["loss"].is_null());
  EXPECT_TRUE(json["gradient_norm"].is_null());
}

TEST_F(StepLogTest, AResumeDropsWhatIsRepeated) {
  {
    auto log = StepLog::Open(path_, 0);
    ASSERT_TRUE(log.ok());
    Append(log->get(), 1, 10);
  }
  const std::string first = *ReadFile(path_);
  for (const int64_t resumed : {10, 7, 1}) {
    auto log = StepLog::Open(path_, resumed);
    ASSERT_TRUE(log.ok());
    EXPECT_EQ((*log)->missing_count(), 0);
    EXPECT_EQ(Steps(), UpTo(resumed));
    Append(log->get(), resumed + 1, 10);
    EXPECT_EQ(*ReadFile(path_), first);  // The same bytes as without a stop.
  }
  ASSERT_TRUE(StepLog::Open(path_, 0).ok());
  EXPECT_TRUE(Steps().empty());
}

// Goal: wherever the file was cut, opening it leaves whole lines of the steps before.
// Method: a log of five steps cut at every byte.
TEST_F(StepLogTest, ATornLineIsRepairedWhereverItWasCut) {
  {
    auto log = StepLog::Open(path_, 0);
    ASSERT_TRUE(log.ok());
    Append(log->get(), 1, 5);
  }
  const std::string whole = *ReadFile(path_);
  for (size_t length = 0; length <= whole.size(); ++length) {
    ASSERT_TRUE(WriteFileAtomically(path_, whole.substr(0, length)).ok());
    const auto lines = static_cast<int64_t>(
        std::count(whole.begin(), whole.begin() + static_cast<long>(length), '\n'));
    auto log = StepLog::Open(path_, 5);
    ASSERT_TRUE(log.ok());
    EXPECT_EQ(Steps(), UpTo(lines)) << length;
    EXPECT_EQ((*log)->missing_count(), 5 - lines) << length;
  }
}

TEST_F(StepLogTest, GarbageAndRepetitionsInTheMiddleAreDropped) {
  const std::string text = FormatStepRecord(Record(1)) + "garbage\n" + FormatStepRecord(Record(2)) +
                           FormatStepRecord(Record(2)) + FormatStepRecord(Record(1)) +
                           FormatStepRecord(Record(3)) + "{\"step\": 4}\n" +
                           FormatStepRecord(Record(4));
  ASSERT_TRUE(WriteFileAtomically(path_, text).ok());
  auto log = StepLog::Open(path_, 4);
  ASSERT_TRUE(log.ok());
  EXPECT_EQ(Steps(), UpTo(4));
  Append(log->get(), 5, 5);
  EXPECT_EQ(Steps(), UpTo(5));
}

TEST_F(StepLogTest, AGapOrARepetitionIsRefused) {
  auto log = StepLog::Open(path_, 0);
  ASSERT_TRUE(log.ok());
  Append(log->get(), 1, 2);
  EXPECT_EQ((*log)->Append(Record(2)).code(), Code::kInvalidArgument);
  EXPECT_EQ((*log)->Append(Record(4)).code(), Code::kInvalidArgument);
  EXPECT_EQ((*log)->last_step(), 2);
  EXPECT_EQ(Steps(), UpTo(2));
}

// Goal: a full disk leaves whole lines, and the same record can be written later.
// Method: a file size limit that falls into a line, lifted again. In a child, since the limit is
// the process's.
TEST_F(StepLogTest, AFullDiskLeavesWholeLines) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    auto log = StepLog::Open(path_, 0);
    struct rlimit before {};
    if (!log.ok() || ::getrlimit(RLIMIT_FSIZE, &before) != 0) ::_exit(2);
    struct rlimit small = before;
    small.rlim_cur = 1000;
    if (::setrlimit(RLIMIT_FSIZE, &small) != 0) ::_exit(2);
    int64_t step = 1;
    while ((*log)->Append(Record(step)).ok()) ++step;
    if (step < 2 || static_cast<int64_t>(Steps().size()) != step - 1) ::_exit(3);
    if (::setrlimit(RLIMIT_FSIZE, &before) != 0) ::_exit(2);
    ::_exit((*log)->Append(Record(step)).ok() && Steps() == UpTo(step) ? 0 : 4);
  }
  int wait_status = 0;
  ASSERT_EQ(::waitpid(child, &wait_status, 0), child);
  ASSERT_TRUE(WIFEXITED(wait_status));
  EXPECT_EQ(WEXITSTATUS(wait_status), 0);
}

TEST_F(StepLogTest, AMissingFolderIsNamed) {
  const auto log = StepLog::Open(directory_ + "/none/steps.jsonl", 0);
  ASSERT_FALSE(log.ok());
  EXPECT_EQ(log.status().code(), Code::kNotFound);
  EXPECT_NE(log.status().message().find("none"), std::string::npos);
}

}  // namespace
}  // namespace oom
