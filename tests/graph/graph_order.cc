#include "tests/graph/graph_order.h"

#include <functional>
#include <map>

namespace oom::testing {

Order::Order(const StepGraph& graph) : count_(static_cast<int64_t>(graph.nodes.size())) {
  const auto total = static_cast<size_t>(2 * count_);
  std::vector<std::vector<int64_t>> before(total);
  std::map<Resource, int64_t> last;
  for (int64_t i = 0; i < 2 * count_; ++i) {
    const int64_t step = i / count_;
    const Node& node = graph.nodes[static_cast<size_t>(i % count_)];
    for (const Edge& edge : node.predecessors) {
      const int64_t from = edge.node + (step - edge.distance) * count_;
      if (from >= 0) before[static_cast<size_t>(i)].push_back(from);
    }
    if (node.resource == Resource::kHostOptimizer) continue;
    const auto previous = last.find(node.resource);
    if (previous != last.end()) before[static_cast<size_t>(i)].push_back(previous->second);
    last[node.resource] = i;
  }
  // Edges may point forward in issue order (backlog slots), so ancestors are found by search.
  ancestors_.assign(total, std::vector<bool>(total, false));
  std::vector<int> state(total, 0);
  std::function<void(int64_t)> visit = [&](int64_t i) {
    const auto at = static_cast<size_t>(i);
    if (state[at] == 1) cyclic_ = true;
    if (state[at] != 0) return;
    state[at] = 1;
    for (const int64_t from : before[at]) {
      visit(from);
      ancestors_[at][static_cast<size_t>(from)] = true;
      for (size_t j = 0; j < total; ++j) {
        if (ancestors_[static_cast<size_t>(from)][j]) ancestors_[at][j] = true;
      }
    }
    state[at] = 2;
  };
  for (int64_t i = 0; i < 2 * count_; ++i) visit(i);
}

}  // namespace oom::testing
