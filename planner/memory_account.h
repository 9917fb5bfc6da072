// MemoryAccount says what a plan needs, byte by byte and by space: pools by NUMA node, plan-named device buffers,
// operator temporaries, process overhead, checkpoint disk. What it says is what `oom plan` prints, what oomd
// admits, and what a run's measured peaks are held against. Pure functions.

#pragma once

#include <cstdint>
#include <vector>

#include "oom/v1/plan.pb.h"
#include "runtime/graph/step_graph.h"
#include "runtime/memory/shm_layout.h"
#include "runtime/model/description.h"

namespace oom {

// What a process's CUDA context holds of a GPU's memory, and what libraries add when their kernels are first used.
inline constexpr int64_t kGpuContextBytes = int64_t{704} << 20;
inline constexpr int64_t kGpuLibraryGrowthBytes = int64_t{256} << 20;

struct MemoryAccount {
  std::vector<v1::MemoryEstimate> items;
  // By NUMA node, with the devices of that node when they are cpu devices: what oomd reserves.
  std::vector<int64_t> host_bytes_by_node;
  int64_t host_bytes = 0;                  // Everything on the host, CPU "devices" included.
  int64_t device_bytes = 0;                // Of the fullest device.
  int64_t checkpoint_bytes = 0;            // One checkpoint.
  int64_t deferred_extra_bytes = 0;        // Kept gradients beyond a backlog, whole node.
};

// The space of cpu devices is host memory and is counted there too.
MemoryAccount AccountMemory(const ModelDescription& model, const v1::Plan& plan,
                            const SharedLayout& layout, const StepGraph& graph,
                            const BatchShape& batch, int numa_node_count);

// Peak bytes of what operators allocate on one device beside plan-named buffers: boundaries on the device,
// retained layers, and the largest single layer's or head's saved and temporary tensors.
int64_t OperatorBytes(const ModelDescription& model, const v1::Plan& plan, const BatchShape& batch,
                      bool float32);

}  // namespace oom
