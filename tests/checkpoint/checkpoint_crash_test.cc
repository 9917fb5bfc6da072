#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <functional>

#include "runtime/base/file.h"
#include "runtime/checkpoint/checkpoint_directory.h"
#include "runtime/checkpoint/checkpoint_source.h"
#include "tests/checkpoint/checkpoint_testing.h"

namespace oom {
namespace {

namespace fs = std::filesystem;

using testing::TemporaryDirectory;
using testing::TinyModel;

// Runs `body` in a child; its wait status.
int InChild(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body());
  int wait_status = 0;
  EXPECT_EQ(::waitpid(child, &wait_status, 0), child);
  return wait_status;
}

// A small file system of its own, if this process may mount one.
class SmallFileSystem {
 public:
  explicit SmallFileSystem(int64_t bytes) {
    const std::string options = "size=" + std::to_string(bytes);
    mounted_ = ::mount("tmpfs", directory_.path().c_str(), "tmpfs", 0, options.c_str()) == 0;
  }
  ~SmallFileSystem() {
    if (mounted_) ::umount2(directory_.path().c_str(), MNT_DETACH);
  }
  bool mounted() const { return mounted_; }
  const std::string& path() const { return directory_.path(); }

 private:
  TemporaryDirectory directory_;
  bool mounted_ = false;
};

// Goal: kill -9 at any stage of a checkpoint leaves the older ones whole, the new one whole or not
// there, and the next checkpoint collects what was left. Method: two checkpoints, then a child that
// kills itself on stage 0, 1, 2, ... of the third, until one survives.
TEST(CheckpointCrashTest, KillAtAnyStageLeavesOnlyWholeCheckpoints) {
  const ModelDescription model = TinyModel();
  const auto units = BuildUnits(model, 1);
  bool survived = false;
  for (int die_at_stage = 0; !survived; ++die_at_stage) {
    ASSERT_LT(die_at_stage, 20);
    TemporaryDirectory directory;
    for (const int64_t step : {1, 2}) {
      ASSERT_TRUE(testing::WriteCheckpoint(directory.path(), model, step, 2).ok());
    }
    const int wait_status = InChild([&] {
      int stage_count = 0;
      const auto report = testing::WriteCheckpoint({.output_directory = directory.path(),
                                                    .manifest = testing::ManifestOf(model, 3),
                                                    .units = units,
                                                    .keep = 2,
                                                    .on_stage = [&](std::string_view) {
                                                      if (stage_count++ == die_at_stage)
                                                        ::raise(SIGKILL);
                                                    }});
      return report.ok() ? 0 : 1;
    });
    survived = WIFEXITED(wait_status);
    if (survived) {
      ASSERT_EQ(WEXITSTATUS(wait_status), 0);
      EXPECT_GE(die_at_stage, 6);  // Every stage was died on.
    }
    const auto found = FindNewestCheckpoint(directory.path());
    ASSERT_TRUE(found.ok()) << found.status().ToString();
    EXPECT_TRUE(found->skipped.empty());
    EXPECT_GE(found->manifest.step, 2);
    const auto listed = ListCheckpoints(directory.path());
    ASSERT_TRUE(listed.ok());
    EXPECT_GE(listed->size(), 2u);
    for (const auto& checkpoint : *listed) {
      EXPECT_TRUE(VerifyCheckpoint(checkpoint.path).ok()) << checkpoint.path;
    }
    ASSERT_TRUE(testing::WriteCheckpoint(directory.path(), model, 4, 2).ok());
    for (const std::string& name : testing::Names(directory.path() + "/checkpoints")) {
      EXPECT_EQ(name.find(".tmp."), std::string::npos)
          << name << " after death at " << die_at_stage;
    }
  }
}

// The same at moments that no stage marks: between any two ranges of the state.
TEST(CheckpointCrashTest, KillBetweenAnyTwoWritesLeavesTheOlderOne) {
  const ModelDescription model = TinyModel();
  const auto units = BuildUnits(model, 1);
  TemporaryDirectory directory;
  ASSERT_TRUE(testing::WriteCheckpoint(directory.path(), model, 1).ok());
  for (int die_after_writes = 0; die_after_writes < 8; ++die_after_writes) {
    const int wait_status = InChild([&] {
      auto writer = CheckpointWriter::Create({.output_directory = directory.path(),
                                              .manifest = testing::ManifestOf(model, 2),
                                              .units = units});
      if (!writer.ok()) return 1;
      int write_count = 0;
      for (const ParameterUnit& unit : units) {
        if (write_count++ == die_after_writes) ::raise(SIGKILL);
        const auto values = testing::ValuesOf(unit, 2, 0, unit.elements);
        if (!(*writer)
                 ->WriteBlocks(unit.index, 0, values.masters, values.moment1, values.moment2)
                 .ok()) {
          return 1;
        }
      }
      ::raise(SIGKILL);
      return 0;
    });
    ASSERT_TRUE(WIFSIGNALED(wait_status)) << wait_status;
    const auto found = FindNewestCheckpoint(directory.path());
    ASSERT_TRUE(found.ok());
    EXPECT_EQ(found->manifest.step, 1);
    // One directory of the dead writer at most: each writer removes its forerunner's.
    EXPECT_LE(testing::Names(directory.path() + "/checkpoints").size(), 2u);
  }
}

TEST(CheckpointCrashTest, ALivingWritersDirectoryIsNotStale) {
  TemporaryDirectory directory;
  const ModelDescription model = TinyModel();
  auto writer = CheckpointWriter::Create({.output_directory = directory.path(),
                                          .manifest = testing::ManifestOf(model, 1),
                                          .units = BuildUnits(model, 1)});
  ASSERT_TRUE(writer.ok());
  ASSERT_TRUE(RemoveStaleTemporaries(directory.path()).ok());
  EXPECT_EQ(testing::Names(directory.path() + "/checkpoints").size(), 1u);
  writer->reset();
  EXPECT_TRUE(testing::Names(directory.path() + "/checkpoints").empty());
}

// Goal: a full disk is reported before a byte of state is written, by name and number; nothing is
// left, the older ones stand.
TEST(CheckpointCrashTest, AFullDiskIsReportedAtTheStart) {
  const ModelDescription model = TinyModel(128, 1024);
  int64_t checkpoint_bytes = 0;
  {
    TemporaryDirectory directory;
    const auto report = testing::WriteCheckpoint(directory.path(), model, 1);
    ASSERT_TRUE(report.ok());
    checkpoint_bytes = report->bytes;
  }
  SmallFileSystem disk(checkpoint_bytes * 3 / 2);
  if (!disk.mounted())
    GTEST_SKIP() << "may not mount a tmpfs; AFileSizeLimitIsAFullDisk runs instead";
  ASSERT_TRUE(testing::WriteCheckpoint(disk.path(), model, 1).ok());
  const auto writer = CheckpointWriter::Create({.output_directory = disk.path(),
                                                .manifest = testing::ManifestOf(model, 2),
                                                .units = BuildUnits(model, 1)});
  ASSERT_FALSE(writer.ok());
  EXPECT_EQ(writer.status().code(), Code::kResourceExhausted);
  EXPECT_EQ(writer.status().reason(), "STORAGE_FULL");
  EXPECT_NE(writer.status().message().find("cannot reserve"), std::string::npos)
      << writer.status().message();
  EXPECT_EQ(testing::Names(disk.path() + "/checkpoints"),
            std::vector<std::string>{"step-00000001"});
  EXPECT_TRUE(VerifyCheckpoint(disk.path() + "/checkpoints/step-00000001").ok());
}

TEST(CheckpointCrashTest, AFileSizeLimitIsAFullDisk) {
  TemporaryDirectory directory;
  const ModelDescription model = TinyModel();
  ASSERT_TRUE(testing::WriteCheckpoint(directory.path(), model, 1).ok());
  const int wait_status = InChild([&] {
    ::signal(SIGXFSZ, SIG_IGN);
    const struct rlimit limit { 8192, 8192 };
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return 2;
    const auto report = testing::WriteCheckpoint(directory.path(), model, 2);
    return !report.ok() && report.status().reason() == "STORAGE_FULL" ? 0 : 1;
  });
  ASSERT_TRUE(WIFEXITED(wait_status));
  EXPECT_EQ(WEXITSTATUS(wait_status), 0);
  EXPECT_EQ(testing::Names(directory.path() + "/checkpoints"),
            std::vector<std::string>{"step-00000001"});
  EXPECT_TRUE(FindNewestCheckpoint(directory.path()).ok());
}

TEST(CheckpointCrashTest, AnUnwritableDirectoryIsNamed) {
  TemporaryDirectory directory;
  const std::string output = directory.path() + "/run";
  ASSERT_EQ(::mkdir(output.c_str(), 0555), 0);
  ASSERT_EQ(::chmod(directory.path().c_str(), 0755), 0);
  const int wait_status = InChild([&] {
    // Permissions do not hold for root.
    if (::geteuid() == 0 && ::setresuid(65534, 65534, 65534) != 0) return 2;
    const auto writer = CheckpointWriter::Create({.output_directory = output,
                                                  .manifest = testing::ManifestOf(TinyModel(), 2),
                                                  .units = BuildUnits(TinyModel(), 1)});
    const bool named = !writer.ok() && writer.status().code() == Code::kPermissionDenied &&
                       writer.status().message().find(output) != std::string::npos;
    return named ? 0 : 1;
  });
  ASSERT_TRUE(WIFEXITED(wait_status));
  EXPECT_EQ(WEXITSTATUS(wait_status), 0);
}

// An output that is a file, and a checkpoints path that is one.
TEST(CheckpointCrashTest, AFileInTheWayIsAnErrorAndStays) {
  TemporaryDirectory directory;
  ASSERT_TRUE(WriteFileAtomically(directory.path() + "/checkpoints", "mine").ok());
  const auto report = testing::WriteCheckpoint(directory.path(), TinyModel(), 1);
  ASSERT_FALSE(report.ok());
  EXPECT_NE(report.status().message().find("checkpoints"), std::string::npos);
  EXPECT_TRUE(fs::is_regular_file(directory.path() + "/checkpoints"));
}

}  // namespace
}  // namespace oom
