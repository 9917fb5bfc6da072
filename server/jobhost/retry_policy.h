// Whether a job goes on after a failed attempt, and after how long (service decisions, D3). Pure:
// time and randomness are passed in. Not thread-safe.

#pragma once

#include <cstdint>
#include <string>

namespace oom {

class RetryPolicy {
 public:
  struct Options {
    int max_failures = 3;  // Failures that are answered with a new attempt.
    double backoff_initial_seconds = 10.0;
    double backoff_max_seconds = 600.0;
    int failure_count = 0;                   // So far, over earlier job hosts too.
    int64_t last_failure_durable_step = -1;  // -1: no failure yet.
  };

  struct Decision {
    bool retry = false;
    double delay_seconds = 0.0;
    // Of the final state, when it is not retried.
    std::string reason;
    std::string explanation;
  };

  explicit RetryPolicy(const Options& options) : options_(options) {}

  // An attempt failed with `reason` while `durable_step` was the newest checkpoint. `uniform` in
  // [0, 1) draws the jitter: the delay is uniform in [0, min(max, initial * 2^(failures - 1))).
  Decision OnFailure(const std::string& reason, int64_t durable_step, double uniform);

  int failure_count() const { return options_.failure_count; }

 private:
  Options options_;
};

// Failures that the same plan and input can only repeat.
bool IsFinalReason(const std::string& reason);

}  // namespace oom
