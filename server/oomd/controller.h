// Controller is the daemon's core: the job table, the queue, the state machine and the retry rules.
// It knows no sockets, no processes, no gRPC and no wall clock, so a test can run histories of it.
//
// Changes are staged and become visible (to readers, watchers, callers, job hosts) only when Flush
// has committed them, all that came in between together. A failed commit changes nothing but makes
// the store read-only: from then on each change is refused with kUnavailable. Not thread-safe: the
// control thread owns it. Callbacks run on it, within Flush or the call itself.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "runtime/base/status.h"
#include "server/oomd/clock.h"
#include "server/oomd/event_log.h"
#include "server/oomd/job_queue.h"
#include "server/oomd/job_record.h"
#include "server/oomd/job_view.h"
#include "server/oomd/launcher.h"
#include "server/oomd/store.h"

namespace oom {

// What happens, for metrics and the log. Called on the control thread.
class Observer {
 public:
  virtual ~Observer() = default;
  virtual void JobTransitioned(const v1::Job& job) = 0;
  virtual void QueueWaited(double seconds) = 0;
  virtual void Progressed(const v1::Job& job, const internal::v1::Progress& progress) = 0;
  virtual void StoreCommitted(double seconds) = 0;
  virtual void StoreFailed(const Status& status) = 0;
  virtual void Warned(const std::string& message) = 0;
};

class Controller : public HostEvents {
 public:
  struct Options {
    NodeResources::Options node;
    std::string job_directory_root;  // "<state>/jobs".
    std::string worker_path;
    bool ephemeral = false;
    double backoff_initial_seconds = 10;
    double backoff_max_seconds = 600;
    // After the grace of a stop: how long a host may still take before it is killed.
    double stop_slack_seconds = 30;
    int max_queued_jobs = 1000;
    uint64_t seed = 0;  // Of uids and jitter.
  };
  struct Parts {
    Clock* clock = nullptr;
    Store* store = nullptr;
    Launcher* launcher = nullptr;
    Observer* observer = nullptr;
    EventLog* events = nullptr;
    JobView* view = nullptr;
  };
  using Reply = std::function<void(Result<v1::Job>)>;
  using CheckpointReply = std::function<void(Result<internal::v1::CheckpointDone>)>;

  // `parts` outlive the controller.
  Controller(const Options& options, const Parts& parts);

  // Loads the jobs, takes over live hosts, restarts what has none. Call once, before anything else.
  Status Recover();

  struct NewJob {
    v1::Job job;  // Planned: spec, plan, model.
    std::vector<internal::v1::Pool> pools;
    std::string job_id;  // Empty: made from the name.
    uint32_t owner = 0;
    std::string request_id;  // Empty: none.
    uint64_t payload_hash = 0;
    bool validate_only = false;
  };
  // The first answer of this request id, if there is one; nothing if it is new. Fails with
  // kInvalidArgument (REQUEST_ID_REUSED) if the payload is another.
  Result<std::optional<v1::Job>> FindReplay(uint32_t owner, const std::string& request_id,
                                            uint64_t payload_hash);
  // Replies after the commit. Fails with kAlreadyExists, kInvalidArgument, kResourceExhausted
  // (QUEUE_FULL; OUT_OF_HOST_MEMORY if it can never fit), kUnavailable.
  void CreateJob(NewJob job, Reply reply);

  // Each fails with kNotFound, kFailedPrecondition (a state that does not allow it), kUnavailable.
  // kAborted: `etag` is not the job's.
  void CancelJob(const v1::CancelJobRequest& request, Reply reply);
  void SuspendJob(const std::string& name, Reply reply);
  void ResumeJob(const std::string& name, Reply reply);
  // Replies when the checkpoint is durable. kAborted if the job stops first, kDataLoss and others
  // from the job host.
  void CheckpointJob(const std::string& name, CheckpointReply reply);

