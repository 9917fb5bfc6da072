// Following jobs across restarts of oomd, and what is said when a job ends.
// Not thread-safe, but OomClient::CancelStreams may end a watch from another thread.

#pragma once

#include <functional>
#include <optional>

#include "client/commands.h"
#include "client/interrupt.h"
#include "client/oom_client.h"
#include "client/output.h"
#include "oom/v1/job.pb.h"
#include "runtime/base/status.h"

namespace oom {

struct WatchOptions {
  // Only this job ("jobs/tiny"); empty: all.
  std::string name;
  std::string resume_token;
  // How long oomd may be away before that is an error.
  double patience_seconds = 120.0;
  // Called once each time the connection is lost; may be null.
  std::function<void(const Status&)> on_lost;
};

// Calls `on_event` for each event, every transition once and in order, until it returns false
// (kOk). Goes on after the last token when oomd restarts or cuts the stream, and from a new
// snapshot when that token is too old. kCancelled after OomClient::CancelStreams, kUnavailable when
// patience ends, kDeadlineExceeded at the client's deadline, else the server's error.
Status WatchEvents(OomClient* client, const WatchOptions& options,
                   const std::function<bool(const v1::JobEvent&)>& on_event);

struct FollowOptions {
  std::string name;
  double interval_seconds = 10.0;
  // What a second Ctrl-C does: cancel the job, or nothing.
  bool may_cancel = false;
  // The daemon ends with this process, so that Ctrl-C cannot detach: the first one cancels.
  bool embedded = false;
  // " --host X" for the line that says how to attach again.
  std::string host_flag;
};

// Shows progress until the job is terminal; prints its outcome; returns the exit code.
int FollowJob(Session* session, Interrupt* interrupt, const FollowOptions& options);

// Waits for a terminal state without showing anything.
Result<v1::Job> WaitForEnd(OomClient* client, const std::string& name, double patience_seconds);

// Where the results are, or why it failed with the end of the failing rank's log; data is the job
// itself in the forms other than tables. Returns the exit code.
int ReportOutcome(Session* session, const v1::Job& job);

}  // namespace oom
