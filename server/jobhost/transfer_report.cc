#include "server/jobhost/transfer_report.h"

#include <map>
#include <nlohmann/json.hpp>

#include "runtime/base/file.h"

namespace oom {

Status WriteTransferReport(const std::string& path, int64_t steps, const SharedLayout& layout,
                           const std::vector<internal::v1::WorkerDone>& ranks,
                           const HostOptimizer& optimizer) {
  std::map<std::string, std::map<std::string, int64_t>> bytes;
  for (const internal::v1::WorkerDone& rank : ranks) {
    for (const internal::v1::Transfer& transfer : rank.transfers()) {
      bytes[transfer.resource()][transfer.unit()] += transfer.bytes();
    }
  }
  for (const ParameterUnit& unit : layout.units()) {
    const int64_t updated = optimizer.update_bytes(unit.index);
    if (updated > 0) bytes["optimizer"][unit.name] = updated;
  }
  const nlohmann::ordered_json report = {
      {"steps", steps}, {"ranks", ranks.size()}, {"bytes", bytes}};
  return WriteFileAtomically(path, report.dump(1) + "\n");
}

}  // namespace oom
