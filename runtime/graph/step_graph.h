// StepGraph is one step as data (architecture, idea 1): nodes, each on one resource, with their predecessors
// in this step or the one before, and the buffers that they write and read in a named space. The executor
// runs it; the simulator in planner/ walks the very same graph with durations. All ranks of a job share it;
// a node with an owner runs on that rank only, nodes of the host optimizer run in the job host.
// Immutable once built; thread-safe.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace oom {

enum class Resource {
  kCompute,
  kHostToDevice,    // Parameters in.
  kDeviceToHost,    // Gradients out.
  kBoundaryOut,     // Layer boundaries to the host.
  kBoundaryIn,      // And back.
  kCollective,      // Between devices.
  kDeviceUpdate,    // Updates of resident chunks.
  kHostOptimizer,   // In the job host.
};
inline constexpr int kResourceCount = 8;
// "compute", "H2D", ...
std::string_view ResourceName(Resource resource);

enum class NodeKind {
  kGatherRows,         // The batch's embedding rows.
  kLoadUnit,           // A unit's weights into its window, or this rank's slice of every chunk of them.
  kGatherUnit,         // The other ranks' slices.
  kForwardMixer,
  kForwardMixture,
  kStoreBoundary,      // The input of a layer, to the host.
  kHead,               // Final norm, logits, loss and their gradients.
  kEvaluationHead,     // Loss alone.
  kLoadBoundary,
  kReplayMixer,
  kReplayMixture,      // Ends at the gate/up product.
  kBackwardMixture,
  kBackwardMixer,
  kReduceGradient,     // The ranks' partials of a chunk, added up: this rank's slice of the sum.
  kStoreGradient,      // A rank's partial of a chunk, or its slice, to where its updater reads it.
  kEmbeddingBackward,  // The batch's rows, summed in token order; of a tied embedding added to the head's gradient.
  kStoreRows,
  kNorm,               // Squares of a resident chunk's summed gradient.
  kClip,               // Norm and clip factor of the whole gradient.
  kUpdate,             // Of a chunk.
};
std::string_view NodeKindName(NodeKind kind);

struct Edge {
  int64_t node = 0;      // Index in StepGraph::nodes.
  int distance = 0;      // 0: this step; 1: the step before.
};

struct Node {
  NodeKind kind;
  Resource resource;
  int micro_batch = 0;
  int64_t layer = -1;
  int64_t unit = -1;
  int64_t chunk = -1;
  int owner_rank = -1;         // -1: every rank (or the job host for kHostOptimizer).
  int64_t buffer = -1;         // Window of a load; what a store reads; a reduced slice; boundary buffer.
  // Of compute nodes: where the weights of the layer's ordinary unit (or the head) and of its experts lie, and
  // where their gradients are summed. A dense layer's mixture has the ordinary unit's. The head's `mixture_*` are those
  // of a tied embedding.
  int64_t weights = -1;
  int64_t mixture_weights = -1;
  int64_t gradient = -1;
  int64_t mixture_gradient = -1;
  // Layers whose returning inputs get their place in the operators' memory at the end of this compute node
  // (boundary_schedule.h).
  std::vector<int64_t> takes;
  std::vector<Edge> predecessors;
  std::vector<int64_t> reads;  // Buffers.
  std::vector<int64_t> writes;
  // Moved by the resource, on one rank: H2D, D2H and boundaries their payload, updates their DRAM traffic.
  int64_t bytes = 0;
};

enum class Space { kDevice, kHost };

// Plan-named memory that is taken before the first step and lives as long as the attempt.
struct Buffer {
  std::string name;            // "window.experts.1"
  Space space = Space::kDevice;
  int64_t bytes = 0;
};

struct StepGraph {
  std::vector<Node> nodes;     // In the order in which every rank issues them.
  std::vector<Buffer> buffers;

  // Over everything that the executors rely on; compared by job host and workers at start.
  uint64_t Hash() const;
};

}  // namespace oom
