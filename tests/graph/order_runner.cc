#include "tests/graph/order_runner.h"

#include <algorithm>

namespace oom::testing {

OrderRunner::OrderRunner(const Options& options)
    : options_(options),
      done_(options.graph->nodes.size()),
      times_(options.graph->nodes.size()),
      free_(kResourceCount, 0.0) {}

void OrderRunner::Abort() {
  aborted_.Publish(1);
  for (SharedWord& word : done_) word.WakeAll();
}

Status OrderRunner::Run(const Node& node, int64_t step) {
  const auto index = static_cast<size_t>(&node - options_.graph->nodes.data());
  ++run_count_;
  if (!RunsHere(node)) return Status(Code::kDataLoss, "a node of somebody else");
  if (static_cast<int64_t>(done_[index].Load()) != step) {
    return Status(Code::kDataLoss, "a node ran out of its turn");
  }
  if (options_.fail) OOM_RETURN_IF_ERROR(options_.fail(node, step));
  double start = free_[static_cast<size_t>(node.resource)];
  for (const Edge& edge : node.predecessors) {
    const int64_t wanted = step - edge.distance + 1;
    if (wanted <= 0) continue;
    const auto from = static_cast<size_t>(edge.node);
    const Node& before = options_.graph->nodes[from];
    if (!RunsHere(before)) {
      if (before.resource != Resource::kHostOptimizer) continue;
      if (done_[from].WaitAtLeast(static_cast<uint64_t>(wanted), aborted_) !=
          WaitResult::kReached) {
        return Status(Code::kAborted, "aborted");
      }
    } else if (static_cast<int64_t>(done_[from].Load()) < wanted) {
      return Status(Code::kDataLoss, std::string(NodeKindName(node.kind)) + " ran before its " +
                                         std::string(NodeKindName(before.kind)));
    }
    start = std::max(start, virtual_end(edge.node, step - edge.distance));
  }
  if (options_.work) options_.work(node, step);
  const double seconds = options_.seconds ? options_.seconds(node) : 0.0;
  times_[index].start[step % 4] = start;
  times_[index].end[step % 4] = start + seconds;
  free_[static_cast<size_t>(node.resource)] = start + seconds;
  done_[index].Publish(static_cast<uint64_t>(step + 1));
  return Status::Ok();
}

void OrderRunner::HostLoop(const std::vector<OrderRunner*>& ranks, int64_t last,
                           const SharedWord& stop) {
  const StepGraph& graph = *ranks.front()->options_.graph;
  // An update follows its chunk's store, the last predecessor in issue order.
  std::vector<std::pair<int64_t, size_t>> order;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    if (graph.nodes[i].resource != Resource::kHostOptimizer) continue;
    int64_t latest = -1;
    for (const Edge& edge : graph.nodes[i].predecessors) {
      if (edge.distance == 0) latest = std::max(latest, edge.node);
    }
    order.emplace_back(latest, i);
  }
  std::sort(order.begin(), order.end());
  double free = 0.0;
  for (int64_t step = 0; step < last; ++step) {
    for (const auto& [latest, i] : order) {
      const Node& node = graph.nodes[i];
      double start = free;
      for (const Edge& edge : node.predecessors) {
        const int64_t wanted = step - edge.distance + 1;
        if (wanted <= 0) continue;
        for (OrderRunner* rank : ranks) {
          const SharedWord& word = rank->done_[static_cast<size_t>(edge.node)];
          if (word.WaitAtLeast(static_cast<uint64_t>(wanted), stop) != WaitResult::kReached) return;
          start = std::max(start, rank->virtual_end(edge.node, step - edge.distance));
        }
      }
      const Options& options = ranks.front()->options_;
      if (options.work) options.work(node, step);
      free = start + (options.seconds ? options.seconds(node) : 0.0);
      for (OrderRunner* rank : ranks) {
        rank->times_[i].start[step % 4] = start;
        rank->times_[i].end[step % 4] = free;
        rank->done_[i].Publish(static_cast<uint64_t>(step + 1));
      }
    }
  }
}

}  // namespace oom::testing
