// GradientNodes adds to a graph what becomes of gradients: sums over ranks, stores to where their
// updater reads them, norms, clipping, updates; and it knows which update the next reader of a
// weight waits for. Used by one builder, on one assembly.

#pragma once

#include <cstdint>
#include <vector>

#include "oom/v1/plan.pb.h"
#include "runtime/graph/graph_assembly.h"
#include "runtime/memory/shm_layout.h"

namespace oom {

class GradientNodes {
 public:
  // All must outlive the object.
  GradientNodes(const v1::Plan& plan, const SharedLayout& layout, GraphAssembly* assembly)
      : plan_(plan), layout_(layout), assembly_(*assembly), updates_(NoNodes()) {}

  void BeginStep();
  // The last node computes the losses: nothing is updated before all of them are known.
  void SetLossNode() { loss_node_ = assembly_.last(); }

  // Behind the node that completes a unit's gradient in buffer `gradient`.
  void Store(int64_t unit, int64_t gradient);
  // Of the embedding's rows in buffer `rows`, once a step.
  void StoreRows(int64_t embedding, int64_t rows);

  // The name by which compute reads a unit that is used in place.
  int64_t WeightsInPlace(int64_t unit);

  // The last node needs the unit's newest version: updates of the step before.
  void AfterUpdatesOf(int64_t unit);
  // The step's updates, in the order of next use. The executor of a worker runs those of its own
  // resident chunks.
  void Updates();

 private:
  Node& Add(NodeKind kind, Resource resource) { return assembly_.Add(kind, resource); }
  int64_t Reduce(int64_t unit, int64_t c, int64_t gradient);
  int64_t StoredBytes(int64_t c) const;
  void Landed(int64_t c);
  void Norms(int64_t unit);
  void WaitForBacklogSlots(const std::vector<int64_t>& new_updates);
  // By chunk: -1.
  std::vector<int64_t> NoNodes() const { return std::vector<int64_t>(layout_.chunks().size(), -1); }

  const v1::Plan& plan_;
  const SharedLayout& layout_;
  GraphAssembly& assembly_;
  std::vector<int64_t> stores_;  // Of this step.
  // By chunk, -1: none. A planner builds hundreds of graphs of tens of thousands of chunks.
  std::vector<int64_t> landed_;   // The node that completes its gradient.
  std::vector<int64_t> updates_;  // Its newest update.
  int64_t loss_node_ = -1;
  int64_t reduced_ = 0;  // Chunks of this step that were reduced so far.
};

}  // namespace oom
