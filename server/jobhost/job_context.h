// JobContext is everything of a job that stays the same over its attempts: what to run, the model,
// where each shared byte lies, the graph, the mapped pools. Immutable after Create; thread-safe.

#pragma once

#include <memory>
#include <string>
#include <vector>

#include "oom/internal/v1/control.pb.h"
#include "runtime/base/status.h"
#include "runtime/base/unique_fd.h"
#include "runtime/memory/numa.h"
#include "runtime/memory/pool.h"
#include "runtime/memory/shm_layout.h"
#include "runtime/model/description.h"
#include "runtime/model/state_source.h"

namespace oom {

class JobContext {
 public:
  // Takes over `pool_fds` (one a pool, in order). Fails with kInvalidArgument (reason
  // INVALID_INPUT: the model's configuration or the plan, field named; reason INTERNAL: pools that
  // are not the plan's) or the codes of ReadFile and PoolMapping::Map.
  static Result<std::unique_ptr<JobContext>> Create(const internal::v1::JobStart& start,
                                                    std::vector<UniqueFd> pool_fds,
                                                    std::unique_ptr<NumaTopology> topology);

  const internal::v1::JobStart& start() const { return start_; }
  const v1::JobSpec& spec() const { return start_.spec(); }
  const v1::Plan& plan() const { return start_.plan(); }
  const ModelDescription& model() const { return model_; }
  const SharedLayout& layout() const { return *layout_; }
  const PoolMap& pools() const { return pool_map_; }
  std::vector<int> pool_descriptors() const;
  NumaTopology& topology() const { return *topology_; }
  uint64_t graph_hash() const { return graph_hash_; }
  Precision precision() const {
    return layout_->float32() ? Precision::kFloat32 : Precision::kBfloat16;
  }
  std::vector<int> optimizer_threads() const {
    return {plan().optimizer_threads().begin(), plan().optimizer_threads().end()};
  }
  int64_t tokens_per_step() const { return spec().global_batch() * spec().sequence_length(); }

  // The state that a job without a checkpoint starts from: the model's files, or random
  // initialisation. Fails with kNotFound or kInvalidArgument (file and tensor named).
  Result<std::unique_ptr<StateSource>> OpenModel() const;

 private:
  explicit JobContext(const internal::v1::JobStart& start) : start_(start) {}

  Status MapPools();

  const internal::v1::JobStart start_;
  ModelDescription model_;
  std::unique_ptr<SharedLayout> layout_;
  std::unique_ptr<NumaTopology> topology_;
  std::vector<UniqueFd> pool_fds_;
  std::vector<PoolMapping> mappings_;
  PoolMap pool_map_;
  uint64_t graph_hash_ = 0;
};

}  // namespace oom
