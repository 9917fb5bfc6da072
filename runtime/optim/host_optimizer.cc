#include "runtime/optim/host_optimizer.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <span>
#include <string>
#include <thread>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/base/clock.h"
#include "runtime/base/mutex.h"
#include "runtime/optim/chunk_update.h"
#include "runtime/optim/node_scheduler.h"

namespace oom {
namespace {

// 2^18 parameters: small enough that all threads share a chunk, large enough that taking one costs nothing.
constexpr int64_t kPieceBlocks = (int64_t{1} << 18) / kBlockElements;

}  // namespace

struct HostOptimizer::Impl {
  explicit Impl(const Options& given)
      : options(given),
        update(given.layout, given.pools, given.accumulation, given.simd),
        update_bytes(given.layout->units().size()) {
    if (!options.device_produces) return;
    // The threads look in turn, not all at once; whoever finds a chunk rings for the others.
    int threads = 0;
    for (const int count : options.threads_by_node) threads += count;
    thread_wait.timeout = kDevicePollInterval * std::max(1, threads);
    step_wait.timeout = kDevicePollInterval;
  }

  struct Node {
    int numa_node;
    std::unique_ptr<NodeScheduler> scheduler;
    std::vector<std::thread> threads;
    std::atomic<int64_t> busy_nanoseconds{0};
  };

  void RunThread(Node* node);
  void RunPiece(Node* node, const NodeScheduler::Piece& piece, ChunkUpdate::Scratch* scratch);
  void FreeSlot(int64_t chunk, int64_t step);
  void SetScalars(int64_t step, double clip);
  Status WaitFor(const std::function<bool()>& done);
  Status CheckLosses(int64_t step, StepOutcome* outcome);
  double SumOfSquares() const;
  Status NonFinite() const;
  // Of a resident chunk whose owner left its squares and said nothing yet.
  Status NonFiniteSquares(int64_t step) const;

  ControlPage& page() const { return *options.page; }

  const Options options;
  // Where nobody may ring the bell, the words themselves are looked at again and again.
  WaitOptions thread_wait;
  WaitOptions step_wait;
  const ChunkUpdate update;
  std::vector<std::unique_ptr<Node>> nodes;
  std::vector<std::atomic<int64_t>> update_bytes;  // By unit.
  std::atomic<int64_t> step{-1};
  std::atomic<bool> stop{false};
  // Written by FinishStep before a gate opens, read by the threads after.
  AdamWScalars decayed{};
  AdamWScalars plain{};

