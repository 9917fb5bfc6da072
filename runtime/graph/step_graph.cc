#include "runtime/graph/step_graph.h"

#include <array>

namespace oom {
namespace {

class Fnv {
 public:
  void Add(int64_t value) {
    for (int byte = 0; byte < 8; ++byte) AddByte(static_cast<uint8_t>(value >> (8 * byte)));
  }
  void Add(std::string_view text) {
    Add(static_cast<int64_t>(text.size()));
    for (const char c : text) AddByte(static_cast<uint8_t>(c));
  }
  uint64_t value() const { return value_; }

 private:
  void AddByte(uint8_t byte) { value_ = (value_ ^ byte) * 0x100000001b3ULL; }
  uint64_t value_ = 0xcbf29ce484222325ULL;
};

}  // namespace

std::string_view ResourceName(Resource resource) {
  constexpr std::array<std::string_view, kResourceCount> kNames = {
      "compute",    "H2D",        "D2H",           "boundary out",
      "boundary in", "collective", "device update", "host optimizer"};
  return kNames[static_cast<size_t>(resource)];
}

std::string_view NodeKindName(NodeKind kind) {
  constexpr std::array<std::string_view, 20> kNames = {
      "gather rows",    "load",           "gather slices",      "forward mixer",
      "forward mixture", "store boundary", "head",               "evaluation head",
      "load boundary",  "replay mixer",   "replay mixture",     "backward mixture",
      "backward mixer", "reduce",         "store gradient",     "embedding backward",
      "store rows",     "norm",           "clip",               "update"};
  return kNames[static_cast<size_t>(kind)];
}

uint64_t StepGraph::Hash() const {
  Fnv hash;
  hash.Add(static_cast<int64_t>(nodes.size()));
  for (const Node& node : nodes) {
    hash.Add(static_cast<int64_t>(node.kind));
    hash.Add(static_cast<int64_t>(node.resource));
    hash.Add(node.micro_batch);
    hash.Add(node.layer);
    hash.Add(node.unit);
    hash.Add(node.chunk);
    hash.Add(node.owner_rank);
    for (const int64_t buffer : {node.buffer, node.weights, node.mixture_weights, node.gradient,
                                 node.mixture_gradient}) {
      hash.Add(buffer);
    }
    hash.Add(node.bytes);
    hash.Add(static_cast<int64_t>(node.takes.size()));
    for (const int64_t layer : node.takes) hash.Add(layer);
    for (const Edge& edge : node.predecessors) {
      hash.Add(edge.node);
      hash.Add(edge.distance);
    }
  }
  for (const Buffer& buffer : buffers) {
    hash.Add(buffer.name);
    hash.Add(buffer.bytes);
  }
  return hash.value();
}

}  // namespace oom
