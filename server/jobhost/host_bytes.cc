#include "server/jobhost/host_bytes.h"

#include <cstdlib>
#include <string>

#include "runtime/base/file.h"
#include "runtime/memory/pool.h"

namespace oom {

int64_t ProportionalSetBytes(const std::vector<pid_t>& processes) {
  int64_t bytes = 0;
  for (const pid_t pid : processes) {
    const auto text = ReadFile("/proc/" + std::to_string(pid) + "/smaps_rollup", 1 << 20);
    if (!text.ok()) continue;
    const size_t place = text->find("\nPss:");
    if (place != std::string::npos) bytes += std::atoll(text->c_str() + place + 5) * 1024;
  }
  return bytes;
}

int64_t HugetlbPoolBytes(const internal::v1::JobStart& start) {
  int64_t bytes = 0;
  for (const internal::v1::Pool& pool : start.pools()) {
    if (pool.page_kind() == kHugetlbPages) bytes += pool.bytes();
  }
  return bytes;
}

}  // namespace oom
