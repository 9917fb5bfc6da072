// The control page: one mapping for one attempt, with words and records that never overlap.

#include "runtime/memory/control_page.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace oom {
namespace {

constexpr ControlPage::Layout kLayout{
    .rank_count = 3, .chunk_count = 7, .block_count = 41, .expert_count = 10};

std::unique_ptr<ControlPage> MakePage(const ControlPage::Layout& layout = kLayout) {
  auto page = ControlPage::Create(layout);
  EXPECT_TRUE(page.ok());
  return std::move(page).value();
}

std::vector<SharedWord*> AllWords(ControlPage& page) {
  std::vector<SharedWord*> words = {
      &page.aborted(),    &page.step_limit(),    &page.stop_step(),    &page.checkpoint_step(),
      &page.clip_known(), &page.backlog_freed(), &page.updates_done(), &page.bell()};
  for (int64_t chunk = 0; chunk < page.layout().chunk_count; ++chunk) {
    words.insert(words.end(),
                 {&page.version(chunk), &page.norm_known(chunk), &page.snapshot_taken(chunk)});
    for (int rank = 0; rank < page.layout().rank_count; ++rank)
      words.push_back(&page.landed(rank, chunk));
  }
  for (int rank = 0; rank < page.layout().rank_count; ++rank) {
    words.insert(words.end(), {&page.loss_known(rank), &page.step_done(rank), &page.heartbeat(rank),
                               &page.exchange_ready(rank), &page.exchange_read(rank),
                               &page.router_counted(rank)});
  }
  return words;
}

// Goal: no two words, records or sums share a byte, and no two words a cache line.
TEST(ControlPage, WordsRecordsAndSumsNeverOverlap) {
  const auto page = MakePage();
  std::vector<std::pair<uintptr_t, uintptr_t>> ranges;
  const auto add = [&](const void* begin, size_t bytes) {
    ranges.emplace_back(reinterpret_cast<uintptr_t>(begin),
                        reinterpret_cast<uintptr_t>(begin) + bytes);
  };
  for (SharedWord* word : AllWords(*page)) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(word) % 64, 0u);
    EXPECT_EQ(word->Load(), 0u);
    add(word, 64);
  }
  for (int rank = 0; rank < kLayout.rank_count; ++rank) {
    for (int64_t step = 0; step < kStepRing; ++step)
      add(&page->rank_record(rank, step), sizeof(RankRecord));
    for (int64_t step = 0; step < kStepRing; ++step) {
      const RouterCounts counts = page->router_counts(rank, step);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(&counts.tokens) % 64, 0u);
      EXPECT_EQ(counts.choices_E.size(), 10u);
      EXPECT_EQ(counts.choices_E.data(), &counts.tokens + 1);
      // To the end of its last cache line.
      add(&counts.tokens, 128);
    }
  }
  for (int64_t step = 0; step < kStepRing; ++step)
    add(&page->clip_record(step), sizeof(ClipRecord));
  EXPECT_EQ(page->norm_squares().size(), 41u);
  add(page->norm_squares().data(), page->norm_squares().size_bytes());
  std::sort(ranges.begin(), ranges.end());
  for (size_t i = 1; i < ranges.size(); ++i) EXPECT_LE(ranges[i - 1].second, ranges[i].first);
  EXPECT_EQ(page->norm_squares()[40], 0.0);
  // Records of a step come back after kStepRing steps.
  EXPECT_EQ(&page->rank_record(1, 2), &page->rank_record(1, 2 + kStepRing));
  EXPECT_EQ(&page->router_counts(1, 2).tokens, &page->router_counts(1, 2 + kStepRing).tokens);
}

