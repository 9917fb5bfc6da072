// SharedWord between threads and between processes (engine rules, section 5).

#include "runtime/memory/shared_word.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <random>
#include <thread>
#include <vector>

namespace oom {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// Words in zero-filled memory that children share.
class SharedMemory {
 public:
  explicit SharedMemory(size_t count) : bytes_(count * sizeof(SharedWord)) {
    address_ = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    EXPECT_NE(address_, MAP_FAILED);
  }
  ~SharedMemory() { ::munmap(address_, bytes_); }
  SharedWord& operator[](size_t index) { return static_cast<SharedWord*>(address_)[index]; }

 private:
  void* address_;
  size_t bytes_;
};

// Runs `body` in a child; its return value is the exit status.
pid_t Fork(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body());
  return child;
}

int ExitStatus(pid_t child) {
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 200 + WTERMSIG(status);
}

TEST(SharedWord, IsACacheLineOfItsOwn) {
  EXPECT_EQ(sizeof(SharedWord), 64u);
  EXPECT_EQ(alignof(SharedWord), 64u);
  SharedMemory words(2);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(&words[1]) - reinterpret_cast<uintptr_t>(&words[0]), 64u);
  EXPECT_EQ(words[0].Load(), 0u);
}

// Goal: publishing wakes a sleeper of another process every time.
// Method: two processes play ping-pong; a lost wake would cost 50 ms a round, a broken one hang.
TEST(SharedWord, PublishWakesAWaiterInAnotherProcess) {
  constexpr uint64_t kRounds = 300;
  SharedMemory words(3);
  const WaitOptions patience{.timeout = seconds(20)};
  const pid_t child = Fork([&] {
    for (uint64_t round = 1; round <= kRounds; ++round) {
      if (words[0].WaitAtLeast(round, words[2], patience) != WaitResult::kReached) return 1;
      words[1].Publish(round);
    }
    return 0;
  });
  for (uint64_t round = 1; round <= kRounds; ++round) {
    words[0].Publish(round);
    ASSERT_EQ(words[1].WaitAtLeast(round, words[2], patience), WaitResult::kReached);
  }
  EXPECT_EQ(ExitStatus(child), 0);
}

// What was written before the word is seen after it.
TEST(SharedWord, PublishOrdersThePayload) {
  SharedMemory words(3);
  auto* payload = reinterpret_cast<volatile uint64_t*>(&words[2]) + 1;
  const pid_t child = Fork([&] {
    for (uint64_t value = 1; value <= 2000; ++value) {
      if (words[0].WaitAtLeast(value, words[2], {.timeout = seconds(20)}) != WaitResult::kReached)
        return 1;
      if (*payload < value) return 2;
    }
    return 0;
  });
  for (uint64_t value = 1; value <= 2000; ++value) {
    *payload = value;
    words[0].Publish(value);
  }
  EXPECT_EQ(ExitStatus(child), 0);
}

TEST(SharedWord, AnAbortBeatsAReachedTarget) {
  SharedMemory words(2);
  words[0].Publish(7);
  EXPECT_EQ(words[0].WaitAtLeast(7, words[1]), WaitResult::kReached);
  words[1].Publish(1);
  EXPECT_EQ(words[0].WaitAtLeast(7, words[1]), WaitResult::kAborted);
  EXPECT_EQ(words[0].WaitAtLeast(0, words[1]), WaitResult::kAborted);
  EXPECT_EQ(words[0].WaitAtLeast(8, words[1]), WaitResult::kAborted);
}

TEST(SharedWord, AnAbortReleasesASleeperInAnotherProcess) {
  SharedMemory words(2);
  const pid_t child = Fork([&] {
    return words[0].WaitAtLeast(1, words[1], {.timeout = seconds(60)}) == WaitResult::kAborted ? 0
                                                                                               : 1;
  });
  words[1].Publish(1);
  words[0].WakeAll();
  EXPECT_EQ(ExitStatus(child), 0);
}

