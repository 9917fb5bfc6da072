// StateSource yields canonical state (FP32 masters and moments) of any range of any tensor, wherever it
// comes from: a Hugging Face directory, random initialisation, or a checkpoint. Whoever owns a unit's
// state (the job host for streamed units, a worker for its resident chunks) reads just its part.
// Read is thread-safe.

#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "runtime/base/status.h"
#include "runtime/model/unit.h"

namespace oom {

enum class StateArray { kMaster, kMoment1, kMoment2 };

class StateSource {
 public:
  virtual ~StateSource() = default;

  // Elements [first, first + out.size()) of tensor `tensor` of unit `unit`, row-major, without padding.
  // Moments of a source without any are zero. Fails with kInvalidArgument or kDataLoss (the file named).
  virtual Status Read(int64_t unit, int64_t tensor, StateArray array, int64_t first_element,
                      std::span<float> out) const = 0;

  // Completed optimizer steps that the state stands for; 0 for weights alone.
  virtual int64_t step() const = 0;
};

// Counter-based normal initialisation by tensor name and element index (deviation initializer_range;
// norms 1), so that placement, chunking and rank count do not matter.
std::unique_ptr<StateSource> MakeRandomSource(const ModelDescription& model,
                                              std::vector<ParameterUnit> units, uint64_t seed);

}  // namespace oom
