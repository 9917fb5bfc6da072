#include "server/jobhost/transition_journal.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "runtime/base/file.h"

namespace oom {
namespace {

using internal::v1::Transition;

class JournalTest : public ::testing::Test {
 protected:
  JournalTest() {
    char pattern[] = "/tmp/oom-journal-XXXXXX";
    folder_ = ::mkdtemp(pattern);
    path_ = folder_ + "/transitions.journal";
  }
  ~JournalTest() override { std::filesystem::remove_all(folder_); }

  std::unique_ptr<TransitionJournal> Open(int64_t first_number = 1) {
    auto journal = TransitionJournal::Open(path_, first_number);
    EXPECT_TRUE(journal.ok()) << journal.status().ToString();
    return std::move(journal).value();
  }
  static Transition Named(const std::string& message) {
    Transition transition;
    transition.set_message(message);
    return transition;
  }
  std::string Content() { return ReadFile(path_).value(); }
  void Overwrite(const std::string& content) {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << content;
  }

  std::string folder_;
  std::string path_;
};

TEST_F(JournalTest, UnacknowledgedTransitionsAndNumbersSurviveReopening) {
  {
    auto journal = Open(7);
    for (const char* name : {"a", "b", "c"}) ASSERT_TRUE(journal->Append(Named(name)).ok());
    ASSERT_TRUE(journal->Acknowledge(7).ok());
  }
  auto journal = Open(1);
  const auto pending = journal->pending();
  ASSERT_EQ(pending.size(), 2u);
  EXPECT_EQ(pending[0].number(), 8);
  EXPECT_EQ(pending[0].message(), "b");
  EXPECT_EQ(pending[1].message(), "c");
  EXPECT_EQ(journal->Append(Named("d"))->number(), 10);
}

TEST_F(JournalTest, AnAcknowledgedJournalIsSmallAndStillKnowsItsNumber) {
  auto journal = Open();
  for (int i = 0; i < 50; ++i) ASSERT_TRUE(journal->Append(Named(std::string(1000, 'x'))).ok());
  ASSERT_TRUE(journal->Acknowledge(50).ok());
  EXPECT_LT(Content().size(), 100u);
  journal.reset();
  EXPECT_EQ(Open()->next_number(), 51);
  EXPECT_EQ(Open(80)->next_number(), 80);
}

TEST_F(JournalTest, AnAcknowledgementOfWhatWasNeverSentChangesNothing) {
  auto journal = Open();
  ASSERT_TRUE(journal->Append(Named("a")).ok());
  ASSERT_TRUE(journal->Acknowledge(99).ok());
  EXPECT_EQ(journal->pending().size(), 1u);
}

// Goal: whatever part of the last write a crash leaves, what was before it is kept.
TEST_F(JournalTest, ACutAtAnyByteLosesAtMostTheLastRecord) {
  {
    auto journal = Open();
    ASSERT_TRUE(journal->Append(Named("first")).ok());
  }
  const size_t whole = Content().size();
  ASSERT_TRUE(Open()->Append(Named("second")).ok());
  const std::string full = Content();
  for (size_t cut = whole; cut < full.size(); ++cut) {
    Overwrite(full.substr(0, cut));
    auto journal = Open();
    ASSERT_EQ(journal->pending().size(), 1u) << cut;
    EXPECT_EQ(journal->Append(Named("again"))->number(), 2) << cut;
  }
}

TEST_F(JournalTest, AChangedByteBeforeTheLastRecordIsRefused) {
  {
    auto journal = Open();
    ASSERT_TRUE(journal->Append(Named("first")).ok());
    ASSERT_TRUE(journal->Append(Named("second")).ok());
  }
  const std::string full = Content();
  const size_t place = full.find("first");
  for (const size_t at : {size_t{0}, size_t{5}, place}) {
    std::string damaged = full;
    damaged[at] ^= 1;
    Overwrite(damaged);
    EXPECT_EQ(TransitionJournal::Open(path_, 1).status().code(), Code::kDataLoss) << at;
  }
}

// Goal: what Append has returned is there after kill -9, in order and without a gap.
// Method: a child says each number that was recorded through a pipe until it is killed; many rounds
// on one file.
TEST_F(JournalTest, KillMinusNineLosesNothingThatWasRecorded) {
  int64_t recorded = 0;
  for (int round = 0; round < 20; ++round) {
    int ends[2];
    ASSERT_EQ(::pipe(ends), 0);
    const pid_t child = ::fork();
    if (child == 0) {
      ::close(ends[0]);
      auto journal = TransitionJournal::Open(path_, 1);
      while (journal.ok()) {
        const auto transition = journal.value()->Append(Named("x"));
        if (!transition.ok()) break;
        const int64_t number = transition->number();
        if (::write(ends[1], &number, sizeof(number)) < 0) break;
      }
      ::_exit(1);
    }
    ::close(ends[1]);
    int64_t number = 0;
    for (int seen = 0; seen <= round % 5; ++seen) {
      ASSERT_EQ(::read(ends[0], &number, sizeof(number)), static_cast<ssize_t>(sizeof(number)));
      recorded = number;
    }
    ::kill(child, SIGKILL);
    int status = 0;
    ::waitpid(child, &status, 0);
    ASSERT_TRUE(WIFSIGNALED(status));
    while (::read(ends[0], &number, sizeof(number)) == sizeof(number)) recorded = number;
    ::close(ends[0]);
    const auto pending = Open()->pending();
    ASSERT_GE(pending.size(), static_cast<size_t>(recorded)) << "round " << round;
    for (size_t i = 0; i < pending.size(); ++i) {
      ASSERT_EQ(pending[i].number(), static_cast<int64_t>(i) + 1);
    }
  }
}

}  // namespace
}  // namespace oom
