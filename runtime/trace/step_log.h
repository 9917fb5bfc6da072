// StepLog is steps.jsonl: one JSON object a completed step, in order, without gap and repetition
// over all attempts of a job. Numbers are written so that reading them gives the same bits.
// Thread-compatible.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "runtime/base/status.h"
#include "runtime/base/unique_fd.h"

namespace oom {

struct StepRecord {
  int64_t step = 0;  // Completed steps, from 1.
  double loss = 0;
  double auxiliary_loss = 0;
  int64_t tokens = 0;
  double gradient_norm = 0;
  double learning_rate = 0;
  double step_seconds = 0;
  double tokens_per_second = 0;
  double exposed_wait_seconds = 0;
  int64_t gpu_bytes_peak = 0;
  int64_t host_bytes_peak = 0;
  std::optional<double> evaluation_loss;
};

// One line, with its newline. A value that is not finite becomes null.
std::string FormatStepRecord(const StepRecord& record);
// Fails with kInvalidArgument: not one object of exactly these keys.
Result<StepRecord> ParseStepRecord(std::string_view line);

class StepLog {
 public:
  // Opens or creates the log to go on after `completed_steps` (0: from nothing). Lines of later
  // steps, torn lines and repetitions are dropped. Codes of ErrnoStatus.
  static Result<std::unique_ptr<StepLog>> Open(const std::string& path, int64_t completed_steps);

  // Writes one line with one write. Fails with kInvalidArgument unless record.step is last_step() +
  // 1, or with codes of ErrnoStatus; then the file holds whole lines only.
  Status Append(const StepRecord& record);

  // Makes the lines durable; called before a checkpoint gets its name, so that a resume finds no
  // gap.
  Status Sync();

  int64_t last_step() const { return last_step_; }
  // Steps up to completed_steps that had no line at Open: 0, or what a power loss took or was
  // logged elsewhere.
  int64_t missing_count() const { return missing_count_; }

 private:
  StepLog() = default;

  std::string path_;
  UniqueFd fd_;
  int64_t last_step_ = 0;
  int64_t missing_count_ = 0;
  int64_t size_bytes_ = 0;
};

}  // namespace oom
