#include "worker/batch_reader.h"

#include <algorithm>
#include <utility>

namespace oom {

Batch MakeBatch(const Dataset& dataset, const std::vector<int64_t>& sequences) {
  std::vector<int32_t> tokens;
  std::vector<int64_t> targets;
  std::vector<int64_t> cu_seqlens;
  Batch batch;
  for (const int64_t index : sequences) {
    const Sequence sequence = dataset.Read(index);
    const auto base = static_cast<int64_t>(tokens.size());
    for (const int32_t start : sequence.document_starts) cu_seqlens.push_back(base + start);
    tokens.insert(tokens.end(), sequence.tokens.begin(), sequence.tokens.end());
    targets.insert(targets.end(), sequence.targets.begin(), sequence.targets.end());
  }
  cu_seqlens.push_back(static_cast<int64_t>(tokens.size()));
  batch.valid_targets = static_cast<int64_t>(
      std::count_if(targets.begin(), targets.end(), [](int64_t target) { return target >= 0; }));
  batch.tokens = at::tensor(tokens, at::kInt);
  batch.targets = at::tensor(targets, at::kLong);
  batch.packed = MakePackedBatch(std::move(cu_seqlens));
  return batch;
}

BatchReader::BatchReader(const Options& options)
    : options_(options),
      order_(options.dataset->sequence_count(), options.global_batch, options.shuffle,
             options.seed) {}

Batch BatchReader::Read(int64_t step, int micro_batch) const {
  const int64_t per_rank = options_.global_batch / options_.rank_count;
  const int64_t per_micro_batch = per_rank / options_.accumulation;
  const int64_t first = options_.rank * per_rank + micro_batch * per_micro_batch;
  std::vector<int64_t> sequences;
  for (int64_t i = 0; i < per_micro_batch; ++i) sequences.push_back(order_.At(step, first + i));
  Batch batch = MakeBatch(*options_.dataset, sequences);
  batch.valid_targets = 0;
  for (int64_t slot = 0; slot < options_.global_batch; ++slot) {
    batch.valid_targets += options_.dataset->ValidTargets(order_.At(step, slot));
  }
  return batch;
}

}  // namespace oom