  Mutex ring_mutex;
  // Ring chunks that are updated but wait for an older one to leave first.
  std::vector<int64_t> left_early OOM_GUARDED_BY(ring_mutex);
};

void HostOptimizer::Impl::RunThread(Node* node) {
  if (options.bind_thread) options.bind_thread(node->numa_node);
  const ScopedOptimizerMxcsr mxcsr;
  ChunkUpdate::Scratch scratch;
  while (true) {
    const uint64_t bell = page().bell().Load();
    if (step.load(std::memory_order_acquire) >= 0) {
      if (const auto piece = node->scheduler->Next()) {
        if (options.device_produces && piece->first_block == 0) page().bell().Ring();
        RunPiece(node, *piece, &scratch);
        continue;
      }
    }
    if (stop.load(std::memory_order_acquire)) return;
    // After an abort the wait returns at once; then only Stop ends the thread.
    if (page().bell().WaitAtLeast(bell + 1, page().aborted(), thread_wait) == WaitResult::kAborted) {
      if (stop.load(std::memory_order_acquire)) return;
      std::this_thread::yield();
    }
  }
}

void HostOptimizer::Impl::RunPiece(Node* node, const NodeScheduler::Piece& piece,
                                   ChunkUpdate::Scratch* scratch) {
  const int64_t now = piece.step;
  const double start = MonotonicSeconds();
  bool finite = true;
  if (piece.phase == NodeScheduler::Phase::kSquares) {
    const Chunk& chunk = options.layout->chunks()[piece.chunk];
    finite = update.Squares(piece.chunk, now, piece.first_block,
                            page().norm_squares().subspan(
                                static_cast<size_t>(chunk.first_block + piece.first_block),
                                static_cast<size_t>(piece.block_count)),
                            scratch);
  } else {
    if (piece.first_of_update) {
      if (options.before_update) options.before_update(piece.chunk, now);
      node->scheduler->Prepared(piece.chunk);
      page().bell().Ring();
    }
    update.Apply(piece.chunk, now, piece.first_block, piece.block_count, decayed, plain, scratch);
    const int64_t unit = options.layout->chunks()[piece.chunk].unit;
    update_bytes[static_cast<size_t>(unit)] +=
        piece.block_count * kBlockElements * options.layout->update_traffic_bytes(unit);
  }
  const double end = MonotonicSeconds();
  node->busy_nanoseconds += static_cast<int64_t>((end - start) * 1e9);
  if (piece.phase == NodeScheduler::Phase::kUpdate && options.on_update) {
    options.on_update(node->numa_node, piece.chunk, now, start, end);
  }
  switch (node->scheduler->Finish(piece, finite)) {
    case NodeScheduler::Completed::kNothing:
      return;
    case NodeScheduler::Completed::kSquares:
      page().norm_known(piece.chunk).Publish(static_cast<uint64_t>(now + 1));
      break;
    case NodeScheduler::Completed::kUpdate:
      page().version(piece.chunk).Publish(static_cast<uint64_t>(now + 1));
      FreeSlot(piece.chunk, now);
      break;
  }
  page().bell().Ring();
}

// Slots leave in FIFO order, so that a copy stream can wait on one word.
void HostOptimizer::Impl::FreeSlot(int64_t chunk, int64_t now) {
  const int64_t sequence = options.layout->ring_sequence(chunk, now);
  if (sequence < 0) return;
  MutexLock lock(ring_mutex);
  left_early.push_back(sequence);
  std::sort(left_early.begin(), left_early.end());
  auto freed = static_cast<int64_t>(page().backlog_freed().Load());
  size_t gone = 0;
  while (gone < left_early.size() && left_early[gone] == freed) {
    ++freed;
    ++gone;
  }
  if (gone == 0) return;
  left_early.erase(left_early.begin(), left_early.begin() + static_cast<int64_t>(gone));
  page().backlog_freed().Publish(static_cast<uint64_t>(freed));
}

void HostOptimizer::Impl::SetScalars(int64_t now, double clip) {
  const double rate = LearningRate(options.schedule, now);
  decayed = MakeAdamWScalars(options.hyper, rate, now + 1, true, clip);
  plain = MakeAdamWScalars(options.hyper, rate, now + 1, false, clip);
}

Status HostOptimizer::Impl::WaitFor(const std::function<bool()>& done) {
  while (true) {
    const uint64_t bell = page().bell().Load();
    if (page().aborted().Load() != 0) return Status(Code::kAborted, "the attempt was aborted");
    if (done()) return Status::Ok();
    static_cast<void>(page().bell().WaitAtLeast(bell + 1, page().aborted(), step_wait));
  }
}

Status HostOptimizer::Impl::CheckLosses(int64_t now, StepOutcome* outcome) {
  for (int rank = 0; rank < options.layout->rank_count(); ++rank) {
    const RankRecord& record = page().rank_record(rank, now);
    OOM_CHECK(record.step == now);
    outcome->loss_sum += record.loss_sum;
    outcome->auxiliary_loss += record.auxiliary_loss;
    outcome->valid_targets = record.valid_targets;
  }
  if (std::isfinite(outcome->loss_sum) && std::isfinite(outcome->auxiliary_loss)) {
    return Status::Ok();
  }
  return Status(Code::kFailedPrecondition,
                "the loss of step " + std::to_string(now + 1) + " is not finite")
      .WithReason("NON_FINITE_LOSS");
}

Status HostOptimizer::Impl::NonFinite() const {
  for (const auto& node : nodes) {
    const int64_t chunk = node->scheduler->non_finite_chunk();
    if (chunk < 0) continue;
    return NonFiniteGradient(*options.layout, chunk, step.load());
  }
  return Status::Ok();
}

Status HostOptimizer::Impl::NonFiniteSquares(int64_t now) const {
  const std::span<const double> squares = page().norm_squares();
  for (const Chunk& chunk : options.layout->chunks()) {
    const auto of_chunk = squares.subspan(static_cast<size_t>(chunk.first_block),
                                          static_cast<size_t>(chunk.elements / kBlockElements));
    const bool finite = std::all_of(of_chunk.begin(), of_chunk.end(),
                                    [](double sum) { return std::isfinite(sum); });
    if (!finite) return NonFiniteGradient(*options.layout, chunk.index, now);
  }
  return Status(Code::kFailedPrecondition,
                "the gradient norm of step " + std::to_string(now + 1) + " is not finite")
      .WithReason("NON_FINITE_GRADIENT");
}

double HostOptimizer::Impl::SumOfSquares() const {
  double sum = 0.0;
  for (const double squares : page().norm_squares()) sum += squares;
  return sum;
}

HostOptimizer::HostOptimizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

HostOptimizer::~HostOptimizer() { Stop(); }

Result<std::unique_ptr<HostOptimizer>> HostOptimizer::Start(const Options& options) {
  if (options.max_gradient_norm > 0.0 && options.update_mode != v1::UPDATE_MODE_DEFERRED) {
    return Status(Code::kInvalidArgument, "clipping needs deferred updates")
        .WithField("plan.update_mode");
  }
  auto impl = std::make_unique<Impl>(options);
  const auto first = static_cast<uint64_t>(options.first_step);
  for (const Chunk& chunk : options.layout->chunks()) {
    if (chunk.owner_rank < 0) options.page->version(chunk.index).RaiseTo(first);
  }
  options.page->backlog_freed().RaiseTo(
      first * static_cast<uint64_t>(options.layout->ring_chunks_per_step()));
  options.page->clip_known().RaiseTo(first);
  options.page->updates_done().RaiseTo(first);
  for (size_t n = 0; n < options.threads_by_node.size(); ++n) {
    auto node = std::make_unique<Impl::Node>();
    node->numa_node = static_cast<int>(n);
    node->scheduler = std::make_unique<NodeScheduler>(NodeScheduler::Options{
        .layout = options.layout,
        .page = options.page,
        .numa_node = node->numa_node,
        .piece_blocks = kPieceBlocks,
        .squares_first = options.update_mode == v1::UPDATE_MODE_DEFERRED,
        .blocks_with_rows = [update = &impl->update](int64_t chunk, int64_t step) {
          return update->BlocksWithRows(chunk, step);
        },
    });
    impl->nodes.push_back(std::move(node));
  }
  for (const Chunk& chunk : options.layout->chunks()) {
    const auto node = static_cast<size_t>(chunk.numa_node);
    if (chunk.owner_rank < 0 &&
        (node >= impl->nodes.size() || options.threads_by_node[node] <= 0)) {
      return Status(Code::kInvalidArgument, "no optimizer threads on NUMA node " +
                                                std::to_string(chunk.numa_node))
          .WithField("plan.optimizer_threads");
    }
  }
  Impl* shared = impl.get();
  std::unique_ptr<HostOptimizer> optimizer(new HostOptimizer(std::move(impl)));
  for (auto& node : shared->nodes) {
    for (int i = 0; i < options.threads_by_node[static_cast<size_t>(node->numa_node)]; ++i) {
      node->threads.emplace_back([shared, raw = node.get()] { shared->RunThread(raw); });
    }
  }
  return optimizer;
}

Result<HostOptimizer::StepOutcome> HostOptimizer::FinishStep(int64_t step) {
  Impl& impl = *impl_;
  const SharedLayout& layout = *impl.options.layout;
  const auto target = static_cast<uint64_t>(step + 1);
  const bool deferred = impl.options.update_mode == v1::UPDATE_MODE_DEFERRED;
  StepOutcome outcome;
  outcome.learning_rate = LearningRate(impl.options.schedule, step);

  for (auto& node : impl.nodes) node->scheduler->BeginStep(step);
  impl.step.store(step, std::memory_order_release);
  impl.page().bell().Ring();

  OOM_RETURN_IF_ERROR(impl.WaitFor([&] {
    for (int rank = 0; rank < layout.rank_count(); ++rank) {
      if (impl.page().loss_known(rank).Load() < target) return false;
    }
    return true;
  }));
  OOM_RETURN_IF_ERROR(impl.CheckLosses(step, &outcome));
  const auto open_gates = [&] {
    for (auto& node : impl.nodes) node->scheduler->OpenGate();
    impl.page().bell().Ring();
  };
  if (!deferred) {
    impl.SetScalars(step, 1.0);
    open_gates();
  }

  const auto all_squared = [&] {
    for (const auto& node : impl.nodes) {
      if (node->scheduler->squared_count() < node->scheduler->chunk_count()) return false;
    }
    for (const Chunk& chunk : layout.chunks()) {
      if (chunk.owner_rank >= 0 && impl.page().norm_known(chunk.index).Load() < target) return false;
    }
    return true;
  };
  Status non_finite;
  OOM_RETURN_IF_ERROR(impl.WaitFor([&] {
    // In this order: a chunk that counts as squared has already said whether it is finite.
    const bool all = all_squared();
    non_finite = impl.NonFinite();
    return all || !non_finite.ok();
  }));
  if (!non_finite.ok()) return non_finite;
  outcome.gradient_norm = std::sqrt(impl.SumOfSquares());
  if (!std::isfinite(outcome.gradient_norm)) return impl.NonFiniteSquares(step);
  outcome.clip = deferred ? ClipFactor(outcome.gradient_norm, impl.options.max_gradient_norm) : 1.0;
  impl.page().clip_record(step) = {
      .step = step, .gradient_norm = outcome.gradient_norm, .clip = outcome.clip};
  impl.page().clip_known().Publish(target);
  if (deferred) {
    impl.SetScalars(step, outcome.clip);
    open_gates();
  }

  OOM_RETURN_IF_ERROR(impl.WaitFor([&] {
    for (const auto& node : impl.nodes) {
      if (node->scheduler->updated_count() < node->scheduler->chunk_count()) return false;
    }
    for (const Chunk& chunk : layout.chunks()) {
      if (chunk.owner_rank >= 0 && impl.page().version(chunk.index).Load() < target) return false;
    }
    return true;
  }));
  impl.page().updates_done().Publish(target);
  return outcome;
}

void HostOptimizer::Stop() {
  for (auto& node : impl_->nodes) node->scheduler->Drain();
  impl_->stop.store(true, std::memory_order_release);
  impl_->page().bell().Ring();
  for (auto& node : impl_->nodes) {
    for (std::thread& thread : node->threads) {
      if (thread.joinable()) thread.join();
    }
  }
}

int64_t HostOptimizer::update_bytes(int64_t unit) const {
  return impl_->update_bytes[static_cast<size_t>(unit)];
}

double HostOptimizer::busy_seconds(int numa_node) const {
  if (numa_node < 0 || numa_node >= static_cast<int>(impl_->nodes.size())) return 0.0;
  return static_cast<double>(impl_->nodes[static_cast<size_t>(numa_node)]->busy_nanoseconds) * 1e-9;
}

}  // namespace oom
