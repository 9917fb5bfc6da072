#include "client/doctor.h"

#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "runtime/base/file.h"
#include "runtime/base/units.h"

namespace oom {
namespace {

// Three checkpoints of a one-billion-parameter model and its export.
constexpr int64_t kLowDiskBytes = 50_GiB;
constexpr int64_t kNoLimit = -1;
// The first driver that offers CUDA 13.0.
constexpr int64_t kDriverNeeded = 580;

// The file's text without the last newline, or "" when it cannot be read.
std::string Text(const std::string& path) {
  const Result<std::string> text = ReadFile(path, 16_MiB);
  if (!text.ok()) return "";
  std::string trimmed = *text;
  while (trimmed.ends_with('\n')) trimmed.pop_back();
  return trimmed;
}

int64_t Number(const std::string& text, int64_t fallback) {
  int64_t value = fallback;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() ? value : fallback;
}

std::string FirstLine(const std::string& text) { return text.substr(0, text.find('\n')); }

int64_t MemoryTotalBytes(const MachineFiles& files) {
  std::istringstream lines(Text(files.root + "/proc/meminfo"));
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("MemTotal:")) continue;
    const size_t digit = line.find_first_of("0123456789");
    return digit == std::string::npos ? 0 : Number(line.substr(digit), 0) * 1024;
  }
  return 0;
}

std::string DriverText(const MachineFiles& files) {
  return FirstLine(Text(files.root + "/proc/driver/nvidia/version"));
}

bool HasGpu(const MachineFiles& files) {
  if (!DriverText(files).empty()) return true;
  std::error_code error;
  for (const auto& device :
       std::filesystem::directory_iterator(files.root + "/sys/bus/pci/devices", error)) {
    // Display controllers of NVIDIA.
    if (Text(device.path() / "vendor") == "0x10de" &&
        Text(device.path() / "class").starts_with("0x03")) {
      return true;
    }
  }
  return false;
}

// 580 of "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27", or -1.
int64_t DriverBranch(const std::string& text) {
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const size_t dot = word.find('.');
    if (dot == std::string::npos || word.find_first_not_of("0123456789.") != std::string::npos)
      continue;
    return Number(word.substr(0, dot), -1);
  }
  return -1;
}

Finding Driver(const MachineFiles& files) {
  const std::string text = DriverText(files);
  const int64_t branch = DriverBranch(text);
  if (branch >= 0 && branch < kDriverNeeded) {
    return {
        "driver", FindingLevel::kError,
        text + "; OOM needs CUDA 13.0, which comes with driver " + std::to_string(kDriverNeeded),
        "sudo apt-get install nvidia-driver-" + std::to_string(kDriverNeeded) + " && sudo reboot"};
  }
  if (!text.empty()) return {"driver", FindingLevel::kOk, text, ""};
  if (HasGpu(files)) {
    return {"driver", FindingLevel::kError, "there is an NVIDIA GPU, but no driver is loaded",
            "sudo apt-get install nvidia-driver && sudo modprobe nvidia"};
  }
  return {"driver", FindingLevel::kOk, "no NVIDIA GPU: cpu devices only", ""};
}

Finding Hugepages(const MachineFiles& files) {
  const std::string folder = files.root + "/sys/kernel/mm/hugepages/hugepages-2048kB/";
  const int64_t total = Number(Text(folder + "nr_hugepages"), 0);
  const int64_t free = Number(Text(folder + "free_hugepages"), 0);
  if (total > 0) {
    return {"hugepages", FindingLevel::kOk,
            std::to_string(free) + " of " + std::to_string(total) + " 2 MiB pages are free (" +
                FormatBytes(free * 2_MiB) + ")",
            ""};
  }
  const std::string shared = Text(files.root + "/sys/kernel/mm/transparent_hugepage/shmem_enabled");
  for (const char* mode : {"[always]", "[advise]", "[within_size]", "[force]"}) {
    if (shared.find(mode) == std::string::npos) continue;
    return {"hugepages", FindingLevel::kOk, "transparent, for shared memory: " + shared, ""};
  }
  const int64_t pages = std::max<int64_t>(MemoryTotalBytes(files) / 2 / 2_MiB, 1);
  return {"hugepages", FindingLevel::kWarning,
          HasGpu(files)
              ? "none for shared memory: pools use 4 KiB pages, which are slower to update and "
                "to lock for the GPUs"
              : "none for shared memory: pools use 4 KiB pages, which are slower to update",
          "echo advise | sudo tee /sys/kernel/mm/transparent_hugepage/shmem_enabled   # or: sudo "
          "sysctl "
          "vm.nr_hugepages=" +
              std::to_string(pages)};
}

