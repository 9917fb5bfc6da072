// The simulator walks the very step graph that the executor runs, with a duration for each node, and returns
// when steps end (paper, Eq. 3: a node ends its duration after the last of its predecessors), how long each
// resource works and how long compute waits. Pure functions.

#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <vector>

#include "runtime/graph/step_graph.h"

namespace oom {

struct SimulatedNode {
  int64_t node = 0;
  double start_seconds = 0.0;
  double end_seconds = 0.0;
};

struct Simulation {
  // Of the steady state: from one step's end of compute to the next one's.
  double step_seconds = 0.0;
  // Longest chain of predecessors and resource orders through a single step, by itself.
  double single_step_seconds = 0.0;
  // Sum over all nodes of a step: what a chain of parts without overlap would take.
  double serial_seconds = 0.0;
  std::array<double, kResourceCount> busy_seconds{};
  double compute_wait_seconds = 0.0;
  // Of the last simulated step, relative to its first node.
  std::vector<SimulatedNode> nodes;
};

// Runs steps until two have the same period, at most `max_steps`. Each resource does one node at a time:
// those of a device in issue order, the host optimizer the one that is ready first.
Simulation Simulate(const StepGraph& graph,
                    const std::function<double(const Node&)>& duration_seconds, int max_steps = 12);

}  // namespace oom
