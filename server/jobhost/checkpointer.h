// Checkpointer takes the checkpoints of one attempt: at a cut it starts a snapshot, which is
// written while training goes on, and says when it is durable. A checkpoint that fails (a full
// disk) is reported and does not stop training; the older ones stand. Begin, Wait: the training
// loop's thread. BeforeUpdate: optimizer threads. The rest is thread-safe.

#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "runtime/base/mutex.h"
#include "runtime/base/status.h"
#include "runtime/checkpoint/snapshot.h"
#include "runtime/memory/control_page.h"
#include "server/jobhost/job_context.h"

namespace oom {

class Checkpointer {
 public:
  struct Outcome {
    Status status;
    int64_t step = 0;
    std::string path;
    int64_t bytes = 0;
  };

  struct Options {
    const JobContext* context = nullptr;
    ControlPage* page = nullptr;
    std::string output_directory;
    // Called once for each Begin, on any thread.
    std::function<void(const Outcome&)> on_done;
  };

  explicit Checkpointer(Options options);
  // Waits for a snapshot that is being written.
  ~Checkpointer();

  // The state after `step` completed steps is to be saved. REQUIRES: called between the last update
  // of step `step` - 1 and the first one of step `step`, with no snapshot active.
  void Begin(int64_t step);
  // Before streamed chunk `chunk` is updated in place; may block.
  void BeforeUpdate(int64_t chunk);
  bool active() const { return snapshot_->active(); }
  void Wait() { snapshot_->Wait(); }
  // An optimizer thread waits for the disk.
  bool holds_up_updates() const { return blocked_updates_.load() > 0; }

 private:
  class Staging;
  Status ReadChunk(int64_t chunk, const StateBuffer& buffer) const;
  Manifest MakeManifest(int64_t step) const;

  const Options options_;
  std::unique_ptr<Staging> staging_;
  std::atomic<int64_t> step_{0};
  std::atomic<int> blocked_updates_{0};
  std::unique_ptr<Snapshot> snapshot_;  // Last: its destructor waits for threads that use the rest.
};

}  // namespace oom
