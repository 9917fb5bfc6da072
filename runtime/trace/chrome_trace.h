// ChromeTrace collects what ran when on which resource, and writes it as Chrome trace JSON, which
// Perfetto opens: one process per rank and job host, one row per resource. Times are microseconds
// of one clock (CLOCK_MONOTONIC of the node), so parts that were written by several processes merge
// into one picture. Thread-compatible.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "runtime/base/status.h"

namespace oom {

struct TraceEvent {
  std::string name;     // "forward layers.3"
  std::string process;  // "rank 0", "job host"
  std::string row;      // The resource: "compute", "H2D", "optimizer numa 0 thread 3"
  double start_microseconds = 0;
  double duration_microseconds = 0;
  int64_t bytes = -1;  // -1: moves none.
};

// A point of a curve that stays at its value until the next point.
struct TraceCounter {
  std::string name;     // "device memory"
  std::string process;  // "rank 0"
  double time_microseconds = 0;
  int64_t bytes = 0;
};

class ChromeTrace {
 public:
  // Where the process stands in the picture, the lowest on top; rows stand in the order of first
  // use or of the calls of AddRow. A process or row that is only named by an event comes after
  // those.
  void AddProcess(const std::string& process);
  void AddRow(const std::string& process, const std::string& row);
  void Add(TraceEvent event);
  void AddCounter(TraceCounter counter);
  // Everything of `part`, its processes and rows after ours unless we have them.
  void Merge(const ChromeTrace& part);

  const std::vector<TraceEvent>& events() const { return events_; }
  const std::vector<TraceCounter>& counters() const { return counters_; }

  // Events of one row that overlap only in part go to extra rows "<row> (2)", since the format can
  // show a row's events side by side or nested only.
  std::string ToJson() const;
  // Reads what ToJson wrote. Fails with kInvalidArgument (`where` named).
  static Result<ChromeTrace> FromJson(const std::string& text, const std::string& where);

  // Codes of WriteFileAtomically.
  Status Write(const std::string& path) const;
  // Fails with codes of ReadFile or kInvalidArgument.
  static Result<ChromeTrace> Read(const std::string& path);

 private:
  struct Process {
    std::string name;
    std::vector<std::string> rows;
  };
  Process& FindProcess(const std::string& name);

  std::vector<Process> processes_;
  std::vector<TraceEvent> events_;
  std::vector<TraceCounter> counters_;
};

}  // namespace oom
