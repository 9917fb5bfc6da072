// Goal: the mixer's backward is the derivative of its forward, states included; a sequence cut into
// segments computes what the uncut one does; documents do not see each other; what replay saves is
// what the forward saved.
// Method: the token recurrence of delta_net_reference.h under autograd in FP64, and the operator
// against itself.

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "tests/ops/delta_net_reference.h"

namespace oom::testing {
namespace {

constexpr int64_t kTaps = 4;

// Documents that end within a chunk, at its end, and after a single token.
const std::vector<int64_t> kDocuments = {0, 10, 64, 65, 201, 330, 441};

struct SizedShape {
  int64_t hidden;
  GatedDeltaNetShape shape;
};

// Two and four value heads a key head; H != NV, K != V.
std::vector<SizedShape> Shapes() {
  return {{22, {.key_heads = 2, .value_heads = 4, .key_size = 6, .value_size = 5}},
          {10, {.key_heads = 1, .value_heads = 4, .key_size = 4, .value_size = 7}}};
}

GatedDeltaNetShape LargeShape() {
  return {.key_heads = 2, .value_heads = 4, .key_size = 32, .value_size = 24};
}
constexpr int64_t kLargeHidden = 80;

at::Tensor Weighted(const GatedDeltaNetOutput& output, const at::Tensor& dy,
                    const GatedDeltaNetState& dstate) {
  return (output.y_TH * dy).sum() + (output.state.convolution_DPC * dstate.convolution_DPC).sum() +
         (output.state.rule_DNKV * dstate.rule_DNKV).sum();
}

TEST(GatedDeltaNetTest, BackwardIsTheDerivativeOfForward) {
  const std::vector<int64_t> documents = {0, 1, 40, 107};
  for (const auto& [hidden, shape] : Shapes()) {
    SCOPED_TRACE(hidden);
    const GatedDeltaNetTensors weights = RandomDeltaNet(shape, hidden, kTaps, 10);
    GatedDeltaNetState state = RandomDeltaNetState(shape, 3, kTaps, 30);
    const GatedDeltaNetState dstate = RandomDeltaNetState(shape, 3, kTaps, 40);
    const at::Tensor x = Random({107, hidden}, 50).requires_grad_();
    const at::Tensor dy = Random({107, hidden}, 51);
    GatedDeltaNetTensors leaves;
    GatedDeltaNetState leaf_state = {
        .convolution_DPC = state.convolution_DPC.clone().requires_grad_(),
        .rule_DNKV = state.rule_DNKV.clone().requires_grad_()};
    std::vector<at::Tensor> listed = {x, leaf_state.convolution_DPC, leaf_state.rule_DNKV};
    for (const auto& [name, field] : DeltaNetFields()) {
      leaves.*field = (weights.*field).clone().requires_grad_();
      listed.push_back(leaves.*field);
    }
    const GatedDeltaNetOutput expected = ReferenceDeltaNet(shape, leaves, x, leaf_state, documents);
    const at::Tensor sum = Weighted(expected, dy, dstate);
    const std::vector<at::Tensor> derivatives = Autograd(sum, at::ones_like(sum), listed);

    GatedDeltaNetSaved saved;
    const GatedDeltaNetOutput actual =
        GatedDeltaNetForward(shape, weights, x.detach(), state, documents, &saved);
    ExpectNear(actual.y_TH, expected.y_TH, 1e-11, "y");
    ExpectNear(actual.state.convolution_DPC, expected.state.convolution_DPC, 1e-12, "context");
    ExpectNear(actual.state.rule_DNKV, expected.state.rule_DNKV, 1e-11, "state");
    GatedDeltaNetTensors gradients = ZeroGradients(weights);
    const GatedDeltaNetGradients result =
        GatedDeltaNetBackward(shape, weights, dy, dstate, saved, documents, &gradients);
    ExpectNear(result.x_TH, derivatives[0], 1e-10, "dx");
    ExpectNear(result.state.convolution_DPC, derivatives[1], 1e-10, "dcontext");
    ExpectNear(result.state.rule_DNKV, derivatives[2], 1e-10, "dstate");
    for (size_t i = 0; i < DeltaNetFields().size(); ++i) {
      const auto& [name, field] = DeltaNetFields()[i];
      ExpectNear(gradients.*field, derivatives[3 + i], 1e-10, name);
    }
  }
}

// Tokens [first, end) of a packed sequence.
struct Segment {
  Segment(const std::vector<int64_t>& cu_seqlens, int64_t first, int64_t end)
      : first(first),
        tokens(end - first),
        continues(!Starts(cu_seqlens, first)),
        continued(!Starts(cu_seqlens, end)) {
    documents = {0};
    for (const int64_t start : cu_seqlens) {
      if (start > first && start < end) documents.push_back(start - first);
    }
    documents.push_back(tokens);
  }