TEST(ControlPage, AnotherMappingSeesTheSameWords) {
  const auto page = MakePage();
  auto other = ControlPage::Map(UniqueFd(::dup(page->fd())), kLayout);
  ASSERT_TRUE(other.ok()) << other.status().ToString();
  const std::vector<SharedWord*> here = AllWords(*page);
  const std::vector<SharedWord*> there = AllWords(**other);
  ASSERT_EQ(here.size(), there.size());
  for (size_t i = 0; i < here.size(); ++i) {
    EXPECT_NE(here[i], there[i]);
    here[i]->Publish(i + 1);
    EXPECT_EQ(there[i]->Load(), i + 1);
  }
  page->rank_record(2, 5).loss_sum = 1.25;
  EXPECT_EQ((*other)->rank_record(2, 5).loss_sum, 1.25);
  page->norm_squares()[3] = 9.0;
  EXPECT_EQ((*other)->norm_squares()[3], 9.0);
}

TEST(ControlPage, ANewPageIsZeroWhateverTheOldOneSaid) {
  const auto old = MakePage();
  for (SharedWord* word : AllWords(*old)) word->Publish(99);
  const auto fresh = MakePage();
  for (SharedWord* word : AllWords(*fresh)) EXPECT_EQ(word->Load(), 0u);
}

TEST(ControlPage, AnotherLayoutIsRefused) {
  const auto page = MakePage();
  std::vector<ControlPage::Layout> others(6, kLayout);
  others[0].rank_count = 2;
  others[1].chunk_count = 8;
  others[2].block_count = 42;
  others[3].chunk_count = 70000;
  others[4].expert_count = 11;
  others[5].expert_count = 0;
  for (const ControlPage::Layout& layout : others) {
    const auto other = ControlPage::Map(UniqueFd(::dup(page->fd())), layout);
    ASSERT_FALSE(other.ok());
    EXPECT_EQ(other.status().code(), Code::kInvalidArgument) << other.status().ToString();
  }
}

TEST(ControlPage, AFileThatIsNoPageIsRefused) {
  UniqueFd empty(::memfd_create("empty", MFD_CLOEXEC));
  const auto none = ControlPage::Map(std::move(empty), kLayout);
  ASSERT_FALSE(none.ok());
  EXPECT_EQ(none.status().code(), Code::kInvalidArgument);
  // Large enough, but zero: no magic, and not sealed.
  UniqueFd zero(::memfd_create("zero", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(zero.get(), 1 << 20), 0);
  const auto blank = ControlPage::Map(std::move(zero), kLayout);
  ASSERT_FALSE(blank.ok());
  EXPECT_EQ(blank.status().code(), Code::kInvalidArgument);
}

// A mapper can never be hit by SIGBUS, since nobody can shrink the file.
TEST(ControlPage, TheFileIsSealed) {
  const auto page = MakePage();
  EXPECT_NE(::ftruncate(page->fd(), 0), 0);
  EXPECT_NE(::ftruncate(page->fd(), 1 << 30), 0);
  const int seals = ::fcntl(page->fd(), F_GET_SEALS);
  EXPECT_EQ(seals & (F_SEAL_SHRINK | F_SEAL_GROW), F_SEAL_SHRINK | F_SEAL_GROW);
}

// Goal: an abort ends the waits on every word, in every process.
TEST(ControlPage, AbortReleasesWaitersOfEveryWordInEveryProcess) {
  const auto page = MakePage();
  const size_t count = AllWords(*page).size();
  const pid_t child = ::fork();
  if (child == 0) {
    std::vector<std::thread> threads;
    std::atomic<int> wrong{0};
    for (size_t i = 1; i < count; ++i) {
      threads.emplace_back([&, i] {
        const WaitResult result = AllWords(*page)[i]->WaitAtLeast(
            1, page->aborted(), {.timeout = std::chrono::seconds(60)});
        if (result != WaitResult::kAborted) ++wrong;
      });
    }
    for (std::thread& thread : threads) thread.join();
    ::_exit(wrong.load() == 0 ? 0 : 1);
  }
  page->Abort();
  EXPECT_EQ(page->aborted().Load(), 1u);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

}  // namespace
}  // namespace oom
