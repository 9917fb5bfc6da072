#include "server/jobhost/step_tracer.h"

#include <unistd.h>

#include <algorithm>

#include "runtime/base/file.h"

namespace oom {

StepTracer::StepTracer(const v1::JobSpec& spec, const SharedLayout* layout)
    : layout_(layout), directory_(spec.output() + "/trace") {
  if (!spec.has_trace() || spec.trace().first_step() <= 0) return;
  first_step_ = spec.trace().first_step() - 1;
  end_step_ = first_step_ + spec.trace().step_count();
  for (int rank = 0; rank < layout_->rank_count(); ++rank) ::unlink(PartPath(rank).c_str());
}

std::string StepTracer::PartPath(int rank) const {
  if (first_step_ >= end_step_) return "";
  return directory_ + "/parts/rank-" + std::to_string(rank) + ".json";
}

void StepTracer::OnUpdate(int numa_node, int64_t chunk, int64_t step, double start_seconds,
                          double end_seconds) {
  if (step < first_step_ || step >= end_step_) return;
  MutexLock lock(mutex_);
  spans_.push_back({.thread = std::this_thread::get_id(),
                    .numa_node = numa_node,
                    .chunk = chunk,
                    .start_seconds = start_seconds,
                    .end_seconds = end_seconds});
}

Status StepTracer::Write() {
  MutexLock lock(mutex_);
  ChromeTrace merged;
  bool has_part = false;
  for (int rank = 0; rank < layout_->rank_count(); ++rank) {
    auto part = ChromeTrace::Read(PartPath(rank));
    if (!part.ok() && part.status().code() == Code::kNotFound) continue;
    if (!part.ok()) return part.status();
    merged.Merge(*part);
    has_part = true;
  }
  // A resume beyond the traced steps traced nothing: what an earlier attempt wrote stays.
  if (!has_part && spans_.empty()) return Status::Ok();
  std::sort(spans_.begin(), spans_.end(),
            [](const Span& a, const Span& b) { return a.start_seconds < b.start_seconds; });
  std::map<std::thread::id, std::string> rows;
  std::map<int, int> thread_count;
  ChromeTrace host;
  host.AddProcess("job host");
  for (const Span& span : spans_) {
    auto [row, is_new] = rows.try_emplace(span.thread);
    if (is_new) {
      row->second = "optimizer numa " + std::to_string(span.numa_node) + " thread " +
                    std::to_string(thread_count[span.numa_node]++);
    }
    const Chunk& chunk = layout_->chunks()[static_cast<size_t>(span.chunk)];
    host.Add({.name = "update " + layout_->units()[static_cast<size_t>(chunk.unit)].name,
              .process = "job host",
              .row = row->second,
              .start_microseconds = span.start_seconds * 1e6,
              .duration_microseconds = (span.end_seconds - span.start_seconds) * 1e6});
  }
  OOM_RETURN_IF_ERROR(MakeDirectories(directory_ + "/parts"));
  OOM_RETURN_IF_ERROR(host.Write(directory_ + "/parts/job-host.json"));
  merged.Merge(host);
  return merged.Write(directory_ + "/steps.json");
}

}  // namespace oom
