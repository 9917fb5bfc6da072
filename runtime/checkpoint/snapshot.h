// Snapshot writes a checkpoint of one moment (the cut) while training goes on (engine rules,
// section 11). From Begin on, an optimizer thread calls BeforeUpdate before it touches a chunk; a
// chunk that is not saved yet is then copied aside into staging, or, with staging full, the call
// waits until the chunk is saved. A failed write never stops training: every waiter is released and
// the completion carries the status. Thread-safe. Begin must happen before any BeforeUpdate of the
// next step, and after the last update of the step that it saves (the cut). It outlives the threads
// that call it; its destructor waits for the write.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "runtime/base/mutex.h"
#include "runtime/base/status.h"
#include "runtime/checkpoint/checkpoint_writer.h"
#include "runtime/checkpoint/raw_state.h"

namespace oom {

// What is saved, copied aside and waited for as a whole. Need not be a gradient chunk: a writer
// thread and a staging slot each hold one, so 1 to 4 Mi elements (12 to 48 MiB) are enough for the
// disk.
struct SnapshotChunk {
  int64_t unit = 0;
  int64_t first_element = 0;  // In the unit, a multiple of kBlockElements.
  int64_t elements = 0;       // A multiple of kBlockElements; twelve bytes each.
};

class Snapshot {
 public:
  // Copies the raw state of a chunk into `buffer`, which has room for it. For a chunk that is not
  // in this process's memory (a resident one, copied out at the cut) it may block until the copy is
  // there; it must not wait for an optimizer thread. Called from several threads for different
  // chunks.
  using ReadChunk = std::function<Status(int64_t chunk, const StateBuffer& buffer)>;
  // On the writer's thread, after the last waiter was released.
  using Completion = std::function<void(const Result<CheckpointReport>& result)>;

  struct Options {
    std::vector<SnapshotChunk> chunks;
    // Indices into `chunks`, those that are updated first in front, those that nobody updates in
    // place (resident ones) last. Each once.
    std::vector<int64_t> order;
    Precision precision = Precision::kBfloat16;
    // Memory for chunks copied aside. Less than the largest chunk: updates wait for the disk
    // instead.
    std::span<std::byte> staging;
    ReadChunk read_chunk;
    int writer_thread_count = 1;
  };

  // Memory that a snapshot takes beside its staging while it is being written.
  static int64_t BufferBytes(int64_t largest_chunk_elements, int writer_thread_count);

  explicit Snapshot(Options options);
  ~Snapshot();
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  // The cut: all chunks are unsaved from here on. The writer covers exactly these chunks' elements.
  // Fails with kFailedPrecondition while the last snapshot is still being written.
  Status Begin(std::unique_ptr<CheckpointWriter> writer, Completion completion);

  // Returns once the chunk may be changed. Cheap when no snapshot is being written or the chunk is
  // saved.
  void BeforeUpdate(int64_t chunk);

  // Waits until no snapshot is being written. REQUIRES: not called from the completion.
  void Wait();
  bool active() const { return active_.load(std::memory_order_acquire); }

  // Chunks that were copied aside, and calls that had to wait, since construction.
  int64_t staged_count() const { return staged_count_.load(); }
  int64_t waited_count() const { return waited_count_.load(); }

 private:
  enum class State : uint8_t {
    kSaved,    // May be changed: written or in a private copy.
    kUnsaved,  // Only in the live state.
    kReading,  // A writer copies it.
    kCopying,  // An optimizer thread copies it aside.
  };
  struct Staged {
    int64_t chunk = 0;
    int64_t slot = 0;
  };
  class WriterBuffers;

  void Run(std::unique_ptr<CheckpointWriter> writer, Completion completion);
  void WriteChunks(CheckpointWriter* writer);
  Status WriteChunk(CheckpointWriter* writer, int64_t chunk, std::span<std::byte> raw,
                    WriterBuffers* buffers);
  // The next unsaved chunk in order, now kReading; -1 if there is none.
  int64_t TakeUnsaved() OOM_REQUIRES(mutex_);
  void Fail(Status status);
  std::span<std::byte> Slot(int64_t slot) const;
  std::atomic<State>& state(int64_t chunk) { return states_[static_cast<size_t>(chunk)]; }

  const Options options_;
  const int64_t slot_bytes_;  // Of the largest chunk.

  std::atomic<bool> active_{false};
  std::atomic<int64_t> staged_count_{0};
  std::atomic<int64_t> waited_count_{0};
  // Written under the mutex; read without it for the answer "saved".
  std::vector<std::atomic<State>> states_;

  Mutex mutex_;
  CondVar changed_;
  std::vector<int64_t> free_slots_ OOM_GUARDED_BY(mutex_);
  std::vector<Staged> staged_ OOM_GUARDED_BY(mutex_);  // Waiting for a writer.
  size_t next_in_order_ OOM_GUARDED_BY(mutex_) = 0;
  int64_t copying_count_ OOM_GUARDED_BY(mutex_) = 0;
  Status status_ OOM_GUARDED_BY(mutex_);
  std::thread thread_;  // Touched by Begin, Wait and the destructor under begin_mutex_.
  Mutex begin_mutex_;
};

}  // namespace oom
