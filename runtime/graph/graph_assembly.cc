#include "runtime/graph/graph_assembly.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "runtime/base/check.h"

namespace oom {

Node& GraphAssembly::Add(NodeKind kind, Resource resource) {
  Node node{.kind = kind, .resource = resource};
  node.micro_batch = micro_batch_;
  nodes_.push_back(std::move(node));
  return nodes_.back();
}

void GraphAssembly::After(int64_t predecessor) { After(last(), predecessor); }

void GraphAssembly::After(int64_t node, int64_t predecessor) {
  if (predecessor < 0 || predecessor == node) return;
  nodes_[static_cast<size_t>(node)].predecessors.push_back({.node = predecessor});
}

int64_t GraphAssembly::BufferIndex(const std::string& name, Space space, int64_t bytes) {
  auto [entry, is_new] = buffer_index_.try_emplace(name, static_cast<int64_t>(buffers_.size()));
  if (is_new) {
    buffers_.push_back({.name = name, .space = space, .bytes = bytes});
    uses_.emplace_back();
  }
  Buffer& buffer = buffers_[static_cast<size_t>(entry->second)];
  buffer.bytes = std::max(buffer.bytes, bytes);
  return entry->second;
}

void GraphAssembly::Read(int64_t buffer) {
  if (buffer < 0) return;
  Use& use = uses_[static_cast<size_t>(buffer)];
  After(use.writer);
  use.readers.push_back(last());
  nodes_.back().reads.push_back(buffer);
}

void GraphAssembly::Write(int64_t buffer) {
  Use& use = uses_[static_cast<size_t>(buffer)];
  After(use.writer);
  for (const int64_t reader : use.readers) After(reader);
  use = {.writer = last(), .readers = {}};
  nodes_.back().writes.push_back(buffer);
}

StepGraph GraphAssembly::Take() {
  const int64_t count = static_cast<int64_t>(nodes_.size()) / 2;
  OOM_CHECK(step_begin_ == count);
  StepGraph graph;
  graph.buffers = std::move(buffers_);
  graph.nodes.assign(std::make_move_iterator(nodes_.begin() + count),
                     std::make_move_iterator(nodes_.end()));
  for (Node& node : graph.nodes) {
    for (Edge& edge : node.predecessors) {
      edge.distance = edge.node < count ? 1 : 0;
      if (edge.distance == 0) edge.node -= count;
    }
    const auto key = [](const Edge& edge) { return std::pair(edge.distance, edge.node); };
    std::ranges::sort(node.predecessors, {}, key);
    const auto repeated = std::ranges::unique(node.predecessors, {}, key);
    node.predecessors.erase(repeated.begin(), repeated.end());
  }
  return graph;
}

}  // namespace oom
