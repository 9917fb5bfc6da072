// The part that both exports share: a list of safetensors files to write from a StateSource, cut
// into shards and written by a few threads. Internal to runtime/model. Thread-compatible values.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/model/safetensors_directory.h"
#include "runtime/model/safetensors_writer.h"
#include "runtime/model/state_source.h"

namespace oom {

struct ExportTensor {
  SafetensorEntry entry;
  const FileTensor* source = nullptr;     // A range of the state, or
  SafetensorsDirectory::Location copied;  // bytes of another file.
};

struct ExportFile {
  std::string name;
  std::vector<ExportTensor> tensors;
  const SafetensorsFile* like = nullptr;  // Its header is taken over, if set.
  int64_t bytes() const;
};

// `published` in order, cut into files of at most `shard_bytes` (a larger tensor gets its own
// file), named as transformers names them. The result points into `published`.
std::vector<ExportFile> CutIntoShards(const std::vector<FileTensor>& published, TensorType type,
                                      int64_t shard_bytes);

// Writes and syncs every file into `directory`, at most `thread_count` at the same time. The first
// failure is returned.
Status WriteExportFiles(const StateSource& state, StateArray array,
                        const std::vector<ExportFile>& files, const std::string& directory,
                        int thread_count);

// The index of more than one file; nothing for `model.safetensors` alone.
Status WriteExportIndex(const std::vector<ExportFile>& files, const std::string& directory);

}  // namespace oom
