// ControlPage is the data plane's only channel (architecture, idea 5): one shared mapping for one attempt of a
// job, zero at first, with the words and records by which workers and job host follow each other. Word
// indices follow from the graph; none is sent. A new attempt gets a new page, so a resumed step can never
// take a stale word for a new one.
// Step numbers count from 0; words hold "steps done": version(c) = t means that t updates are in the weights.
// Any process may map it. Accessors are thread-safe; which process writes a word is said beside it.

#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "runtime/base/status.h"
#include "runtime/base/unique_fd.h"
#include "runtime/memory/shared_word.h"

namespace oom {

// Steps that may be in flight at once: records are kept in a ring of this many.
inline constexpr int64_t kStepRing = 4;

// What one rank says of one step; written before loss_known(rank) is published (losses) or
// step_done(rank) (the rest).
struct RankRecord {
  int64_t step;
  double loss_sum;            // Sum over this rank's valid targets.
  int64_t valid_targets;      // Of the whole global batch, counted by this rank.
  double auxiliary_loss;      // Coefficient applied; this rank's share, so that the ranks' add up to the step's.
  double exposed_wait_seconds;
  double step_seconds;
  double evaluation_loss_sum;
  int64_t evaluation_targets;
  int64_t device_bytes_peak;
  // Moved since the step before.
  int64_t host_to_device_bytes;
  int64_t device_to_host_bytes;
  int64_t boundary_bytes;       // Out and back.
  int64_t collective_bytes;
};

// What the job host says of one step; written before clip_known is published.
struct ClipRecord {
  int64_t step;
  double gradient_norm;
  double clip;                // k of the update rule; 1: no clipping.
};

// What a rank's routers chose in the forward pass of one step, over all its routed layers
// (load-balancing loss); written before router_counted(rank) is published.
struct RouterCounts {
  int64_t& tokens;               // N: tokens summed over layers.
  std::span<int64_t> choices_E;  // Of each of the E experts.
};

// As shm_layout.md says.
static_assert(sizeof(RankRecord) == 104 && sizeof(ClipRecord) == 24);

class ControlPage {
 public:
  struct Layout {
    int rank_count = 0;
    int64_t chunk_count = 0;
    int64_t block_count = 0;  // 4,096-blocks of all units.
    int64_t expert_count = 0;  // E where ranks may add up their router counts; 0: there are none.
  };

  // A new zero page in a sealed memfd. Codes of ErrnoStatus.
  static Result<std::unique_ptr<ControlPage>> Create(const Layout& layout);
  // Maps a page that another process made. Fails with kInvalidArgument if its layout is not `layout`.
  static Result<std::unique_ptr<ControlPage>> Map(UniqueFd fd, const Layout& layout);
  ~ControlPage();
  ControlPage(const ControlPage&) = delete;
  ControlPage& operator=(const ControlPage&) = delete;

  int fd() const { return fd_.get(); }
  // The whole mapping, to register it with a device.
  std::span<std::byte> memory() const { return {base_, static_cast<size_t>(bytes_)}; }
  const Layout& layout() const { return layout_; }

  // Job host: not 0 ends every wait. Stored first in the order of engine rules, section 7.
  SharedWord& aborted() const { return word(0); }
  // Job host: steps below this number may be begun.
  SharedWord& step_limit() const { return word(1); }
  // Job host: 0, or 1 + the step before which workers end (no step from there on is begun).
  SharedWord& stop_step() const { return word(2); }
  // Job host: the cut that a checkpoint takes: after that many completed steps (0: none yet). Set before the
  // last of those steps is granted, so that owners of resident chunks see it when they update them.
  SharedWord& checkpoint_step() const { return word(3); }
  // Job host: norm and clip factor of steps below this number are known, and norm_squares may be overwritten.
  SharedWord& clip_known() const { return word(4); }
  // Job host: gradient chunks that have left the backlog, in FIFO order.
  SharedWord& backlog_freed() const { return word(5); }
  // Job host: every update of steps below this number is done.
  SharedWord& updates_done() const { return word(6); }

