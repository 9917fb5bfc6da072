// StepReporter writes what users plot: steps.jsonl and TensorBoard events of the steps of one
// attempt. One thread.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "runtime/base/status.h"

namespace oom {

class StepLog;
class TensorboardWriter;

// What is said of one step.
struct StepReport {
  int64_t completed_steps = 0;  // This step included.
  double loss = 0.0;
  double auxiliary_loss = 0.0;
  int64_t tokens = 0;
  double gradient_norm = 0.0;
  double learning_rate = 0.0;
  double step_seconds = 0.0;
  double exposed_wait_seconds = 0.0;
  int64_t device_bytes_peak = 0;
  int64_t host_bytes_peak = 0;
  std::optional<double> evaluation_loss;

  double tokens_per_second() const {
    return step_seconds > 0.0 ? static_cast<double>(tokens) / step_seconds : 0.0;
  }
};

class StepReporter {
 public:
  // Cuts steps.jsonl back to `completed_steps` and goes on from there. Codes of ErrnoStatus.
  static Result<std::unique_ptr<StepReporter>> Open(const std::string& output_directory,
                                                    int64_t completed_steps);
  ~StepReporter();

  // Fails with codes of ErrnoStatus for the step log. TensorBoard is a convenience: an error there
  // is logged once.
  Status Report(const StepReport& report);

  // Makes the step log durable: called before a checkpoint is written.
  Status Sync();

 private:
  StepReporter();

  std::unique_ptr<StepLog> log_;
  std::unique_ptr<TensorboardWriter> tensorboard_;
  bool tensorboard_failed_ = false;
};

}  // namespace oom
