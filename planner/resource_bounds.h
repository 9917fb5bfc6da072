// The seconds that each resource needs for one step by itself, from the graph's bytes and the model's FLOPs at
// the machine's rates: the slowest of them is a lower bound of the step. Pure functions.

#pragma once

#include <cstdint>
#include <vector>

#include "oom/v1/plan.pb.h"
#include "planner/plan_job.h"
#include "runtime/graph/step_graph.h"
#include "runtime/memory/shm_layout.h"
#include "runtime/model/description.h"

namespace oom {

// Rates of one device and of the host's memory.
struct MachineRates {
  double compute_flops_per_second = 0.0;   // Matrix products of one device.
  double copy_bytes_per_second = 0.0;      // One copy stream of one device.
  double collective_bytes_per_second = 0.0;  // Into one device from the others.
  bool collectives_in_host_memory = false;
  double memory_bytes_per_second = 0.0;    // Host DRAM over all users.
};

// What CPU devices of `worker_threads` cores can be expected to reach; deliberately on the high side, since
// a bound has to hold.
MachineRates CpuRates(int cpu_count, int worker_threads);

// What a Hopper GPU on PCIe 5 can be expected to reach, likewise.
MachineRates CudaRates(int cpu_count, bool float32);

// FLOPs of one token that backward spends on a layer's forward again where its activations are not kept. A mixture's
// replay ends at the gate/up product.
struct ReplayFlops {
  double mixer = 0.0;
  double mixture = 0.0;
};
ReplayFlops TokenReplayFlops(const ModelDescription& model, int64_t layer, int64_t sequence_length);

// FLOPs of one rank's forward and backward of a step, replay included (models reference, section 8).
double StepFlops(const ModelDescription& model, const v1::Plan& plan, const BatchShape& batch);

std::vector<v1::ResourceEstimate> BoundResources(const ModelDescription& model,
                                                 const v1::Plan& plan, const SharedLayout& layout,
                                                 const StepGraph& graph, const BatchShape& batch,
                                                 const MachineRates& rates);

}  // namespace oom
