// Brings the pools to life at the start of an attempt: each page is touched first by a thread that
// is bound to the pool's NUMA node (so that it lies there, and the job's cgroup is charged), and
// the streamed chunks get their masters and moments from a StateSource. Blocks until all is done;
// starts and joins its own threads.

#pragma once

#include <functional>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/memory/numa.h"
#include "runtime/memory/shm_layout.h"
#include "runtime/model/state_source.h"

namespace oom {

struct FillOptions {
  const SharedLayout* layout = nullptr;
  const PoolMap* pools = nullptr;
  NumaTopology* topology = nullptr;
  std::vector<int> threads_by_node;
  // Looked at between pieces; true ends the call with kAborted.
  std::function<bool()> cancelled;
};

// Touches every page of every pool without changing a byte. For the first attempt in new pools.
// A node that the topology does not let threads bind to is filled by unbound ones.
Status TouchPools(const FillOptions& options);

// Fails with the codes of StateSource::Read, or kAborted.
Status FillStreamedState(const FillOptions& options, const StateSource& source);

}  // namespace oom
