// Exports a checkpoint of a job's output directory as files that other tools read: a Hugging Face
// directory, or FP32 masters and moments. Needs nothing but the directory: no daemon, no job host.
// Thread-safe on different destinations.

#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "runtime/base/status.h"

namespace oom {

struct ExportOptions {
  std::string output_directory;  // Of the job; holds job.json and checkpoints/.
  std::optional<int64_t> step;   // Absent: the newest checkpoint that is whole.
  bool state =
      false;  // Three folders master, moment1, moment2 instead of a Hugging Face directory.
  std::string destination;  // Empty: <output>/export, with `state` <output>/export-state.
};

struct ExportReport {
  std::string destination;
  std::string checkpoint;
  int64_t step = 0;
  int skipped_count = 0;  // Newer checkpoints that are not whole.
};

// Tensors get the types of the model that training started from, BF16 if it started from nothing,
// and F32 if the job's precision is float32, so that nothing of what was trained is rounded away.
// Fails with kNotFound (no job.json, no checkpoint of that step: those that exist are named),
// kDataLoss (file and piece named), kInvalidArgument (job.json), and codes of ExportHuggingFace.
Result<ExportReport> ExportCheckpoint(const ExportOptions& options);

}  // namespace oom
