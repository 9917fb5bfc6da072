// Units, layout and published names against engine rules 1 and 14 and models reference 2, 3, 7.

#include "runtime/model/unit.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

#include "runtime/model/hf_config.h"
#include "tests/model/model_testing.h"

namespace oom {
namespace {

using testing::TinyGemmaConfig;
using testing::TinyMixtralConfig;
using testing::TinyQwenConfig;
using testing::WithKey;

ModelDescription Parse(const std::string& config) {
  auto model = ParseHfConfig(config, "config.json");
  OOM_CHECK_MSG(model.ok(), model.ok() ? "" : model.status().message().c_str());
  return std::move(model).value();
}

ModelDescription Geometry(const std::string& name) {
  auto model = ReadHfConfig(OOM_SOURCE_DIR "/geometries/" + name);
  OOM_CHECK_MSG(model.ok(), model.ok() ? "" : model.status().message().c_str());
  return std::move(model).value();
}

// Of a unit, without padding.
int64_t Parameters(const ParameterUnit& unit) {
  int64_t elements = 0;
  for (const TensorSpec& tensor : unit.tensors) elements += tensor.elements;
  return elements;
}

// Goal: the geometries have the published numbers to the last digit. Method: the table of
// components of the models reference, section 7, by unit.
TEST(Units, PublishedModelsHaveTheirPublishedTensorAndParameterCounts) {
  const struct {
    const char* name;
    int64_t layers, embedding;
    // Of a layer but its experts; `every_other`: of each `interval`-th layer, where there are two kinds.
    int64_t ordinary, experts, head, total;
    size_t tensors;
    int64_t interval = 0;
    int64_t every_other = 0;
  } cases[] = {
      {"mixtral-8x7b", 32, 131'072'000, 41'943'040 + 32'768 + 8'192, 1'409'286'144,
       131'072'000 + 4'096, 46'702'792'704, 995},
      {"qwen3-30b-a3b", 48, 311'164'928, 18'874'624 + 262'144 + 4'096, 603'979'776,
       311'164'928 + 2'048, 30'532'122'624, 18'867},
      {"qwen3.6-35b-a3b", 40, 508'559'360, 842'700'992 - 805'306'368, 805'306'368,
       508'559'360 + 2'048, 34'660'610'688, 693, 4, 836'246'016 - 805'306'368},
      {"qwen3.5-122b-a10b", 48, 762'839'040, 2'514'674'944 - 2'415'919'104, 2'415'919'104,
       762'839'040 + 3'072, 122'111'526'912, 831, 4, 2'504'795'648 - 2'415'919'104},
  };
  for (const auto& expected : cases) {
    SCOPED_TRACE(expected.name);
    const ModelDescription model = Geometry(expected.name);
    const auto units = BuildUnits(model, 1);
    ASSERT_EQ(static_cast<int64_t>(units.size()), 2 + 2 * expected.layers);
    EXPECT_EQ(Parameters(units.front()), expected.embedding);
    for (size_t u = 1; u + 1 < units.size(); u += 2) {
      const bool other = expected.interval > 0 && (units[u].layer + 1) % expected.interval == 0;
      EXPECT_EQ(Parameters(units[u]), other ? expected.every_other : expected.ordinary)
          << units[u].name;
      EXPECT_EQ(Parameters(units[u + 1]), expected.experts) << units[u + 1].name;
    }
    EXPECT_EQ(Parameters(units.back()), expected.head);
    EXPECT_EQ(ParameterCount(units), expected.total);
    EXPECT_EQ(PublishedTensors(model, units).size(), expected.tensors);
  }
}

TEST(Units, GemmaHasItsPublishedTensorAndParameterCounts) {
  const ModelDescription model = Geometry("gemma4-26b-a4b");
  const auto units = BuildUnits(model, 1);
  ASSERT_EQ(units.size(), 2u + 2 * 30);
  EXPECT_EQ(Parameters(units.front()), 738'197'504);
  for (size_t u = 1; u + 1 < units.size(); u += 2) {
    const int64_t mixer = units[u].layer % 6 == 5 ? 49'021'952 : 34'603'520;
    EXPECT_EQ(Parameters(units[u]), mixer + 363'392 + 17'842'176 + 19'713) << units[u].name;
    EXPECT_EQ(Parameters(units[u + 1]), 761'266'176) << units[u + 1].name;
  }
  EXPECT_EQ(Parameters(units.back()), 2'816);
  EXPECT_EQ(ParameterCount(units), 25'233'141'790);
  EXPECT_EQ(PublishedTensors(model, units).size(), 657u);
}

TEST(Units, PaddingCostsUnderHalfAPercentOnPublishedGeometries) {
  for (const char* name : {"mixtral-8x7b", "qwen3-30b-a3b", "qwen3.6-35b-a3b", "qwen3.5-122b-a10b",
                           "gemma4-26b-a4b"}) {
    int64_t padded = 0;
    const auto units = BuildUnits(Geometry(name), 8);
    for (const ParameterUnit& unit : units) padded += unit.elements;
    EXPECT_LT(static_cast<double>(padded), 1.005 * static_cast<double>(ParameterCount(units)));
  }
}

TEST(Units, TensorsStartAtBlocksAndUnitsDivideByRanks) {
  for (const std::string& config : {TinyQwenConfig(), TinyMixtralConfig()}) {
    for (const int rank_count : {1, 2, 3, 8}) {
      std::set<std::string> names;
      int64_t index = 0;
      for (const ParameterUnit& unit : BuildUnits(Parse(config), rank_count)) {
        EXPECT_EQ(unit.index, index++);
        EXPECT_EQ(unit.elements % (kBlockElements * rank_count), 0);
        int64_t end = 0;
        for (const TensorSpec& tensor : unit.tensors) {
          EXPECT_EQ(tensor.offset_elements % kBlockElements, 0);
          EXPECT_GE(tensor.offset_elements, end);
          EXPECT_LT(tensor.offset_elements, end + kBlockElements);
          end = tensor.offset_elements + tensor.elements;
          EXPECT_TRUE(names.insert(tensor.name).second) << tensor.name;
        }
        EXPECT_GE(unit.elements, end);
        EXPECT_LT(unit.elements, end + kBlockElements * rank_count);
      }
    }
  }
}

TEST(Units, LayoutOfTensorsDoesNotDependOnTheNumberOfRanks) {
  const auto one = BuildUnits(Parse(TinyQwenConfig()), 1);
  const auto eight = BuildUnits(Parse(TinyQwenConfig()), 8);
  ASSERT_EQ(one.size(), eight.size());
  for (size_t u = 0; u < one.size(); ++u) {
    ASSERT_EQ(one[u].tensors.size(), eight[u].tensors.size());
    for (size_t t = 0; t < one[u].tensors.size(); ++t) {
      EXPECT_EQ(one[u].tensors[t].offset_elements, eight[u].tensors[t].offset_elements);
    }
  }
}

TEST(Units, ComeInTheOrderOfFirstUseAndDenseLayersHaveNoExperts) {
  std::string order;
  for (const ParameterUnit& unit : BuildUnits(Parse(TinyQwenConfig()), 1)) order += unit.name + " ";
  EXPECT_EQ(order, "embedding layers.0 layers.0.experts layers.1 layers.2 layers.2.experts head ");
}

TEST(Units, ExactlyTheNormsAreNotDecayed) {
  for (const std::string& config : {TinyQwenConfig(), TinyMixtralConfig()}) {
    for (const ParameterUnit& unit : BuildUnits(Parse(config), 1)) {
      for (const TensorSpec& tensor : unit.tensors) {
        EXPECT_EQ(tensor.decayed, tensor.name.find("norm") == std::string::npos) << tensor.name;
      }
    }
  }
}

TEST(Units, GemmasRouterScalesAndLayerScaleAreNotDecayedEither) {
  for (const ParameterUnit& unit : BuildUnits(Parse(TinyGemmaConfig()), 1)) {
    for (const TensorSpec& tensor : unit.tensors) {
      const bool decays =
          tensor.name.find("norm") == std::string::npos && !tensor.name.ends_with("_scale");
      EXPECT_EQ(tensor.decayed, decays) << tensor.name;
    }
  }
}

TEST(Units, TiedHeadHasOnlyTheFinalNorm) {
  const ModelDescription model = Parse(WithKey(TinyQwenConfig(), "tie_word_embeddings", "true"));
  const auto units = BuildUnits(model, 1);
  EXPECT_FALSE(units.back().has(TensorRole::kHead));
  EXPECT_TRUE(units.back().has(TensorRole::kFinalNorm));
  EXPECT_EQ(units.back().tensor(TensorRole::kFinalNorm).elements, model.hidden_size);
  for (const FileTensor& tensor : PublishedTensors(model, units)) {
    EXPECT_NE(tensor.name, "lm_head.weight");
  }
}

TEST(PublishedTensors, CoverEveryParameterOnceAndInRisingOrder) {
  for (const std::string& config : {TinyQwenConfig(), TinyMixtralConfig(), TinyGemmaConfig()}) {
    const ModelDescription model = Parse(config);
    const auto units = BuildUnits(model, 2);
    std::map<std::pair<int64_t, int64_t>, int64_t> covered;
    std::set<std::string> names;
    for (const FileTensor& tensor : PublishedTensors(model, units)) {
      EXPECT_TRUE(names.insert(tensor.name).second) << tensor.name;
      int64_t& end = covered[{tensor.unit, tensor.tensor}];
      EXPECT_EQ(tensor.offset_elements, end);
      int64_t elements = 1;
      for (const int64_t dimension : tensor.shape) elements *= dimension;
      EXPECT_EQ(tensor.elements, elements);
      end += elements;
    }
    for (const ParameterUnit& unit : units) {
      for (size_t t = 0; t < unit.tensors.size(); ++t) {
        EXPECT_EQ((covered[{unit.index, static_cast<int64_t>(t)}]), unit.tensors[t].elements);
      }
    }
  }
}

// The names and places of an expert's three matrices: gate above up in the canonical tensor.
TEST(PublishedTensors, ExpertMatricesLieWhereTheOperatorsLookForThem) {
  struct Case {
    std::string config, gate, up, down;
    int64_t width;
  };
  const Case cases[] = {
      {TinyQwenConfig(), "model.layers.2.mlp.experts.3.gate_proj.weight",
       "model.layers.2.mlp.experts.3.up_proj.weight",
       "model.layers.2.mlp.experts.3.down_proj.weight", 12},
      {TinyMixtralConfig(), "model.layers.1.block_sparse_moe.experts.3.w1.weight",
       "model.layers.1.block_sparse_moe.experts.3.w3.weight",
       "model.layers.1.block_sparse_moe.experts.3.w2.weight", 20},
  };
  for (const Case& test : cases) {
    const ModelDescription model = Parse(test.config);
    const auto units = BuildUnits(model, 1);
    std::map<std::string, FileTensor> by_name;
    for (FileTensor& tensor : PublishedTensors(model, units)) by_name[tensor.name] = tensor;
    const int64_t matrix = test.width * 24;
    ASSERT_TRUE(by_name.contains(test.gate) && by_name.contains(test.up) &&
                by_name.contains(test.down));
    EXPECT_EQ(by_name[test.gate].offset_elements, 3 * 2 * matrix);
    EXPECT_EQ(by_name[test.up].offset_elements, 3 * 2 * matrix + matrix);
    EXPECT_EQ(by_name[test.down].offset_elements, 3 * matrix);
    EXPECT_EQ(by_name[test.gate].shape, (std::vector<int64_t>{test.width, 24}));
    EXPECT_EQ(by_name[test.down].shape, (std::vector<int64_t>{24, test.width}));
    const ParameterUnit& unit = units[static_cast<size_t>(by_name[test.gate].unit)];
    EXPECT_EQ(unit.kind, UnitKind::kExperts);
    EXPECT_EQ(unit.tensors[static_cast<size_t>(by_name[test.gate].tensor)].role,
              TensorRole::kExpertsGateUp);
  }
}

TEST(PublishedTensors, DenseLayersAndRoutersHaveThePublishedNames) {
  const ModelDescription qwen = Parse(TinyQwenConfig());
  std::map<std::string, std::vector<int64_t>> shapes;
  for (const FileTensor& t : PublishedTensors(qwen, BuildUnits(qwen, 1))) shapes[t.name] = t.shape;
  using Shape = std::vector<int64_t>;
  EXPECT_EQ(shapes["model.layers.1.mlp.gate_proj.weight"], (Shape{20, 24}));
  EXPECT_EQ(shapes["model.layers.1.mlp.up_proj.weight"], (Shape{20, 24}));
  EXPECT_EQ(shapes["model.layers.1.mlp.down_proj.weight"], (Shape{24, 20}));
  EXPECT_EQ(shapes["model.layers.0.mlp.gate.weight"], (Shape{5, 24}));
  EXPECT_EQ(shapes["model.layers.0.self_attn.q_proj.weight"], (Shape{32, 24}));
  EXPECT_EQ(shapes["model.layers.0.self_attn.k_proj.weight"], (Shape{16, 24}));
  EXPECT_EQ(shapes["model.layers.0.self_attn.o_proj.weight"], (Shape{24, 32}));
  EXPECT_EQ(shapes["model.layers.0.self_attn.q_norm.weight"], (Shape{8}));
  EXPECT_FALSE(shapes.contains("model.layers.1.mlp.gate.weight"));
  const ModelDescription mixtral = Parse(TinyMixtralConfig());
  shapes.clear();
  for (const FileTensor& t : PublishedTensors(mixtral, BuildUnits(mixtral, 1))) {
    shapes[t.name] = t.shape;
  }
  EXPECT_EQ(shapes["model.layers.1.block_sparse_moe.gate.weight"], (Shape{5, 24}));
  EXPECT_FALSE(shapes.contains("model.layers.0.self_attn.q_norm.weight"));
}

}  // namespace
}  // namespace oom
