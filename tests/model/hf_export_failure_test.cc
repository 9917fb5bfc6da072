// Exports that must fail: one clear error, nothing left behind, nothing lost.

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "runtime/model/hf_config.h"
#include "runtime/model/hf_export.h"
#include "runtime/model/hf_source.h"
#include "tests/model/model_testing.h"

namespace oom {
namespace {

namespace fs = std::filesystem;
using testing::FindTensor;
using testing::IsError;
using testing::RandomTensors;
using testing::RawTensor;
using testing::ReadTree;
using testing::TempDirectory;
using testing::TinyQwenConfig;
using testing::WriteCheckpoint;
using testing::WriteText;

ModelDescription Parse(const std::string& config) {
  return std::move(ParseHfConfig(config, "config.json")).value();
}

Status CopyModel(const std::string& from, const std::string& to,
                 std::optional<TensorType> type = std::nullopt) {
  OOM_ASSIGN_OR_RETURN(const ModelDescription model, ReadHfConfig(from));
  const auto units = BuildUnits(model, 2);
  OOM_ASSIGN_OR_RETURN(const auto source, HfSource::Open(from, model, units));
  return ExportHuggingFace(*source, model, units,
                           {.output_directory = to, .template_directory = from, .type = type});
}

TEST(HfExport, RefusesAValueBeyondHalfPrecisionAndLeavesNothing) {
  TempDirectory directory;
  std::vector<RawTensor> tensors = RandomTensors(Parse(TinyQwenConfig()), TensorType::kF32, 5);
  for (RawTensor& tensor : tensors) tensor.bytes.assign(tensor.bytes.size(), '\0');
  RawTensor* router = FindTensor(tensors, "model.layers.0.mlp.gate.weight");
  const float large = 70000.0f;
  std::memcpy(router->bytes.data() + 4 * 5, &large, 4);
  WriteCheckpoint(directory / "in", TinyQwenConfig(), tensors, 1);
  EXPECT_TRUE(IsError(CopyModel(directory / "in", directory / "out", TensorType::kF16),
                      Code::kInvalidArgument, {router->name, "element 5", "70000", "F16"}));
  EXPECT_EQ(std::distance(fs::directory_iterator(directory.path()), fs::directory_iterator()), 1);
}

TEST(HfExport, NeverReplacesWhatIsNoExport) {
  TempDirectory directory;
  WriteCheckpoint(directory / "in", TinyQwenConfig(),
                  RandomTensors(Parse(TinyQwenConfig()), TensorType::kBF16, 5), 1);
  WriteText(directory / "home/config.json", "{}");
  WriteText(directory / "home/thesis.txt", "years of work");
  WriteText(directory / "file", "x");
  const auto before = ReadTree(directory.path());
  EXPECT_TRUE(IsError(CopyModel(directory / "in", directory / "home"), Code::kFailedPrecondition,
                      {directory / "home", "not replaced"}));
  EXPECT_TRUE(IsError(CopyModel(directory / "in", directory / "file"), Code::kFailedPrecondition,
                      {directory / "file", "not a directory"}));
  // Neither the source of the weights, nor around it, nor in it.
  for (const std::string& path :
       {directory / "in", directory.path(), directory / "in/export", directory / "home/../in"}) {
    EXPECT_TRUE(
        IsError(CopyModel(directory / "in", path), Code::kInvalidArgument, {directory / "in"}));
  }
  EXPECT_EQ(ReadTree(directory.path()), before);
  fs::create_directories(directory / "empty");
  EXPECT_TRUE(CopyModel(directory / "in", directory / "empty").ok());
  EXPECT_EQ(ReadTree(directory / "empty"), ReadTree(directory / "in"));
}

// Runs `body` in a child process, since it changes the process; returns its exit status.
int InChild(const std::function<int()>& body) {
  const pid_t child = ::fork();
  OOM_CHECK(child >= 0);
  if (child == 0) ::_exit(body());
  int status = 0;
  OOM_CHECK(::waitpid(child, &status, 0) == child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

constexpr int kSkipped = 77;

// An error of that code and nothing left beside the input: 0.
int Expect(const Status& status, Code code, const std::string& part) {
  if (status.code() == code && status.message().find(part) != std::string::npos) return 0;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return 1;
}

TEST(HfExport, AnUnwritableDirectoryIsOneClearError) {
  TempDirectory directory;
  const std::string from = directory / "in";
  WriteCheckpoint(from, TinyQwenConfig(),
                  RandomTensors(Parse(TinyQwenConfig()), TensorType::kBF16, 5), 1);
  fs::create_directories(directory / "locked");
  ASSERT_EQ(::chmod(directory.path().c_str(), 0755), 0);
  ASSERT_EQ(::chmod((directory / "locked").c_str(), 0555), 0);
  const int result = InChild([&] {
    // Permissions do not bind root.
    if (::geteuid() == 0 && ::setuid(65534) != 0) return kSkipped;
    return Expect(CopyModel(from, directory / "locked/out"), Code::kPermissionDenied,
                  directory / "locked/out");
  });
  ::chmod((directory / "locked").c_str(), 0755);
  if (result == kSkipped) GTEST_SKIP() << "cannot give up root";
  EXPECT_EQ(result, 0);
  EXPECT_TRUE(fs::is_empty(directory / "locked"));
}

// The disk fills while files are written (a limit on a file's size stands for it).
TEST(HfExport, AFullDiskIsOneClearErrorAndTheOldExportStays) {
  TempDirectory directory;
  const std::string from = directory / "in";
  WriteCheckpoint(from, TinyQwenConfig(),
                  RandomTensors(Parse(TinyQwenConfig()), TensorType::kBF16, 5), 1);
  ASSERT_TRUE(CopyModel(from, directory / "out").ok());
  const auto before = ReadTree(directory / "out");
  EXPECT_EQ(InChild([&] {
              ::signal(SIGXFSZ, SIG_IGN);
              const rlimit limit = {30'000, 30'000};
              if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return 2;
              return Expect(CopyModel(from, directory / "out"), Code::kResourceExhausted,
                            "model.safetensors");
            }),
            0);
  EXPECT_EQ(ReadTree(directory / "out"), before);
  EXPECT_EQ(std::distance(fs::directory_iterator(directory.path()), fs::directory_iterator()), 2);
}

// Mounts of this process are its own from here on: as root, else in a user namespace.
bool EnterPrivateMounts() {
  const uid_t user = ::geteuid();
  if (::unshare(CLONE_NEWNS) != 0) {
    if (::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return false;
    WriteText("/proc/self/uid_map", "0 " + std::to_string(user) + " 1");
  }
  return ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0;
}

// A file system that is too small is seen before anything is written.
TEST(HfExport, TooLittleSpaceIsAnErrorWithNumbers) {
  TempDirectory directory;
  const std::string from = directory / "in";
  WriteCheckpoint(from, TinyQwenConfig(),
                  RandomTensors(Parse(TinyQwenConfig()), TensorType::kF32, 5), 1);
  fs::create_directories(directory / "small");
  const int result = InChild([&] {
    if (!EnterPrivateMounts()) return kSkipped;
    if (::mount("tmpfs", (directory / "small").c_str(), "tmpfs", 0, "size=64k") != 0)
      return kSkipped;
    return Expect(CopyModel(from, directory / "small/out"), Code::kResourceExhausted,
                  "KiB are free");
  });
  if (result == kSkipped) GTEST_SKIP() << "cannot mount a small file system here";
  EXPECT_EQ(result, 0);
}

TEST(HfExport, ReportsAFailingSource) {
  class Failing : public StateSource {
   public:
    Status Read(int64_t, int64_t, StateArray, int64_t, std::span<float>) const override {
      return Status(Code::kDataLoss, "chunk 3 is corrupt");
    }
    int64_t step() const override { return 1; }
  };
  TempDirectory directory;
  const ModelDescription model = Parse(TinyQwenConfig());
  EXPECT_TRUE(IsError(ExportHuggingFace(Failing(), model, BuildUnits(model, 1),
                                        {.output_directory = directory / "out",
                                         .config_json = TinyQwenConfig(),
                                         .shard_bytes = 10'000}),
                      Code::kDataLoss, {"chunk 3 is corrupt"}));
  EXPECT_TRUE(fs::is_empty(directory.path()));
}

}  // namespace
}  // namespace oom
