// Job hosts as processes: found again by their file, whenever and wherever the daemon that started
// them died.
#include "server/oomd/host_process.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/base/file.h"
#include "server/jobhost/host_pid_file.h"
#include "tests/server/folder_test.h"

namespace oom {
namespace {

class HostProcessTest : public testing::FolderTest {
 protected:
  // A program that says that it runs, as a job host does, then does `more`, and sleeps.
  SpawnOptions Sleeper(const std::string& more, std::vector<int> descriptors) const {
    const std::string running =
        "read -r pid ticks state <$0/host.pid; echo $pid $ticks running >$0/new; mv $0/new "
        "$0/host.pid; ";
    return {.program = "/bin/sh",
            .arguments = {"-c", running + more + "sleep 60", folder_},
            .directory = folder_,
            .descriptors = std::move(descriptors)};
  }
};

TEST_F(HostProcessTest, WhatWasForkedAndNeverRanIsNoLostHost) {
  const pid_t child = fork();
  if (child == 0) _exit(0);
  const uint64_t ticks = ProcessStartTicks(child);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  ASSERT_TRUE(WriteHostPid(folder_, {.pid = child, .start_ticks = ticks}).ok());
  EXPECT_EQ(FindHost(folder_).status().code(), Code::kNotFound);
  ASSERT_TRUE(WriteHostPid(folder_, {.pid = child, .start_ticks = ticks, .is_running = true}).ok());
  EXPECT_EQ(FindHost(folder_).status().code(), Code::kUnavailable);
  // As it was written once.
  Write("host.pid", std::to_string(child) + " " + std::to_string(ticks) + "\n");
  EXPECT_EQ(FindHost(folder_).status().code(), Code::kUnavailable);
  Write("host.pid", "nobody\n");
  EXPECT_EQ(FindHost(folder_).status().code(), Code::kUnavailable);
}

// Goal: wherever a daemon dies while it starts a host, its successor finds that host running, or
// finds that it never ran; never a lost host, which would count as a failure of the job.
TEST_F(HostProcessTest, ADaemonKilledWhileItStartsAHostLeavesARunningOneOrNone) {
  std::minstd_rand random(1);
  for (int round = 0; round < 60; ++round) {
    RemoveHostPid(folder_);
    const pid_t daemon = fork();
    if (daemon == 0) {
      static_cast<void>(SpawnHost(Sleeper("", {})));
      pause();
    }
    while (access((folder_ + "/host.pid").c_str(), F_OK) != 0) std::this_thread::yield();
    const auto until = std::chrono::steady_clock::now() +
                       std::chrono::microseconds(std::uniform_int_distribution(0, 2000)(random));
    while (std::chrono::steady_clock::now() < until) {
    }
    kill(daemon, SIGKILL);
    waitpid(daemon, nullptr, 0);
    const auto found = FindHost(folder_);
    if (!found.ok()) {
      EXPECT_EQ(found.status().code(), Code::kNotFound) << found.status().ToString();
      continue;
    }
    EXPECT_TRUE(ReadHostPid(folder_)->is_running);
    kill(-found->pid, SIGKILL);
  }
}

TEST_F(HostProcessTest, AHostIsFoundAgainWhileItLivesAndNotByItsNumberAlone) {
  EXPECT_EQ(FindHost(folder_).status().code(), Code::kNotFound);
  const UniqueFd marker(memfd_create("marker", 0));
  const auto host =
      SpawnHost(Sleeper("test -e /dev/fd/10 && ! test -e /dev/fd/3 && ! test "
                        "-e /dev/fd/11 && echo good; ",
                        {marker.get()}));
  ASSERT_TRUE(host.ok()) << host.status().ToString();
  const auto found = FindHost(folder_);
  ASSERT_TRUE(found.ok());
  EXPECT_EQ(found->pid, host->pid);
  EXPECT_EQ(getsid(host->pid), host->pid) << "it has a session of its own";
  // Another process with that number, as its start time shows.
  const std::string text = ReadFile(folder_ + "/host.pid").value();
  Write("host.pid", std::to_string(host->pid) + " 1\n");
  EXPECT_EQ(FindHost(folder_).status().code(), Code::kUnavailable);
  Write("host.pid", text);
  while (ReadFile(folder_ + "/host.log").value() != "good\n" && ProcessStartTicks(host->pid) != 0) {
    std::this_thread::yield();
  }
  EXPECT_EQ(ReadFile(folder_ + "/host.log").value(), "good\n")
      << "it has its descriptors and no others";
  kill(-host->pid, SIGKILL);
  waitpid(host->pid, nullptr, 0);
  EXPECT_EQ(FindHost(folder_).status().code(), Code::kUnavailable);
  RemoveHostPid(folder_);
  EXPECT_EQ(FindHost(folder_).status().code(), Code::kNotFound);
}

}  // namespace
}  // namespace oom