TEST(SharedWord, AWaitEndsAtItsTimeoutAndNotBefore) {
  SharedMemory words(2);
  for (const int spin : {0, 20}) {
    const auto start = std::chrono::steady_clock::now();
    EXPECT_EQ(
        words[0].WaitAtLeast(1, words[1], {.spin_microseconds = spin, .timeout = milliseconds(80)}),
        WaitResult::kTimeout);
    EXPECT_GE(std::chrono::steady_clock::now() - start, milliseconds(80));
  }
  // Reached counts, however short the patience.
  EXPECT_EQ(words[0].WaitAtLeast(0, words[1], {.timeout = std::chrono::nanoseconds(0)}),
            WaitResult::kReached);
}

// Goal: with several producers the word ends at the highest value and never falls on the way.
TEST(SharedWord, RaiseToByManyProcessesNeverFalls) {
  SharedMemory words(2);
  constexpr int kProducers = 4;
  std::vector<pid_t> children;
  uint64_t highest = 0;
  for (int producer = 0; producer < kProducers; ++producer) {
    std::mt19937_64 random(static_cast<uint64_t>(producer));
    std::vector<uint64_t> values;
    for (int i = 0; i < 5000; ++i) values.push_back(random() % 1000000007);
    highest = std::max(highest, *std::max_element(values.begin(), values.end()));
    children.push_back(Fork([&] {
      for (const uint64_t value : values) {
        words[0].RaiseTo(value);
        if (words[0].Load() < value) return 1;
      }
      return 0;
    }));
  }
  uint64_t seen = 0;
  while (seen < highest) {
    ASSERT_EQ(words[0].WaitAtLeast(seen + 1, words[1], {.timeout = seconds(20)}),
              WaitResult::kReached);
    const uint64_t now = words[0].Load();
    ASSERT_GT(now, seen);
    seen = now;
  }
  for (const pid_t child : children) EXPECT_EQ(ExitStatus(child), 0);
  EXPECT_EQ(words[0].Load(), highest);
}

TEST(SharedWord, RingsOfManyProcessesAllCount) {
  SharedMemory words(2);
  constexpr uint64_t kRingers = 4, kRings = 3000;
  std::vector<pid_t> children;
  for (uint64_t ringer = 0; ringer < kRingers; ++ringer) {
    children.push_back(Fork([&] {
      for (uint64_t i = 0; i < kRings; ++i) words[0].Ring();
      return 0;
    }));
  }
  EXPECT_EQ(words[0].WaitAtLeast(kRingers * kRings, words[1], {.timeout = seconds(30)}),
            WaitResult::kReached);
  for (const pid_t child : children) EXPECT_EQ(ExitStatus(child), 0);
  EXPECT_EQ(words[0].Load(), kRingers * kRings);
}

// One producer wakes every waiter, threads of this process among them.
TEST(SharedWord, APublishWakesEveryWaiter) {
  SharedMemory words(2);
  std::atomic<int> reached{0};
  std::vector<std::thread> waiters;
  for (int i = 0; i < 6; ++i) {
    waiters.emplace_back([&, i] {
      const auto target = static_cast<uint64_t>(1 + i % 3);
      if (words[0].WaitAtLeast(target, words[1], {.timeout = seconds(20)}) == WaitResult::kReached)
        ++reached;
    });
  }
  words[0].Publish(3);
  for (std::thread& waiter : waiters) waiter.join();
  EXPECT_EQ(reached.load(), 6);
}

// A futex is 32 bits wide; the word is not.
TEST(SharedWord, ValuesBeyond32BitsAreComparedWhole) {
  SharedMemory words(2);
  words[0].Publish(uint64_t{5} << 32);
  EXPECT_EQ(words[0].WaitAtLeast((uint64_t{4} << 32) + 9, words[1]), WaitResult::kReached);
  EXPECT_EQ(words[0].WaitAtLeast((uint64_t{5} << 32) + 1, words[1], {.timeout = milliseconds(5)}),
            WaitResult::kTimeout);
}

TEST(SharedWord, SpinsOnlyWhereThreadsHaveCores) {
  const auto cores = static_cast<int>(std::thread::hardware_concurrency());
  EXPECT_EQ(SpinMicrosecondsFor(cores + 1), 0);
  EXPECT_GT(SpinMicrosecondsFor(1), 0);
  EXPECT_LE(SpinMicrosecondsFor(1), 20);
}

}  // namespace
}  // namespace oom
