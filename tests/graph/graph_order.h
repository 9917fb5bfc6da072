// What must have ended before what in a step graph, over two consecutive steps: edges and the order
// of each device stream. Immutable after construction.

#pragma once

#include <cstdint>
#include <vector>

#include "runtime/graph/graph_builder.h"

namespace oom::testing {

class Order {
 public:
  explicit Order(const StepGraph& graph);

  bool cyclic() const { return cyclic_; }
  // Node numbers count on in the second step.
  bool Before(int64_t earlier, int64_t later) const {
    return ancestors_[static_cast<size_t>(later)][static_cast<size_t>(earlier)];
  }

 private:
  int64_t count_;
  bool cyclic_ = false;
  std::vector<std::vector<bool>> ancestors_;
};

}  // namespace oom::testing
