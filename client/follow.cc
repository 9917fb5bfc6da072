#include "client/follow.h"

#include <deque>
#include <string>
#include <utility>

#include "client/exit_code.h"
#include "client/job_view.h"
#include "client/progress.h"
#include "runtime/base/clock.h"
#include "runtime/base/file.h"

namespace oom {
namespace {

constexpr double kSecondInterruptSeconds = 2.0;
constexpr size_t kFailedLogLines = 20;
// The end of a log is looked for in at most this much of it.
constexpr int64_t kFailedLogLimitBytes = int64_t{64} << 20;

std::deque<std::string> LastLines(const std::string& text, size_t count) {
  std::deque<std::string> lines;
  size_t end = text.size();
  while (end > 0 && lines.size() < count) {
    if (text[end - 1] == '\n') --end;
    const size_t newline = end == 0 ? std::string::npos : text.rfind('\n', end - 1);
    const size_t begin = newline == std::string::npos ? 0 : newline + 1;
    lines.push_front(text.substr(begin, end - begin));
    end = begin;
  }
  return lines;
}

// The number after "rank-" in a log's path, or -1: the job host's log.
int RankOfLog(const std::string& path) {
  const size_t found = path.rfind("rank-");
  if (found == std::string::npos) return -1;
  int rank = 0;
  for (size_t i = found + 5; i < path.size() && path[i] >= '0' && path[i] <= '9'; ++i) {
    rank = rank * 10 + (path[i] - '0');
    if (rank > 1000000) return -1;
  }
  return rank;
}

// From the file, or from oomd where this user cannot read it.
std::deque<std::string> FailedLog(OomClient* client, const v1::Job& job) {
  const Result<std::string> text = ReadFile(job.failed_log_path(), kFailedLogLimitBytes);
  if (text.ok()) return LastLines(*text, kFailedLogLines);
  v1::StreamLogsRequest request;
  request.set_name(job.name());
  request.add_ranks(RankOfLog(job.failed_log_path()));
  request.set_tail_lines(kFailedLogLines);
  std::deque<std::string> lines;
  const Status status = client->StreamLogs(request, [&](const v1::LogChunk& chunk) {
    lines.push_back(chunk.line());
    if (lines.size() > kFailedLogLines) lines.pop_front();
    return true;
  });
  if (!status.ok()) lines.push_back("(the log cannot be read: " + status.message() + ")");
  return lines;
}

void ReportFailure(Session* session, const v1::Job& job) {
  Output& output = session->output();
  std::string text = JobId(job.name()) + " FAILED";
  if (!job.reason().empty()) text += ": " + job.reason();
  if (!job.message().empty()) text += ": " + job.message();
  output.ErrorText(text);
  if (job.failed_log_path().empty()) return;
  const Result<OomClient*> client = session->Client();
  if (client.ok()) {
    for (const std::string& line : FailedLog(*client, job)) output.ErrorText("  | " + line);
  }
  output.ErrorText("log: " + job.failed_log_path());
}

void ReportSuccess(Session* session, const v1::Job& job) {
  Output& output = session->output();
  const std::string& folder = job.spec().output();
  output.Message(JobId(job.name()) + " SUCCEEDED after " + std::to_string(job.step()) + " steps" +
                 (job.step() > 0 ? ", loss " + FormatNumber(job.loss(), 4) : ""));
  output.Message("  export       " + folder + "/export");
  output.Message("  steps        " + folder + "/steps.jsonl");
  output.Message("  tensorboard  tensorboard --logdir " + folder + "/tensorboard");
  output.Message("  trace        " + folder + "/trace (opens in https://ui.perfetto.dev)");
}

// What Ctrl-C means while a job is followed. The follower asks after each interrupted watch.
class InterruptPolicy {
 public:
  InterruptPolicy(Interrupt* interrupt, OomClient* client, const FollowOptions& options,
                  ProgressPrinter* progress)
      : interrupt_(interrupt), client_(client), options_(options), progress_(progress) {
    interrupt_->OnInterrupt([client] { client->CancelStreams(); });
  }
  ~InterruptPolicy() {
    interrupt_->OnInterrupt(nullptr);
    client_->AllowStreams();
  }

  // After a watch that ended with kCancelled: true to go on following, false to leave.
  bool GoOn() {
    const int seen = interrupt_->count();
    client_->AllowStreams();
    if (options_.embedded) {
      progress_->Message(cancels_ == 0 ? "stopping after a checkpoint; Ctrl-C again stops at once"
                                       : "stopping at once");
      Cancel(cancels_ == 0 ? v1::CANCEL_MODE_CHECKPOINT : v1::CANCEL_MODE_NOW);
      return cancels_ <= 2;
    }
    const std::string attach = "re-attach: oom watch " + JobId(options_.name) + options_.host_flag;
    if (!options_.may_cancel || cancels_ > 0) {
      progress_->Message("detached; the job goes on\n" + attach);
      return false;
    }
    progress_->Message("detached; the job goes on (Ctrl-C again within 2 s cancels it)\n" + attach);
    if (!interrupt_->WaitForMoreThan(seen, kSecondInterruptSeconds)) return false;
    client_->AllowStreams();
    progress_->Message("cancelling " + JobId(options_.name) + " after a checkpoint");
    Cancel(v1::CANCEL_MODE_CHECKPOINT);
    return true;
  }

