// BatchReader cuts a rank's micro-batches out of a dataset as tensors: rank r of P takes sequences
// [r*B/P, (r+1)*B/P) of the step's global batch, its micro-batches in order. Every rank counts the valid
// targets of the whole global batch itself (engine rules, section 3). Thread-safe.

#pragma once

#include <cstdint>
#include <vector>

#include "runtime/data/dataset.h"
#include "runtime/ops/aten.h"
#include "runtime/ops/layer.h"

namespace oom {

struct Batch {
  at::Tensor tokens;             // [T] int32
  at::Tensor targets;            // [T] int64, -1: ignored
  PackedBatch packed;
  int64_t valid_targets = 0;     // Of the global batch (training) or of these sequences (evaluation).
};

// The sequences one after another; documents and sequences both end attention.
Batch MakeBatch(const Dataset& dataset, const std::vector<int64_t>& sequences);

class BatchReader {
 public:
  struct Options {
    const Dataset* dataset = nullptr;  // Must outlive the object.
    int64_t global_batch = 0;
    int rank = 0;
    int rank_count = 1;
    int accumulation = 1;
    bool shuffle = true;
    uint64_t seed = 1;
  };
  explicit BatchReader(const Options& options);

  Batch Read(int64_t step, int micro_batch) const;

 private:
  const Options options_;
  const SequenceOrder order_;
};

}  // namespace oom
