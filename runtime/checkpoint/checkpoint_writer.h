// CheckpointWriter writes one checkpoint: it takes all of the space first, then state in any order,
// and the manifest last. Until the directory gets its name by one rename, nothing of it counts; a
// writer that is destroyed before removes it. Then older checkpoints are removed, never before the
// new one was read back. WriteBlocks is thread-safe; the rest is not.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/base/unique_fd.h"
#include "runtime/checkpoint/manifest.h"
#include "runtime/checkpoint/state_file_writer.h"
#include "runtime/checkpoint/unit_file.h"
#include "runtime/model/unit.h"

namespace oom {

struct CheckpointReport {
  std::string path;
  int64_t step = 0;
  int64_t bytes = 0;
  std::vector<std::string> removed;  // Older checkpoints.
  // Of the removal. The checkpoint stands even if an older one could not be removed.
  Status retention;
};

class CheckpointWriter {
 public:
  struct Options {
    std::string output_directory;
    Manifest manifest;  // Without its files.
    std::vector<ParameterUnit> units;
    int keep = 3;  // Checkpoints that stay, this one included; at least 2.
    // Called with "reserved", "written", "synced", "manifest", "renamed" and "retained" as each is
    // reached.
    std::function<void(std::string_view stage)> on_stage;
  };

  // Removes what dead writers left, then reserves the files. Fails with kResourceExhausted (reason
  // STORAGE_FULL, the file and its size named) or kPermissionDenied (directory named); nothing is
  // left then.
  static Result<std::unique_ptr<CheckpointWriter>> Create(Options options);
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  // State of elements [first_element, first_element + masters.size()) of a unit, in unit
  // coordinates: padding is among them and is dropped. Every element once. Fails with
  // kResourceExhausted, kInternal (the disk) or kInvalidArgument (written twice). REQUIRES: the
  // range lies in the unit; spans of one size.
  Status WriteBlocks(int64_t unit, int64_t first_element, std::span<const float> masters,
                     std::span<const float> moment1, std::span<const float> moment2);

  // Makes it durable under its name; replaces a checkpoint of the same step. Fails with
  // kFailedPrecondition if elements are missing, kDataLoss (reading back gave other bytes: it is
  // removed again), or the disk's errors.
  Result<CheckpointReport> Commit();

 private:
  explicit CheckpointWriter(Options options);
  Status Reserve();
  Status WriteTensorPart(int64_t unit, size_t tensor, int64_t first_in_unit, int64_t begin,
                         int64_t end, std::span<const float> values, StateArray array);
  Status WriteManifest();
  Status Rename(const std::string& path);
  void Stage(std::string_view stage);

  Options options_;
  const std::string parent_;
  std::string temporary_;  // Empty once it has its name.
  UniqueFd lock_fd_;       // Of the temporary directory; locked while this writer lives.
  std::vector<UnitFileLayout> layouts_;
  std::vector<std::unique_ptr<StateFileWriter>> files_;
};

}  // namespace oom
