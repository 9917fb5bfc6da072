// Speed of attention of wide heads, as Gemma 4's global layers have it: 16 query heads of 512
// elements on 2 key/value heads. One line a case and direction: the median of the runs, and over it
// the arithmetic of the scores that exist (2 products of 2 * d FLOPs forward, 5 backward).

#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "runtime/ops/cuda/cuda_tensors.h"
#include "runtime/ops/cuda/wide_head_attention.h"
#include "tests/gpu/bench_timing.h"
#include "tests/gpu/cuda_check.h"

namespace oom {
namespace {

constexpr int64_t kQueryHeads = 16, kKvHeads = 2, kHeadSize = 512;

void Report(const std::string& name, double flops, const std::function<void()>& run) {
  const double seconds =
      testing::MedianSeconds({.stream = OperatorStream(), .warm_ups = 1, .runs = 5}, run);
  std::printf("%-44s %9.3f ms  %6.1f TFLOP/s\n", name.c_str(), seconds * 1e3,
              flops / seconds * 1e-12);
  std::fflush(stdout);
}

void Bench(const std::string& name, const std::vector<int64_t>& lengths,
           const WideHeadAttentionOptions& options) {
  std::vector<int64_t> cu_seqlens = {0};
  double scores = 0.0;
  for (const int64_t length : lengths) {
    cu_seqlens.push_back(cu_seqlens.back() + length);
    scores += 0.5 * static_cast<double>(length) * static_cast<double>(length);
  }
  const double product = scores * kQueryHeads * 2 * kHeadSize;
  PackedBatch batch = MakePackedBatch(cu_seqlens);
  batch.positions = batch.positions.to(at::kCUDA);
  const auto values = [&](int64_t heads) {
    return at::randn({cu_seqlens.back(), heads, kHeadSize},
                     at::device(at::kCUDA).dtype(at::kBFloat16));
  };
  const at::Tensor query = values(kQueryHeads), key = values(kKvHeads), value = values(kKvHeads),
                   doutput = values(kQueryHeads);
  AttentionOutput forward;
  Report(name + ", forward", 2 * product, [&] {
    forward = {};
    forward = WideHeadAttentionForward(query, key, value, batch, options);
  });
  Report(name + ", backward", 5 * product, [&] {
    WideHeadAttentionBackward(doutput, query, key, value, forward, batch, options);
  });
}

}  // namespace
}  // namespace oom

int main() {
  if (!oom::testing::HasGpu()) return 77;
  // As the worker has it.
  at::globalContext().setAllowBF16ReductionCuBLAS(false, /*allow_splitk=*/true);
  at::manual_seed(20261201);
  const std::vector<int64_t> one = {32768}, eight(8, 4096);
  for (const bool portable : {false, true}) {
    const std::string how = portable ? ", portable" : "";
    oom::Bench("1 document of 32768" + how, one, {.portable = portable});
    oom::Bench("8 documents of 4096" + how, eight, {.portable = portable});
  }
  return 0;
}
