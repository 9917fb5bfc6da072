// Import and export of Hugging Face directories: bit-equal at learning rate 0, every file carried
// along, and every bad input refused by name.

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "runtime/base/file.h"
#include "runtime/model/hf_config.h"
#include "runtime/model/hf_export.h"
#include "runtime/model/hf_source.h"
#include "tests/model/model_testing.h"

namespace oom {
namespace {

namespace fs = std::filesystem;
using testing::FindTensor;
using testing::IsError;
using testing::Multimodal;
using testing::RandomTensors;
using testing::RawTensor;
using testing::ReadText;
using testing::ReadTree;
using testing::SameBits;
using testing::TempDirectory;
using testing::TinyGemmaConfig;
using testing::TinyMixtralConfig;
using testing::TinyQwen35Config;
using testing::TinyQwenConfig;
using testing::WithKey;
using testing::WriteCheckpoint;
using testing::WriteText;

ModelDescription Parse(const std::string& config) {
  return std::move(ParseHfConfig(config, "config.json")).value();
}

Result<std::unique_ptr<HfSource>> OpenSource(const std::string& directory) {
  OOM_ASSIGN_OR_RETURN(const ModelDescription model, ReadHfConfig(directory));
  return HfSource::Open(directory, model, BuildUnits(model, 2));
}

Status CopyModel(const std::string& from, const std::string& to,
                 std::optional<TensorType> type = std::nullopt) {
  OOM_ASSIGN_OR_RETURN(const ModelDescription model, ReadHfConfig(from));
  const auto units = BuildUnits(model, 2);
  OOM_ASSIGN_OR_RETURN(const auto source, HfSource::Open(from, model, units));
  return ExportHuggingFace(*source, model, units,
                           {.output_directory = to, .template_directory = from, .type = type});
}

// Arbitrary bits, so -0.0, infinities, denormals and NaNs are among them; whole files are compared.
TEST(HfRoundTrip, ImportThenExportKeepsEveryByteOfEveryFile) {
  for (const std::string& config : {TinyQwenConfig(), TinyMixtralConfig(),
                                    WithKey(TinyQwenConfig(), "tie_word_embeddings", "true")}) {
    for (const TensorType type : {TensorType::kBF16, TensorType::kF32, TensorType::kF16}) {
      for (const int shard_count : {1, 3}) {
        TempDirectory directory;
        const std::string from = directory / "in";
        std::vector<RawTensor> tensors = RandomTensors(Parse(config), type, 17);
        tensors.push_back(
            {"model.layers.0.self_attn.rotary_emb.inv_freq", TensorType::kF32, {2}, "abcdefgh"});
        WriteCheckpoint(from, config, tensors, shard_count);
        ASSERT_TRUE(CopyModel(from, directory / "out").ok());
        EXPECT_EQ(ReadTree(from), ReadTree(directory / "out")) << TensorTypeName(type);
        // And once more over the first export, leaving nothing beside it.
        ASSERT_TRUE(CopyModel(from, directory / "out").ok());
        EXPECT_EQ(ReadTree(from), ReadTree(directory / "out"));
        EXPECT_EQ(std::distance(fs::directory_iterator(directory.path()), fs::directory_iterator()),
                  2);
      }
    }
  }
}

// Goal: Gemma 4 as it is published (the text model's tensors under a prefix, packed experts, no
// head) and as its text-only class saves it. What belongs to the image tower is carried along.
TEST(HfRoundTrip, GemmaKeepsEveryByteInBothOfItsLayouts) {
  const NameLayout nested = {.prefix = "model.language_model.", .packed_experts = true};
  const ModelDescription model = Parse(TinyGemmaConfig());
  for (const bool multimodal : {true, false}) {
    for (const int shard_count : {1, 3}) {
      TempDirectory directory;
      const std::string from = directory / "in";
      std::vector<RawTensor> tensors = RandomTensors(
          model, TensorType::kBF16, 23, multimodal ? nested : DefaultLayout(Family::kGemma4));
      const std::string prefix = multimodal ? nested.prefix : "model.";
      ASSERT_NE(FindTensor(tensors, prefix + "layers.0.experts.gate_up_proj"), nullptr);
      EXPECT_NE(FindTensor(tensors, prefix + "layers.5.layer_scalar"), nullptr);
      EXPECT_NE(FindTensor(tensors, prefix + "layers.0.self_attn.v_proj.weight"), nullptr);
      EXPECT_EQ(FindTensor(tensors, prefix + "layers.5.self_attn.v_proj.weight"), nullptr);
      EXPECT_EQ(FindTensor(tensors, "lm_head.weight"), nullptr);
      if (multimodal) {
        tensors.push_back({"model.vision_tower.encoder.layers.0.self_attn.q_norm.weight",
                           TensorType::kBF16,
                           {2},
                           "abcd"});
        tensors.push_back({"model.vision_tower.std_bias", TensorType::kF32, {1}, "efgh"});
        tensors.push_back({"model.embed_vision.embedding_projection.weight",
                           TensorType::kBF16,
                           {24, 1},
                           std::string(48, 'v')});
      }
      const std::string config = multimodal ? Multimodal(TinyGemmaConfig()) : TinyGemmaConfig();
      WriteCheckpoint(from, config, tensors, shard_count);
      const Status copied = CopyModel(from, directory / "out");
      ASSERT_TRUE(copied.ok()) << copied.ToString();
      EXPECT_EQ(ReadTree(from), ReadTree(directory / "out")) << multimodal << shard_count;
    }
  }
}

// Goal: Qwen3.5 in the published layout, as its text-only class saves it, and with experts one by
// one under both prefixes.
TEST(HfRoundTrip, Qwen35KeepsEveryByteInEachOfItsLayouts) {
  const ModelDescription model = Parse(TinyQwen35Config());
  for (const std::string prefix : {"model.", "model.language_model."}) {
    for (const bool packed : {true, false}) {
      TempDirectory directory;
      const std::string from = directory / "in";
      std::vector<RawTensor> tensors =
          RandomTensors(model, TensorType::kBF16, 29, {.prefix = prefix, .packed_experts = packed});
      EXPECT_NE(FindTensor(tensors, prefix + "layers.0.linear_attn.A_log"), nullptr);
      EXPECT_NE(FindTensor(tensors, prefix + "layers.3.self_attn.q_proj.weight"), nullptr);
      EXPECT_EQ(FindTensor(tensors, prefix + "layers.3.mlp.experts.gate_up_proj") != nullptr,
                packed);
      tensors.push_back({"model.visual.patch_embed.proj.bias", TensorType::kF32, {1}, "abcd"});
      tensors.push_back({"mtp.fc.weight", TensorType::kBF16, {2, 1}, "efgh"});
      WriteCheckpoint(from, TinyQwen35Config(), tensors, 2);
      const Status copied = CopyModel(from, directory / "out");
      ASSERT_TRUE(copied.ok()) << copied.ToString();
      EXPECT_EQ(ReadTree(from), ReadTree(directory / "out")) << prefix << packed;
    }
  }
}

// Goal: one message says how many tensors do not fit, and names the first ten.
TEST(HfSource, ListsTheFirstTensorsThatDoNotFitAndTheirNumber) {
  TempDirectory directory;
  std::vector<RawTensor> tensors = RandomTensors(Parse(TinyQwen35Config()), TensorType::kBF16, 29);
  std::erase_if(tensors, [](const RawTensor& tensor) {
    return tensor.name.find("linear_attn") != std::string::npos;
  });
  tensors.push_back({"model.layers.0.extra.weight", TensorType::kBF16, {1}, "ab"});
  WriteCheckpoint(directory / "in", TinyQwen35Config(), tensors, 1);
  const auto source = OpenSource(directory / "in");
  // Nine of each of three layers, and one that is too much.
  EXPECT_TRUE(IsError(source, Code::kInvalidArgument,
                      {"28 tensors", "model.layers.0.linear_attn.in_proj_qkv.weight", "is missing",
                       "and 18 more"}));
}

TEST(HfSource, RefusesGemmaTensorsOfNoKnownTower) {
  TempDirectory directory;
  std::vector<RawTensor> tensors = RandomTensors(Parse(TinyGemmaConfig()), TensorType::kBF16, 23);
  tensors.push_back({"model.embed_tokens_per_layer.weight", TensorType::kBF16, {1}, "ab"});
  WriteCheckpoint(directory / "in", TinyGemmaConfig(), tensors, 1);
  EXPECT_TRUE(IsError(OpenSource(directory / "in"), Code::kInvalidArgument,
                      {"embed_tokens_per_layer", "not part of the architecture"}));
}

TEST(HfRoundTrip, TensorsOfDifferentTypesEachKeepTheirs) {
  TempDirectory directory;
  std::vector<RawTensor> tensors = RandomTensors(Parse(TinyQwenConfig()), TensorType::kBF16, 5);
  RawTensor* norm = FindTensor(tensors, "model.norm.weight");
  norm->type = TensorType::kF32;
  norm->bytes = std::string(24 * 4, 'q');
  WriteCheckpoint(directory / "in", TinyQwenConfig(), tensors, 2);
  ASSERT_TRUE(CopyModel(directory / "in", directory / "out").ok());
  EXPECT_EQ(ReadTree(directory / "in"), ReadTree(directory / "out"));
}

TEST(HfRoundTrip, AnotherTypeIsWrittenToTheConfigurationAndBackAgain) {
  TempDirectory directory;
  const std::vector<RawTensor> tensors =
      RandomTensors(Parse(TinyQwenConfig()), TensorType::kBF16, 5);
  WriteCheckpoint(directory / "in", TinyQwenConfig(), tensors, 2);
  ASSERT_TRUE(CopyModel(directory / "in", directory / "wide", TensorType::kF32).ok());
  EXPECT_NE(ReadText(directory / "wide/config.json").find("\"torch_dtype\": \"float32\""),
            std::string::npos);
  auto wide = SafetensorsDirectory::Open(directory / "wide");
  ASSERT_TRUE(wide.ok()) << wide.status().ToString();
  EXPECT_EQ((*wide)->Find("lm_head.weight").info->type, TensorType::kF32);
  ASSERT_TRUE(CopyModel(directory / "wide", directory / "back", TensorType::kBF16).ok());
  auto back = SafetensorsDirectory::Open(directory / "back");
  ASSERT_TRUE(back.ok());
  for (const RawTensor& tensor : tensors) {
    const auto location = (*back)->Find(tensor.name);
    ASSERT_NE(location.file, nullptr);
    const auto bytes = location.file->bytes(*location.info);
    EXPECT_EQ(std::memcmp(bytes.data(), tensor.bytes.data(), tensor.bytes.size()), 0)
        << tensor.name;
  }
}

TEST(HfExport, OtherWeightFormatsAndHiddenFoldersStayBehind) {
  TempDirectory directory;
  const std::string from = directory / "in";
  WriteCheckpoint(from, TinyQwenConfig(),
                  RandomTensors(Parse(TinyQwenConfig()), TensorType::kBF16, 5), 1);
  const auto wanted = ReadTree(from);
  for (const char* name : {"pytorch_model.bin", "pytorch_model.bin.index.json",
                           "consolidated.00.pth", "consolidated.safetensors", "model.gguf",
                           "stale.safetensors", ".git/HEAD", "original/weights.pt"}) {
    WriteText(from + "/" + name, "x");
  }
  ASSERT_TRUE(CopyModel(from, directory / "out").ok());
  EXPECT_EQ(ReadTree(directory / "out"), wanted);
}

TEST(HfExport, LinkedFilesOfAHubCacheAreCopied) {
  TempDirectory directory;
  WriteCheckpoint(directory / "blobs", TinyQwenConfig(),
                  RandomTensors(Parse(TinyQwenConfig()), TensorType::kBF16, 5), 1);
  fs::create_directories(directory / "snapshot");
  for (const auto& [name, content] : ReadTree(directory / "blobs")) {
    fs::create_directories(fs::path(directory / "snapshot") / fs::path(name).parent_path());
    fs::create_symlink(directory / "blobs/" + name, directory / "snapshot/" + name);
  }
  ASSERT_TRUE(CopyModel(directory / "snapshot", directory / "out").ok());
  EXPECT_EQ(ReadTree(directory / "out"), ReadTree(directory / "blobs"));
  EXPECT_FALSE(fs::is_symlink(directory / "out/config.json"));
}

TEST(HfExport, ABareConfigurationIsCompletedAndSharded) {
  TempDirectory directory;
  const std::string config =
      WithKey(WithKey(TinyQwenConfig(), "architectures", ""), "torch_dtype", "");
  const ModelDescription model = Parse(config);
  const auto units = BuildUnits(model, 1);
  const auto source = MakeRandomSource(model, units, 1);
  ASSERT_TRUE(ExportHuggingFace(*source, model, units,
                                {.output_directory = directory / "out",
                                 .config_json = config,
                                 .type = TensorType::kF32,
                                 .shard_bytes = 20'000})
                  .ok());
  const std::string written = ReadText(directory / "out/config.json");
  EXPECT_NE(written.find("Qwen3MoeForCausalLM"), std::string::npos);
  EXPECT_NE(written.find("\"dtype\": \"float32\""), std::string::npos);
  auto files = SafetensorsDirectory::Open(directory / "out");
  ASSERT_TRUE(files.ok()) << files.status().ToString();
  EXPECT_GT((*files)->files().size(), 2u);
  for (const auto& file : (*files)->files()) {
    EXPECT_LE(file->header().data_bytes, 20'000) << file->path();
  }
  // What comes back is what was generated.
  auto again = OpenSource(directory / "out");
  ASSERT_TRUE(again.ok()) << again.status().ToString();
  for (const ParameterUnit& unit : units) {
    for (size_t t = 0; t < unit.tensors.size(); ++t) {
      std::vector<float> a(static_cast<size_t>(unit.tensors[t].elements)), b(a.size());
      const int64_t tensor = static_cast<int64_t>(t);
      ASSERT_TRUE(source->Read(unit.index, tensor, StateArray::kMaster, 0, a).ok());
      ASSERT_TRUE((*again)->Read(unit.index, tensor, StateArray::kMaster, 0, b).ok());
      EXPECT_EQ(a, b) << unit.tensors[t].name;
    }
  }
}

// Goal: a model trained from a bare configuration is usable as it is exported.
TEST(HfExport, TokenizerFilesBesideABareConfigurationAreCarriedAlongAndNothingElse) {
  TempDirectory directory;
  fs::create_directories(directory / "model");
  const std::string config = TinyQwenConfig();
  ASSERT_TRUE(
      WriteFileAtomically(directory / "model/config.json", "the text counts, not this").ok());
  ASSERT_TRUE(WriteFileAtomically(directory / "model/tokenizer.json", "{}").ok());
  ASSERT_TRUE(WriteFileAtomically(directory / "model/notes.txt", "private").ok());
  const ModelDescription model = Parse(config);
  const auto units = BuildUnits(model, 1);
  const auto source = MakeRandomSource(model, units, 1);
  ASSERT_TRUE(ExportHuggingFace(*source, model, units,
                                {.output_directory = directory / "out",
                                 .config_json = config,
                                 .companion_directory = directory / "model"})
                  .ok());
  EXPECT_EQ(ReadText(directory / "out/tokenizer.json"), "{}");
  EXPECT_FALSE(fs::exists(directory / "out/notes.txt"));
  EXPECT_NE(ReadText(directory / "out/config.json").find("hidden_size"), std::string::npos);
}

// A source whose every value says where it comes from.
class LabelledSource : public StateSource {
 public:
  Status Read(int64_t unit, int64_t tensor, StateArray array, int64_t first,
              std::span<float> out) const override {
    for (size_t i = 0; i < out.size(); ++i) {
      out[i] = static_cast<float>(unit * 1'000'000 + tensor * 100'000 + first +
                                  static_cast<int64_t>(i) + static_cast<int>(array));
    }
    return Status::Ok();
  }
  int64_t step() const override { return 7; }
};

TEST(ExportState, WritesThreeFoldersOfFloatTensorsUnderThePublishedNames) {
  TempDirectory directory;
  const ModelDescription model = Parse(TinyMixtralConfig());
  const auto units = BuildUnits(model, 4);
  const LabelledSource source;
  for (int round = 0; round < 2; ++round) {  // The second one replaces the first.
    const Status status = ExportState(
        source, model, units, {.output_directory = directory / "state", .shard_bytes = 30'000});
    ASSERT_TRUE(status.ok()) << status.ToString();
  }
  const std::pair<const char*, StateArray> folders[] = {{"master", StateArray::kMaster},
                                                        {"moment1", StateArray::kMoment1},
                                                        {"moment2", StateArray::kMoment2}};
  for (const auto& [folder, array] : folders) {
    auto files = SafetensorsDirectory::Open(directory / "state/" + folder);
    ASSERT_TRUE(files.ok()) << files.status().ToString();
    EXPECT_GT((*files)->files().size(), 1u);
    size_t count = 0;
    for (const FileTensor& tensor : PublishedTensors(model, units)) {
      const auto location = (*files)->Find(tensor.name);
      ASSERT_NE(location.file, nullptr) << tensor.name;
      EXPECT_EQ(location.info->type, TensorType::kF32);
      EXPECT_EQ(location.info->shape, tensor.shape);
      std::vector<float> values(static_cast<size_t>(tensor.elements)), expected(values.size());
      ASSERT_TRUE(location.file->ReadFloats(*location.info, 0, values).ok());
      ASSERT_TRUE(
          source.Read(tensor.unit, tensor.tensor, array, tensor.offset_elements, expected).ok());
      EXPECT_EQ(values, expected) << tensor.name;
      ++count;
    }
    size_t written = 0;
    for (const auto& file : (*files)->files()) written += file->header().tensors.size();
    EXPECT_EQ(written, count);
  }
}

TEST(HfSource, AnyRangeHasTheValuesOfTheWholeAcrossFileTensors) {
  TempDirectory directory;
  WriteCheckpoint(directory / "in", TinyMixtralConfig(),
                  RandomTensors(Parse(TinyMixtralConfig()), TensorType::kBF16, 5), 3);
  auto source = OpenSource(directory / "in");
  ASSERT_TRUE(source.ok()) << source.status().ToString();
  EXPECT_EQ((*source)->step(), 0);
  const auto units = BuildUnits(Parse(TinyMixtralConfig()), 2);
  const ParameterUnit& experts = units[2];
  ASSERT_EQ(experts.kind, UnitKind::kExperts);
  std::vector<float> whole(static_cast<size_t>(experts.tensors[0].elements));
  ASSERT_TRUE((*source)->Read(2, 0, StateArray::kMaster, 0, whole).ok());
  for (const int64_t first : {0, 1, 479, 480, 481, 2000}) {
    for (const size_t count : {0u, 1u, 480u, 481u, 1500u}) {
      std::vector<float> part(count);
      ASSERT_TRUE((*source)->Read(2, 0, StateArray::kMaster, first, part).ok());
      EXPECT_TRUE(SameBits(part, std::span(whole).subspan(static_cast<size_t>(first), count)))
          << first << " " << count;
    }
  }
  std::vector<float> moment(100, 1.0f);
  ASSERT_TRUE((*source)->Read(2, 0, StateArray::kMoment2, 10, moment).ok());
  EXPECT_EQ(moment, std::vector<float>(100, 0.0f));
}

TEST(HfSource, RefusesWeightsThatDoNotFitTheModel) {
  const std::string name = "model.layers.0.mlp.experts.2.up_proj.weight";
  const std::vector<RawTensor> good = RandomTensors(Parse(TinyQwenConfig()), TensorType::kBF16, 5);
  const auto open_with = [&](const std::function<void(std::vector<RawTensor>&)>& change,
                             const std::string& config = TinyQwenConfig()) {
    TempDirectory directory;
    std::vector<RawTensor> tensors = good;
    change(tensors);
    WriteCheckpoint(directory / "in", config, tensors, 2);
    auto source = OpenSource(directory / "in");
    return source.ok() ? Status::Ok() : source.status();
  };
  EXPECT_TRUE(open_with([](auto&) {}).ok());
  EXPECT_TRUE(IsError(open_with([&](auto& tensors) {
                        FindTensor(tensors, name)->shape = {24, 12};
                      }),
                      Code::kInvalidArgument, {name, "[24, 12]", "[12, 24]", "part-"}));
  EXPECT_TRUE(
      IsError(open_with([&](auto& tensors) { FindTensor(tensors, name)->type = TensorType::kI16; }),
              Code::kInvalidArgument, {name, "I16"}));
  EXPECT_TRUE(
      IsError(open_with([&](auto& tensors) { FindTensor(tensors, name)->name = "x.weight"; }),
              Code::kInvalidArgument, {name, "missing"}));
  EXPECT_TRUE(
      IsError(open_with([&](auto& tensors) {
                tensors.push_back(
                    {"model.layers.0.mlp.shared_expert.weight", TensorType::kBF16, {1}, "ab"});
              }),
              Code::kInvalidArgument, {"shared_expert", "not part of the architecture"}));
  // A tied head may repeat the embedding, and nothing else.
  const std::string tied = WithKey(TinyQwenConfig(), "tie_word_embeddings", "true");
  EXPECT_TRUE(IsError(open_with([](auto&) {}, tied), Code::kInvalidArgument, {"lm_head.weight"}));
  EXPECT_TRUE(open_with(
                  [](auto& tensors) {
                    FindTensor(tensors, "lm_head.weight")->bytes =
                        FindTensor(tensors, "model.embed_tokens.weight")->bytes;
                  },
                  tied)
                  .ok());
}

TEST(HfRoundTrip, ATiedHeadThatRepeatsTheEmbeddingStaysInTheFile) {
  TempDirectory directory;
  std::vector<RawTensor> tensors = RandomTensors(Parse(TinyQwenConfig()), TensorType::kBF16, 5);
  FindTensor(tensors, "lm_head.weight")->bytes =
      FindTensor(tensors, "model.embed_tokens.weight")->bytes;
  WriteCheckpoint(directory / "in", WithKey(TinyQwenConfig(), "tie_word_embeddings", "true"),
                  tensors, 2);
  ASSERT_TRUE(CopyModel(directory / "in", directory / "out").ok());
  EXPECT_EQ(ReadTree(directory / "in"), ReadTree(directory / "out"));
}

}  // namespace
}  // namespace oom
