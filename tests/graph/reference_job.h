// ReferenceJob is a training job as one would write it without an engine: one thread, plain arrays,
// the update rule restated (engine rules, sections 2 and 3). The gradient of a step is a function
// of the step, the rank and of the weights that were read, so that one stale or torn read shows in
// every later weight. To be cheap, everything repeats: all elements of a 4,096-block (of the
// embedding: of a row) hold 16 values in turn, so the reference keeps 16 lanes for each such group.
// Not thread-safe, but for the static functions.

#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "runtime/memory/shm_layout.h"
#include "runtime/optim/adamw.h"
#include "runtime/optim/schedule.h"
#include "tests/graph/engine_testing.h"

namespace oom::testing {

inline constexpr int64_t kLanes = 16;
using Lanes = std::array<float, kLanes>;

class ReferenceJob {
 public:
  ReferenceJob(const TestJob& job, uint64_t seed);

  // What a rank's backward makes of weights that it read as `weights` (working weights as FP32).
  // `group` numbers the groups of a unit; the sum over micro-batches is the partial.
  static Lanes Gradient(uint64_t seed, int64_t step, int rank, int micro_batch, int64_t unit,
                        int64_t group, const Lanes& weights);
  // Tokens of a micro-batch, in order.
  static std::vector<int64_t> Tokens(uint64_t seed, int64_t step, int rank, int micro_batch,
                                     int64_t count, int64_t vocabulary_size);
  static double Loss(uint64_t seed, int64_t step, int rank);

  static AdamWHyperparameters Hyper();
  static Schedule ScheduleOf();

  // One step with the given clip factor. Keeps the states of every step for Matches.
  void Step(double clip);
  // Of the next step's summed gradient, over all elements.
  double GradientNorm() const;
  int64_t step() const { return static_cast<int64_t>(history_.size()) - 1; }

  // Writes the state after `step()` steps into the pools.
  void Fill(const PoolMap& pools) const;
  // Empty, or where a chunk's weights and moments are not bit for bit those after `step` steps. `within_a_step`: what
  // the next step may update early (engine rules, section 8) may also be one step ahead.
  std::string Compare(const PoolMap& pools, int64_t chunk, int64_t step,
                      bool within_a_step = false) const;
  // The same of every chunk at the newest step.
  std::string CompareAll(const PoolMap& pools) const;

 private:
  struct State {
    Lanes master, moment1, moment2;
  };
  struct Group {
    int64_t unit;
    int64_t index;          // In the unit.
    int64_t first_element;  // In the unit.
    int64_t elements;
    bool decayed;
  };

  std::string CompareGroup(const PoolMap& pools, const Chunk& chunk, int64_t group,
                           int64_t step) const;
  // Nothing in the group's blocks has a gradient in step `step`, and nobody has to wait for that.
  bool IsEarly(const Group& group, int64_t step) const;
  Lanes Working(const Lanes& master) const;
  // The summed gradient of the next step, by group.
  std::vector<Lanes> SummedGradients() const;

  const TestJob& job_;
  const uint64_t seed_;
  std::vector<Group> groups_;
  std::vector<int64_t> first_group_;         // Of a unit.
  std::vector<std::vector<State>> history_;  // By step, by group.
};

// Fills `count` floats with 16 lanes in turn. REQUIRES: count a multiple of 16.
void Repeat(const Lanes& lanes, int64_t count, float* out);
// The working weight of a master as FP32.
float WorkingWeight(float master, bool float32);
// 16 working weights in memory.
Lanes ReadLanes(const std::byte* weights, bool float32);

}  // namespace oom::testing
