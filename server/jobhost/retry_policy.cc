#include "server/jobhost/retry_policy.h"

#include <algorithm>
#include <cmath>

namespace oom {

bool IsFinalReason(const std::string& reason) {
  return reason == "INVALID_INPUT" || reason == "OUT_OF_HOST_MEMORY" ||
         reason == "OUT_OF_GPU_MEMORY" || reason == "CHECKPOINT_CORRUPT";
}

RetryPolicy::Decision RetryPolicy::OnFailure(const std::string& reason, int64_t durable_step,
                                             double uniform) {
  ++options_.failure_count;
  const bool same_step = options_.last_failure_durable_step == durable_step;
  options_.last_failure_durable_step = durable_step;
  if (IsFinalReason(reason)) return {.reason = reason};
  if (options_.max_failures == 0)
    return {.reason = reason, .explanation = "no retries are allowed"};
  if (options_.failure_count > options_.max_failures) {
    return {.reason = "RETRIES_EXHAUSTED",
            .explanation = std::to_string(options_.failure_count) + " failures, " +
                           std::to_string(options_.max_failures) + " are allowed"};
  }
  if (same_step) {
    return {.reason = "RETRIES_EXHAUSTED",
            .explanation = "two failures in a row with no checkpoint between them (durable step " +
                           std::to_string(durable_step) + ")"};
  }
  const double longest = std::min(
      options_.backoff_max_seconds,
      std::ldexp(options_.backoff_initial_seconds, std::min(options_.failure_count - 1, 60)));
  return {.retry = true, .delay_seconds = longest * uniform};
}

}  // namespace oom