  // Anyone: rung after every word that may give the host optimizer work (landed, loss_known, norm_known,
  // version of resident chunks), since one thread cannot sleep on many words. A GPU cannot ring; then
  // the optimizer looks again after at most 200 us.
  SharedWord& bell() const { return word(7); }
  // Workers of GPUs: ranks below this number have registered their memory with the driver.
  SharedWord& registered() const { return word(9); }
  // Worker 0, where GPUs exchange with each other: communicator_id() is in place.
  SharedWord& communicator_known() const { return word(8); }

  // The chunk's updater (job host, or the owner of a resident chunk): updates in its weights.
  SharedWord& version(int64_t chunk) const { return word(kFixedWords + chunk); }
  // The chunk's updater: squares of its summed gradient are in norm_squares, for steps below.
  SharedWord& norm_known(int64_t chunk) const {
    return word(kFixedWords + layout_.chunk_count + chunk);
  }
  // The owner of a resident chunk: its state after that many steps is in the snapshot pool.
  SharedWord& snapshot_taken(int64_t chunk) const {
    return word(kFixedWords + 2 * layout_.chunk_count + chunk);
  }
  // Worker `rank`: its partial gradient of the chunk is in place for steps below.
  SharedWord& landed(int rank, int64_t chunk) const {
    return word(kFixedWords + (3 + rank) * layout_.chunk_count + chunk);
  }
  // Worker `rank`: its loss of steps below this number is in its record.
  SharedWord& loss_known(int rank) const { return word(RankWords() + kWordsOfARank * rank); }
  // Worker `rank`: all of its nodes of steps below this number are done.
  SharedWord& step_done(int rank) const { return word(RankWords() + kWordsOfARank * rank + 1); }
  // Worker `rank`: raised at every node: the watchdog's heartbeat.
  SharedWord& heartbeat(int rank) const { return word(RankWords() + kWordsOfARank * rank + 2); }
  // Worker `rank`, where ranks exchange through the host's memory: its part of exchanges below this number is in place.
  SharedWord& exchange_ready(int rank) const {
    return word(RankWords() + kWordsOfARank * rank + 3);
  }
  // And it has read everybody's part of exchanges below this number.
  SharedWord& exchange_read(int rank) const {
    return word(RankWords() + kWordsOfARank * rank + 4);
  }

  // Worker `rank`, where several ranks have a load-balancing loss: its router counts of steps below
  // this number are in place.
  SharedWord& router_counted(int rank) const {
    return word(RankWords() + kWordsOfARank * rank + 5);
  }

  // What NCCL's ranks find each other by.
  static constexpr int64_t kCommunicatorIdBytes = 128;
  std::span<std::byte> communicator_id() const;

  RankRecord& rank_record(int rank, int64_t step) const;
  ClipRecord& clip_record(int64_t step) const;
  // On cache lines of its own. REQUIRES: the layout has experts.
  RouterCounts router_counts(int rank, int64_t step) const;
  // Sum of squares of each 4,096-block, all units in canonical order.
  std::span<double> norm_squares() const;

  // Stores `aborted` and wakes every sleeper of every word.
  void Abort();

 private:
  static constexpr int64_t kFixedWords = 10;
  static constexpr int64_t kWordsOfARank = 6;

  ControlPage(UniqueFd fd, const Layout& layout, std::byte* base, int64_t bytes)
      : fd_(std::move(fd)), layout_(layout), base_(base), bytes_(bytes) {}

  static int64_t WordCount(const Layout& layout);
  static int64_t TotalBytes(const Layout& layout);
  static Result<std::unique_ptr<ControlPage>> MapPage(UniqueFd fd, const Layout& layout);
  int64_t RankWords() const { return kFixedWords + (3 + layout_.rank_count) * layout_.chunk_count; }
  SharedWord& word(int64_t index) const;

  const UniqueFd fd_;
  const Layout layout_;
  std::byte* const base_;
  const int64_t bytes_;
};

}  // namespace oom
