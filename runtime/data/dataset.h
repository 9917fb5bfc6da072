// Dataset maps a packed dataset directory (tokens.npy uint32, documents.npy int64, optional loss_mask.npy
// uint8, dataset.json) and cuts it into sequences (engine rules, section 14). Read-only after Open;
// thread-safe.

#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/base/status.h"

namespace oom {

// One sequence of `sequence_length` tokens.
struct Sequence {
  std::vector<int32_t> tokens;            // [L]
  std::vector<int32_t> targets;           // [L]; -1: ignored (mask 0, or another document's token)
  std::vector<int32_t> positions;         // [L]; restart at 0 with each document and with the sequence
  std::vector<int32_t> document_starts;   // First positions in the sequence, the first is 0.
};

class Dataset {
 public:
  struct Options {
    std::string directory;
    int64_t sequence_length = 0;
    int64_t vocabulary_size = 0;  // Of the model; a token id beyond it is an error that names its place.
  };

  // Fails with kNotFound (a file is missing) or kInvalidArgument: wrong type or shape, offsets that are not
  // increasing from 0 to the token count, a mask of the wrong length, an empty dataset, token ids beyond
  // the vocabulary, fewer tokens than one sequence and its last target, counts that differ from dataset.json.
  static Result<std::unique_ptr<Dataset>> Open(const Options& options);
  ~Dataset();

  // floor((n - 1) / L).
  int64_t sequence_count() const;
  int64_t token_count() const;
  // REQUIRES: 0 <= index < sequence_count().
  Sequence Read(int64_t index) const;
  // Valid targets of a sequence, without building it.
  int64_t ValidTargets(int64_t index) const;

 private:
  struct Impl;
  explicit Dataset(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

// Which sequences step s (from 0) takes: the positions s*B to (s+1)*B - 1 of the endless stream of epochs,
// each epoch a permutation (counter-based by seed and epoch: random access, no state) or the identity.
class SequenceOrder {
 public:
  SequenceOrder(int64_t sequence_count, int64_t global_batch, bool shuffle, uint64_t seed);
  // Sequence index of slot `slot` in [0, global_batch) of step `step`.
  int64_t At(int64_t step, int64_t slot) const;
  // Epoch that the step's first sequence belongs to.
  int64_t Epoch(int64_t step) const;

 private:
  int64_t sequence_count_;
  int64_t global_batch_;
  bool shuffle_;
  uint64_t seed_;
};

}  // namespace oom
