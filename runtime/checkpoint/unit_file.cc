#include "runtime/checkpoint/unit_file.h"

#include <cstdio>
#include <cstring>

#include "runtime/base/check.h"
#include "runtime/base/units.h"

namespace oom {
namespace {

constexpr int64_t kAlignmentBytes = 4096;

// Tensor names are made of letters, digits, '.' and '_' (runtime/model/unit.cc), so none needs
// escapes.
void AppendEntry(std::string* json, StateArray array, const TensorSpec& spec, int64_t begin_bytes,
                 int64_t end_bytes) {
  *json += json->size() > 1 ? ",\"" : "\"";
  *json += StateTensorName(array, spec.name) + "\":{\"dtype\":\"F32\",\"shape\":[";
  for (size_t i = 0; i < spec.shape.size(); ++i) {
    if (i > 0) *json += ",";
    *json += std::to_string(spec.shape[i]);
  }
  *json +=
      "],\"data_offsets\":[" + std::to_string(begin_bytes) + "," + std::to_string(end_bytes) + "]}";
}

}  // namespace

std::string_view StateArrayName(StateArray array) {
  switch (array) {
    case StateArray::kMaster:
      return "master";
    case StateArray::kMoment1:
      return "moment1";
    case StateArray::kMoment2:
      return "moment2";
  }
  OOM_CHECK_MSG(false, "unknown state array");
}

std::string StateTensorName(StateArray array, std::string_view tensor_name) {
  return std::string(StateArrayName(array)) + "/" + std::string(tensor_name);
}

UnitFileLayout LayOutUnitFile(const ParameterUnit& unit) {
  UnitFileLayout layout;
  char name[48];
  std::snprintf(name, sizeof(name), "unit-%04lld.safetensors", static_cast<long long>(unit.index));
  layout.name = name;
  layout.offset_bytes.resize(unit.tensors.size());
  std::string json = "{";
  int64_t data_bytes = 0;
  for (const bool aligned : {true, false}) {
    for (size_t tensor = 0; tensor < unit.tensors.size(); ++tensor) {
      const TensorSpec& spec = unit.tensors[tensor];
      const int64_t bytes = spec.elements * static_cast<int64_t>(sizeof(float));
      if ((bytes % kAlignmentBytes == 0) != aligned) continue;
      for (const StateArray array : kStateArrays) {
        AppendEntry(&json, array, spec, data_bytes, data_bytes + bytes);
        layout.offset_bytes[tensor][static_cast<size_t>(array)] = data_bytes;
        data_bytes += bytes;
      }
    }
  }
  json += "}";
  const int64_t header_bytes = RoundUp(8 + static_cast<int64_t>(json.size()), kAlignmentBytes);
  json.resize(static_cast<size_t>(header_bytes - 8), ' ');
  const uint64_t json_bytes = json.size();
  layout.header.resize(8);
  std::memcpy(layout.header.data(), &json_bytes, 8);  // Little-endian, as the machine is.
  layout.header += json;
  for (auto& offsets : layout.offset_bytes) {
    for (int64_t& offset : offsets) offset += header_bytes;
  }
  layout.bytes = header_bytes + data_bytes;
  return layout;
}

}  // namespace oom
