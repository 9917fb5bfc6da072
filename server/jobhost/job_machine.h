// JobMachine is the job's state machine in the job host (service decisions, D2): attempts one after
// the other with backoff between them, a stop at any moment, the export at the end, and every
// transition journaled before it is told. One thread calls Run; it must be the process's main
// thread (see Attempt).

#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "oom/internal/v1/control.pb.h"
#include "runtime/base/status.h"
#include "runtime/base/unique_fd.h"
#include "runtime/memory/numa.h"
#include "server/jobhost/attempt.h"
#include "server/jobhost/control_server.h"
#include "server/jobhost/host_log.h"
#include "server/jobhost/job_status.h"
#include "server/jobhost/retry_policy.h"
#include "server/jobhost/stop_control.h"
#include "server/jobhost/transition_journal.h"

namespace oom {

class JobMachine {
 public:
  struct Options {
    internal::v1::JobStart start;
    std::vector<UniqueFd> pool_fds;
    std::unique_ptr<NumaTopology> topology;
    HostLog* log = nullptr;  // Must outlive the machine.
    std::chrono::duration<double> worker_silence_limit{120.0};
    std::chrono::milliseconds daemon_absence_limit{10000};  // Of an ephemeral job host.
  };

  explicit JobMachine(Options options);
  ~JobMachine();

  // Runs the job to a final state (or SUSPENDED), and returns when oomd has recorded it. Fails with
  // codes of TransitionJournal::Open and ControlServer::Start; then the job was not touched.
  Status Run();

 private:
  // A final state, decided but not told yet.
  struct End {
    v1::JobState state = v1::JOB_STATE_FAILED;
    std::string reason;
    std::string message;
    std::string failed_log_path;
  };

  Status StartServer();
  End RunJob();
  Status Prepare();
  Attempt::Outcome RunAttempt(int number);
  // The end that follows from an attempt's outcome, or nothing: then the job is recovering.
  std::optional<End> AfterAttempt(const Attempt::Outcome& outcome, int number);
  std::optional<End> Recover(const Attempt::Outcome& outcome, int number);
  End Export();
  End StoppedEnd() const;
  void Publish(v1::JobState state, int attempt, const End& details);
  void StopBecause(const std::string& why);

  Options options_;
  StopControl stop_;
  RetryPolicy retry_;
  std::mt19937_64 random_;
  std::atomic<bool> daemon_is_gone_{false};
  std::atomic<bool> journal_failed_{false};
  int attempt_ = 0;
  bool pools_are_new_ = true;
  std::unique_ptr<TransitionJournal> journal_;
  std::unique_ptr<ControlServer> server_;
  std::unique_ptr<JobStatus> status_;
  std::unique_ptr<OutputDirectory> output_;
  std::unique_ptr<JobContext> context_;
};

}  // namespace oom
