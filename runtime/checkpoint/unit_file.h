// The file of one parameter unit in a checkpoint: a safetensors file with the FP32 tensors
// "master/<name>", "moment1/<name>" and "moment2/<name>" of each of the unit's tensors, without
// padding. The layout follows from the unit alone, so that the file can be reserved and written in
// any order. Pure functions; thread-safe.

#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/model/state_source.h"
#include "runtime/model/unit.h"

namespace oom {

inline constexpr std::array<StateArray, 3> kStateArrays = {
    StateArray::kMaster, StateArray::kMoment1, StateArray::kMoment2};

// "master", "moment1", "moment2".
std::string_view StateArrayName(StateArray array);
// "moment1/layers.3.query"
std::string StateTensorName(StateArray array, std::string_view tensor_name);

struct UnitFileLayout {
  std::string name;  // "unit-0003.safetensors"
  std::string
      header;  // Length, JSON and spaces up to a multiple of 4,096 bytes: the tensors begin there.
  int64_t bytes = 0;  // Of the whole file.
  // offset_bytes[tensor][array]: of its first element, from the start of the file.
  std::vector<std::array<int64_t, 3>> offset_bytes;
};

// Tensors whose bytes are a multiple of 4,096 come first: they lie aligned, so that they can be
// written past the page cache.
UnitFileLayout LayOutUnitFile(const ParameterUnit& unit);

}  // namespace oom
