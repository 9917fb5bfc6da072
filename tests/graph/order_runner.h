// OrderRunner runs the nodes of any graph on the real executor: it checks that every predecessor is
// done, keeps virtual time by the simulator's rule (a node starts after the last of its
// predecessors and of its resource), and may let each node really take its time. Nodes of the host
// optimizer are run by HostLoop on one thread for all ranks. Run is called by stream threads,
// HostLoop by one.

#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "runtime/graph/executor.h"
#include "runtime/memory/shared_word.h"

namespace oom::testing {

class OrderRunner : public NodeRunner {
 public:
  struct Options {
    const StepGraph* graph = nullptr;  // Must outlive the object.
    int rank = 0;
    std::function<double(const Node&)> seconds;           // Virtual length of a node.
    std::function<void(const Node&, int64_t step)> work;  // May delay; null: nothing.
    std::function<Status(const Node&, int64_t step)> fail;
  };
  explicit OrderRunner(const Options& options);

  Status Run(const Node& node, int64_t step) override;

  // Runs the host optimizer's nodes of steps [0, last) for these ranks, in the order of the nodes
  // that they wait for. Ends early once `stop` is set.
  static void HostLoop(const std::vector<OrderRunner*>& ranks, int64_t last,
                       const SharedWord& stop);

  // Ends every wait.
  void Abort();
  double virtual_start(int64_t node, int64_t step) const {
    return times_[static_cast<size_t>(node)].start[step % 4];
  }
  double virtual_end(int64_t node, int64_t step) const {
    return times_[static_cast<size_t>(node)].end[step % 4];
  }
  int64_t done_steps(int64_t node) const {
    return static_cast<int64_t>(done_[static_cast<size_t>(node)].Load());
  }
  int64_t run_count() const { return run_count_.load(); }

 private:
  struct Times {
    double start[4] = {};
    double end[4] = {};
  };
  bool RunsHere(const Node& node) const {
    return node.resource != Resource::kHostOptimizer &&
           (node.owner_rank < 0 || node.owner_rank == options_.rank);
  }

  const Options options_;
  std::vector<SharedWord> done_;  // By node: steps in which it is done.
  std::vector<Times> times_;
  std::vector<double> free_;  // By resource.
  SharedWord aborted_{};
  std::atomic<int64_t> run_count_{0};
};

}  // namespace oom::testing
