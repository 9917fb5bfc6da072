// What the tests of the GPU's operators share: small models whose sizes the kernels take, and the
// comparison of three results: the GPU's in BF16, the composite's in BF16 and, as the truth, the
// composite's in FP64, both on the CPU.

#pragma once

#include <map>
#include <string>
#include <vector>

#include "tests/ops/ops_testing.h"

namespace oom::testing {

// Qwen3 with both kinds of top-k weights, Mixtral without and with a sliding window, Qwen3.5's
// attention layer with a shared expert, Gemma 4's two kinds of layers.
std::vector<NamedModel> SmallCudaModels();

constexpr int64_t kTokens = 320;

// Documents of two whole sequences; documents of many lengths, one of them empty.
std::vector<std::pair<std::string, std::vector<int64_t>>> Batches();

LayerTensors Moved(const LayerTensors& tensors, at::TensorOptions options);

// With everything that the operators read on the GPU.
PackedBatch OnGpu(PackedBatch batch);

// Where and in which type a case runs.
struct Setting {
  at::TensorOptions options;
  bool gpu() const { return options.device().is_cuda(); }
  at::Tensor operator()(const at::Tensor& x) const { return x.to(options); }
};
Setting Gpu();
Setting Composite();
Setting Exact();

// Qwen3.5 with one Gated DeltaNet layer, of heads that the kernels take.
ModelDescription SmallDeltaModel();

// Rows whose choice of experts no rounding of BF16 can change. Norm weights are `weights`'.
at::Tensor RowsOfClearChoice(const ModelDescription& model, const LayerTensors& weights,
                             int64_t rows, uint64_t seed);

// Repeatable operators only, for the length of the object's life.
class DeterministicMode {
 public:
  DeterministicMode() { Set(true); }
  ~DeterministicMode() { Set(false); }
  DeterministicMode(const DeterministicMode&) = delete;

 private:
  static void Set(bool on) {
    at::globalContext().setDeterministicAlgorithms(on, /*warn_only=*/false);
  }
};

// Relative errors of many results against FP64, collected for one case. When it ends, the GPU's
// root mean square may be no more than 1.5 times the composite's, and no single result's more than
// three times. A result of few elements may be added several times, from other random numbers each:
// two errors of four elements easily differ by that much.
class Comparison {
 public:
  explicit Comparison(std::string name) : name_(std::move(name)) {}
  Comparison(const Comparison&) = delete;
  ~Comparison();

  void Add(const std::string& what, const at::Tensor& gpu, const at::Tensor& composite,
           const at::Tensor& exact);
  void Add(const LayerTensors& gpu, const LayerTensors& composite, const LayerTensors& exact);

 private:
  struct Squares {
    double gpu = 0.0;
    double composite = 0.0;
    int64_t count = 0;
  };

  const std::string name_;
  std::map<std::string, Squares> by_result_;
};

}  // namespace oom::testing
