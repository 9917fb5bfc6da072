#include "client/doctor.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>

namespace oom {
namespace {

// A tree of /proc and /sys files that a test writes.
class Machine {
 public:
  Machine() {
    char pattern[] = "/tmp/oom-machine-XXXXXX";
    root_ = ::mkdtemp(pattern);
    Write("proc/meminfo", "MemTotal:       16777216 kB\nMemFree: 1 kB\n");
    Write("proc/cpuinfo",
          "processor : 0\nflags : fpu fma avx2 avx512f\nprocessor : 1\nflags : fpu\n");
    Write("proc/self/cgroup", "0::/user/job\n");
    Write("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "100\n");
    Write("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "40\n");
    Write("sys/devices/system/node/node0/cpulist", "0-1\n");
  }
  ~Machine() { std::filesystem::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = root_ / path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  void Remove(const std::string& path) { std::filesystem::remove_all(root_ / path); }

  std::map<std::string, Finding> Examine(int64_t locked_bytes = -1) {
    std::map<std::string, Finding> by_name;
    for (Finding& finding : ExamineMachine({.root = root_.string(),
                            .disk_folder = "/tmp",
                            .locked_memory_limit_bytes = locked_bytes})) {
      by_name[finding.name] = finding;
    }
    return by_name;
  }

 private:
  std::filesystem::path root_;
};

TEST(DoctorTest, AGoodMachineHasNothingToFix) {
  Machine machine;
  auto findings = machine.Examine();
  for (const char* name : {"driver", "hugepages", "locked memory", "cgroup", "numa", "cpu"}) {
    EXPECT_EQ(findings[name].level, FindingLevel::kOk) << name << ": " << findings[name].text;
    EXPECT_EQ(findings[name].fix, "") << name;
  }
  EXPECT_NE(findings["hugepages"].text.find("40 of 100"), std::string::npos);
  EXPECT_EQ(findings["cpu"].text, "2 CPUs, AVX-512");
  EXPECT_FALSE(findings["disk"].text.empty());
}

TEST(DoctorTest, EveryFindingThatIsNotOkNamesACommand) {
  Machine machine;
  machine.Remove("sys/kernel/mm/hugepages");
  machine.Write("sys/kernel/mm/transparent_hugepage/shmem_enabled",
                "always within_size advise [never]\n");
  machine.Write("proc/cpuinfo", "processor : 0\nflags : fpu sse2\n");
  machine.Write("sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n");
  machine.Write("sys/bus/pci/devices/0000:01:00.0/class", "0x030200\n");
  machine.Write("sys/devices/system/node/node1/cpulist", "2-3\n");
  machine.Write("proc/sys/kernel/numa_balancing", "1\n");
  machine.Write("sys/fs/cgroup/user/memory.max", "1073741824\n");
  machine.Write("sys/fs/cgroup/user/job/memory.max", "max\n");
  auto findings = machine.Examine(8 << 20);
  EXPECT_EQ(findings["driver"].level, FindingLevel::kError);
  for (const char* name : {"hugepages", "locked memory", "cgroup", "numa", "cpu"}) {
    EXPECT_EQ(findings[name].level, FindingLevel::kWarning) << name << ": " << findings[name].text;
  }
  for (const char* name : {"driver", "hugepages", "locked memory", "cgroup", "numa", "cpu"}) {
    EXPECT_FALSE(findings[name].fix.empty()) << name;
  }
  EXPECT_NE(findings["cgroup"].text.find("1.00 GiB of 16.0 GiB by /sys/fs/cgroup/user/memory.max"),
            std::string::npos)
      << findings["cgroup"].text;
}

TEST(DoctorTest, TheSmallestCgroupLimitUpTheTreeCounts) {
  Machine machine;
  machine.Write("sys/fs/cgroup/user/job/memory.max", "2147483648\n");
  machine.Write("sys/fs/cgroup/user/memory.max", "4294967296\n");
  EXPECT_NE(machine.Examine()["cgroup"].text.find("2.00 GiB"), std::string::npos);
  machine.Write("proc/self/cgroup", "9:memory:/old\n8:cpu:/old\n");
  machine.Write("sys/fs/cgroup/memory/old/memory.limit_in_bytes", "3221225472\n");
  EXPECT_NE(machine.Examine()["cgroup"].text.find("3.00 GiB"), std::string::npos);
  machine.Write("sys/fs/cgroup/memory/old/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(machine.Examine()["cgroup"].level, FindingLevel::kOk);
}

TEST(DoctorTest, OnlyWhereThereIsAGpuItsMemoryMustBeLocked) {
  Machine machine;
  machine.Remove("sys/kernel/mm/hugepages");
  EXPECT_EQ(machine.Examine(8 << 20)["locked memory"].level, FindingLevel::kOk);
  EXPECT_EQ(machine.Examine(8 << 20)["hugepages"].text.find("lock"), std::string::npos);
  machine.Write(
      "proc/driver/nvidia/version",
      "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n");
  auto findings = machine.Examine(8 << 20);
  EXPECT_EQ(findings["driver"].level, FindingLevel::kOk) << findings["driver"].text;
  EXPECT_EQ(findings["locked memory"].level, FindingLevel::kWarning);
  EXPECT_NE(findings["locked memory"].fix.find("LimitMEMLOCK=infinity"), std::string::npos);
  EXPECT_NE(findings["hugepages"].text.find("lock for the GPUs"), std::string::npos);
}

TEST(DoctorTest, ADriverThatIsTooOldIsAnError) {
  Machine machine;
  machine.Write(
      "proc/driver/nvidia/version",
      "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n");
  const Finding driver = machine.Examine()["driver"];
  EXPECT_EQ(driver.level, FindingLevel::kError);
  EXPECT_NE(driver.text.find("550.54.15"), std::string::npos);
  EXPECT_NE(driver.text.find("CUDA 13.0"), std::string::npos);
  EXPECT_NE(driver.fix.find("580"), std::string::npos);
}

TEST(DoctorTest, TransparentHugepagesAreEnough) {
  Machine machine;
  machine.Remove("sys/kernel/mm/hugepages");
  machine.Write("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always [advise] never\n");
  EXPECT_EQ(machine.Examine()["hugepages"].level, FindingLevel::kOk);
}

}  // namespace
}  // namespace oom
