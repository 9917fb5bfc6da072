// Any bytes as a safetensors file: Open fails with a Status or gives tensors whose every byte can
// be read. The file lies in memory (memfd), so that an iteration costs no disk.

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/base/check.h"
#include "runtime/base/unique_fd.h"
#include "runtime/model/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  oom::UniqueFd memory(::memfd_create("input", MFD_CLOEXEC));
  OOM_CHECK(memory.valid());
  OOM_CHECK(::write(memory.get(), data, size) == static_cast<ssize_t>(size));
  const std::string path = "/proc/self/fd/" + std::to_string(memory.get());
  const auto file = oom::SafetensorsFile::Open(path);
  if (!file.ok()) {
    OOM_CHECK(file.status().message().find(path) != std::string::npos);
    return 0;
  }
  int64_t total_bytes = 0;
  for (const oom::SafetensorInfo& tensor : (*file)->header().tensors) {
    OOM_CHECK((*file)->Find(tensor.name) == &tensor);
    std::vector<std::byte> bytes(static_cast<size_t>(tensor.bytes));
    OOM_CHECK((*file)->Read(tensor, 0, bytes).ok());
    const auto mapped = (*file)->bytes(tensor);
    OOM_CHECK(std::vector<std::byte>(mapped.begin(), mapped.end()) == bytes);
    if (oom::IsTrainableType(tensor.type)) {
      std::vector<float> values(static_cast<size_t>(tensor.elements()));
      OOM_CHECK((*file)->ReadFloats(tensor, 0, values).ok());
      OOM_CHECK(oom::ConvertFromFloat(tensor.type, values, bytes) < 0 ||
                tensor.type == oom::TensorType::kF16);
      OOM_CHECK(std::vector<std::byte>(mapped.begin(), mapped.end()) == bytes);
    }
    total_bytes += tensor.bytes;
  }
  OOM_CHECK(total_bytes == (*file)->header().data_bytes);
  return 0;
}
