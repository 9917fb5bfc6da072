// Goal: an acknowledged job survives kill -9 of the daemon, and a repeated request never makes a
// second one. Method: eight submitters, each with request ids that it repeats until it has an
// answer; the daemon is killed at a random moment of each round and started again; at the end every
// acknowledged job is there once. OOM_KILL_ROUNDS: number of rounds (default 5).
#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sqlite3.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "oom/v1/job.grpc.pb.h"
#include "runtime/base/mutex.h"
#include "runtime/base/unique_fd.h"
#include "server/oomd/host_process.h"

namespace oom {
namespace {

class DaemonProcess {
 public:
  explicit DaemonProcess(const std::string& state) {
    int out[2];
    EXPECT_EQ(pipe2(out, O_CLOEXEC), 0);
    pid_ = fork();
    if (pid_ == 0) {
      dup2(out[1], 1);
      execl(OOM_TEST_OOMD, OOM_TEST_OOMD, state.c_str(), OOM_FAKE_JOBHOST, nullptr);
      _exit(127);
    }
    close(out[1]);
    const UniqueFd reader(out[0]);
    std::string line;
    for (char c; line.find('\n') == std::string::npos && read(reader.get(), &c, 1) == 1;) line += c;
    EXPECT_EQ(line, "oomd ready\n");
  }
  ~DaemonProcess() { Stop(SIGTERM); }
  void Stop(int signal_number) {
    if (pid_ <= 0) return;
    kill(pid_, signal_number);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  pid_t pid_ = -1;
};

std::unique_ptr<v1::JobService::Stub> Connect(const std::string& state) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return v1::JobService::NewStub(grpc::CreateCustomChannel(
      "unix:" + state + "/oomd.sock", grpc::InsecureChannelCredentials(), arguments));
}

TEST(KillTest, EveryAcknowledgedJobIsThereOnceAfterKills) {
  const char* rounds_text = std::getenv("OOM_KILL_ROUNDS");
  const int rounds = rounds_text == nullptr ? 5 : std::atoi(rounds_text);
  constexpr int kSubmitters = 8;
  char name[] = "/tmp/oom-kill-XXXXXX";
  const std::string state = mkdtemp(name);
  std::mt19937_64 random(1);
  Mutex mutex;
  std::map<std::string, std::string> acknowledged;  // Request id -> uid.
  std::set<std::string> asked;
  std::vector<int> next(kSubmitters, 0);
  for (int round = 0; round < rounds; ++round) {
    DaemonProcess daemon(state);
    std::atomic<int> acks = 0;
    std::atomic<bool> dead = false;
    std::vector<std::thread> submitters;
    for (int submitter = 0; submitter < kSubmitters; ++submitter) {
      submitters.emplace_back([&, submitter] {
        const auto stub = Connect(state);
        while (!dead) {
          // The same id until it is answered, over the rounds.
          const std::string id = std::to_string(submitter) + "-" + std::to_string(next[submitter]);
          v1::CreateJobRequest request;
          request.set_request_id(id);
          v1::JobSpec& spec = *request.mutable_job()->mutable_spec();
          spec.set_name("job " + id);
          spec.set_output(state + "/out");
          (*spec.mutable_labels())["steps"] = "0";
          (*spec.mutable_labels())["step_milliseconds"] = "1000";
          grpc::ClientContext context;
          v1::Job job;
          {
            const MutexLock lock(mutex);
            asked.insert(id);
          }
          if (!stub->CreateJob(&context, request, &job).ok()) return;
          const MutexLock lock(mutex);
          EXPECT_TRUE(acknowledged.emplace(id, job.uid()).second);
          ++next[submitter];
          ++acks;
        }
      });
    }
    const int wanted = 5 + static_cast<int>(random() % 60);
    while (acks < wanted) poll(nullptr, 0, 1);
    daemon.Stop(SIGKILL);
    dead = true;
    for (std::thread& submitter : submitters) submitter.join();
  }
  {
    DaemonProcess daemon(state);
    const auto stub = Connect(state);
    std::multimap<std::string, std::string> found;  // Job name as asked -> uid.
    std::set<std::string> uids;
    v1::ListJobsRequest request;
    request.set_page_size(1000);
    do {
      grpc::ClientContext context;
      v1::ListJobsResponse response;
      ASSERT_TRUE(stub->ListJobs(&context, request, &response).ok());
      for (const v1::Job& job : response.jobs()) {
        EXPECT_TRUE(uids.insert(job.uid()).second) << "uid " << job.uid() << " twice";
        found.emplace(job.spec().name().substr(4), job.uid());
      }
      request.set_page_token(response.next_page_token());
    } while (!request.page_token().empty());
    for (const auto& [id, uid] : acknowledged) {
      ASSERT_EQ(found.count(id), 1U) << "request " << id;
      EXPECT_EQ(found.find(id)->second, uid);
    }
    for (const auto& [id, uid] : found) EXPECT_TRUE(asked.contains(id)) << id;
    EXPECT_GE(acknowledged.size(), static_cast<size_t>(rounds) * 5);
    RecordProperty("acknowledged", static_cast<int>(acknowledged.size()));
  }
  sqlite3* database = nullptr;
  ASSERT_EQ(sqlite3_open((state + "/oomd.sqlite").c_str(), &database), SQLITE_OK);
  std::string answer;
  sqlite3_exec(
      database, "PRAGMA integrity_check",
      [](void* out, int, char** values, char**) {
        *static_cast<std::string*>(out) += values[0];
        return 0;
      },
      &answer, nullptr);
  sqlite3_close(database);
  EXPECT_EQ(answer, "ok");
  int hosts = 0;
  for (const auto& entry : std::filesystem::directory_iterator(state + "/jobs")) {
    const Result<HostProcess> host = FindHost(entry.path());
    if (!host.ok()) continue;
    ++hosts;
    kill(host->pid, SIGKILL);
  }
  EXPECT_EQ(hosts, 1) << "one device, one job host, over all the daemons";
  std::filesystem::remove_all(state);
}

}  // namespace
}  // namespace oom