 private:
  void Cancel(v1::CancelMode mode) {
    ++cancels_;
    v1::CancelJobRequest request;
    request.set_name(options_.name);
    request.set_mode(mode);
    const Result<v1::Job> job = client_->CancelJob(request);
    if (!job.ok()) progress_->Message("cannot cancel: " + job.status().message());
  }

  Interrupt* const interrupt_;
  OomClient* const client_;
  const FollowOptions& options_;
  ProgressPrinter* const progress_;
  int cancels_ = 0;
};

}  // namespace

Status WatchEvents(OomClient* client, const WatchOptions& options,
                   const std::function<bool(const v1::JobEvent&)>& on_event) {
  v1::WatchJobsRequest request;
  request.set_name(options.name);
  request.set_resume_token(options.resume_token);
  int64_t last_sequence = 0;
  double heard_at = MonotonicSeconds();
  int failures = 0;
  while (true) {
    bool heard = false;
    bool stopped = false;
    const Status status = client->WatchJobs(request, [&](const v1::JobEvent& event) {
      heard = true;
      failures = 0;
      if (!event.resume_token().empty()) request.set_resume_token(event.resume_token());
      if (event.kind() == v1::JOB_EVENT_KIND_TRANSITION) {
        if (event.sequence() <= last_sequence) return true;
        last_sequence = event.sequence();
      }
      stopped = !on_event(event);
      return !stopped;
    });
    if (stopped) return Status::Ok();
    if (heard) heard_at = MonotonicSeconds();
    switch (status.code()) {
      case Code::kOk:
      case Code::kUnavailable:
        break;
      case Code::kResourceExhausted:
        // This reader was too slow: go on after the last event that came, if one did.
        if (!heard) return status;
        continue;
      case Code::kOutOfRange:
        if (request.resume_token().empty()) return status;
        request.clear_resume_token();
        continue;
      default:
        return status;
    }
    if (++failures == 1 && options.on_lost) options.on_lost(status);
    if (MonotonicSeconds() - heard_at >= options.patience_seconds) {
      return status.ok() ? Status(Code::kUnavailable, "oomd ended the stream") : status;
    }
    if (!client->Backoff(failures)) return Status(Code::kCancelled, "interrupted");
  }
}

int FollowJob(Session* session, Interrupt* interrupt, const FollowOptions& options) {
  Result<OomClient*> client = session->Client();
  if (!client.ok()) return session->Fail(client.status());
  ProgressPrinter progress({.interval_seconds = options.interval_seconds, .clock = MonotonicSeconds},
                           &session->output());
  v1::Job last;
  WatchOptions watch{.name = options.name};
  watch.on_lost = [&](const Status&) { progress.Message("lost oomd; the job goes on; waiting"); };
  // The policy ends before a log is read, so that Ctrl-C then ends the program.
  {
    InterruptPolicy policy(interrupt, *client, options, &progress);
    while (true) {
      const Status status = WatchEvents(*client, watch, [&](const v1::JobEvent& event) {
        if (event.kind() == v1::JOB_EVENT_KIND_BOOKMARK) return true;
        last = event.job();
        progress.Update(last);
        return !IsTerminal(last.state());
      });
      if (status.ok()) break;
      if (status.code() == Code::kCancelled) {
        if (policy.GoOn()) continue;
        return kExitDetached;
      }
      progress.Finish();
      const int code = session->Fail(status);
      if (code == kExitNoDaemon || code == kExitTimeout) {
        progress.Message("re-attach: oom watch " + JobId(options.name) + options.host_flag);
      }
      return code;
    }
    progress.Finish();
  }
  return ReportOutcome(session, last);
}

Result<v1::Job> WaitForEnd(OomClient* client, const std::string& name, double patience_seconds) {
  v1::Job last;
  OOM_RETURN_IF_ERROR(WatchEvents(client, {.name = name, .patience_seconds = patience_seconds},
                                  [&](const v1::JobEvent& event) {
                                    if (event.kind() == v1::JOB_EVENT_KIND_BOOKMARK) return true;
                                    last = event.job();
                                    return !IsTerminal(last.state());
                                  }));
  return last;
}

int ReportOutcome(Session* session, const v1::Job& job) {
  switch (job.state()) {
    case v1::JOB_STATE_SUCCEEDED:
      ReportSuccess(session, job);
      break;
    case v1::JOB_STATE_FAILED:
      ReportFailure(session, job);
      break;
    default: {
      std::string text = JobId(job.name()) + " " + StateName(job.state()) + " at step " +
                         std::to_string(job.step()) + ", durable step " +
                         std::to_string(job.durable_step());
      if (!job.message().empty()) text += ": " + job.message();
      session->output().Message(text);
    }
  }
  if (!session->output().is_table()) WriteJob(job, UnixSeconds(), &session->output());
  return ExitCodeOf(job.state());
}

}  // namespace oom
