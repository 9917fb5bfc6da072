#include "runtime/checkpoint/manifest.h"

#include <gtest/gtest.h>

#include <random>

#include "runtime/checkpoint/crc32c.h"
#include "tests/checkpoint/checkpoint_testing.h"

namespace oom {
namespace {

Manifest Example() {
  Manifest manifest = testing::ManifestOf(testing::TinyModel(), 12, "uid-\"quoted\"\n");
  manifest.precision = Precision::kFloat32;
  manifest.seed = ~uint64_t{0};
  manifest.data_cursor = int64_t{1} << 60;
  manifest.model.norm.epsilon = 1.0000000000000002e-6;
  manifest.files = {{"unit-0000.safetensors", 5, {0xDEADBEEF}},
                    {"unit-0001.safetensors", kPieceBytes + 1, {0, 0xFFFFFFFF}}};
  return manifest;
}

// The text with a checksum that fits.
std::string Resealed(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  text.replace(at, from.size(), to);
  const size_t tail = text.rfind(",\n \"checksum\"");
  const std::string_view body = std::string_view(text).substr(0, tail);
  char hex[9];
  std::snprintf(hex, sizeof(hex), "%08x",
                Crc32c(std::as_bytes(std::span(body.data(), body.size()))));
  return text.replace(text.size() - 11, 8, hex);
}

TEST(ManifestTest, ReadsBackWhatItWrote) {
  const Manifest manifest = Example();
  const auto parsed = ParseManifest(FormatManifest(manifest), "m");
  ASSERT_TRUE(parsed.ok()) << parsed.status().ToString();
  EXPECT_EQ(parsed->step, 12);
  EXPECT_EQ(parsed->job_uid, manifest.job_uid);
  EXPECT_EQ(parsed->precision, Precision::kFloat32);
  EXPECT_EQ(parsed->seed, manifest.seed);
  EXPECT_EQ(parsed->data_cursor, manifest.data_cursor);
  EXPECT_EQ(ModelDifference(parsed->model, manifest.model), "");
  ASSERT_EQ(parsed->files.size(), 2u);
  EXPECT_EQ(parsed->files[1].piece_crcs, manifest.files[1].piece_crcs);
  EXPECT_EQ(FormatManifest(*parsed), FormatManifest(manifest));
}

// Goal: a scaled rotary embedding is part of the model, and manifests without one stay as they
// were.
TEST(ManifestTest, YarnIsReadBackAndComparedAndOnlyThereIfItIsUsed) {
  Manifest manifest = Example();
  EXPECT_EQ(FormatManifest(manifest).find("yarn"), std::string::npos);
  const ModelDescription plain = manifest.model;
  YarnScaling yarn = MakeYarn(4.0, 32768);
  yarn.truncate = false;
  manifest.model.set_yarn(yarn);
  const auto parsed = ParseManifest(FormatManifest(manifest), "m");
  ASSERT_TRUE(parsed.ok()) << parsed.status().ToString();
  EXPECT_EQ(parsed->model, manifest.model);
  EXPECT_EQ(ModelDifference(parsed->model, manifest.model), "");
  EXPECT_TRUE(ModelDifference(plain, manifest.model).starts_with("yarn null against {"));
  EXPECT_TRUE(ModelDifference(manifest.model, plain).ends_with(" against null"));
  const std::string text = FormatManifest(manifest);
  for (const auto& [from, to] :
       {std::pair("\"original_positions\":32768", "\"original_positions\":0"),
        std::pair("\"truncate\":false", "\"truncate\":0"),
        std::pair("\"beta_slow\"", "\"beta_slaw\"")}) {
    EXPECT_FALSE(ParseManifest(Resealed(text, from, to), "m").ok()) << from;
  }
}

TEST(ManifestTest, EveryFlippedBitIsSeen) {
  const std::string text = FormatManifest(Example());
  for (size_t byte = 0; byte < text.size(); ++byte) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string damaged = text;
      damaged[byte] = static_cast<char>(damaged[byte] ^ (1 << bit));
      const auto parsed = ParseManifest(damaged, "m");
      ASSERT_FALSE(parsed.ok()) << "byte " << byte << " bit " << bit;
      EXPECT_EQ(parsed.status().code(), Code::kDataLoss);
    }
  }
}