Finding LockedMemory(const MachineFiles& files) {
  int64_t limit = files.locked_memory_limit_bytes;
  if (limit == -2) {
    rlimit value{};
    ::getrlimit(RLIMIT_MEMLOCK, &value);
    limit = value.rlim_cur == RLIM_INFINITY ? kNoLimit : static_cast<int64_t>(value.rlim_cur);
  }
  if (limit == kNoLimit) return {"locked memory", FindingLevel::kOk, "unlimited", ""};
  const std::string text = "at most " + FormatBytes(limit);
  if (limit >= MemoryTotalBytes(files)) return {"locked memory", FindingLevel::kOk, text, ""};
  if (!HasGpu(files)) {
    return {"locked memory", FindingLevel::kOk, text + "; cpu devices lock nothing", ""};
  }
  return {"locked memory", FindingLevel::kWarning,
          text + "; cuda devices lock their host memory, and a driver may hold them to this limit",
          "echo '* - memlock unlimited' | sudo tee /etc/security/limits.d/oom.conf   # then log in "
          "again; for a service: LimitMEMLOCK=infinity"};
}

// The smallest memory limit from this process's cgroup up, and the file that sets it.
Finding CgroupLimit(const MachineFiles& files) {
  std::istringstream lines(Text(files.root + "/proc/self/cgroup"));
  int64_t smallest = kNoLimit;
  std::string source;
  const auto consider = [&](const std::filesystem::path& file) {
    const std::string text = Text(file.string());
    const int64_t limit = Number(text, kNoLimit);
    // "max", and the huge number that version 1 writes for no limit.
    if (limit < 0 || limit >= int64_t{1} << 60) return;
    if (smallest != kNoLimit && limit >= smallest) return;
    smallest = limit;
    source = file.string().substr(files.root.size());
  };
  for (std::string line; std::getline(lines, line);) {
    const size_t last = line.rfind(':');
    if (last == std::string::npos || last + 1 >= line.size()) continue;
    const bool version2 = line.starts_with("0::");
    if (!version2 && line.find(":memory:") == std::string::npos) continue;
    const std::string base = files.root + "/sys/fs/cgroup" + (version2 ? "" : "/memory");
    const char* name = version2 ? "memory.max" : "memory.limit_in_bytes";
    std::filesystem::path group = line.substr(last + 1);
    while (true) {
      consider(std::filesystem::path(base + group.string()) / name);
      if (!group.has_relative_path()) break;
      group = group.parent_path();
    }
  }
  const int64_t total = MemoryTotalBytes(files);
  if (smallest == kNoLimit || (total > 0 && smallest >= total)) {
    return {"cgroup", FindingLevel::kOk,
            "no memory limit below the machine's " + FormatBytes(total), ""};
  }
  return {"cgroup", FindingLevel::kWarning,
          "memory is limited to " + FormatBytes(smallest) + " of " + FormatBytes(total) + " by " +
              source,
          "echo max | sudo tee " + source};
}

Finding Numa(const MachineFiles& files) {
  int nodes = 0;
  std::error_code error;
  for (const auto& entry :
       std::filesystem::directory_iterator(files.root + "/sys/devices/system/node", error)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("node") && name.size() > 4 && name[4] >= '0' && name[4] <= '9') ++nodes;
  }
  nodes = std::max(nodes, 1);
  const std::string balancing = Text(files.root + "/proc/sys/kernel/numa_balancing");
  const std::string text = std::to_string(nodes) + (nodes == 1 ? " node" : " nodes");
  if (nodes > 1 && !balancing.empty() && balancing != "0") {
    return {"numa", FindingLevel::kWarning,
            text + "; the kernel moves pages between them on its own",
            "sudo sysctl kernel.numa_balancing=0"};
  }
  return {"numa", FindingLevel::kOk, text, ""};
}

