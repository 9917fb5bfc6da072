#include "server/oomd/node_resources.h"

#include <algorithm>
#include <cstdlib>

#include "runtime/base/check.h"
#include "runtime/base/units.h"

namespace oom {
namespace {

const char* KindName(v1::DeviceKind kind) { return kind == v1::DEVICE_KIND_CUDA ? "cuda" : "cpu"; }

// The number after `prefix`, or -1.
int IndexAfter(const std::string& text, const std::string& prefix) {
  if (text.rfind(prefix, 0) != 0) return -1;
  char* end = nullptr;
  const long index = std::strtol(text.c_str() + prefix.size(), &end, 10);
  return *end == '\0' && index >= 0 && index < 4096 ? static_cast<int>(index) : -1;
}

}  // namespace

ResourceNeed NeedOf(const v1::Job& job, const std::vector<internal::v1::Pool>& pools) {
  ResourceNeed need;
  need.device_kind = job.spec().devices().kind() == v1::DEVICE_KIND_CUDA ? v1::DEVICE_KIND_CUDA
                                                                         : v1::DEVICE_KIND_CPU;
  need.device_count = std::max(1, job.spec().devices().count());
  const auto add = [](std::vector<int64_t>& bytes, int node, int64_t more) {
    if (node < 0) return;
    if (static_cast<int>(bytes.size()) <= node) bytes.resize(node + 1, 0);
    bytes[node] += more;
  };
  for (const internal::v1::Pool& pool : pools)
    add(need.bytes_by_node, pool.numa_node(), pool.bytes());
  std::vector<int64_t> estimated;
  std::vector<int64_t> device_bytes;
  for (const v1::MemoryEstimate& item : job.plan().estimate().memory()) {
    add(estimated, IndexAfter(item.space(), "numa "), item.bytes());
    const int rank = IndexAfter(item.space(), "device ");
    if (rank >= 0 && need.device_kind == v1::DEVICE_KIND_CPU) {
      const auto& nodes = job.plan().rank_numa_node();
      add(device_bytes, rank < nodes.size() ? nodes[rank] : 0, item.bytes());
    }
  }
  // The estimate names the pools' contents and more; pools alone are the floor.
  for (size_t node = 0; node < estimated.size(); ++node) {
    const int64_t have = node < need.bytes_by_node.size() ? need.bytes_by_node[node] : 0;
    if (estimated[node] > have)
      add(need.bytes_by_node, static_cast<int>(node), estimated[node] - have);
  }
  for (size_t node = 0; node < device_bytes.size(); ++node) {
    add(need.bytes_by_node, static_cast<int>(node), device_bytes[node]);
  }
  return need;
}

NodeResources::NodeResources(const Options& options)
    : options_(options), used_bytes_(options.capacity_bytes.size(), 0) {
  for (const auto& [kind, count] : options_.device_counts) devices_[kind].resize(count);
}

std::string NodeResources::NeverFits(const ResourceNeed& need) const {
  const NodeResources empty(options_);
  std::string blocker = empty.Blocker(need);
  const bool lacks_gpus =
      need.device_kind == v1::DEVICE_KIND_CUDA &&
      need.device_count > static_cast<int>(empty.devices(need.device_kind).size());
  if (lacks_gpus && !options_.gpu_problem.empty()) blocker += "; " + options_.gpu_problem;
  return blocker;
}

std::string NodeResources::Blocker(const ResourceNeed& need) const {
  const std::vector<std::string>& devices = this->devices(need.device_kind);
  const auto free = static_cast<int>(std::count(devices.begin(), devices.end(), ""));
  if (need.device_count > free) {
    return std::string(KindName(need.device_kind)) + " devices: needs " +
           std::to_string(need.device_count) + ", " + std::to_string(free) + " of " +
           std::to_string(devices.size()) + " free";
  }
  for (size_t node = 0; node < need.bytes_by_node.size(); ++node) {
    const int64_t wanted = need.bytes_by_node[node];
    if (wanted <= 0) continue;
    const int64_t capacity = node < used_bytes_.size() ? options_.capacity_bytes[node] : 0;
    const int64_t free_bytes =
        node < used_bytes_.size() ? std::max<int64_t>(0, capacity - used_bytes_[node]) : 0;
    if (wanted > free_bytes) {
      return "host memory of numa " + std::to_string(node) + ": needs " + FormatBytes(wanted) +
             ", " + FormatBytes(free_bytes) + " of " + FormatBytes(capacity) + " free";
    }
  }
  return "";
}

std::vector<int> NodeResources::ChooseDevices(const ResourceNeed& need) const {
  std::vector<int> chosen;
  const std::vector<std::string>& holders = devices(need.device_kind);
  for (size_t i = 0;
       i < holders.size() && static_cast<int>(chosen.size()) < need.device_count; ++i) {
    if (holders[i].empty()) chosen.push_back(static_cast<int>(i));
  }
  return chosen;
}

void NodeResources::Take(const std::string& holder, const ResourceNeed& need,
                         const std::vector<int>& devices) {
  OOM_CHECK(!held_.contains(holder));
  Held held{.need = need, .devices = {}};
  std::vector<std::string>& holders = devices_[need.device_kind];
  for (const int device : devices) {
    if (device < 0 || device >= static_cast<int>(holders.size())) continue;
    holders[static_cast<size_t>(device)] = holder;
    held.devices.push_back(device);
  }
  for (size_t node = 0; node < need.bytes_by_node.size() && node < used_bytes_.size(); ++node) {
    used_bytes_[node] += need.bytes_by_node[node];
  }
  held_[holder] = std::move(held);
}

void NodeResources::Release(const std::string& holder) {
  const auto it = held_.find(holder);
  if (it == held_.end()) return;
  std::vector<std::string>& holders = devices_[it->second.need.device_kind];
  for (const int device : it->second.devices) {
    std::string& holds = holders[static_cast<size_t>(device)];
    if (holds == holder) holds.clear();
  }
  const std::vector<int64_t>& bytes = it->second.need.bytes_by_node;
  for (size_t node = 0; node < bytes.size() && node < used_bytes_.size(); ++node)
    used_bytes_[node] -= bytes[node];
  held_.erase(it);
}

const std::vector<std::string>& NodeResources::devices(v1::DeviceKind kind) const {
  static const std::vector<std::string> none;
  const auto it = devices_.find(kind);
  return it == devices_.end() ? none : it->second;
}

}  // namespace oom
