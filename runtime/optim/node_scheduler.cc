#include "runtime/optim/node_scheduler.h"

#include <algorithm>

#include "runtime/base/check.h"

namespace oom {
namespace {

// Below this many free slots the workers' gradient copies are about to stall.
constexpr int64_t kComfortableFreeSlots = 4;

}  // namespace

NodeScheduler::NodeScheduler(const Options& options) : options_(options) {
  const SharedLayout& layout = *options_.layout;
  // Backward produces gradients from the last unit to the first.
  for (auto unit = layout.units().rbegin(); unit != layout.units().rend(); ++unit) {
    for (int64_t c = layout.first_chunk(unit->index); c < layout.first_chunk(unit->index + 1); ++c) {
      const Chunk& chunk = layout.chunks()[c];
      if (chunk.owner_rank < 0 && chunk.numa_node == options_.numa_node) store_order_.push_back(c);
    }
  }
  MutexLock lock(mutex_);
  tasks_.resize(store_order_.size());
}

int64_t NodeScheduler::BlockCount(int64_t chunk) const {
  return options_.layout->chunks()[chunk].elements / kBlockElements;
}

int64_t NodeScheduler::ChunkOf(const Task& task) const {
  return store_order_[static_cast<size_t>(&task - tasks_.data())];
}

NodeScheduler::Task& NodeScheduler::TaskOf(int64_t chunk) {
  const auto at = std::find(store_order_.begin(), store_order_.end(), chunk);
  return tasks_[static_cast<size_t>(at - store_order_.begin())];
}

void NodeScheduler::BeginStep(int64_t step) {
  MutexLock lock(mutex_);
  std::fill(tasks_.begin(), tasks_.end(), Task{});
  step_ = step;
  landed_ = 0;
  gate_open_ = false;
  squared_ = 0;
  updated_ = 0;
}

void NodeScheduler::OpenGate() {
  MutexLock lock(mutex_);
  gate_open_ = true;
  if (options_.squares_first) return;
  for (Task& task : tasks_) {
    const Chunk& chunk = options_.layout->chunks()[ChunkOf(task)];
    if (!options_.layout->gradient_by_row(chunk.unit)) continue;
    task.waits_for_gradient = options_.blocks_with_rows(chunk.index, step_);
    task.taken_early.assign(task.waits_for_gradient.size(), 0);
  }
}

void NodeScheduler::Drain() {
  MutexLock lock(mutex_);
  draining_ = true;
}

// Gradients land in store order, so only the first that has not landed is looked at.
void NodeScheduler::TakeLanded() {
  const auto target = static_cast<uint64_t>(step_ + 1);
  while (landed_ < tasks_.size()) {
    for (int rank = 0; rank < options_.layout->rank_count(); ++rank) {
      if (options_.page->landed(rank, store_order_[landed_]).Load() < target) return;
    }
    // A stream that an abort released publishes words over garbage.
    if (options_.page->aborted().Load() != 0) return;
    tasks_[landed_++].state = State::kSquares;
  }
}

std::optional<NodeScheduler::Piece> NodeScheduler::NextSquares() {
  if (draining_) return std::nullopt;
  for (size_t i = 0; i < landed_; ++i) {
    Task& task = tasks_[i];
    const int64_t left = BlockCount(store_order_[i]) - task.next_squares;
    if (task.state != State::kSquares || left == 0) continue;
    const Piece piece{.phase = Phase::kSquares,
                      .step = step_,
                      .chunk = store_order_[i],
                      .first_block = task.next_squares,
                      .block_count = std::min(options_.piece_blocks, left),
                      .first_of_update = false};
    task.next_squares += piece.block_count;
    return piece;
  }
  return std::nullopt;
}

NodeScheduler::Task* NodeScheduler::ChooseUpdate() {
  Task* soonest = nullptr;
  Task* oldest = nullptr;
  int64_t ring_landed = 0;
  for (size_t i = 0; i < landed_; ++i) {
    Task& task = tasks_[i];
    const int64_t sequence = options_.layout->ring_sequence(store_order_[i], step_);
    ring_landed = std::max(ring_landed, sequence + 1);
    if (task.preparation == Preparation::kUnderWay) continue;
    if (task.state == State::kUpdating && task.next_update < BlockCount(store_order_[i])) return &task;
    if (task.state != State::kSquared || draining_ || !gate_open_) continue;
    if (oldest == nullptr) oldest = &task;
    // Store order is the reverse of use order.
    soonest = &task;
  }
  if (options_.layout->ring_slot_count() == 0) return soonest;
  const auto freed = static_cast<int64_t>(options_.page->backlog_freed().Load());
  const int64_t free_slots =
      options_.layout->ring_slot_count() - std::max<int64_t>(0, ring_landed - freed);
  return free_slots >= kComfortableFreeSlots ? soonest : oldest;
}

// The next run of blocks to update: early those that wait for no gradient, else all that were not taken early.
std::optional<NodeScheduler::Piece> NodeScheduler::CutUpdate(Task* task, bool early) {
  const int64_t chunk = ChunkOf(*task);
  const int64_t end = BlockCount(chunk);
  const auto passes_by = [&](int64_t block) OOM_REQUIRES(mutex_) {
    const auto at = static_cast<size_t>(block);
    if (early) return task->waits_for_gradient[at] != 0;
    return !task->taken_early.empty() && task->taken_early[at] != 0;
  };
  int64_t& next = early ? task->next_early : task->next_update;
  while (next < end && passes_by(next)) ++next;
  if (next == end) return std::nullopt;
  Piece piece{.phase = Phase::kUpdate,
              .step = step_,
              .chunk = chunk,
              .first_block = next,
              .block_count = 0,
              .first_of_update = task->preparation == Preparation::kNone};
  while (next < end && piece.block_count < options_.piece_blocks && !passes_by(next)) {
    if (early) task->taken_early[static_cast<size_t>(next)] = 1;
    ++next;
    ++piece.block_count;
  }
  if (piece.first_of_update) task->preparation = Preparation::kUnderWay;
  return piece;
}

std::optional<NodeScheduler::Piece> NodeScheduler::NextUpdate() {
  // A chunk whose remaining blocks were all taken early yields no piece: on to the next.
  while (Task* task = ChooseUpdate()) {
    if (task->state == State::kSquared) {
      // An abort that came after the squares: nothing new is applied.
      if (options_.page->aborted().Load() != 0) return std::nullopt;
      task->state = State::kUpdating;
    }
    if (std::optional<Piece> piece = CutUpdate(task, /*early=*/false)) return piece;
  }
  return std::nullopt;
}

std::optional<NodeScheduler::Piece> NodeScheduler::NextEarly() {
  if (draining_ || !gate_open_ || options_.page->aborted().Load() != 0) return std::nullopt;
  // The embedding's chunks come last in store order; a chunk that is past its squares needs no early update.
  for (auto task = tasks_.rbegin(); task != tasks_.rend() && !task->taken_early.empty(); ++task) {
    if (task->state != State::kWaiting || task->preparation == Preparation::kUnderWay) continue;
    if (std::optional<Piece> piece = CutUpdate(&*task, /*early=*/true)) return piece;
  }
  return std::nullopt;
}

std::optional<NodeScheduler::Piece> NodeScheduler::Next() {
  MutexLock lock(mutex_);
  if (!draining_) TakeLanded();
  std::optional<Piece> piece = options_.squares_first ? NextSquares() : NextUpdate();
  if (!piece) piece = options_.squares_first ? NextUpdate() : NextSquares();
  if (!piece) piece = NextEarly();
  return piece;
}

void NodeScheduler::Prepared(int64_t chunk) {
  MutexLock lock(mutex_);
  Task& task = TaskOf(chunk);
  OOM_CHECK(task.preparation == Preparation::kUnderWay);
  task.preparation = Preparation::kDone;
}

NodeScheduler::Completed NodeScheduler::Finish(const Piece& piece, bool finite) {
  MutexLock lock(mutex_);
  Task& task = TaskOf(piece.chunk);
  const int64_t blocks = BlockCount(piece.chunk);
  if (piece.phase == Phase::kUpdate) {
    task.updated_blocks += piece.block_count;
    if (task.updated_blocks < blocks) return Completed::kNothing;
    ++updated_;
    if (task.state == State::kUpdating) task.state = State::kDone;
    return Completed::kUpdate;
  }
  task.squared_blocks += piece.block_count;
  task.finite = task.finite && finite;
  if (task.squared_blocks < blocks) return Completed::kNothing;
  ++squared_;
  // What is not finite stays out of every later choice: it is never applied. And early blocks may have been all.
  const bool has_update = task.finite && task.updated_blocks < blocks;
  task.state = has_update ? State::kSquared : State::kDone;
  if (!task.finite && non_finite_chunk_ < 0) non_finite_chunk_ = piece.chunk;
  return Completed::kSquares;
}

int64_t NodeScheduler::squared_count() const {
  MutexLock lock(mutex_);
  return squared_;
}

int64_t NodeScheduler::updated_count() const {
  MutexLock lock(mutex_);
  return updated_;
}

int64_t NodeScheduler::non_finite_chunk() const {
  MutexLock lock(mutex_);
  return non_finite_chunk_;
}

}  // namespace oom
