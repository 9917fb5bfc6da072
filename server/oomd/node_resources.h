// NodeResources accounts for what jobs hold of the node: devices by kind, and host bytes by NUMA
// node. Not thread-safe: the control thread owns it.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "oom/internal/v1/control.pb.h"
#include "oom/v1/job.pb.h"

namespace oom {

// What a job holds while it is active.
struct ResourceNeed {
  v1::DeviceKind device_kind = v1::DEVICE_KIND_CPU;
  int device_count = 0;
  std::vector<int64_t> bytes_by_node;  // Shorter than the node count: 0 from there on.
};

// Pools, and what the plan's estimate adds on the host ("numa N"; on cpu devices also "device R").
ResourceNeed NeedOf(const v1::Job& job, const std::vector<internal::v1::Pool>& pools);

class NodeResources {
 public:
  struct Options {
    std::vector<int64_t> capacity_bytes;  // By NUMA node.
    std::map<v1::DeviceKind, int> device_counts;
    // Empty, or why there are no more GPUs.
    std::string gpu_problem;
  };
  explicit NodeResources(const Options& options);

  // Empty if it fits beside what is held now, else what blocks it, for a human.
  std::string Blocker(const ResourceNeed& need) const;
  // Empty if it fits on an empty node.
  std::string NeverFits(const ResourceNeed& need) const;
  // Free devices for it, as many as there are.
  std::vector<int> ChooseDevices(const ResourceNeed& need) const;
  // REQUIRES: `holder` holds nothing. A job re-adopted after a restart may exceed the capacity, and may share devices
  // that are gone.
  void Take(const std::string& holder, const ResourceNeed& need, const std::vector<int>& devices);
  // Does nothing if `holder` holds nothing.
  void Release(const std::string& holder);

  bool holds(const std::string& holder) const { return held_.contains(holder); }
  const std::vector<int64_t>& used_bytes() const { return used_bytes_; }
  const std::vector<int64_t>& capacity_bytes() const { return options_.capacity_bytes; }
  // Holder by device index; "" when free.
  const std::vector<std::string>& devices(v1::DeviceKind kind) const;

 private:
  struct Held {
    ResourceNeed need;
    std::vector<int> devices;
  };
  const Options options_;
  std::vector<int64_t> used_bytes_;
  std::map<v1::DeviceKind, std::vector<std::string>> devices_;
  std::map<std::string, Held> held_;
};

}  // namespace oom