TEST(ManifestTest, EveryTruncationIsSeen) {
  const std::string text = FormatManifest(Example());
  for (size_t length = 0; length < text.size(); ++length) {
    EXPECT_FALSE(ParseManifest(text.substr(0, length), "m").ok()) << length;
  }
}

// Goal: with a checksum that fits, what does not make sense is still refused, and the message names
// it.
TEST(ManifestTest, NamesTheFieldThatIsWrong) {
  const std::string text = FormatManifest(Example());
  const struct {
    std::string from, to, expected;
  } cases[] = {
      {"\"step\": 12", "\"step\": -1", "step"},
      {"\"step\": 12", "\"step\": 1.5", "step"},
      {"\"step\": 12", "\"step\": 99999999999999999999", "step"},
      {"\"version\": 1", "\"version\": 2", "version 2"},
      {"oom-checkpoint", "other", "format"},
      {"\"seed\": 18446744073709551615", "\"seed\": \"x\"", "seed"},
      {"\"seed\": 18446744073709551615", "\"sead\": 1", "seed"},
      {"\"seed\"", "\"extra\": 1,\n \"seed\"", "extra"},
      {"\"seed\"", "\"step\": 12,\n \"seed\"", "twice"},
      {"\"precision\": \"float32\"", "\"precision\": \"float16\"", "float16"},
      {"unit-0000.safetensors", "../../etc/passwd", "plain file name"},
      {"unit-0000.safetensors", ".hidden", "plain file name"},
      {"unit-0000.safetensors", "manifest.json", "plain file name"},
      {"unit-0000.safetensors", "unit-0001.safetensors", "twice"},
      {"\"bytes\": 5", "\"bytes\": 0", "bytes"},
      {"\"bytes\": 5", "\"bytes\": 8388609", "pieces"},
      {"deadbeef", "DEADBEEF", "hexadecimal"},
      {"\"piece_bytes\": 8388608", "\"piece_bytes\": 1", "pieces"},
      {"\"hidden_size\":24", "\"hidden_size\":0", "hidden_size"},
      {"\"layer_count\":2", "\"layer_count\":3", "mixtures"},
      {"\"routed\"", "\"other\"", "mixture"},
      {"\"family\":\"qwen3_moe\"", "\"family\":\"gpt\"", "gpt"},
      {"\"tied_embedding\":false", "\"tied_embedding\":0", "tied_embedding"},
  };
  for (const auto& test : cases) {
    const auto parsed = ParseManifest(Resealed(text, test.from, test.to), "dir/manifest.json");
    ASSERT_FALSE(parsed.ok()) << test.to;
    EXPECT_NE(parsed.status().message().find(test.expected), std::string::npos)
        << parsed.status().message();
    EXPECT_NE(parsed.status().message().find("dir/manifest.json"), std::string::npos);
  }
}

// The resealing itself makes a good manifest when nothing is changed.
TEST(ManifestTest, ResealedTextWithoutAFaultIsAccepted) {
  EXPECT_TRUE(
      ParseManifest(Resealed(FormatManifest(Example()), "\"step\": 12", "\"step\": 13"), "m").ok());
}

TEST(ManifestTest, NamesTheFirstDifferenceOfTwoModels) {
  const ModelDescription a = testing::TinyModel();
  ModelDescription b = a;
  b.expert_width = 21;
  EXPECT_EQ(ModelDifference(a, a), "");
  EXPECT_EQ(ModelDifference(a, b), "expert_width 20 against 21");
}

}  // namespace
}  // namespace oom
