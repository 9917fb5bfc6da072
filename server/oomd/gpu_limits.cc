#include "server/oomd/gpu_limits.h"

#include <algorithm>
#include <future>

#include "runtime/base/units.h"

namespace oom {
namespace {

// The driver's own reserve and an idle display take less.
constexpr int64_t kIdleBytes = 1_GiB;

std::vector<std::string> Holders(const ServiceContext& services) {
  std::promise<std::vector<std::string>> answer;
  services.loop->Post([&answer](Controller& controller) {
    answer.set_value(controller.resources().devices(v1::DEVICE_KIND_CUDA));
  });
  return answer.get_future().get();
}

}  // namespace

void LimitGpuMemory(const std::vector<Gpu>& gpus, const std::vector<std::string>& holders,
                    NodeLimits* limits) {
  limits->gpu_memory_bytes = 0;
  limits->gpu_memory_note.clear();
  for (size_t i = 0; i < gpus.size(); ++i) {
    const Gpu& gpu = gpus[i];
    const bool is_held = i < holders.size() && !holders[i].empty();
    const int64_t used_bytes = gpu.memory_bytes - gpu.free_bytes;
    const bool has_others = !is_held && used_bytes > kIdleBytes;
    // 0 would say that it is not known.
    const int64_t bytes = std::max<int64_t>(1, has_others ? gpu.free_bytes : gpu.memory_bytes);
    if (i > 0 && bytes >= limits->gpu_memory_bytes) continue;
    limits->gpu_memory_bytes = bytes;
    limits->gpu_memory_note = "";
    if (!has_others) continue;
    limits->gpu_memory_note =
        "other processes hold " + FormatBytes(used_bytes) + " of GPU " + std::to_string(i) + "'s " +
        FormatBytes(gpu.memory_bytes) +
        ": end them (nvidia-smi lists them), or start oomd with CUDA_VISIBLE_DEVICES without it";
  }
}

NodeLimits LimitsNow(const ServiceContext& services, const v1::JobSpec& spec) {
  NodeLimits limits = services.limits;
  if (spec.devices().kind() != v1::DEVICE_KIND_CUDA || services.gpus.empty()) return limits;
  std::vector<std::string> holders = Holders(services);
  // While jobs have all of them there is nothing to ask, and a driver that locks a job's memory
  // answers late.
  if (std::count(holders.begin(), holders.end(), "") == 0) return limits;
  const std::vector<Gpu> gpus = FindGpus().gpus;
  if (gpus.size() != services.gpus.size()) return limits;
  // What a job took meanwhile is not others'.
  const std::vector<std::string> after = Holders(services);
  for (size_t i = 0; i < holders.size(); ++i) {
    if (holders[i].empty()) holders[i] = after[i];
  }
  LimitGpuMemory(gpus, holders, &limits);
  return limits;
}

}  // namespace oom