  // Commits what is staged, then starts what can start.
  void Flush();
  // Monotonic time at which OnTimer has work; empty: none.
  std::optional<double> NextDeadline() const;
  void OnTimer();

  // Tells every watcher how far the events have come.
  void PublishBookmark();

  // No job starts any more. Ephemeral: the running ones write a checkpoint and stop (they are
  // queued again by the next daemon with this state); `idle()` tells when they are done.
  void BeginShutdown();
  // Answers every CheckpointJob that still waits.
  void EndWaits(const Status& status);
  bool idle() const { return hosts_.empty(); }

  const std::string& store_id() const { return store_id_; }
  int64_t last_sequence() const { return committed_sequence_; }
  const NodeResources& resources() const { return resources_; }
  bool store_failed() const { return store_failed_; }

  void OnHello(const std::string& uid, const internal::v1::HostHello& hello) override;
  void OnTransition(const std::string& uid, const internal::v1::Transition& transition) override;
  void OnProgress(const std::string& uid, const internal::v1::Progress& progress) override;
  void OnCheckpointDone(const std::string& uid, const internal::v1::CheckpointDone& done) override;
  void OnDisconnect(const std::string& uid) override;
  void OnExit(const std::string& uid) override;

 private:
  struct PendingCheckpoint {
    std::string uid;
    CheckpointReply reply;
  };
  struct Change {
    v1::JobState state = v1::JOB_STATE_UNSPECIFIED;
    std::string reason;
    std::string message;
  };

  // The newest version, staged or committed; nullptr if there is none.
  const JobRecord* Find(const std::string& uid) const;
  Result<std::string> UidOf(const std::string& name) const;
  // A staged copy to change; its row is written by the next Flush.
  JobRecord& Edit(const std::string& uid);
  // Applies `change` and records an event. REQUIRES: the state machine allows it.
  void Record(JobRecord& record, const Change& change);
  void ReplyAfterCommit(const std::string& uid, Reply reply);
  void AfterCommit(std::function<void(const Status&)> action) {
    after_commit_.push_back(std::move(action));
  }
  Status CheckWritable() const;
  bool CommitOnce();
  // Queue and accounts follow the committed states.
  void Reconcile(const JobRecord& record);
  bool StartJobs();
  void ExplainQueue();
  void PublishProgress(const JobRecord& record);
  void RequestStop(JobRecord& record, v1::JobState final_state, bool checkpoint,
                   double grace_seconds, const std::string& reason);
  void SendStop(const JobRecord& record);
  void StageStart(const std::string& uid);
  void Launch(const std::string& uid);
  void HostLost(const std::string& uid);
  void ApplyProgress(const std::string& uid, const internal::v1::Progress& progress);
  void FailCheckpoints(const std::string& uid, const Status& status);
  void AddTimer(double seconds_from_now, const std::string& uid, std::function<void()> action);
  void DropTimers(const std::string& uid);

  const Options options_;
  const Parts parts_;
  std::string store_id_;
  std::mt19937_64 random_;

  // Committed.
  std::map<std::string, JobRecord> jobs_;    // By uid.
  std::map<std::string, std::string> uids_;  // By name.
  int64_t committed_sequence_ = 0;
  JobQueue queue_;
  NodeResources resources_;

  // Staged.
  std::map<std::string, JobRecord> staged_;
  std::map<std::string, std::string> staged_uids_;
  StoreBatch batch_;
  int64_t next_sequence_ = 1;
  int64_t next_submit_order_ = 1;
  std::vector<std::function<void(const Status&)>> after_commit_;

  std::set<std::string> hosts_;      // Processes that may be alive.
  std::set<std::string> connected_;  // Of those, the ones that said hello.
  int64_t next_checkpoint_request_ = 1;
  std::map<int64_t, PendingCheckpoint> checkpoints_;
  struct Timer {
    std::string uid;
    std::function<void()> action;
  };
  std::multimap<double, Timer> timers_;
  bool store_failed_ = false;
  bool shutting_down_ = false;
};

}  // namespace oom
