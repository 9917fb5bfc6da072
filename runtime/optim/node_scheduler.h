// NodeScheduler hands the work of one step on one NUMA node's streamed chunks to that node's optimizer
// threads: first the squares of a chunk whose gradient has landed, then, once the step's gate is open, its
// update. Of the chunks that are ready for their update the one whose weights are needed soonest comes
// first while at least four backlog slots are free, else the oldest (engine rules, section 6).
// Thread-safe. One object per node and attempt; BeginStep is called with no thread at work.

#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "runtime/base/mutex.h"
#include "runtime/memory/control_page.h"
#include "runtime/memory/shm_layout.h"

namespace oom {

class NodeScheduler {
 public:
  enum class Phase { kSquares, kUpdate };

  // Blocks of one chunk for one thread.
  struct Piece {
    Phase phase;
    int64_t step;
    int64_t chunk;
    int64_t first_block;
    int64_t block_count;
    bool first_of_update;  // The caller prepares the chunk, then calls Prepared().
  };

  struct Options {
    const SharedLayout* layout;
    ControlPage* page;
    int numa_node;
    int64_t piece_blocks;  // Of a full piece.
    bool squares_first;    // Deferred updates: the norm is what everything waits for.
  };

  explicit NodeScheduler(const Options& options);

  void BeginStep(int64_t step);
  // From now on chunks with finite squares may be updated.
  void OpenGate();

  // The next piece, or nothing at the moment. Reads `aborted` after the words that it found landed.
  std::optional<Piece> Next();
  // After the preparation of a piece with first_of_update: other threads may take pieces of the chunk.
  void Prepared(int64_t chunk);
  // What a finished piece completed: the squares of a whole chunk, its whole update, or neither.
  enum class Completed { kNothing, kSquares, kUpdate };
  Completed Finish(const Piece& piece, bool finite);

  // Stops handing out new chunks; pieces of a chunk whose update has begun still come (a chunk is updated whole
  // or not at all).
  void Drain();

  int64_t chunk_count() const { return static_cast<int64_t>(store_order_.size()); }
  // Chunks of this step whose squares, and whose update, are complete.
  int64_t squared_count() const;
  int64_t updated_count() const;
  // First chunk whose gradient is not finite, or -1.
  int64_t non_finite_chunk() const;

 private:
  enum class State { kWaiting, kSquares, kSquared, kPreparing, kUpdating, kUpdated };
  struct Task {
    State state = State::kWaiting;
    int64_t next_block = 0;
    int64_t done_blocks = 0;
    bool finite = true;
  };

  void TakeLanded() OOM_REQUIRES(mutex_);
  Task* ChooseUpdate() OOM_REQUIRES(mutex_);
  Piece Cut(Task* task, int64_t chunk, Phase phase) OOM_REQUIRES(mutex_);
  int64_t BlockCount(int64_t chunk) const;

  const Options options_;
  std::vector<int64_t> store_order_;     // Of this node's streamed chunks.

  mutable Mutex mutex_;
  std::vector<Task> tasks_ OOM_GUARDED_BY(mutex_);  // Parallel to store_order_.
  int64_t step_ OOM_GUARDED_BY(mutex_) = 0;
  size_t landed_ OOM_GUARDED_BY(mutex_) = 0;        // Tasks from here on have not landed.
  bool gate_open_ OOM_GUARDED_BY(mutex_) = false;
  bool draining_ OOM_GUARDED_BY(mutex_) = false;
  int64_t squared_ OOM_GUARDED_BY(mutex_) = 0;
  int64_t updated_ OOM_GUARDED_BY(mutex_) = 0;
  int64_t non_finite_chunk_ OOM_GUARDED_BY(mutex_) = -1;
};

}  // namespace oom
