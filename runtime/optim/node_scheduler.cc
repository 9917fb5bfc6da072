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

NodeScheduler::Task* NodeScheduler::ChooseUpdate() {
  Task* soonest = nullptr;
  Task* oldest = nullptr;
  int64_t ring_landed = 0;
  for (size_t i = 0; i < landed_; ++i) {
    Task& task = tasks_[i];
    const int64_t sequence = options_.layout->ring_sequence(store_order_[i], step_);
    ring_landed = std::max(ring_landed, sequence + 1);
    const bool started = task.state == State::kUpdating && task.next_block < BlockCount(store_order_[i]);
    if (started) return &task;
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

NodeScheduler::Piece NodeScheduler::Cut(Task* task, int64_t chunk, Phase phase) {
  const int64_t count = std::min(options_.piece_blocks, BlockCount(chunk) - task->next_block);
  OOM_CHECK(count > 0);
  const Piece piece{.phase = phase,
                    .step = step_,
                    .chunk = chunk,
                    .first_block = task->next_block,
                    .block_count = count,
                    .first_of_update = false};
  task->next_block += count;
  return piece;
}

std::optional<NodeScheduler::Piece> NodeScheduler::Next() {
  MutexLock lock(mutex_);
  if (!draining_) TakeLanded();
  const auto squares = [&]() OOM_REQUIRES(mutex_) -> std::optional<Piece> {
    if (draining_) return std::nullopt;
    for (size_t i = 0; i < landed_; ++i) {
      Task& task = tasks_[i];
      if (task.state == State::kSquares && task.next_block < BlockCount(store_order_[i])) {
        return Cut(&task, store_order_[i], Phase::kSquares);
      }
    }
    return std::nullopt;
  };
  const auto update = [&]() OOM_REQUIRES(mutex_) -> std::optional<Piece> {
    Task* task = ChooseUpdate();
    if (task == nullptr) return std::nullopt;
    const int64_t chunk = store_order_[static_cast<size_t>(task - tasks_.data())];
    const bool first = task->state == State::kSquared;
    if (first) {
      // An abort that came after the squares: nothing new is applied.
      if (options_.page->aborted().Load() != 0) return std::nullopt;
      task->state = State::kPreparing;
      task->next_block = 0;
      task->done_blocks = 0;
    }
    Piece piece = Cut(task, chunk, Phase::kUpdate);
    piece.first_of_update = first;
    return piece;
  };
  std::optional<Piece> piece = options_.squares_first ? squares() : update();
  if (!piece) piece = options_.squares_first ? update() : squares();
  return piece;
}

void NodeScheduler::Prepared(int64_t chunk) {
  MutexLock lock(mutex_);
  const auto at = std::find(store_order_.begin(), store_order_.end(), chunk);
  Task& task = tasks_[static_cast<size_t>(at - store_order_.begin())];
  OOM_CHECK(task.state == State::kPreparing);
  task.state = State::kUpdating;
}

NodeScheduler::Completed NodeScheduler::Finish(const Piece& piece, bool finite) {
  MutexLock lock(mutex_);
  const auto at = std::find(store_order_.begin(), store_order_.end(), piece.chunk);
  Task& task = tasks_[static_cast<size_t>(at - store_order_.begin())];
  task.done_blocks += piece.block_count;
  task.finite = task.finite && finite;
  if (task.done_blocks < BlockCount(piece.chunk)) return Completed::kNothing;
  if (piece.phase == Phase::kUpdate) {
    task.state = State::kUpdated;
    ++updated_;
    return Completed::kUpdate;
  }
  ++squared_;
  if (task.finite) {
    task.state = State::kSquared;
  } else {
    // Stays out of every later choice: it is never applied.
    task.state = State::kUpdated;
    if (non_finite_chunk_ < 0) non_finite_chunk_ = piece.chunk;
  }
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
