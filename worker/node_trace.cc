#include "worker/node_trace.h"

namespace oom {

NodeTrace::NodeTrace(const Options& options) : options_(options) {
  MutexLock lock(mutex_);
  trace_.AddProcess(options_.process);
  for (int r = 0; r + 1 < kResourceCount; ++r) {
    trace_.AddRow(options_.process, std::string(ResourceName(static_cast<Resource>(r))));
  }
}

void NodeTrace::Add(const Node& node, int64_t step, double start_seconds, double end_seconds) {
  if (!Wants(step)) return;
  std::string name(NodeKindName(node.kind));
  if (node.layer >= 0) {
    name += " layer " + std::to_string(node.layer);
  } else if (node.unit >= 0) {
    name += " " + options_.layout->units()[static_cast<size_t>(node.unit)].name;
  }
  if (node.chunk >= 0) name += " chunk " + std::to_string(node.chunk);
  MutexLock lock(mutex_);
  trace_.Add({.name = name,
              .process = options_.process,
              .row = std::string(ResourceName(node.resource)),
              .start_microseconds = start_seconds * 1e6,
              .duration_microseconds = (end_seconds - start_seconds) * 1e6,
              .bytes = node.bytes > 0 ? node.bytes : -1});
  if (node.resource != Resource::kCompute || memory_uses_.empty()) return;
  const MemoryUse use = memory_uses_.front();
  memory_uses_.pop_front();
  const auto point = [&](double seconds, int64_t bytes) {
    trace_.AddCounter({.name = "device memory",
                       .process = options_.process,
                       .time_microseconds = seconds * 1e6,
                       .bytes = bytes});
  };
  point(start_seconds, use.peak_bytes);
  point(end_seconds, use.bytes);
}

void NodeTrace::AddMemoryUse(const MemoryUse& use) {
  MutexLock lock(mutex_);
  memory_uses_.push_back(use);
}

Status NodeTrace::Write() {
  if (options_.path.empty()) return Status::Ok();
  MutexLock lock(mutex_);
  return trace_.Write(options_.path);
}

}  // namespace oom