  static bool Starts(const std::vector<int64_t>& cu_seqlens, int64_t token) {
    return std::find(cu_seqlens.begin(), cu_seqlens.end(), token) != cu_seqlens.end();
  }
  int64_t document_count() const { return static_cast<int64_t>(documents.size()) - 1; }

  int64_t first;
  int64_t tokens;
  bool continues;  // A document of the segment before.
  bool continued;  // By the segment after.
  std::vector<int64_t> documents;
};

GatedDeltaNetState OneDocument(const GatedDeltaNetState& state, int64_t document) {
  return {.convolution_DPC = state.convolution_DPC.narrow(0, document, 1),
          .rule_DNKV = state.rule_DNKV.narrow(0, document, 1)};
}

// Zeros but for one document.
GatedDeltaNetState AmongDocuments(const GatedDeltaNetState& one, int64_t document, int64_t count) {
  const auto place = [&](const at::Tensor& row) {
    std::vector<int64_t> sizes = row.sizes().vec();
    sizes[0] = count;
    at::Tensor rows = at::zeros(sizes, row.options());
    rows.narrow(0, document, 1).copy_(row);
    return rows;
  };
  return {.convolution_DPC = place(one.convolution_DPC), .rule_DNKV = place(one.rule_DNKV)};
}

struct SegmentedRun {
  at::Tensor y_TH;
  at::Tensor dx_TH;
  GatedDeltaNetState last;    // After the last document.
  GatedDeltaNetState dfirst;  // Gradient of the state before the first one.
  GatedDeltaNetTensors gradients;
};

// `cuts`: where segments begin, and the end. The first document has a state before it, the last one
// a gradient after it.
SegmentedRun RunSegments(const GatedDeltaNetTensors& weights, const at::Tensor& x_TH,
                         const at::Tensor& dy_TH, const std::vector<int64_t>& cuts) {
  const GatedDeltaNetShape shape = LargeShape();
  std::vector<Segment> segments;
  for (size_t i = 1; i < cuts.size(); ++i) segments.emplace_back(kDocuments, cuts[i - 1], cuts[i]);
  std::vector<GatedDeltaNetSaved> saved(segments.size());
  std::vector<at::Tensor> y, dx(segments.size());
  SegmentedRun run;
  run.last = RandomDeltaNetState(shape, 1, kTaps, 300, at::kFloat);
  for (size_t i = 0; i < segments.size(); ++i) {
    const Segment& segment = segments[i];
    GatedDeltaNetState state;
    if (i == 0 || segment.continues) state = AmongDocuments(run.last, 0, segment.document_count());
    const GatedDeltaNetOutput output =
        GatedDeltaNetForward(shape, weights, x_TH.narrow(0, segment.first, segment.tokens), state,
                             segment.documents, &saved[i]);
    y.push_back(output.y_TH);
    run.last = OneDocument(output.state, segment.document_count() - 1);
  }
  run.y_TH = at::cat(y);
  run.gradients = ZeroGradients(weights);
  run.dfirst = RandomDeltaNetState(shape, 1, kTaps, 310, at::kFloat);
  for (size_t i = segments.size(); i-- > 0;) {
    const Segment& segment = segments[i];
    GatedDeltaNetState dstate;
    if (i + 1 == segments.size() || segment.continued) {
      dstate = AmongDocuments(run.dfirst, segment.document_count() - 1, segment.document_count());
    }
    const GatedDeltaNetGradients result =
        GatedDeltaNetBackward(shape, weights, dy_TH.narrow(0, segment.first, segment.tokens),
                              dstate, saved[i], segment.documents, &run.gradients);
    dx[i] = result.x_TH;
    if (i == 0 || segment.continues) run.dfirst = OneDocument(result.state, 0);
  }
  run.dx_TH = at::cat(dx);
  return run;
}

TEST(GatedDeltaNetTest, SegmentsOfWholeChunksHaveTheBitsOfTheUncutSequence) {
  const int64_t tokens = kDocuments.back();
  const GatedDeltaNetTensors weights =
      RandomDeltaNet(LargeShape(), kLargeHidden, kTaps, 100, at::kFloat);
  const at::Tensor x = Random({tokens, kLargeHidden}, 120, at::kFloat);
  const at::Tensor dy = Random({tokens, kLargeHidden}, 121, at::kFloat);
  const SegmentedRun whole = RunSegments(weights, x, dy, {0, tokens});
  const std::vector<std::vector<int64_t>> partitions = {
      {0, 64, 128, 192, 256, 320, 384, tokens}, {0, 128, tokens}, {0, 320, 384, tokens}};
  for (const std::vector<int64_t>& cuts : partitions) {
    SCOPED_TRACE(cuts[1]);
    const SegmentedRun parts = RunSegments(weights, x, dy, cuts);
    EXPECT_TRUE(BitEqual(parts.y_TH, whole.y_TH)) << RelativeError(parts.y_TH, whole.y_TH);
    EXPECT_TRUE(BitEqual(parts.last.rule_DNKV, whole.last.rule_DNKV));
    EXPECT_TRUE(BitEqual(parts.last.convolution_DPC, whole.last.convolution_DPC));
    ExpectNear(parts.dx_TH, whole.dx_TH, 1e-6, "dx");
    ExpectNear(parts.dfirst.rule_DNKV, whole.dfirst.rule_DNKV, 1e-6, "dstate");
    ExpectNear(parts.dfirst.convolution_DPC, whole.dfirst.convolution_DPC, 1e-6, "dcontext");
    for (const auto& [name, field] : DeltaNetFields()) {
      ExpectNear(parts.gradients.*field, whole.gradients.*field, 1e-6, name);
    }
  }
}

TEST(GatedDeltaNetTest, AnyPartitionIsTheUncutSequenceWithinRounding) {
  const int64_t tokens = kDocuments.back();
  const GatedDeltaNetTensors weights =
      RandomDeltaNet(LargeShape(), kLargeHidden, kTaps, 130, at::kFloat);
  const at::Tensor x = Random({tokens, kLargeHidden}, 131, at::kFloat);
  const at::Tensor dy = Random({tokens, kLargeHidden}, 132, at::kFloat);
  const SegmentedRun whole = RunSegments(weights, x, dy, {0, tokens});
  // Cuts after two tokens, within the context of a convolution, and at a document's end.
  const SegmentedRun parts = RunSegments(weights, x, dy, {0, 2, 3, 66, 201, 377, tokens});
  ExpectNear(parts.y_TH, whole.y_TH, 1e-6, "y");
  ExpectNear(parts.dx_TH, whole.dx_TH, 1e-6, "dx");
  ExpectNear(parts.dfirst.rule_DNKV, whole.dfirst.rule_DNKV, 1e-6, "dstate");
  for (const auto& [name, field] : DeltaNetFields()) {
    ExpectNear(parts.gradients.*field, whole.gradients.*field, 1e-6, name);
  }
}

TEST(GatedDeltaNetTest, PackedDocumentsEqualDocumentsRunAlone) {
  for (const SizedShape& named : Shapes()) {
    const int64_t hidden = named.hidden;
    const GatedDeltaNetShape& shape = named.shape;
    const GatedDeltaNetTensors weights = RandomDeltaNet(shape, hidden, kTaps, 140);
    const at::Tensor x = Random({kDocuments.back(), hidden}, 141);
    const at::Tensor dy = Random({kDocuments.back(), hidden}, 142);
    const auto run = [&](int64_t first, int64_t end, const std::vector<int64_t>& documents,
                         GatedDeltaNetTensors* gradients) {
      GatedDeltaNetSaved saved;
      const at::Tensor y =
          GatedDeltaNetForward(shape, weights, x.slice(0, first, end), {}, documents, &saved).y_TH;
      const at::Tensor dx = GatedDeltaNetBackward(shape, weights, dy.slice(0, first, end), {},
                                                  saved, documents, gradients)
                                .x_TH;
      return std::pair(y, dx);
    };
    GatedDeltaNetTensors packed_gradients = ZeroGradients(weights);
    GatedDeltaNetTensors alone_gradients = ZeroGradients(weights);
    const auto [packed_y, packed_dx] = run(0, kDocuments.back(), kDocuments, &packed_gradients);
    for (size_t i = 1; i < kDocuments.size(); ++i) {
      const int64_t first = kDocuments[i - 1], end = kDocuments[i];
      const auto [y, dx] = run(first, end, {0, end - first}, &alone_gradients);
      ExpectNear(packed_y.slice(0, first, end), y, 1e-12, "y");
      ExpectNear(packed_dx.slice(0, first, end), dx, 1e-11, "dx");
    }
    for (const auto& [name, field] : DeltaNetFields()) {
      ExpectNear(packed_gradients.*field, alone_gradients.*field, 1e-11, name);
    }
  }
}

TEST(GatedDeltaNetTest, BackwardOfAReplayHasTheSameBits) {
  const GatedDeltaNetShape shape = LargeShape();
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    GatedDeltaNetTensors weights = RandomDeltaNet(shape, kLargeHidden, kTaps, 150, type);
    // As files hold them beside BF16 matrices.
    weights.a_log = weights.a_log.to(at::kFloat);
    weights.norm = weights.norm.to(at::kFloat);
    const at::Tensor x = Random({130, kLargeHidden}, 151, type);
    const at::Tensor dy = Random({130, kLargeHidden}, 152, type);
    const GatedDeltaNetState state = RandomDeltaNetState(shape, 2, kTaps, 153, type);
    GatedDeltaNetSaved kept, replayed;
    const std::vector<int64_t> documents = {0, 70, 130};
    const at::Tensor y = GatedDeltaNetForward(shape, weights, x, state, documents, &kept).y_TH;
    EXPECT_EQ(y.scalar_type(), type);
    EXPECT_TRUE(BitEqual(
        y, GatedDeltaNetForward(shape, weights, x.clone(), state, documents, &replayed).y_TH));
    EXPECT_TRUE(
        BitEqual(y, GatedDeltaNetForward(shape, weights, x, state, documents, nullptr).y_TH));
    GatedDeltaNetTensors from_kept = ZeroGradients(weights), from_replay = ZeroGradients(weights);
    const at::Tensor dx =
        GatedDeltaNetBackward(shape, weights, dy, {}, kept, documents, &from_kept).x_TH;
    EXPECT_TRUE(BitEqual(
        dx, GatedDeltaNetBackward(shape, weights, dy, {}, replayed, documents, &from_replay).x_TH));
    for (const auto& [name, field] : DeltaNetFields()) {
      EXPECT_TRUE(BitEqual(from_kept.*field, from_replay.*field)) << name;
    }
  }
}

// BF16 keeps 8 bits: 2^-9 a rounding, a few of them in a row.
TEST(GatedDeltaNetTest, Bf16IsWithinItsRoundingOfFp64) {
  const GatedDeltaNetShape shape = LargeShape();
  const GatedDeltaNetTensors narrow =
      RandomDeltaNet(shape, kLargeHidden, kTaps, 160, at::kBFloat16);
  GatedDeltaNetTensors exact;
  for (const auto& [name, field] : DeltaNetFields()) exact.*field = (narrow.*field).to(at::kDouble);
  const at::Tensor x = Random({200, kLargeHidden}, 161, at::kBFloat16);
  const at::Tensor dy = Random({200, kLargeHidden}, 162, at::kBFloat16);
  const std::vector<int64_t> documents = {0, 90, 200};
  GatedDeltaNetSaved narrow_saved, exact_saved;
  GatedDeltaNetTensors gradients = ZeroGradients(narrow), derivatives = ZeroGradients(exact);
  ExpectNear(
      GatedDeltaNetForward(shape, narrow, x, {}, documents, &narrow_saved).y_TH,
      GatedDeltaNetForward(shape, exact, x.to(at::kDouble), {}, documents, &exact_saved).y_TH, 0.02,
      "y");
  const at::Tensor dx =
      GatedDeltaNetBackward(shape, narrow, dy, {}, narrow_saved, documents, &gradients).x_TH;
  EXPECT_EQ(dx.scalar_type(), at::kFloat);
  ExpectNear(dx,
             GatedDeltaNetBackward(shape, exact, dy.to(at::kDouble), {}, exact_saved, documents,
                                   &derivatives)
                 .x_TH,
             0.03, "dx");
  for (const auto& [name, field] : DeltaNetFields()) {
    ExpectNear(gradients.*field, derivatives.*field, 0.03, name);
  }
}

}  // namespace
}  // namespace oom::testing
