#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <filesystem>
#include <random>
#include <thread>

#include "runtime/base/file.h"
#include "runtime/checkpoint/checkpoint_directory.h"
#include "runtime/checkpoint/checkpoint_source.h"
#include "runtime/checkpoint/checkpoint_writer.h"
#include "runtime/model/safetensors.h"
#include "tests/checkpoint/checkpoint_testing.h"

namespace oom {
namespace {

using testing::TemporaryDirectory;
using testing::TinyModel;

struct Range {
  int64_t unit, first, elements;
};

// Goal: any order of ranges of any size, from several threads, gives the same checkpoint; odd sizes
// and powers of two, tensors that fill their blocks and tensors that leave most of one empty;
// padding never shows. Method: every unit cut into random ranges of whole blocks, shuffled, written
// by four threads; read back through a source whose units are padded for another number of ranks.
TEST(CheckpointRoundtripTest, AnyOrderOfWritesGivesTheSameState) {
  const uint64_t seed = 20240229;
  std::mt19937_64 random(seed);
  const std::vector<std::pair<int64_t, int64_t>> shapes = {
      {24, 101}, {64, 64}, {64, 256}, {128, 1024}, {1, 1}, {63, 65}, {256, 4096}};
  for (const auto& [hidden, vocabulary] : shapes) {
    TemporaryDirectory directory;
    const ModelDescription model = TinyModel(hidden, vocabulary);
    const std::vector<ParameterUnit> units = BuildUnits(model, 2);
    std::vector<Range> ranges;
    for (const ParameterUnit& unit : units) {
      for (int64_t first = 0; first < unit.elements;) {
        const int64_t elements = std::min<int64_t>(
            static_cast<int64_t>(random() % 40 + 1) * kBlockElements, unit.elements - first);
        ranges.push_back({unit.index, first, elements});
        first += elements;
      }
    }
    std::shuffle(ranges.begin(), ranges.end(), random);
    auto writer = CheckpointWriter::Create({.output_directory = directory.path(),
                                            .manifest = testing::ManifestOf(model, 5),
                                            .units = units});
    ASSERT_TRUE(writer.ok()) << writer.status().ToString();
    std::atomic<size_t> next{0};
    std::atomic<int> failures{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        for (size_t at = next++; at < ranges.size(); at = next++) {
          const Range& range = ranges[at];
          const auto values = testing::ValuesOf(units[static_cast<size_t>(range.unit)], 5,
                                                range.first, range.elements);
          if (!(*writer)
                   ->WriteBlocks(range.unit, range.first, values.masters, values.moment1,
                                 values.moment2)
                   .ok()) {
            ++failures;
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    ASSERT_EQ(failures, 0);
    const auto report = (*writer)->Commit();
    ASSERT_TRUE(report.ok()) << report.status().ToString();
    EXPECT_EQ(report->path, directory.path() + "/checkpoints/step-00000005");
    ASSERT_TRUE(VerifyCheckpoint(report->path).ok());
    const auto other_units = BuildUnits(model, 3);
    const auto source = CheckpointSource::Open(report->path, other_units);
    ASSERT_TRUE(source.ok()) << source.status().ToString();
    EXPECT_EQ((*source)->step(), 5);
    EXPECT_EQ(testing::CompareWithValues(**source, other_units, 5), "")
        << hidden << " x " << vocabulary << ", seed " << seed;
  }
}

// Ranges need not be blocks: every cut of a tensor lands in its place.
TEST(CheckpointRoundtripTest, UnalignedRangesAreWrittenToo) {
  TemporaryDirectory directory;
  const ModelDescription model = TinyModel();
  const auto report = testing::WriteCheckpoint({.output_directory = directory.path(),
                                                .manifest = testing::ManifestOf(model, 2),
                                                .units = BuildUnits(model, 1)},
                                               /*range_elements=*/1237);
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  const auto units = BuildUnits(model, 1);
  const auto source = CheckpointSource::Open(report->path, units);
  ASSERT_TRUE(source.ok());
  EXPECT_EQ(testing::CompareWithValues(**source, units, 2), "");
}

// Goal: pieces of 8 MiB, ranges that cross them, and the way past the page cache.
// Method: an embedding of 3 x 12.6 MB, written in ranges of 1 Mi elements from page-aligned memory.
TEST(CheckpointRoundtripTest, FilesOfSeveralPiecesComeBack) {
  TemporaryDirectory directory;
  const ModelDescription model = TinyModel(256, 12289);
  const auto units = BuildUnits(model, 1);
  auto writer = CheckpointWriter::Create({.output_directory = directory.path(),
                                          .manifest = testing::ManifestOf(model, 1),
                                          .units = units});
  ASSERT_TRUE(writer.ok()) << writer.status().ToString();
  for (const ParameterUnit& unit : units) {
    for (int64_t first = 0; first < unit.elements; first += 1 << 20) {
      const int64_t elements = std::min<int64_t>(1 << 20, unit.elements - first);
      const auto values = testing::ValuesOf(unit, 1, first, elements);
      std::unique_ptr<float[], void (*)(void*)> aligned(
          static_cast<float*>(std::aligned_alloc(4096, static_cast<size_t>(elements) * 4)),
          std::free);
      std::copy(values.masters.begin(), values.masters.end(), aligned.get());
      ASSERT_TRUE((*writer)
                      ->WriteBlocks(unit.index, first,
                                    {aligned.get(), static_cast<size_t>(elements)}, values.moment1,
                                    values.moment2)
                      .ok());
    }
  }
  const auto report = (*writer)->Commit();
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  const auto manifest = ReadCheckpointManifest(report->path);
  ASSERT_TRUE(manifest.ok());
  EXPECT_GE(manifest->files[0].piece_crcs.size(), 5u);
  const auto source = CheckpointSource::Open(report->path, units);
  ASSERT_TRUE(source.ok());
  EXPECT_EQ(testing::CompareWithValues(**source, units, 1), "");
}

// Goal: the files are what other tools read: strict safetensors without padding, under canonical
// names.
TEST(CheckpointRoundtripTest, FilesAreSafetensorsByCanonicalName) {
  TemporaryDirectory directory;
  const ModelDescription model = TinyModel();
  const auto report = testing::WriteCheckpoint(directory.path(), model, 3);
  ASSERT_TRUE(report.ok());
  int64_t bytes = 0;
  for (const ParameterUnit& unit : BuildUnits(model, 1)) {
    char name[40];
    std::snprintf(name, sizeof(name), "/unit-%04d.safetensors", static_cast<int>(unit.index));
    const auto file = SafetensorsFile::Open(report->path + name);
    ASSERT_TRUE(file.ok()) << file.status().ToString();
    EXPECT_EQ((*file)->header().tensors.size(), 3 * unit.tensors.size());
    for (const TensorSpec& tensor : unit.tensors) {
      for (const char* array : {"master/", "moment1/", "moment2/"}) {
        const SafetensorInfo* info = (*file)->Find(array + tensor.name);
        ASSERT_NE(info, nullptr) << array << tensor.name;
        EXPECT_EQ(info->type, TensorType::kF32);
        EXPECT_EQ(info->shape, tensor.shape);
        bytes += info->bytes;
      }
    }
  }
  EXPECT_EQ(bytes, 12 * ParameterCount(BuildUnits(model, 1)));
}

TEST(CheckpointRoundtripTest, ReadingOutsideATensorIsRefused) {
  TemporaryDirectory directory;
  const ModelDescription model = TinyModel();
  const auto report = testing::WriteCheckpoint(directory.path(), model, 3);
  ASSERT_TRUE(report.ok());
  const auto units = BuildUnits(model, 1);
  const auto source = CheckpointSource::Open(report->path, units);
  ASSERT_TRUE(source.ok());
  std::vector<float> out(2);
  const int64_t elements = units[0].tensors[0].elements;
  EXPECT_TRUE((*source)->Read(0, 0, StateArray::kMaster, elements - 2, out).ok());
  for (const int64_t first : {int64_t{-1}, elements - 1, elements, int64_t{1} << 62}) {
    EXPECT_EQ((*source)->Read(0, 0, StateArray::kMaster, first, out).code(),
              Code::kInvalidArgument);
  }
  EXPECT_EQ((*source)->Read(99, 0, StateArray::kMaster, 0, out).code(), Code::kInvalidArgument);
  EXPECT_EQ((*source)->Read(0, 99, StateArray::kMaster, 0, out).code(), Code::kInvalidArgument);
}

TEST(CheckpointRoundtripTest, MissingElementsAndElementsWrittenTwiceAreRefused) {
  TemporaryDirectory directory;
  const ModelDescription model = TinyModel();
  const auto units = BuildUnits(model, 1);
  {
    auto writer = CheckpointWriter::Create({.output_directory = directory.path(),
                                            .manifest = testing::ManifestOf(model, 1),
                                            .units = units});
    ASSERT_TRUE(writer.ok());
    const auto values = testing::ValuesOf(units[0], 1, 0, 64);
    ASSERT_TRUE((*writer)->WriteBlocks(0, 0, values.masters, values.moment1, values.moment2).ok());
    const Status twice =
        (*writer)->WriteBlocks(0, 0, values.masters, values.moment1, values.moment2);
    EXPECT_EQ(twice.code(), Code::kInvalidArgument);
    const auto report = (*writer)->Commit();
    ASSERT_FALSE(report.ok());
    EXPECT_EQ(report.status().code(), Code::kFailedPrecondition);
    EXPECT_NE(report.status().message().find("unit-0000"), std::string::npos);
  }
  EXPECT_TRUE(testing::Names(directory.path() + "/checkpoints").empty());
}

TEST(CheckpointRoundtripTest, KeepLeavesTheNewestAndNeverFewerThanTwo) {
  TemporaryDirectory directory;
  const ModelDescription model = TinyModel();
  for (const int64_t step : {1, 2, 3, 4}) {
    const auto report = testing::WriteCheckpoint(directory.path(), model, step, /*keep=*/3);
    ASSERT_TRUE(report.ok()) << report.status().ToString();
    EXPECT_EQ(report->removed.size(), step == 4 ? 1u : 0u);
  }
  using NameList = std::vector<std::string>;
  const std::string checkpoints = directory.path() + "/checkpoints";
  EXPECT_EQ(testing::Names(checkpoints),
            (NameList{"step-00000002", "step-00000003", "step-00000004"}));
  ASSERT_TRUE(testing::WriteCheckpoint(directory.path(), model, 5, /*keep=*/1).ok());
  EXPECT_EQ(testing::Names(checkpoints), (NameList{"step-00000004", "step-00000005"}));
}

// A damaged one is no fallback: it must not push a good one out.
TEST(CheckpointRoundtripTest, KeepDoesNotCountOnesThatAreNotWhole) {
  TemporaryDirectory directory;
  const ModelDescription model = TinyModel();
  for (const int64_t step : {1, 2})
    ASSERT_TRUE(testing::WriteCheckpoint(directory.path(), model, step).ok());
  std::filesystem::remove(directory.path() + "/checkpoints/step-00000002/unit-0001.safetensors");
  ASSERT_TRUE(testing::WriteCheckpoint(directory.path(), model, 3, /*keep=*/2).ok());
  EXPECT_TRUE(VerifyCheckpoint(directory.path() + "/checkpoints/step-00000001").ok());
}

TEST(CheckpointRoundtripTest, ACheckpointOfTheSameStepIsReplacedWhole) {
  TemporaryDirectory directory;
  const ModelDescription model = TinyModel();
  ASSERT_TRUE(testing::WriteCheckpoint(directory.path(), model, 4, 3, "first").ok());
  testing::FlipBit(directory.path() + "/checkpoints/step-00000004/unit-0000.safetensors", 5000);
  const auto report = testing::WriteCheckpoint(directory.path(), model, 4, 3, "second");
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  EXPECT_EQ(testing::Names(directory.path() + "/checkpoints").size(), 1u);
  const auto found = FindNewestCheckpoint(directory.path());
  ASSERT_TRUE(found.ok());
  EXPECT_EQ(found->manifest.job_uid, "second");
}

TEST(CheckpointRoundtripTest, FindsOnlyTheJobsOwnWhenAsked) {
  TemporaryDirectory directory;
  const ModelDescription model = TinyModel();
  EXPECT_EQ(FindNewestCheckpoint(directory.path()).status().code(), Code::kNotFound);
  ASSERT_TRUE(testing::WriteCheckpoint(directory.path(), model, 4, 3, "mine").ok());
  ASSERT_TRUE(testing::WriteCheckpoint(directory.path(), model, 9, 3, "other").ok());
  const auto any = FindNewestCheckpoint(directory.path());
  const auto mine = FindNewestCheckpoint(directory.path(), {.job_uid = "mine"});
  ASSERT_TRUE(any.ok() && mine.ok());
  EXPECT_EQ(any->manifest.step, 9);
  EXPECT_EQ(mine->manifest.step, 4);
  EXPECT_TRUE(mine->skipped.empty());
  EXPECT_EQ(FindNewestCheckpoint(directory.path(), {.job_uid = "third"}).status().code(),
            Code::kNotFound);
}

TEST(CheckpointRoundtripTest, ResumeIsRefusedByName) {
  const ModelDescription model = TinyModel();
  const Manifest manifest = testing::ManifestOf(model, 4, "uid-1");
  const ResumeRequest good{.job_name = "tiny", .job_uid = "uid-2", .model = model};
  EXPECT_TRUE(CheckResume(manifest, good).ok());

  ResumeRequest other_job = good;
  other_job.job_name = "large";
  const Status job_status = CheckResume(manifest, other_job);
  EXPECT_EQ(job_status.code(), Code::kFailedPrecondition);
  EXPECT_EQ(job_status.field(), "output");
  EXPECT_NE(job_status.message().find("\"tiny\""), std::string::npos);
  EXPECT_NE(job_status.message().find("\"large\""), std::string::npos);
  other_job.job_uid = "uid-1";  // Renamed, but the same job.
  EXPECT_TRUE(CheckResume(manifest, other_job).ok());
  other_job.job_uid = "uid-2";
  other_job.explicit_path = true;
  EXPECT_TRUE(CheckResume(manifest, other_job).ok());

  ResumeRequest other_precision = good;
  other_precision.precision = Precision::kFloat32;
  const Status precision_status = CheckResume(manifest, other_precision);
  EXPECT_EQ(precision_status.code(), Code::kFailedPrecondition);
  EXPECT_EQ(precision_status.field(), "precision");
  EXPECT_NE(precision_status.message().find("bfloat16"), std::string::npos);
  EXPECT_NE(precision_status.message().find("float32"), std::string::npos);

  ResumeRequest other_model = good;
  other_model.model.hidden_size = 32;
  const Status model_status = CheckResume(manifest, other_model);
  EXPECT_EQ(model_status.field(), "model");
  EXPECT_NE(model_status.message().find("hidden_size 24 against 32"), std::string::npos);
}

}  // namespace
}  // namespace oom
