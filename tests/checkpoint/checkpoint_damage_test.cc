#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <random>

#include "runtime/base/file.h"
#include "runtime/checkpoint/checkpoint_directory.h"
#include "runtime/checkpoint/checkpoint_source.h"
#include "tests/checkpoint/checkpoint_testing.h"

namespace oom {
namespace {

namespace fs = std::filesystem;

using testing::TemporaryDirectory;
using testing::TinyModel;

// Goal: whatever happens to the newest checkpoint, the one before it is found, and the reason names
// the file.
TEST(CheckpointDamageTest, EveryKindOfDamageFallsBackToTheOneBefore) {
  const struct {
    const char* what;
    const char* named;
    std::function<void(const std::string& newest, const std::string& older)> damage;
  } cases[] = {
      {"bit of a value", "unit-0002",
       [](auto& newest, auto&) { testing::FlipBit(newest + "/unit-0002.safetensors", 4096 + 12); }},
      {"bit of a header", "unit-0000",
       [](auto& newest, auto&) { testing::FlipBit(newest + "/unit-0000.safetensors", 30); }},
      {"last bit", "unit-0001",
       [](auto& newest, auto&) {
         const std::string path = newest + "/unit-0001.safetensors";
         testing::FlipBit(path, static_cast<int64_t>(fs::file_size(path)) - 1);
       }},
      {"truncated", "unit-0003",
       [](auto& newest, auto&) {
         const std::string path = newest + "/unit-0003.safetensors";
         fs::resize_file(path, fs::file_size(path) - 1);
       }},
      {"longer", "unit-0003",
       [](auto& newest, auto&) {
         const std::string path = newest + "/unit-0003.safetensors";
         fs::resize_file(path, fs::file_size(path) + 1);
       }},
      {"empty", "unit-0000",
       [](auto& newest, auto&) { fs::resize_file(newest + "/unit-0000.safetensors", 0); }},
      {"missing file", "unit-0004",
       [](auto& newest, auto&) { fs::remove(newest + "/unit-0004.safetensors"); }},
      {"a file of the older one", "unit-0002",
       [](auto& newest, auto& older) {
         fs::copy_file(older + "/unit-0002.safetensors", newest + "/unit-0002.safetensors",
                       fs::copy_options::overwrite_existing);
       }},
      {"a link instead of a file", "unit-0002",
       [](auto& newest, auto& older) {
         fs::remove(newest + "/unit-0002.safetensors");
         fs::create_symlink(older + "/unit-0002.safetensors", newest + "/unit-0002.safetensors");
       }},
      {"manifest of the older one", "manifest.json",
       [](auto& newest, auto& older) {
         fs::copy_file(older + "/manifest.json", newest + "/manifest.json",
                       fs::copy_options::overwrite_existing);
       }},
      {"bit of the manifest", "manifest.json",
       [](auto& newest, auto&) { testing::FlipBit(newest + "/manifest.json", 100); }},
      {"no manifest", "manifest.json",
       [](auto& newest, auto&) { fs::remove(newest + "/manifest.json"); }},
      {"torn manifest", "manifest.json",
       [](auto& newest, auto&) {
         fs::resize_file(newest + "/manifest.json", fs::file_size(newest + "/manifest.json") / 2);
       }},
      {"a directory with nothing", "manifest.json",
       [](auto& newest, auto&) {
         fs::remove_all(newest);
         fs::create_directory(newest);
       }},
  };
  const ModelDescription model = TinyModel();
  for (const auto& test : cases) {
    SCOPED_TRACE(test.what);
    TemporaryDirectory directory;
    const auto older = testing::WriteCheckpoint(directory.path(), model, 10);
    const auto newest = testing::WriteCheckpoint(directory.path(), model, 20);
    ASSERT_TRUE(older.ok() && newest.ok());
    test.damage(newest->path, older->path);
    const auto found = FindNewestCheckpoint(directory.path());
    ASSERT_TRUE(found.ok()) << found.status().ToString();
    EXPECT_EQ(found->manifest.step, 10);
    ASSERT_EQ(found->skipped.size(), 1u);
    EXPECT_EQ(found->skipped[0].path, newest->path);
    EXPECT_EQ(found->skipped[0].status.code(), Code::kDataLoss);
    EXPECT_NE(found->skipped[0].status.message().find(test.named), std::string::npos)
        << found->skipped[0].status.message();
    const auto units = BuildUnits(model, 1);
    const auto source = CheckpointSource::Open(found->path, units);
    ASSERT_TRUE(source.ok());
    EXPECT_EQ(testing::CompareWithValues(**source, units, 10), "");
  }
}

TEST(CheckpointDamageTest, SwappedShardsAreSeen) {
  TemporaryDirectory directory;
  ModelDescription model = TinyModel();
  model.layers[1].mixture = MixtureKind::kRoutedExperts;
  const auto report = testing::WriteCheckpoint(directory.path(), model, 1);
  ASSERT_TRUE(report.ok());
  // The experts of both layers: files of one size.
  const std::string a = report->path + "/unit-0002.safetensors",
                    b = report->path + "/unit-0004.safetensors";
  ASSERT_EQ(fs::file_size(a), fs::file_size(b));
  fs::rename(a, a + ".x");
  fs::rename(b, a);
  fs::rename(a + ".x", b);
  const Status status = VerifyCheckpoint(report->path);
  EXPECT_EQ(status.code(), Code::kDataLoss) << status.ToString();
}

TEST(CheckpointDamageTest, WithNoneLeftItIsCorruptAndNotAbsent) {
  TemporaryDirectory directory;
  const ModelDescription model = TinyModel();
  for (const int64_t step : {1, 2}) {
    const auto report = testing::WriteCheckpoint(directory.path(), model, step);
    ASSERT_TRUE(report.ok());
    testing::FlipBit(report->path + "/unit-0000.safetensors", 5000);
  }
  const auto found = FindNewestCheckpoint(directory.path());
  ASSERT_FALSE(found.ok());
  EXPECT_EQ(found.status().code(), Code::kDataLoss);
  EXPECT_EQ(found.status().reason(), "CHECKPOINT_CORRUPT");
}

// Goal: a source gives out no byte of a damaged piece, and every byte of the others.
// Method: a file of several pieces, one bit flipped in the third.
TEST(CheckpointDamageTest, OnlyTheDamagedPieceIsRefused) {
  TemporaryDirectory directory;
  const ModelDescription model = TinyModel(256, 12289);
  const auto units = BuildUnits(model, 1);
  const auto report = testing::WriteCheckpoint({.output_directory = directory.path(),
                                                .manifest = testing::ManifestOf(model, 1),
                                                .units = units},
                                               1 << 20);
  ASSERT_TRUE(report.ok());
  testing::FlipBit(report->path + "/unit-0000.safetensors", 2 * kPieceBytes + 77);
  const auto source = CheckpointSource::Open(report->path, units);
  ASSERT_TRUE(source.ok()) << source.status().ToString();
  const int64_t elements = units[0].tensors[0].elements;
  int refused = 0;
  std::vector<float> out(4096);
  for (const StateArray array : kStateArrays) {
    for (int64_t first = 0; first + 4096 <= elements; first += 4096) {
      const Status status = (*source)->Read(0, 0, array, first, out);
      if (status.ok()) {
        ASSERT_EQ(out[0], testing::ValueAt(1, 0, array, first));
        ASSERT_EQ(out[4095], testing::ValueAt(1, 0, array, first + 4095));
        continue;
      }
      ++refused;
      EXPECT_EQ(status.code(), Code::kDataLoss);
      EXPECT_NE(status.message().find("unit-0000.safetensors: piece 2"), std::string::npos)
          << status.message();
    }
  }
  // 8 MiB are 512 reads, and two more at its edges.
  EXPECT_GE(refused, 511);
  EXPECT_LE(refused, 514);
}

// Goal: no older checkpoint goes before the new one was read back.
// Method: a bit of the new one flips as soon as it has its name, before the older ones would go.
TEST(CheckpointDamageTest, ADiskThatChangesBytesCostsNoOlderCheckpoint) {
  TemporaryDirectory directory;
  const ModelDescription model = TinyModel();
  for (const int64_t step : {1, 2}) {
    ASSERT_TRUE(testing::WriteCheckpoint(directory.path(), model, step, /*keep=*/2).ok());
  }
  const std::string checkpoints = directory.path() + "/checkpoints";
  const auto report = testing::WriteCheckpoint(
      {.output_directory = directory.path(),
       .manifest = testing::ManifestOf(model, 3),
       .units = BuildUnits(model, 1),
       .keep = 2,
       .on_stage = [&](std::string_view stage) {
         if (stage == "renamed") {
           testing::FlipBit(checkpoints + "/step-00000003/unit-0001.safetensors", 5000);
         }
       }});
  ASSERT_FALSE(report.ok());
  EXPECT_EQ(report.status().code(), Code::kDataLoss);
  EXPECT_EQ(testing::Names(checkpoints),
            (std::vector<std::string>{"step-00000001", "step-00000002"}));
  EXPECT_TRUE(VerifyCheckpoint(checkpoints + "/step-00000001").ok());
  EXPECT_TRUE(VerifyCheckpoint(checkpoints + "/step-00000002").ok());
}

TEST(CheckpointDamageTest, ACheckpointOfAnotherModelIsRefusedByTensor) {
  TemporaryDirectory directory;
  const auto report = testing::WriteCheckpoint(directory.path(), TinyModel(24, 101), 1);
  ASSERT_TRUE(report.ok());
  const auto source = CheckpointSource::Open(report->path, BuildUnits(TinyModel(24, 102), 1));
  ASSERT_FALSE(source.ok());
  EXPECT_EQ(source.status().code(), Code::kInvalidArgument);
  EXPECT_NE(source.status().message().find("master/embedding"), std::string::npos)
      << source.status().message();
  EXPECT_EQ(CheckpointSource::Open(directory.path() + "/nothing", BuildUnits(TinyModel(), 1))
                .status()
                .code(),
            Code::kNotFound);
}

}  // namespace
}  // namespace oom
