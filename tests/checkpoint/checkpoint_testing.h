// What the checkpoint tests share: a temporary directory, tiny models, and state that is a function
// of its place, so that a byte in the wrong place is seen.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/checkpoint/checkpoint_writer.h"
#include "runtime/checkpoint/manifest.h"
#include "runtime/model/state_source.h"
#include "runtime/model/unit.h"

namespace oom::testing {

// Removed with what is in it.
class TemporaryDirectory {
 public:
  TemporaryDirectory();
  ~TemporaryDirectory();
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Qwen3-MoE; no dimension need be a power of two.
ModelDescription TinyModel(int64_t hidden_size = 24, int64_t vocabulary_size = 101);

// A finite FP32 value for element `element` (in unit coordinates) at `step`; differs between
// arrays, units, steps and neighbours. The low bits of the master are used.
float ValueAt(int64_t step, int64_t unit, StateArray array, int64_t element);

Manifest ManifestOf(const ModelDescription& model, int64_t step, const std::string& uid = "uid-1");

// State of elements [first, first + elements) of a unit; padding is filled with garbage that must
// not show.
struct StateValues {
  std::vector<float> masters, moment1, moment2;
};
StateValues ValuesOf(const ParameterUnit& unit, int64_t step, int64_t first_element,
                     int64_t elements);

// Writes a whole checkpoint, each unit in ranges of `range_elements`.
Result<CheckpointReport> WriteCheckpoint(CheckpointWriter::Options options,
                                         int64_t range_elements = 4096);
Result<CheckpointReport> WriteCheckpoint(const std::string& output_directory,
                                         const ModelDescription& model, int64_t step, int keep = 3,
                                         const std::string& uid = "uid-1");

// Every value of the source is ValueAt of its step. Returns "" or the first difference.
std::string CompareWithValues(const StateSource& source, const std::vector<ParameterUnit>& units,
                              int64_t step);

// The names in a directory, sorted.
std::vector<std::string> Names(const std::string& directory);

void FlipBit(const std::string& path, int64_t offset_bytes);

}  // namespace oom::testing
