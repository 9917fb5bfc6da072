// NodeScheduler hands the work of one step on one NUMA node's streamed chunks to that node's optimizer
// threads: first the squares of a chunk whose gradient has landed, then, once the step's gate is open, its
// update. Of the chunks that are ready for their update the one whose weights are needed soonest comes
// first while at least four backlog slots are free, else the oldest (engine rules, section 6). With nothing of that
// to do, and overlapped updates, blocks of the embedding without a row of the batch are updated early: their gradient
// is 0 whatever comes (section 8).
// Thread-safe. One object per node and attempt; BeginStep is called with no thread at work.

#pragma once

#include <cstdint>
#include <functional>
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
    // Of a chunk of the embedding, by block: a row of the batch lies in it. Asked for once the losses are known.
    std::function<std::vector<char>(int64_t chunk, int64_t step)> blocks_with_rows;
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

  // Stops handing out new chunks; pieces of a chunk whose update by gradient has begun still come: such a chunk is
  // updated whole or not at all. (Early blocks of the embedding are not: overlapped updates tear a step anyway.)
  void Drain();

  int64_t chunk_count() const { return static_cast<int64_t>(store_order_.size()); }
  // Chunks of this step whose squares, and whose update, are complete.
  int64_t squared_count() const;
  int64_t updated_count() const;
  // First chunk whose gradient is not finite, or -1.
  int64_t non_finite_chunk() const;

 private:
  enum class State { kWaiting, kSquares, kSquared, kUpdating, kDone };
  // Before the first block of a chunk is updated, the caller of that piece prepares the chunk.
  enum class Preparation { kNone, kUnderWay, kDone };
  struct Task {
    State state = State::kWaiting;
    Preparation preparation = Preparation::kNone;
    bool finite = true;
    int64_t next_squares = 0;        // Block.
    int64_t squared_blocks = 0;
    int64_t next_update = 0;         // Block; those before it are handed out, or wait for their gradient (early).
    int64_t updated_blocks = 0;
    // Of the embedding, from the gate on; empty: no block is updated early.
    std::vector<char> waits_for_gradient;  // By block.
    int64_t next_early = 0;
    std::vector<char> taken_early;         // By block.
  };

  void TakeLanded() OOM_REQUIRES(mutex_);
  std::optional<Piece> NextSquares() OOM_REQUIRES(mutex_);
  std::optional<Piece> NextUpdate() OOM_REQUIRES(mutex_);
  std::optional<Piece> NextEarly() OOM_REQUIRES(mutex_);
  Task* ChooseUpdate() OOM_REQUIRES(mutex_);
  std::optional<Piece> CutUpdate(Task* task, bool early) OOM_REQUIRES(mutex_);
  int64_t ChunkOf(const Task& task) const OOM_REQUIRES(mutex_);
  Task& TaskOf(int64_t chunk) OOM_REQUIRES(mutex_);
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
