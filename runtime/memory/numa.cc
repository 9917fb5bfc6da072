#include "runtime/memory/numa.h"

#include <numa.h>
#include <numaif.h>
#include <sched.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <cerrno>

namespace oom {
namespace {

Status BindCallingThread(const std::vector<int>& cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int cpu : cpus) {
    if (cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
  }
  if (sched_setaffinity(0, sizeof(set), &set) != 0) return ErrnoStatus(errno, "sched_setaffinity");
  return Status::Ok();
}

class SystemTopology : public NumaTopology {
 public:
  SystemTopology() {
    // What this process may use, read once: a thread that is bound later has a smaller set.
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    sched_getaffinity(0, sizeof(allowed), &allowed);
    has_numa_ = numa_available() >= 0;
    if (has_numa_) {
      bitmask* memory_nodes = numa_get_mems_allowed();
      for (int id = 0; id <= numa_max_node(); ++id) {
        long long free_bytes = 0;
        if (!numa_bitmask_isbitset(memory_nodes, id) || numa_node_size64(id, &free_bytes) <= 0)
          continue;
        nodes_.push_back({.id = id, .cpus = {}});
        bitmask* cpus = numa_allocate_cpumask();
        if (numa_node_to_cpus(id, cpus) == 0) {
          for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
            if (CPU_ISSET(cpu, &allowed) && numa_bitmask_isbitset(cpus, cpu))
              nodes_.back().cpus.push_back(cpu);
          }
        }
        numa_free_cpumask(cpus);
      }
      numa_bitmask_free(memory_nodes);
    }
    if (nodes_.empty()) {
      has_numa_ = false;
      nodes_.push_back({.id = 0, .cpus = {}});
    }
    // A node with memory only (or a kernel that names no CPUs) is served by every CPU.
    for (Node& node : nodes_) {
      if (!node.cpus.empty()) continue;
      for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (CPU_ISSET(cpu, &allowed)) node.cpus.push_back(cpu);
      }
    }
  }

  int node_count() const override { return static_cast<int>(nodes_.size()); }

  NumaNodeInfo Describe(int node) const override {
    NumaNodeInfo info;
    info.cpus = nodes_.at(node).cpus;
    if (has_numa_) {
      long long free_bytes = 0;
      info.total_bytes = numa_node_size64(nodes_[node].id, &free_bytes);
      info.free_bytes = free_bytes;
    } else {
      struct sysinfo system = {};
      sysinfo(&system);
      info.total_bytes = static_cast<int64_t>(system.totalram) * system.mem_unit;
      info.free_bytes = static_cast<int64_t>(system.freeram) * system.mem_unit;
    }
    return info;
  }

  Status BindMemory(void* address, int64_t bytes, int node) override {
    if (!has_numa_ || nodes_.size() == 1) return Status::Ok();  // There is nothing to choose.
    bitmask* mask = numa_allocate_nodemask();
    numa_bitmask_setbit(mask, nodes_.at(node).id);
    const long rc = mbind(address, bytes, MPOL_BIND, mask->maskp, mask->size + 1, 0);
    const int error = errno;
    numa_bitmask_free(mask);
    if (rc == 0) return Status::Ok();
    if (error == EPERM) {
      return Status(Code::kPermissionDenied,
                    "mbind is not permitted here; memory is placed by first touch");
    }
    return ErrnoStatus(error, "mbind to NUMA node " + std::to_string(node));
  }

  Status BindThread(int node) override { return BindCallingThread(nodes_.at(node).cpus); }

  void NoteAccess(const void*, int64_t, MemoryAccess) override {}

 private:
  struct Node {
    int id = 0;  // The kernel's number.
    std::vector<int> cpus;
  };

  // Constant after construction.
  bool has_numa_ = false;
  std::vector<Node> nodes_;
};

}  // namespace

std::unique_ptr<NumaTopology> MakeSystemTopology() { return std::make_unique<SystemTopology>(); }

FakeNumaTopology FakeNumaTopology::TwoNodes(int64_t node_bytes) {
  return FakeNumaTopology({{.total_bytes = node_bytes, .free_bytes = node_bytes, .cpus = {0}},
                           {.total_bytes = node_bytes, .free_bytes = node_bytes, .cpus = {1}}});
}

NumaNodeInfo FakeNumaTopology::Describe(int node) const { return nodes_.at(node); }

Status FakeNumaTopology::BindMemory(void* address, int64_t bytes, int node) {
  OOM_CHECK(node >= 0 && node < node_count() && bytes > 0);
  const MutexLock lock(mutex_);
  const auto begin = reinterpret_cast<uintptr_t>(address);
  const uintptr_t end = begin + static_cast<uintptr_t>(bytes);
  // The newest binding wins, as with mbind: cut what it covers out of the older ones.
  auto it = ranges_.lower_bound(begin);
  if (it != ranges_.begin()) --it;
  while (it != ranges_.end() && it->first < end) {
    const auto [old_begin, old] = *it;
    if (old.end <= begin) {
      ++it;
      continue;
    }
    it = ranges_.erase(it);
    if (old_begin < begin) ranges_[old_begin] = {.end = begin, .node = old.node};
    if (old.end > end) it = ranges_.insert({end, {.end = old.end, .node = old.node}}).first;
  }
  ranges_[begin] = {.end = end, .node = node};
  return Status::Ok();
}

Status FakeNumaTopology::BindThread(int node) {
  OOM_CHECK(node >= 0 && node < node_count());
  const MutexLock lock(mutex_);
  threads_[std::this_thread::get_id()] = node;
  return Status::Ok();
}

void FakeNumaTopology::NoteAccess(const void* address, int64_t bytes, MemoryAccess access) {
  const MutexLock lock(mutex_);
  const auto thread = threads_.find(std::this_thread::get_id());
  accesses_.push_back({.thread = std::this_thread::get_id(),
                       .thread_node = thread == threads_.end() ? -1 : thread->second,
                       .memory_node = NodeOfLocked(address),
                       .address = address,
                       .bytes = bytes,
                       .access = access});
}

int FakeNumaTopology::NodeOfLocked(const void* address) const {
  const auto value = reinterpret_cast<uintptr_t>(address);
  auto it = ranges_.upper_bound(value);
  if (it == ranges_.begin()) return -1;
  --it;
  return value < it->second.end ? it->second.node : -1;
}

int FakeNumaTopology::NodeOf(const void* address) const {
  const MutexLock lock(mutex_);
  return NodeOfLocked(address);
}

int FakeNumaTopology::NodeOfThread(std::thread::id thread) const {
  const MutexLock lock(mutex_);
  const auto it = threads_.find(thread);
  return it == threads_.end() ? -1 : it->second;
}

std::vector<FakeNumaTopology::Access> FakeNumaTopology::accesses() const {
  const MutexLock lock(mutex_);
  return accesses_;
}

}  // namespace oom
