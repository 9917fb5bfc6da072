#include "server/jobhost/host_pid_file.h"

#include <unistd.h>

#include <sstream>

#include "runtime/base/file.h"

namespace oom {
namespace {

constexpr const char* kRunning = "running";
constexpr const char* kForked = "forked";

std::string PathIn(const std::string& job_directory) { return job_directory + "/host.pid"; }

}  // namespace

uint64_t ProcessStartTicks(pid_t pid) {
  const Result<std::string> stat = ReadFile("/proc/" + std::to_string(pid) + "/stat", 65536);
  if (!stat.ok()) return 0;
  // The name in parentheses may hold spaces and parentheses itself.
  const size_t close = stat->rfind(')');
  if (close == std::string::npos) return 0;
  std::istringstream fields(stat->substr(close + 1));
  std::string field;
  fields >> field;  // The third: the state.
  if (field == "Z" || field == "X") return 0;
  for (int number = 4; number < 22; ++number) fields >> field;
  uint64_t ticks = 0;
  fields >> ticks;
  return fields ? ticks : 0;
}

Status WriteHostPid(const std::string& job_directory, const HostPid& host) {
  return WriteFileAtomically(PathIn(job_directory), std::to_string(host.pid) + " " + std::to_string(host.start_ticks) +
                                                        " " + (host.is_running ? kRunning : kForked) + "\n");
}

Result<HostPid> ReadHostPid(const std::string& job_directory) {
  const std::string path = PathIn(job_directory);
  const Result<std::string> text = ReadFile(path, 4096);
  if (!text.ok()) return Status(Code::kNotFound, text.status().message());
  HostPid host;
  std::string state;
  std::istringstream fields(*text);
  if (!(fields >> host.pid >> host.start_ticks) || host.pid <= 0) {
    return Status(Code::kDataLoss, path + " names no process");
  }
  fields >> state;
  // Job hosts wrote no word once; an upgraded daemon still finds them.
  host.is_running = state != kForked;
  return host;
}

void RemoveHostPid(const std::string& job_directory) { ::unlink(PathIn(job_directory).c_str()); }

}  // namespace oom
