// The NUMA topology, and binding of memory and threads to its nodes, behind one interface: the
// system's by libnuma, and a fake with nodes of one's choice on which tests check placement and who
// touched what. Nodes are numbered densely from 0 over those that have memory and that this process
// may use. Thread-safe.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "runtime/base/mutex.h"
#include "runtime/base/status.h"

namespace oom {

struct NumaNodeInfo {
  int64_t total_bytes = 0;
  int64_t free_bytes = 0;
  std::vector<int> cpus;
};

enum class MemoryAccess { kFirstTouch, kUpdate };

class NumaTopology {
 public:
  virtual ~NumaTopology() = default;

  virtual int node_count() const = 0;
  // REQUIRES: 0 <= node < node_count(), here and below.
  virtual NumaNodeInfo Describe(int node) const = 0;
  // Pages of [address, address + bytes) that are touched later come from `node`. For a shared
  // mapping of a memfd the policy belongs to the file. Fails with kPermissionDenied where mbind is
  // not allowed (a container without CAP_SYS_NICE): then placement is by first touch of a bound
  // thread.
  virtual Status BindMemory(void* address, int64_t bytes, int node) = 0;
  // The calling thread runs on the node's CPUs from now on.
  virtual Status BindThread(int node) = 0;
  // A bound thread says what it is about to touch or update. Does nothing but in the fake.
  virtual void NoteAccess(const void* address, int64_t bytes, MemoryAccess access) = 0;
};

// The machine's. Where the kernel has no NUMA support: one node with everything.
std::unique_ptr<NumaTopology> MakeSystemTopology();

class FakeNumaTopology : public NumaTopology {
 public:
  struct Access {
    std::thread::id thread;
    int thread_node = -1;  // -1: the thread was never bound.
    int memory_node = -1;  // -1: the address was never bound.
    const void* address = nullptr;
    int64_t bytes = 0;
    MemoryAccess access = MemoryAccess::kFirstTouch;
  };

  explicit FakeNumaTopology(std::vector<NumaNodeInfo> nodes) : nodes_(std::move(nodes)) {}
  // Two nodes of `node_bytes` with one CPU each.
  static FakeNumaTopology TwoNodes(int64_t node_bytes);
  FakeNumaTopology(FakeNumaTopology&& other) noexcept : nodes_(std::move(other.nodes_)) {}

  int node_count() const override { return static_cast<int>(nodes_.size()); }
  NumaNodeInfo Describe(int node) const override;
  Status BindMemory(void* address, int64_t bytes, int node) override;
  Status BindThread(int node) override;
  void NoteAccess(const void* address, int64_t bytes, MemoryAccess access) override;

  // -1 if it was never bound.
  int NodeOf(const void* address) const;
  int NodeOfThread(std::thread::id thread) const;
  std::vector<Access> accesses() const;

 private:
  struct Range {
    uintptr_t end = 0;
    int node = 0;
  };
  int NodeOfLocked(const void* address) const OOM_REQUIRES(mutex_);

  // Constant after construction.
  std::vector<NumaNodeInfo> nodes_;

  mutable Mutex mutex_;
  std::map<uintptr_t, Range> ranges_ OOM_GUARDED_BY(mutex_);
  std::map<std::thread::id, int> threads_ OOM_GUARDED_BY(mutex_);
  std::vector<Access> accesses_ OOM_GUARDED_BY(mutex_);
};

}  // namespace oom
