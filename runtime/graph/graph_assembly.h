// GraphAssembly takes nodes in issue order and derives their edges from the buffers that they write and read. Two
// consecutive steps are built; edges of the second into the first become distance 1 (engine rules, section 4).
// One thread; REQUIRES: both steps add the same nodes.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "runtime/graph/step_graph.h"

namespace oom {

class GraphAssembly {
 public:
  void BeginStep() {
    step_begin_ = static_cast<int64_t>(nodes_.size());
    nodes_.reserve(2 * nodes_.size());
  }
  // Number of the first node of the step that is built.
  int64_t step_begin() const { return step_begin_; }

  // Of the nodes that are added from here on.
  void BeginMicroBatch(int micro_batch) { micro_batch_ = micro_batch; }
  int micro_batch() const { return micro_batch_; }

  // Valid until the next one is added.
  Node& Add(NodeKind kind, Resource resource);
  int64_t last() const { return static_cast<int64_t>(nodes_.size()) - 1; }
  Node& last_node() { return nodes_.back(); }
  // The last node comes after `predecessor`; -1: after nothing.
  void After(int64_t predecessor);
  // `node` comes after `predecessor`.
  void After(int64_t node, int64_t predecessor);

  // The buffer of that name, as large as anyone has asked for.
  int64_t BufferIndex(const std::string& name, Space space, int64_t bytes);
  // The last node reads `buffer`; -1: nothing.
  void Read(int64_t buffer);
  // The last node writes `buffer`: after everyone who read what was in it.
  void Write(int64_t buffer);

  // The second step, with edges into the first at distance 1.
  StepGraph Take();

 private:
  struct Use {
    int64_t writer = -1;
    std::vector<int64_t> readers;
  };

  std::vector<Node> nodes_;
  std::vector<Buffer> buffers_;
  std::vector<Use> uses_;  // By buffer.
  std::map<std::string, int64_t> buffer_index_;
  int64_t step_begin_ = 0;
  int micro_batch_ = 0;
};

}  // namespace oom
