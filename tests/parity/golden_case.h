// GoldenCase is one folder of model_fixture.py: a tiny model as a Hugging Face directory, a batch,
// and what transformers made of it. Read with the engine's own readers; a missing or malformed file
// aborts the test.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "runtime/model/description.h"
#include "runtime/model/unit.h"
#include "runtime/ops/aten.h"

namespace oom::testing {

using TensorsByName = std::map<std::string, at::Tensor>;

struct GoldenCase {
  std::string name;
  ModelDescription model;
  std::vector<ParameterUnit> units;
  TensorsByName masters;  // FP32, by canonical name.

  at::Tensor token_T;   // int64
  at::Tensor target_T;  // int64, -1: ignored.
  std::vector<int64_t> cu_seqlens;
  double auxiliary_coefficient = 0.0;
  std::vector<at::Tensor> chosen_experts;  // By routed layer: [T, K] int64, each row rising.

  TensorsByName reference;  // FP32: "logits", "gradient.NAME", "bf16.gradient.NAME", ...

  // The tensors whose names start with `prefix`, without it.
  TensorsByName ReferenceWithPrefix(const std::string& prefix) const;
};

GoldenCase ReadGoldenCase(const std::string& name);

// Every tensor of a safetensors file, as FP32.
TensorsByName ReadTensors(const std::string& path);

// Canonical tensors cut into the published ones (one an expert), as views.
TensorsByName Published(const GoldenCase& golden, const TensorsByName& canonical);

}  // namespace oom::testing
