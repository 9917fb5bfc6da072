#include "runtime/memory/host_memory.h"

#include <sys/resource.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <sstream>

#include "runtime/base/file.h"
#include "runtime/base/units.h"

namespace oom {
namespace {

std::optional<int64_t> ReadNumber(const std::string& path) {
  const Result<std::string> text = ReadFile(path, 4096);
  if (!text.ok()) return std::nullopt;
  char* end = nullptr;
  const long long value = std::strtoll(text->c_str(), &end, 10);
  if (end == text->c_str()) return std::nullopt;  // "max", for example.
  return value;
}

// The smallest `file` from `base`/`path` up to `base`. In a container the path of /proc/self/cgroup
// may belong to the host's name space and not exist here; then only `base`, which is our own group,
// counts.
std::optional<int64_t> SmallestUpTheTree(const std::string& base, std::string path,
                                         const std::string& file) {
  std::optional<int64_t> smallest;
  while (true) {
    const std::optional<int64_t> value = ReadNumber(base + path + "/" + file);
    if (value && (!smallest || *value < *smallest)) smallest = value;
    if (path.empty() || path == "/") break;
    path.resize(path.rfind('/'));
  }
  return smallest;
}

}  // namespace

Result<HostMemoryLimit> ReadHostMemoryLimit(const std::string& root) {
  OOM_ASSIGN_OR_RETURN(const std::string memory_info, ReadFile(root + "/proc/meminfo", 1_MiB));
  HostMemoryLimit limit;
  std::istringstream lines(memory_info);
  for (std::string key, line; std::getline(lines, line);) {
    std::istringstream words(line);
    int64_t kibibytes = 0;
    if (words >> key >> kibibytes && key == "MemTotal:")
      limit = {.bytes = kibibytes * 1024, .source = "machine"};
  }
  if (limit.bytes <= 0) return Status(Code::kInternal, root + "/proc/meminfo has no MemTotal");

  const Result<std::string> groups = ReadFile(root + "/proc/self/cgroup", 1_MiB);
  if (!groups.ok()) return limit;
  std::istringstream group_lines(*groups);
  for (std::string line; std::getline(group_lines, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string path = line.substr(second + 1);
    std::optional<int64_t> value;
    std::string file;
    if (controllers == ",,") {
      file = "memory.max";
      value = SmallestUpTheTree(root + "/sys/fs/cgroup", path, file);
    } else if (controllers.find(",memory,") != std::string::npos) {
      file = "memory.limit_in_bytes";
      value = SmallestUpTheTree(root + "/sys/fs/cgroup/memory", path, file);
    }
    if (value && *value < limit.bytes) limit = {.bytes = *value, .source = "cgroup " + file};
  }
  return limit;
}

Result<PoolCapacity> ComputePoolCapacity(const NumaTopology& topology, const HostMemoryLimit& limit,
                                         const std::vector<int64_t>& configured) {
  const int count = topology.node_count();
  PoolCapacity capacity{.bytes_by_node = {}, .source = limit.source};
  double total = 0;
  std::vector<int64_t> node_bytes;
  for (int node = 0; node < count; ++node) {
    node_bytes.push_back(std::max<int64_t>(topology.Describe(node).total_bytes, 1));
    total += static_cast<double>(node_bytes.back());
  }
  const auto share_out = [&](int64_t bytes) {
    std::vector<int64_t> shares;
    for (int64_t each : node_bytes) {
      shares.push_back(count == 1 ? bytes
                                  : static_cast<int64_t>(static_cast<double>(bytes) *
                                                         (static_cast<double>(each) / total)));
    }
    return shares;
  };
  capacity.bytes_by_node = share_out(limit.bytes / 10 * 9);
  if (configured.empty()) return capacity;
  if (configured.size() != 1 && static_cast<int>(configured.size()) != count) {
    return Status(Code::kInvalidArgument, "pool_capacity has " + std::to_string(configured.size()) +
                                              " values; this machine has " + std::to_string(count) +
                                              " NUMA node(s): give one value, or one for each")
        .WithField("pool_capacity");
  }
  const std::vector<int64_t> wanted =
      configured.size() == 1 ? share_out(configured[0]) : configured;
  for (int node = 0; node < count; ++node) {
    if (wanted[node] < capacity.bytes_by_node[node]) {
      capacity.bytes_by_node[node] = wanted[node];
      capacity.source = "configuration";
    }
  }
  return capacity;
}

int64_t LockedMemoryLimitBytes() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return -1;
  return static_cast<int64_t>(limit.rlim_cur);
}

}  // namespace oom
