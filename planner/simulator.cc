#include "planner/simulator.h"

#include <algorithm>
#include <cmath>
#include <queue>
#include <utility>

namespace oom {
namespace {

struct Period {
  std::vector<double> start;
  std::vector<double> end;
};

class Walker {
 public:
  Walker(const StepGraph& graph, std::vector<double> durations)
      : graph_(graph), durations_(std::move(durations)) {
    followers_.resize(graph.nodes.size());
    for (size_t i = 0; i < graph.nodes.size(); ++i) {
      for (const Edge& edge : graph.nodes[i].predecessors) {
        if (edge.distance == 0) followers_[static_cast<size_t>(edge.node)].push_back(i);
      }
    }
    for (size_t i = 0; i < graph.nodes.size(); ++i) {
      if (graph.nodes[i].resource != Resource::kHostOptimizer) {
        queues_[static_cast<size_t>(graph.nodes[i].resource)].push_back(i);
      }
    }
  }

  // One more step after the one before; event-driven, so that no order between resources is assumed.
  Period Step() {
    const size_t count = graph_.nodes.size();
    Period period{.start = std::vector<double>(count, 0.0), .end = std::vector<double>(count, 0.0)};
    std::vector<double> ready(count, 0.0);
    std::vector<int> open(count, 0);
    for (size_t i = 0; i < count; ++i) {
      for (const Edge& edge : graph_.nodes[i].predecessors) {
        if (edge.distance == 0) {
          ++open[i];
        } else if (!previous_.empty()) {
          ready[i] = std::max(ready[i], previous_[static_cast<size_t>(edge.node)]);
        }
      }
    }
    std::array<size_t, kResourceCount> next{};
    std::priority_queue<std::pair<double, size_t>, std::vector<std::pair<double, size_t>>,
                        std::greater<>>
        host;  // By readiness.
    std::vector<size_t> done;
    const auto run = [&](size_t i) {
      const auto resource = static_cast<size_t>(graph_.nodes[i].resource);
      period.start[i] = std::max(ready[i], free_[resource]);
      period.end[i] = period.start[i] + durations_[i];
      free_[resource] = period.end[i];
      done.push_back(i);
    };
    for (size_t i = 0; i < count; ++i) {
      if (open[i] == 0 && graph_.nodes[i].resource == Resource::kHostOptimizer) {
        host.push({ready[i], i});
      }
    }
    size_t finished = 0;
    while (finished < count) {
      const size_t before = finished;
      for (size_t r = 0; r < queues_.size(); ++r) {
        while (next[r] < queues_[r].size() && open[queues_[r][next[r]]] == 0) {
          run(queues_[r][next[r]++]);
          Settle(&done, &ready, &open, period, &host, &finished);
        }
      }
      if (finished == before) {
        if (host.empty()) break;  // A cycle: nothing can go on.
        const size_t i = host.top().second;
        host.pop();
        run(i);
        Settle(&done, &ready, &open, period, &host, &finished);
      }
    }
    previous_ = period.end;
    return period;
  }

 private:
  template <class Queue>
  void Settle(std::vector<size_t>* done, std::vector<double>* ready, std::vector<int>* open,
              const Period& period, Queue* host, size_t* finished) {
    while (!done->empty()) {
      const size_t i = done->back();
      done->pop_back();
      ++*finished;
      for (const size_t follower : followers_[i]) {
        (*ready)[follower] = std::max((*ready)[follower], period.end[i]);
        if (--(*open)[follower] == 0 &&
            graph_.nodes[follower].resource == Resource::kHostOptimizer) {
          host->push({(*ready)[follower], follower});
        }
      }
    }
  }

  const StepGraph& graph_;
  const std::vector<double> durations_;
  std::vector<std::vector<size_t>> followers_;
  std::array<std::vector<size_t>, kResourceCount> queues_;
  std::array<double, kResourceCount> free_{};
  std::vector<double> previous_;
};

// When the last compute node of the step ends.
double ComputeEnd(const StepGraph& graph, const Period& period) {
  double end = 0.0;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    if (graph.nodes[i].resource == Resource::kCompute) end = std::max(end, period.end[i]);
  }
  return end;
}

}  // namespace

Simulation Simulate(const StepGraph& graph,
                    const std::function<double(const Node&)>& duration_seconds, int max_steps) {
  std::vector<double> durations;
  Simulation result;
  for (const Node& node : graph.nodes) {
    durations.push_back(duration_seconds(node));
    result.serial_seconds += durations.back();
    result.busy_seconds[static_cast<size_t>(node.resource)] += durations.back();
  }
  Walker walker(graph, durations);
  double last_end = 0.0;
  double last_period = 0.0;
  Period period;
  for (int step = 0; step < max_steps; ++step) {
    period = walker.Step();
    const double end = ComputeEnd(graph, period);
    if (step == 0) {
      result.single_step_seconds = *std::max_element(period.end.begin(), period.end.end());
    }
    result.step_seconds = end - last_end;
    const bool stable =
        step > 1 && std::fabs(result.step_seconds - last_period) <= 1e-9 * (1.0 + last_period);
    last_period = result.step_seconds;
    last_end = end;
    if (stable) break;
  }
  result.compute_wait_seconds =
      result.step_seconds - result.busy_seconds[static_cast<size_t>(Resource::kCompute)];
  const double begin = *std::min_element(period.start.begin(), period.start.end());
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    result.nodes.push_back({.node = static_cast<int64_t>(i),
                            .start_seconds = period.start[i] - begin,
                            .end_seconds = period.end[i] - begin});
  }
  return result;
}

}  // namespace oom
