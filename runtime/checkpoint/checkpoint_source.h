// CheckpointSource yields the state that a checkpoint holds. Every piece of a file is held against
// its checksum before a byte of it is given out. Read-only; Read is thread-safe.

#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/checkpoint/manifest.h"
#include "runtime/checkpoint/piece_reader.h"
#include "runtime/model/state_source.h"
#include "runtime/model/unit.h"

namespace oom {

class CheckpointSource : public StateSource {
 public:
  // `units` are those of the checkpoint's model, for any number of ranks. Fails with kNotFound,
  // kDataLoss or kPermissionDenied (file named), kInvalidArgument if the files hold other tensors
  // than the units.
  static Result<std::unique_ptr<CheckpointSource>> Open(const std::string& checkpoint_directory,
                                                        const std::vector<ParameterUnit>& units);

  // kDataLoss names file and piece.
  Status Read(int64_t unit, int64_t tensor, StateArray array, int64_t first_element,
              std::span<float> out) const override;
  int64_t step() const override { return manifest_.step; }
  const Manifest& manifest() const { return manifest_; }

 private:
  struct Tensor {
    int64_t elements = 0;
    std::array<int64_t, 3> offset_bytes{};  // By StateArray, in the file.
  };
  struct Unit {
    std::unique_ptr<PieceReader> reader;
    std::vector<Tensor> tensors;
  };

  CheckpointSource() = default;
  static Result<Unit> OpenUnit(const std::string& path, const ManifestFile& file,
                               const ParameterUnit& spec);

  Manifest manifest_;
  std::vector<Unit> units_;
};

}  // namespace oom
