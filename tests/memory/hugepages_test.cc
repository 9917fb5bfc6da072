// Goal: the page kind is what a pool would get, and the hint is a command exactly where larger
// pages can be had. Method: trees of /sys files.

#include "runtime/memory/hugepages.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "runtime/base/units.h"
#include "runtime/memory/pool.h"

namespace oom {
namespace {

constexpr const char* kAdvise =
    "echo advise | sudo tee /sys/kernel/mm/transparent_hugepage/shmem_enabled";

class HugepagesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "hugepages-XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  // -1: a kernel without such pages.
  HugepageState Examine(const std::string& shared, int total, int free, bool allow_hugetlb = true) {
    Write("transparent_hugepage/shmem_enabled", shared + "\n");
    if (total >= 0) {
      Write("hugepages/hugepages-2048kB/nr_hugepages", std::to_string(total) + "\n");
      Write("hugepages/hugepages-2048kB/free_hugepages", std::to_string(free) + "\n");
    }
    return ExamineHugepages(8_GiB, allow_hugetlb, root_);
  }

 private:
  void Write(const std::string& name, const std::string& text) {
    const std::filesystem::path file = root_ + "/sys/kernel/mm/" + name;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  std::string root_;
};

TEST_F(HugepagesTest, SmallPagesComeWithBothCommands) {
  for (const int total : {-1, 0}) {
    const HugepageState state = Examine("always within_size advise [never]", total, total);
    EXPECT_EQ(state.kind, kSmallPages);
    // Half of the pools: 4 GiB.
    EXPECT_EQ(state.hint, std::string(kAdvise) + "   # or: sudo sysctl -w vm.nr_hugepages=2048");
  }
}

TEST_F(HugepagesTest, TransparentPagesComeWithTheCommandForReservedOnes) {
  const HugepageState state = Examine("always [advise] never", 0, 0);
  EXPECT_EQ(state.kind, kTransparentHugePages);
  EXPECT_EQ(state.hint, "sudo sysctl -w vm.nr_hugepages=2048");
}

TEST_F(HugepagesTest, EnoughReservedPagesNeedNothing) {
  const HugepageState free = Examine("[never]", 2048, 2048);
  EXPECT_EQ(free.kind, kHugetlbPages);
  EXPECT_EQ(free.hint, "");
  // A job has them all.
  const HugepageState taken = Examine("[never]", 2048, 0);
  EXPECT_EQ(taken.kind, kSmallPages);
  EXPECT_EQ(taken.hint, "");
}

TEST_F(HugepagesTest, WithoutReservedPagesByConfigurationNoneAreAskedFor) {
  const HugepageState small = Examine("[deny]", 2048, 2048, /*allow_hugetlb=*/false);
  EXPECT_EQ(small.kind, kSmallPages);
  EXPECT_EQ(small.hint, kAdvise);
  const HugepageState transparent = Examine("[always]", 0, 0, /*allow_hugetlb=*/false);
  EXPECT_EQ(transparent.kind, kTransparentHugePages);
  EXPECT_EQ(transparent.hint, "");
}

}  // namespace
}  // namespace oom
