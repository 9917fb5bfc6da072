// Stands where libnvidia-ml.so.1 is: the driver's management library of a machine that the file
// $FAKE_NVML describes, read at each nvmlInit. Lines, each with its default left out:
//
//   gpus COUNT              memory BYTES (of each)          used GPU BYTES
//   driver TEXT             cuda VERSION (13000 is 13.0)
//   init_error CODE         gpu_error GPU CODE

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <string>

namespace {

constexpr int kNotFound = 6;

struct Machine {
  unsigned int gpus = 1;
  unsigned long long memory = 80ULL << 30;
  std::map<unsigned int, unsigned long long> used;
  std::string driver = "580.65.06";
  int cuda = 13000;
  int init_error = 0;
  std::map<unsigned int, int> gpu_error;
};

Machine machine;

Machine Read() {
  Machine read;
  const char* path = std::getenv("FAKE_NVML");
  std::ifstream file(path == nullptr ? "" : path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string key;
    unsigned int gpu = 0;
    words >> key;
    if (key == "gpus") words >> read.gpus;
    if (key == "memory") words >> read.memory;
    if (key == "used" && words >> gpu) words >> read.used[gpu];
    if (key == "driver") words >> read.driver;
    if (key == "cuda") words >> read.cuda;
    if (key == "init_error") words >> read.init_error;
    if (key == "gpu_error" && words >> gpu) words >> read.gpu_error[gpu];
  }
  return read;
}

// A handle is the number of its GPU, counted from 1.
unsigned int GpuOf(void* device) {
  return static_cast<unsigned int>(reinterpret_cast<uintptr_t>(device)) - 1;
}

struct Memory {
  unsigned long long total, free, used;
};

}  // namespace

extern "C" {

int nvmlInit_v2() {
  machine = Read();
  return machine.init_error;
}

int nvmlShutdown() { return 0; }

const char* nvmlErrorString(int error) {
  switch (error) {
    case 9:
      return "Driver Not Loaded";
    case 15:
      return "GPU is lost";
    case 18:
      return "Driver/library version mismatch";
    default:
      return "Unknown Error";
  }
}

int nvmlSystemGetDriverVersion(char* text, unsigned int size) {
  std::snprintf(text, size, "%s", machine.driver.c_str());
  return 0;
}

int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = machine.cuda;
  return 0;
}

int nvmlDeviceGetCount_v2(unsigned int* count) {
  *count = machine.gpus;
  return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void** device) {
  if (index >= machine.gpus) return kNotFound;
  if (const auto found = machine.gpu_error.find(index); found != machine.gpu_error.end()) {
    return found->second;
  }
  *device = reinterpret_cast<void*>(static_cast<uintptr_t>(index) + 1);
  return 0;
}

int nvmlDeviceGetName(void*, char* text, unsigned int size) {
  std::snprintf(text, size, "Fake GPU");
  return 0;
}

int nvmlDeviceGetUUID(void* device, char* text, unsigned int size) {
  std::snprintf(text, size, "GPU-%08u", GpuOf(device));
  return 0;
}

int nvmlDeviceGetMemoryInfo(void* device, Memory* memory) {
  const auto found = machine.used.find(GpuOf(device));
  memory->total = machine.memory;
  memory->used = found == machine.used.end() ? 0 : found->second;
  memory->free = memory->total - memory->used;
  return 0;
}

// It lies in no slot.
int nvmlDeviceGetPciInfo_v3(void*, void*) { return kNotFound; }

}  // extern "C"
