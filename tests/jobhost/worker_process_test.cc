#include "server/jobhost/worker_process.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "runtime/base/file.h"
#include "server/jobhost/rank_log.h"

namespace oom {
namespace {

using std::chrono::milliseconds;

class WorkerProcessTest : public ::testing::Test {
 protected:
  WorkerProcessTest() {
    char pattern[] = "/tmp/oom-worker-XXXXXX";
    folder_ = ::mkdtemp(pattern);
  }
  ~WorkerProcessTest() override { std::filesystem::remove_all(folder_); }

  // A program that runs `script`.
  std::string Script(const std::string& script) {
    const std::string path = folder_ + "/worker.sh";
    std::ofstream(path) << "#!/bin/bash\n" << script << "\n";
    ::chmod(path.c_str(), 0755);
    return path;
  }
  Result<std::unique_ptr<WorkerProcess>> Start(const std::string& program,
                                               int64_t cap_bytes = 1 << 20) {
    return WorkerProcess::Start(
        {.program = program, .rank = 3, .log = {.path = LogPath(), .cap_bytes = cap_bytes}});
  }
  std::string LogPath() const { return folder_ + "/rank.log"; }
  std::string Log() { return ReadFile(LogPath()).value(); }

  std::string folder_;
};

bool IsAlive(pid_t pid) { return ::kill(pid, 0) == 0; }

template <class Condition>
bool Eventually(Condition condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    ::usleep(1000);
  }
  return true;
}

TEST_F(WorkerProcessTest, OutputOfBothStreamsIsInTheLogWhenTheEndIsSeen) {
  auto worker = Start(Script("echo \"args $*\"; echo problem >&2; exit 3")).value();
  const auto exit = worker->WaitFor(milliseconds(20000));
  ASSERT_TRUE(exit.has_value());
  EXPECT_EQ(exit->Describe(), "exited with code 3");
  EXPECT_EQ(Log(), "args --rank 3 --control-fd 3\nproblem\n");
}

TEST_F(WorkerProcessTest, TheControlSocketIsDescriptorThreeAndNothingElseIsInherited) {
  // No pipeline and no listing: either would open descriptors of its own while it looks.
  auto worker = Start(Script("[[ -S /proc/self/fd/3 ]] && echo socket; for n in {0..99} 255; do "
                             "[[ -e /proc/$$/fd/$n ]] && echo -n \"$n \"; done; echo"))
                    .value();
  ASSERT_TRUE(worker->WaitFor(milliseconds(20000)).has_value());
  // 255 is the script that the shell reads.
  EXPECT_EQ(Log(), "socket\n0 1 2 3 255 \n");
}

TEST_F(WorkerProcessTest, ASignalIsNamed) {
  auto worker = Start(Script("kill -SEGV $$")).value();
  EXPECT_TRUE(Eventually([&] { return worker->Peek().has_value(); }));
  EXPECT_NE(worker->Peek()->Describe().find("signal 11"), std::string::npos);
  EXPECT_EQ(worker->Poll()->signal, SIGSEGV);
}

TEST_F(WorkerProcessTest, AProgramThatCannotRunIsAnErrorThatNamesIt) {
  const auto missing = Start(folder_ + "/no-such-program");
  EXPECT_EQ(missing.status().code(), Code::kNotFound);
  EXPECT_NE(missing.status().message().find("no-such-program"), std::string::npos);
  std::ofstream(folder_ + "/plain") << "x";
  EXPECT_EQ(Start(folder_ + "/plain").status().code(), Code::kPermissionDenied);
}

// Goal: a worker's own children end with it.
TEST_F(WorkerProcessTest, KillEndsTheWholeGroup) {
  auto worker = Start(Script("sleep 1000 & echo $! > " + folder_ + "/child; wait")).value();
  pid_t child = 0;
  ASSERT_TRUE(Eventually([&] {
    std::ifstream(folder_ + "/child") >> child;
    return child > 0;
  }));
  const pid_t pid = worker->pid();
  worker.reset();
  EXPECT_FALSE(IsAlive(pid));
  // It is nobody's child here, so it stays as a zombie at most until init takes it.
  EXPECT_TRUE(Eventually([&] {
    std::ifstream stat("/proc/" + std::to_string(child) + "/stat");
    std::string line;
    return !std::getline(stat, line) || line.find(") Z") != std::string::npos;
  }));
}

// Goal: the kernel kills workers whose host is gone, however it went.
TEST_F(WorkerProcessTest, AWorkerDiesWithItsHost) {
  const std::string program = Script("echo $$ > " + folder_ + "/pid; sleep 1000");
  const pid_t host = ::fork();
  if (host == 0) {
    auto worker = Start(program);
    ::pause();
    ::_exit(0);
  }
  pid_t pid = 0;
  ASSERT_TRUE(Eventually([&] {
    std::ifstream(folder_ + "/pid") >> pid;
    return pid > 0;
  }));
  ::kill(host, SIGKILL);
  ::waitpid(host, nullptr, 0);
  EXPECT_TRUE(Eventually([&] {
    std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
    std::string line;
    return !std::getline(stat, line) || line.find(") Z") != std::string::npos;
  }));
}

TEST_F(WorkerProcessTest, LongLinesAreCutAndSaidToBe) {
  auto worker = Start(Script("head -c 20000 /dev/zero | tr '\\0' x; echo; echo next")).value();
  ASSERT_TRUE(worker->WaitFor(milliseconds(20000)).has_value());
  const std::string log = Log();
  EXPECT_EQ(log.find('\n'), static_cast<size_t>(kLogLineLimitBytes));
  EXPECT_NE(log.find(std::to_string(20000 - kLogLineLimitBytes) + " bytes more"),
            std::string::npos);
  EXPECT_NE(log.find("\nnext\n"), std::string::npos);
}

TEST_F(WorkerProcessTest, AFloodStaysWithinTwiceTheCapAndKeepsTheEnd) {
  auto worker = Start(Script("seq 1 200000; echo the end"), 64 << 10).value();
  ASSERT_TRUE(worker->WaitFor(milliseconds(60000)).has_value());
  EXPECT_LE(std::filesystem::file_size(LogPath()), 64u << 10);
  EXPECT_LE(std::filesystem::file_size(LogPath() + ".1"), 64u << 10);
  EXPECT_TRUE(Log().ends_with("200000\nthe end\n"));
}

TEST_F(WorkerProcessTest, AFullDiskDoesNotHoldTheWorkerUp) {
  auto worker = WorkerProcess::Start(
      {.program = Script("seq 1 100000; exit 7"), .rank = 0, .log = {.path = "/dev/full"}});
  ASSERT_TRUE(worker.ok()) << worker.status().ToString();
  const auto exit = worker.value()->WaitFor(milliseconds(60000));
  ASSERT_TRUE(exit.has_value());
  EXPECT_EQ(exit->exit_code, 7);
}

}  // namespace
}  // namespace oom
