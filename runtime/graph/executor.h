// Executor runs step graphs on one rank's streams: each node on the stream of its resource, in issue order,
// with an event between streams for every edge; there is no barrier between steps. What a node does is the
// NodeRunner's business, so the executor knows neither LibTorch nor CUDA, and tests run it with fake
// operators. Edges from nodes that other processes run (host updates, other owners) are kept by the shared
// words, which the runner waits for.
// One thread calls Issue and Drain.

#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "runtime/base/mutex.h"
#include "runtime/base/status.h"
#include "runtime/device/stream.h"
#include "runtime/graph/step_graph.h"

namespace oom {

// Does the work of a node on the calling stream thread. Called for one node of a resource at a time, for
// different resources at once. A failed Status ends the attempt.
class NodeRunner {
 public:
  virtual ~NodeRunner() = default;
  virtual Status Run(const Node& node, int64_t step) = 0;
};

class Executor {
 public:
  struct Options {
    int rank = 0;
    // A stream for a resource; called once for each resource that the graph uses on this rank.
    std::function<std::unique_ptr<Stream>(Resource)> make_stream;
    // Called when a node is complete (trace, heartbeat), those of one resource in order. Seconds of steady_clock.
    std::function<void(const Node&, int64_t step, double start, double end)> on_node;
    // For which nodes; empty: for all. On a device each one costs two events.
    std::function<bool(const Node&, int64_t step)> times_node;
    // Called once, on a stream thread, at the first failure: to let peers know before anything waits on.
    std::function<void(const Status&)> on_failure;
  };

  // `runner` must outlive the object.
  Executor(const Options& options, NodeRunner* runner);
  // Waits until all streams are empty; their waits on words must be over (aborted or satisfied).
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Binds a graph; edges between steps of one graph are kept across Issue calls. REQUIRES: `graph` outlives the
  // executor. Returns its handle.
  int AddGraph(const StepGraph* graph);

  // Enqueues one step of a graph and, behind its last nodes, `done` (on a stream thread; not called after a
  // failure). Two steps of a graph may be in flight; a third Issue waits for the first to end. Changing to
  // another graph drains first. Returns the first failure of any node so far.
  Status Issue(int graph, int64_t step, std::function<void()> done);

  // Waits until nothing is in flight. Returns the first failure.
  Status Drain();

  // Seconds that the compute stream stood still waiting for other streams.
  double compute_wait_seconds() const;

 private:
  struct BoundGraph {
    const StepGraph* graph;
    std::vector<char> runs_here;              // By node.
    std::vector<char> has_waiter;             // By node: some other stream waits for it.
    std::unique_ptr<Event[]> events;          // By node.
    std::array<std::unique_ptr<std::atomic<int>>, 2> open_streams;  // Of a step in flight, by parity.
    uint64_t issued = 0;
  };

  Stream& StreamOf(Resource resource);
  void RunNode(const Node& node, int64_t step);
  void WaitForTicket(const BoundGraph& bound, uint64_t ticket) OOM_EXCLUDES(mutex_);
  Status failure() OOM_EXCLUDES(mutex_);

  const Options options_;
  NodeRunner* const runner_;
  std::vector<std::unique_ptr<BoundGraph>> graphs_;
  int current_graph_ = -1;

  std::atomic<bool> failed_{false};
  Mutex mutex_;
  CondVar ended_;
  Status failure_ OOM_GUARDED_BY(mutex_);
  std::vector<uint64_t> ended_tickets_ OOM_GUARDED_BY(mutex_);  // By graph.

  // Last: destroyed first, and their threads use everything above.
  std::array<std::unique_ptr<Stream>, kResourceCount> streams_;
};

}  // namespace oom
