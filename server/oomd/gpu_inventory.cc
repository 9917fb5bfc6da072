#include "server/oomd/gpu_inventory.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>

namespace oom {
namespace {

// Of CUDA 13.0, and of the first driver that offers it.
constexpr int kCudaNeeded = 13000;
constexpr const char* kDriverNeeded = "580";
// Of nvmlReturn_t.
constexpr int kDriverNotLoaded = 9;
constexpr int kGpuIsLost = 15;
constexpr int kLibraryMismatch = 18;

// The few functions of libnvidia-ml that are needed; their binary interface is fixed by the
// versioned names.
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
    if (library_ == nullptr) {
      problem_ = std::string(
                     "no NVIDIA driver is installed (libnvidia-ml.so.1 cannot be loaded); install "
                     "driver ") +
                 kDriverNeeded + " or newer, then restart oomd";
      return;
    }
    const bool found =
        Find("nvmlInit_v2", &init_) && Find("nvmlShutdown", &shutdown_) &&
        Find("nvmlDeviceGetCount_v2", &count_) && Find("nvmlDeviceGetHandleByIndex_v2", &handle_) &&
        Find("nvmlDeviceGetName", &name_) && Find("nvmlDeviceGetUUID", &uuid_) &&
        Find("nvmlDeviceGetMemoryInfo", &memory_) && Find("nvmlDeviceGetPciInfo_v3", &pci_) &&
        Find("nvmlSystemGetDriverVersion", &driver_version_) &&
        Find("nvmlSystemGetCudaDriverVersion_v2", &cuda_version_) &&
        Find("nvmlErrorString", &error_string_);
    if (!found) {
      problem_ = TooOld("the NVIDIA driver's management library lacks functions");
      return;
    }
    if (const int error = init_(); error != 0) {
      problem_ = "the NVIDIA driver does not answer: " + Describe(error);
      if (error == kDriverNotLoaded)
        problem_ += "; load it (sudo modprobe nvidia), then restart oomd";
      if (error == kLibraryMismatch) problem_ += "; the driver was updated: reboot";
      return;
    }
    is_initialized_ = true;
  }
  ~Nvml() {
    if (is_initialized_) shutdown_();
    if (library_ != nullptr) ::dlclose(library_);
  }
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  bool is_loaded() const { return library_ != nullptr; }
  const std::string& problem() const { return problem_; }

  std::vector<Gpu> Gpus() {
    std::vector<Gpu> gpus;
    if (!is_initialized_ || !OffersCuda()) return gpus;
    unsigned int count = 0;
    if (const int error = count_(&count); error != 0) {
      problem_ = "the NVIDIA driver does not say how many GPUs there are: " + Describe(error);
      return gpus;
    }
    if (count == 0) {
      problem_ =
          "the NVIDIA driver sees no GPU; give them to this container (--gpus all), or see lspci "
          "-d 10de:";
    }
    for (unsigned int i = 0; i < count; ++i) {
      NvmlDevice device = nullptr;
      NvmlMemory memory{};
      char name[96] = {};
      char uuid[96] = {};
      int error = handle_(i, &device);
      if (error == 0) error = memory_(device, &memory);
      if (error != 0) {
        const std::string number = std::to_string(i);
        problem_ += (problem_.empty() ? "" : "; ") +
                    ("GPU " + number + " does not answer: " + Describe(error));
        if (error == kGpuIsLost) {
          problem_ +=
              "; look for its XID (sudo dmesg | grep -i xid), then reset it (sudo nvidia-smi "
              "--gpu-reset -i " +
              number + ") or reboot, and restart oomd";
        }
        continue;
      }
      static_cast<void>(name_(device, name, sizeof(name)));
      static_cast<void>(uuid_(device, uuid, sizeof(uuid)));
      gpus.push_back({.index = static_cast<int>(i),
                      .name = name,
                      .uuid = uuid,
                      .memory_bytes = static_cast<int64_t>(memory.total),
                      .free_bytes = static_cast<int64_t>(memory.free),
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

  // "GPU is lost (NVML error 15)"
  std::string Describe(int error) const {
    return std::string(error_string_(error)) + " (NVML error " + std::to_string(error) + ")";
  }

  static std::string TooOld(const std::string& what) {
    return what + "; OOM needs CUDA " + std::to_string(kCudaNeeded / 1000) + "." +
           std::to_string(kCudaNeeded % 1000 / 10) + ": install driver " + kDriverNeeded +
           " or newer, then restart oomd";
  }

  bool OffersCuda() {
    int cuda = 0;
    char driver[96] = {};
    if (cuda_version_(&cuda) != 0 || driver_version_(driver, sizeof(driver)) != 0)
      return true;  // A job will say.
    if (cuda >= kCudaNeeded) return true;
    problem_ = TooOld(std::string("the NVIDIA driver ") + driver + " offers CUDA " +
                      std::to_string(cuda / 1000) + "." + std::to_string(cuda % 1000 / 10));
    return false;
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
  bool is_initialized_ = false;
  std::string problem_;
  int (*init_)() = nullptr;
  int (*shutdown_)() = nullptr;
  int (*count_)(unsigned int*) = nullptr;
  int (*handle_)(unsigned int, NvmlDevice*) = nullptr;
  int (*name_)(NvmlDevice, char*, unsigned int) = nullptr;
  int (*uuid_)(NvmlDevice, char*, unsigned int) = nullptr;
  int (*memory_)(NvmlDevice, NvmlMemory*) = nullptr;
  int (*pci_)(NvmlDevice, NvmlPciInfo*) = nullptr;
  int (*driver_version_)(char*, unsigned int) = nullptr;
  int (*cuda_version_)(int*) = nullptr;
  const char* (*error_string_)(int) = nullptr;
};

std::vector<Gpu> Select(const std::vector<Gpu>& all, const std::string& visible) {
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

}  // namespace

GpuInventory FindGpus() {
  Nvml nvml;
  GpuInventory inventory;
  inventory.gpus = nvml.Gpus();
  inventory.problem = nvml.problem();
  inventory.has_driver = nvml.is_loaded();
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr) return inventory;
  const size_t all = inventory.gpus.size();
  inventory.gpus = Select(inventory.gpus, visible);
  if (inventory.gpus.size() < all) {
    inventory.problem += (inventory.problem.empty() ? "" : "; ") +
                         ("CUDA_VISIBLE_DEVICES=\"" + std::string(visible)) + "\" leaves oomd " +
                         std::to_string(inventory.gpus.size()) + " of " + std::to_string(all) +
                         " GPUs";
  }
  return inventory;
}

}  // namespace oom
