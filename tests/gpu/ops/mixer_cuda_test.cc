// Goal: the GPU's mixer is as near to FP64 as the composite in BF16: forward and both of two
// backwards whose gradients accumulate, for whole sequences and packed documents, with and without
// norms by head, norms of the result and a window, whole and by head group.

#include <gtest/gtest.h>

#include "runtime/ops/cuda/attention_cuda.h"
#include "runtime/ops/gpu_limits.h"
#include "tests/gpu/ops/cuda_ops_testing.h"

namespace oom::testing {
namespace {

struct MixerResult {
  at::Tensor h;
  at::Tensor dx;
  at::Tensor second_dx;
  LayerTensors gradients;
};

MixerResult RunMixer(const ModelDescription& model, const LayerTensors& layer,
                     const std::vector<int64_t>& cu_seqlens, int head_groups,
                     const Setting& setting) {
  const LayerTensors weights = Moved(layer, setting.options);
  PackedBatch batch = MakePackedBatch(cu_seqlens);
  if (setting.gpu()) batch = OnGpu(std::move(batch));
  const at::Tensor x = setting(Random({kTokens, model.hidden_size}, 1, at::kBFloat16));
  MixerResult result;
  result.gradients = ZeroGradients(weights);
  at::Tensor output;  // Of parts' sum, where it is normed.
  const auto backward = [&](const std::vector<MixerSaved>& saved, uint64_t seed) {
    const at::Tensor dh = setting(Random({kTokens, model.hidden_size}, seed, at::kBFloat16));
    const bool whole = saved.size() == 1;
    const at::Tensor doutput =
        whole ? dh : BeginMixerBackward(model, weights, dh, output, &result.gradients);
    at::Tensor sum;
    for (const MixerSaved& part : saved) {
      const at::Tensor dx =
          MixerBackward(model, model.layer(0), weights, doutput, part, batch, &result.gradients);
      sum = sum.defined() ? sum.add_(dx) : dx;
    }
    return whole ? sum : AddResidual(dh, sum);
  };

  std::vector<MixerSaved> saved(static_cast<size_t>(head_groups));
  if (head_groups == 1) {
    result.h = MixerForward(model, model.layer(0), weights, x, batch, &saved[0]);
  } else {
    const int64_t heads = model.layer(0).attention.query_head_count / head_groups;
    at::Tensor sum;
    for (int group = 0; group < head_groups; ++group) {
      const at::Tensor part =
          MixerForward(model, model.layer(0), weights, x, batch, &saved[static_cast<size_t>(group)],
                       {.first = group * heads, .count = heads});
      sum = sum.defined() ? sum.add_(part) : part;
    }
    result.h = FinishMixer(model, weights, x, sum, &output);
  }
  result.dx = backward(saved, 2);
  result.second_dx = backward(saved, 3);
  EXPECT_EQ(result.h.scalar_type(), x.scalar_type());
  EXPECT_EQ(result.dx.scalar_type(), x.scalar_type());
  return result;
}

TEST(MixerCudaTest, IsAsNearToTheTruthAsTheComposite) {
  for (const NamedModel& named : SmallCudaModels()) {
    const LayerTensors layer = RandomLayer(named.model, named.model.layer(0), 10, at::kBFloat16);
    for (const auto& [batch, cu_seqlens] : Batches()) {
      for (const int head_groups : {1, 2}) {
        const auto run = [&, &cu_seqlens = cu_seqlens](const Setting& setting) {
          return RunMixer(named.model, layer, cu_seqlens, head_groups, setting);
        };
        const MixerResult gpu = run(Gpu()), composite = run(Composite()), exact = run(Exact());
        Comparison comparison(named.name + ", " + batch + ", head groups " +
                              std::to_string(head_groups));
        comparison.Add("h", gpu.h, composite.h, exact.h);
        comparison.Add("dx", gpu.dx, composite.dx, exact.dx);
        comparison.Add("second dx", gpu.second_dx, composite.second_dx, exact.second_dx);
        for (const auto& [name, field] : LayerFields()) {
          // The mixture's stay zero.
          if (!(exact.gradients.*field).defined() ||
              (exact.gradients.*field).abs().max().item<double>() == 0.0) {
            continue;
          }
          comparison.Add("d" + name, gpu.gradients.*field, composite.gradients.*field,
                         exact.gradients.*field);
        }
      }
    }
  }
}

// Backward takes a few documents at a time; nobody may see that.
TEST(AttentionCudaTest, ManyTokensGiveWhatTheirDocumentsGiveAlone) {
  constexpr int64_t kLength = 4096;
  constexpr int64_t kDocuments = kCudnnBackwardTokens / kLength + 2;
  constexpr int64_t kSize = 64;
  std::vector<int64_t> starts;
  for (int64_t i = 0; i <= kDocuments; ++i) starts.push_back(i * kLength);
  const auto values = [](int64_t heads, uint64_t seed) {
    return Random({kDocuments * kLength, heads, kSize}, seed, at::kBFloat16).to(at::kCUDA);
  };
  const at::Tensor query = values(4, 1), key = values(1, 2), value = values(1, 3),
                   dout = values(4, 4);
  const auto run = [&](int64_t first, int64_t count) {
    const auto part = [&](const at::Tensor& x) {
      return x.narrow(0, first * kLength, count * kLength);
    };
    const PackedBatch batch = OnGpu(MakePackedBatch({starts.begin(), starts.begin() + count + 1}));
    const AttentionOutput forward =
        CudaAttentionForward(part(query), part(key), part(value), batch, {});
    return CudaAttentionBackward(part(dout), part(query), part(key), part(value), forward, batch,
                                 {});
  };
  const AttentionGradients whole = run(0, kDocuments);
  const auto error = [&](const at::Tensor& all, const at::Tensor& alone, int64_t document) {
    const at::Tensor here = all.narrow(0, document * kLength, kLength).to(at::kFloat);
    const at::Tensor difference = here - alone.to(at::kFloat);
    return (difference.norm() / here.norm()).item<double>();
  };
  // Of the first part and of the last.
  for (const int64_t document : {int64_t{0}, int64_t{7}, int64_t{8}, kDocuments - 1}) {
    const AttentionGradients alone = run(document, 1);
    EXPECT_LT(error(whole.query_TNd, alone.query_TNd, document), 2e-3) << document;
    EXPECT_LT(error(whole.key_TGd, alone.key_TGd, document), 2e-3) << document;
    EXPECT_LT(error(whole.value_TGd, alone.value_TGd, document), 2e-3) << document;
  }
}

}  // namespace
}  // namespace oom::testing
