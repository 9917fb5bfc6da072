// Daemon is oomd put together: store, core, job hosts, gRPC, metrics. The program's main() and the
// tests make one from a configuration and a planner. Start and Shutdown belong to one thread.

#pragma once

#include <functional>
#include <memory>
#include <string>

#include "planner/plan_job.h"
#include "runtime/base/status.h"
#include "runtime/memory/numa.h"
#include "server/oomd/config.h"

namespace oom {

class Daemon {
 public:
  struct Options {
    Config config;  // With its defaults filled in.
    std::function<Result<PlannedJob>(const v1::JobSpec&, const NodeLimits&)> plan;
    std::unique_ptr<NumaTopology> topology;  // nullptr: the machine's.
    std::string version;
  };

  // Serves when it returns. The codes of ListeningSocket::Listen, SqliteStore::Open,
  // Metrics::Serve.
  static Result<std::unique_ptr<Daemon>> Start(Options options);
  // Readiness goes off first, streams end with UNAVAILABLE, jobs go on; with `ephemeral` they write
  // a checkpoint and stop before. Returns when all is closed.
  void Shutdown();
  ~Daemon();

  const std::string& socket() const;
  std::string metrics_address() const;

 private:
  struct Impl;
  explicit Daemon(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace oom