Finding Disk(const MachineFiles& files) {
  struct statvfs info {};
  if (::statvfs(files.disk_folder.c_str(), &info) != 0) {
    return {"disk", FindingLevel::kError, "cannot look at " + files.disk_folder,
            "mkdir -p " + files.disk_folder};
  }
  const int64_t free = static_cast<int64_t>(info.f_bavail) * static_cast<int64_t>(info.f_frsize);
  const std::string text = FormatBytes(free) + " free in " +
                           std::filesystem::absolute(files.disk_folder).lexically_normal().string();
  if (free >= kLowDiskBytes) return {"disk", FindingLevel::kOk, text, ""};
  return {
      "disk", FindingLevel::kWarning,
      text + "; a checkpoint takes 12 bytes a parameter, and keep + 1 of them are there at once",
      "df -h .   # set `output` to a folder on a larger disk, or checkpoint: {keep: 2}"};
}

Finding Cpu(const MachineFiles& files) {
  std::istringstream lines(Text(files.root + "/proc/cpuinfo"));
  std::string flags;
  int count = 0;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("processor")) ++count;
    if (flags.empty() && line.starts_with("flags")) flags = line + " ";
  }
  const std::string text = std::to_string(count) + (count == 1 ? " CPU, " : " CPUs, ");
  if (flags.find(" avx512f ") != std::string::npos)
    return {"cpu", FindingLevel::kOk, text + "AVX-512", ""};
  if (flags.find(" avx2 ") != std::string::npos && flags.find(" fma ") != std::string::npos) {
    return {"cpu", FindingLevel::kOk, text + "AVX2", ""};
  }
  return {"cpu", FindingLevel::kWarning,
          text + "neither AVX-512 nor AVX2: optimizer steps are several times slower",
          "lscpu   # in a virtual machine: let it pass the host's CPU model through"};
}

std::string LevelName(FindingLevel level) {
  switch (level) {
    case FindingLevel::kOk:
      return "ok";
    case FindingLevel::kWarning:
      return "warning";
    case FindingLevel::kError:
      return "error";
  }
  return "";
}

nlohmann::ordered_json ToJson(const Finding& finding) {
  return {{"name", finding.name},
          {"level", LevelName(finding.level)},
          {"text", Printable(finding.text)},
          {"fix", finding.fix}};
}

void WriteTable(const std::vector<Finding>& findings, Output* output) {
  for (const Finding& finding : findings) {
    const Colour colour = finding.level == FindingLevel::kOk        ? Colour::kGreen
                          : finding.level == FindingLevel::kWarning ? Colour::kYellow
                                                                    : Colour::kRed;
    std::string level = LevelName(finding.level);
    const std::string padding(9 - level.size(), ' ');
    std::string name = finding.name;
    name.resize(std::max<size_t>(name.size(), 14), ' ');
    output->Line(output->Paint(level, colour) + padding + name + "  " + Printable(finding.text));
    if (!finding.fix.empty()) output->Line(std::string(25, ' ') + "fix: " + finding.fix);
  }
}

}  // namespace

std::vector<Finding> ExamineMachine(const MachineFiles& files) {
  return {Driver(files), Hugepages(files), LockedMemory(files), CgroupLimit(files),
          Numa(files),   Disk(files),      Cpu(files)};
}

void WriteFindings(const std::vector<Finding>& findings, Output* output) {
  switch (output->form()) {
    case OutputForm::kTable:
    case OutputForm::kWide:
      WriteTable(findings, output);
      return;
    case OutputForm::kName:
      for (const Finding& finding : findings) {
        if (finding.level != FindingLevel::kOk) output->Line(finding.name);
      }
      return;
    case OutputForm::kJsonl:
    case OutputForm::kYaml:
      // A JSON object is a YAML flow mapping too.
      for (const Finding& finding : findings) {
        output->Line((output->form() == OutputForm::kYaml ? "- " : "") + ToJson(finding).dump());
      }
      return;
    case OutputForm::kJson: {
      nlohmann::ordered_json list = nlohmann::ordered_json::array();
      for (const Finding& finding : findings) list.push_back(ToJson(finding));
      output->Line(list.dump(2));
      return;
    }
  }
}

}  // namespace oom
