// The whole model as the engine runs it: embedding, the worker's layer programs over views of its units,
// head and loss, and back; activations kept or replayed, whole or in parts.

#pragma once

#include <vector>

#include "tests/parity/golden_case.h"

namespace oom::testing {

struct RunOptions {
  at::ScalarType type = at::kFloat;
  bool replay = false;
  int64_t head_groups = 1;
  int64_t sub_batch_tokens = 0;      // 0: whole.
  int64_t segment_tokens = 0;        // 0: whole.
  int64_t mixture_chunk_tokens = 0;  // 0: whole.
  int64_t head_chunk_tokens = 1024;
};

struct RunResult {
  at::Tensor logits_TV;
  double loss = 0.0;            // Mean over valid targets, without the auxiliary loss.
  double auxiliary_loss = 0.0;  // Without its coefficient.
  TensorsByName gradients;      // FP32, by canonical name.
  std::vector<at::Tensor> chosen_experts;
};

RunResult RunModel(const GoldenCase& golden, const RunOptions& options);

}  // namespace oom::testing
