#include "server/oomd/gpu_inventory.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>

namespace oom {
namespace {

// The few functions of libnvidia-ml that are needed; their binary interface is fixed by the versioned names.
struct NvmlMemory {
  unsigned long long total, free, used;
};
struct NvmlPciInfo {
  char bus_id_legacy[16];
  unsigned int domain, bus, device, pci_device_id, pci_subsystem_id;
  char bus_id[32];
};
using NvmlDevice = void*;

class Nvml {
 public:
  Nvml() : library_(::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL)) {
    if (library_ == nullptr) return;
    const bool found = Find("nvmlInit_v2", &init_) && Find("nvmlShutdown", &shutdown_) &&
                       Find("nvmlDeviceGetCount_v2", &count_) &&
                       Find("nvmlDeviceGetHandleByIndex_v2", &handle_) &&
                       Find("nvmlDeviceGetName", &name_) && Find("nvmlDeviceGetUUID", &uuid_) &&
                       Find("nvmlDeviceGetMemoryInfo", &memory_) &&
                       Find("nvmlDeviceGetPciInfo_v3", &pci_);
    is_ready_ = found && init_() == 0;
  }
  ~Nvml() {
    if (is_ready_) shutdown_();
    if (library_ != nullptr) ::dlclose(library_);
  }
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  std::vector<Gpu> Gpus() const {
    std::vector<Gpu> gpus;
    unsigned int count = 0;
    if (!is_ready_ || count_(&count) != 0) return gpus;
    for (unsigned int i = 0; i < count; ++i) {
      NvmlDevice device = nullptr;
      NvmlMemory memory{};
      char name[96] = {};
      char uuid[96] = {};
      if (handle_(i, &device) != 0 || memory_(device, &memory) != 0) continue;
      static_cast<void>(name_(device, name, sizeof(name)));
      static_cast<void>(uuid_(device, uuid, sizeof(uuid)));
      gpus.push_back({.index = static_cast<int>(i),
                      .name = name,
                      .uuid = uuid,
                      .memory_bytes = static_cast<int64_t>(memory.total),
                      .numa_node = NumaNode(device)});
    }
    return gpus;
  }

 private:
  template <class Function>
  bool Find(const char* name, Function* function) {
    *function = reinterpret_cast<Function>(::dlsym(library_, name));
    return *function != nullptr;
  }

  int NumaNode(NvmlDevice device) const {
    NvmlPciInfo pci{};
    if (pci_(device, &pci) != 0) return 0;
    char path[96];
    std::snprintf(path, sizeof(path), "/sys/bus/pci/devices/%04x:%02x:%02x.0/numa_node", pci.domain,
                  pci.bus, pci.device);
    int node = 0;
    std::ifstream(path) >> node;
    // -1: the machine has one node, or does not say.
    return std::max(0, node);
  }

  void* library_ = nullptr;
  bool is_ready_ = false;
  int (*init_)() = nullptr;
  int (*shutdown_)() = nullptr;
  int (*count_)(unsigned int*) = nullptr;
  int (*handle_)(unsigned int, NvmlDevice*) = nullptr;
  int (*name_)(NvmlDevice, char*, unsigned int) = nullptr;
  int (*uuid_)(NvmlDevice, char*, unsigned int) = nullptr;
  int (*memory_)(NvmlDevice, NvmlMemory*) = nullptr;
  int (*pci_)(NvmlDevice, NvmlPciInfo*) = nullptr;
};

}  // namespace

std::vector<Gpu> FindGpus() {
  const std::vector<Gpu> all = Nvml().Gpus();
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr) return all;
  std::vector<Gpu> selected;
  std::istringstream list(visible);
  for (std::string wanted; std::getline(list, wanted, ',');) {
    const auto found = std::find_if(all.begin(), all.end(), [&](const Gpu& gpu) {
      return wanted == std::to_string(gpu.index) ||
             (wanted.rfind("GPU-", 0) == 0 && gpu.uuid.rfind(wanted, 0) == 0);
    });
    // CUDA ends the list at the first entry that it does not know.
    if (found == all.end()) break;
    selected.push_back(*found);
    selected.back().index = static_cast<int>(selected.size()) - 1;
  }
  return selected;
}

}  // namespace oom
