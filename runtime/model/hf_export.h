// Writes canonical state as files that other tools read: a Hugging Face directory, or masters and
// moments under the published names. Both are written beside their place and renamed
// (staged_directory.h). Functions are thread-safe; two exports to one target at the same time are
// not meant.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/model/state_source.h"
#include "runtime/model/tensor_type.h"

namespace oom {

inline constexpr int64_t kDefaultShardBytes = 5'000'000'000;

struct HfExportOptions {
  std::string output_directory;

  // Exactly one of the next two. The directory that training started from: its tensor names, types,
  // shards, header bytes, config.json and other files are kept; pass-through tensors are copied.
  // Other weights than the model's own (*.bin, *.pt, *.safetensors outside the index,
  // consolidated.*, ...) stay behind, and so do hidden folders and links to folders.
  std::string template_directory;
  // Or the text of a bare config.json: its keys are kept, `architectures`, `model_type` and `dtype`
  // are added or set.
  std::string config_json;
  // With config_json, optional: tokenizer and generation settings in this folder are carried along.
  std::string companion_directory;

  // Type of every trained tensor. Unset: what the template has; BF16 without one. A type that
  // differs from the template's is written to config.json too, and so is a rotary scaling (YaRN)
  // of the model that differs from the configuration's.
  std::optional<TensorType> type;
  int64_t shard_bytes = kDefaultShardBytes;  // Without a template: the most a file may hold.
  int thread_count = 4;                      // Files written at the same time.
};

// BF16 output rounds the master half away from zero, F16 to nearest even; what was read from a file
// of the same type and not trained comes out with the same bits. Fails with kInvalidArgument
// (template and model differ; output and template overlap; a value beyond F16), kFailedPrecondition
// (the target exists and is no export), kResourceExhausted (disk full), kPermissionDenied, codes of
// StateSource::Read. Nothing is left behind then.
Status ExportHuggingFace(const StateSource& state, const ModelDescription& model,
                         const std::vector<ParameterUnit>& units, const HfExportOptions& options);

struct StateExportOptions {
  std::string output_directory;
  int64_t shard_bytes = kDefaultShardBytes;
  int thread_count = 4;
};

// Three folders, master, moment1 and moment2, of FP32 safetensors under the published names. Codes
// as above.
Status ExportState(const StateSource& state, const ModelDescription& model,
                   const std::vector<ParameterUnit>& units, const StateExportOptions& options);

}  // namespace oom
