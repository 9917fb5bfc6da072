#include "runtime/graph/executor.h"

#include <utility>

#include "runtime/base/check.h"

namespace oom {

Executor::Executor(const Options& options, NodeRunner* runner)
    : options_(options), runner_(runner) {}

Executor::~Executor() { static_cast<void>(Drain()); }

Stream& Executor::StreamOf(Resource resource) {
  std::unique_ptr<Stream>& stream = streams_[static_cast<size_t>(resource)];
  if (!stream) stream = options_.make_stream(resource);
  return *stream;
}

int Executor::AddGraph(const StepGraph* graph) {
  auto bound = std::make_unique<BoundGraph>();
  bound->graph = graph;
  const size_t count = graph->nodes.size();
  bound->runs_here.assign(count, 0);
  bound->has_waiter.assign(count, 0);
  bound->events = std::make_unique<Event[]>(count);
  for (auto& open : bound->open_streams) open = std::make_unique<std::atomic<int>>(0);
  for (size_t i = 0; i < count; ++i) {
    const Node& node = graph->nodes[i];
    bound->runs_here[i] = node.resource != Resource::kHostOptimizer &&
                          (node.owner_rank < 0 || node.owner_rank == options_.rank);
  }
  for (size_t i = 0; i < count; ++i) {
    if (!bound->runs_here[i]) continue;
    for (const Edge& edge : graph->nodes[i].predecessors) {
      const Node& from = graph->nodes[static_cast<size_t>(edge.node)];
      // Issue order keeps edges within a stream.
      if (from.resource != graph->nodes[i].resource) bound->has_waiter[edge.node] = 1;
    }
  }
  graphs_.push_back(std::move(bound));
  MutexLock lock(mutex_);
  ended_tickets_.push_back(0);
  return static_cast<int>(graphs_.size()) - 1;
}

Status Executor::failure() {
  MutexLock lock(mutex_);
  return failure_;
}

void Executor::RunNode(const Node& node, int64_t step) {
  // After a failure the streams run dry: events are still recorded, so nothing hangs.
  if (failed_.load(std::memory_order_acquire)) return;
  Status status = runner_->Run(node, step);
  if (status.ok()) return;
  bool first = false;
  {
    MutexLock lock(mutex_);
    first = failure_.ok();
    if (first) failure_ = status;
  }
  failed_.store(true, std::memory_order_release);
  if (first && options_.on_failure) options_.on_failure(status);
}

Status Executor::Issue(int graph_handle, int64_t step, std::function<void()> done) {
  if (current_graph_ != graph_handle) {
    OOM_RETURN_IF_ERROR(Drain());
    current_graph_ = graph_handle;
  }
  BoundGraph& bound = *graphs_[static_cast<size_t>(graph_handle)];
  if (bound.issued >= 2) WaitForTicket(bound, bound.issued - 1);
  OOM_RETURN_IF_ERROR(failure());

  const uint64_t ticket = ++bound.issued;
  std::array<bool, kResourceCount> used{};
  const StepGraph& graph = *bound.graph;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    if (!bound.runs_here[i]) continue;
    const Node& node = graph.nodes[i];
    Stream& stream = StreamOf(node.resource);
    used[static_cast<size_t>(node.resource)] = true;
    for (const Edge& edge : node.predecessors) {
      const auto from = static_cast<size_t>(edge.node);
      if (!bound.runs_here[from] || graph.nodes[from].resource == node.resource) continue;
      const uint64_t wanted = ticket - static_cast<uint64_t>(edge.distance);
      // The first step has no step before it; 0 is reached from the start.
      stream.Wait(&bound.events[from], wanted);
    }
    Stream::Done done_node;
    if (options_.on_node && (!options_.times_node || options_.times_node(node, step))) {
      done_node = [this, &node, step](double start, double end) {
        if (!failed_.load(std::memory_order_acquire)) options_.on_node(node, step, start, end);
      };
    }
    stream.Launch([this, &node, step] { RunNode(node, step); }, std::move(done_node));
    if (bound.has_waiter[i]) stream.Record(&bound.events[i], ticket);
  }
  // The step has ended when each stream has passed its last node of it; the last one to pass says so.
  auto& open = *bound.open_streams[ticket % 2];
  int streams = 0;
  for (const bool is_used : used) streams += is_used ? 1 : 0;
  OOM_CHECK(streams > 0);
  open.store(streams, std::memory_order_release);
  auto finish = std::make_shared<std::function<void()>>(std::move(done));
  for (int r = 0; r < kResourceCount; ++r) {
    if (!used[static_cast<size_t>(r)]) continue;
    const auto passed = [this, &open, graph_handle, ticket, finish](double, double) {
      if (open.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
      if (*finish && !failed_.load(std::memory_order_acquire)) (*finish)();
      MutexLock lock(mutex_);
      ended_tickets_[static_cast<size_t>(graph_handle)] = ticket;
      ended_.NotifyAll();
    };
    StreamOf(static_cast<Resource>(r)).Launch([] {}, passed);
  }
  return Status::Ok();
}

void Executor::WaitForTicket(const BoundGraph& bound, uint64_t ticket) {
  size_t index = 0;
  while (graphs_[index].get() != &bound) ++index;
  MutexLock lock(mutex_);
  while (ended_tickets_[index] < ticket) ended_.Wait(mutex_);
}

Status Executor::Drain() {
  for (const auto& bound : graphs_) {
    if (bound->issued > 0) WaitForTicket(*bound, bound->issued);
  }
  return failure();
}

double Executor::compute_wait_seconds() const {
  const auto& stream = streams_[static_cast<size_t>(Resource::kCompute)];
  return stream ? stream->wait_seconds() : 0.0;
}

}  // namespace oom
