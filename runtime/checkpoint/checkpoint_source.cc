#include "runtime/checkpoint/checkpoint_source.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "runtime/checkpoint/checkpoint_directory.h"
#include "runtime/checkpoint/unit_file.h"
#include "runtime/model/safetensors.h"

namespace oom {
namespace {

// The header of a safetensors file, from bytes that were checked.
Result<SafetensorsHeader> ReadHeader(const std::string& path, const ManifestFile& file,
                                     const PieceReader& reader, int64_t* data_offset_bytes) {
  uint64_t json_bytes = 0;
  if (file.bytes < 8) return Status(Code::kInvalidArgument, path + ": too short for a header");
  OOM_RETURN_IF_ERROR(reader.Read(0, std::as_writable_bytes(std::span(&json_bytes, 1))));
  if (json_bytes > static_cast<uint64_t>(std::min(kSafetensorsHeaderLimitBytes, file.bytes - 8))) {
    return Status(Code::kInvalidArgument, path + ": its header would pass the end of the file");
  }
  std::string json(json_bytes, '\0');
  OOM_RETURN_IF_ERROR(reader.Read(8, std::as_writable_bytes(std::span(json))));
  *data_offset_bytes = 8 + static_cast<int64_t>(json_bytes);
  return ParseSafetensorsHeader(json, file.bytes - *data_offset_bytes, path);
}

}  // namespace

Result<std::unique_ptr<CheckpointSource>> CheckpointSource::Open(
    const std::string& checkpoint_directory, const std::vector<ParameterUnit>& units) {
  std::unique_ptr<CheckpointSource> source(new CheckpointSource());
  OOM_ASSIGN_OR_RETURN(source->manifest_, ReadCheckpointManifest(checkpoint_directory));
  const std::vector<ManifestFile>& files = source->manifest_.files;
  if (files.size() != units.size()) {
    return Status(Code::kInvalidArgument,
                  checkpoint_directory + ": holds " + std::to_string(files.size()) +
                      " units; the model has " + std::to_string(units.size()));
  }
  for (size_t i = 0; i < units.size(); ++i) {
    OOM_ASSIGN_OR_RETURN(auto unit,
                         OpenUnit(checkpoint_directory + "/" + files[i].name, files[i], units[i]));
    source->units_.push_back(std::move(unit));
  }
  return source;
}

Result<CheckpointSource::Unit> CheckpointSource::OpenUnit(const std::string& path,
                                                          const ManifestFile& file,
                                                          const ParameterUnit& spec) {
  Unit unit;
  OOM_ASSIGN_OR_RETURN(unit.reader, PieceReader::Open(path, file));
  int64_t data_offset_bytes = 0;
  OOM_ASSIGN_OR_RETURN(const SafetensorsHeader header,
                       ReadHeader(path, file, *unit.reader, &data_offset_bytes));
  for (const TensorSpec& tensor : spec.tensors) {
    Tensor& opened = unit.tensors.emplace_back();
    opened.elements = tensor.elements;
    for (const StateArray array : kStateArrays) {
      const std::string name = StateTensorName(array, tensor.name);
      const auto found =
          std::find_if(header.tensors.begin(), header.tensors.end(),
                       [&](const SafetensorInfo& info) { return info.name == name; });
      if (found == header.tensors.end()) {
        return Status(Code::kInvalidArgument, path + ": has no tensor " + name);
      }
      if (found->type != TensorType::kF32 || found->shape != tensor.shape) {
        return Status(
            Code::kInvalidArgument,
            path + ": tensor " + name + " is " + std::string(TensorTypeName(found->type)) + " " +
                FormatShape(found->shape) + "; the model wants F32 " + FormatShape(tensor.shape));
      }
      opened.offset_bytes[static_cast<size_t>(array)] = data_offset_bytes + found->offset_bytes;
    }
  }
  return unit;
}

Status CheckpointSource::Read(int64_t unit, int64_t tensor, StateArray array, int64_t first_element,
                              std::span<float> out) const {
  if (unit < 0 || unit >= static_cast<int64_t>(units_.size()) || tensor < 0 ||
      tensor >= static_cast<int64_t>(units_[static_cast<size_t>(unit)].tensors.size())) {
    return Status(Code::kInvalidArgument, "no tensor " + std::to_string(tensor) + " in unit " +
                                              std::to_string(unit) + " of the checkpoint");
  }
  const Unit& opened = units_[static_cast<size_t>(unit)];
  const Tensor& place = opened.tensors[static_cast<size_t>(tensor)];
  const auto count = static_cast<int64_t>(out.size());
  if (first_element < 0 || count > place.elements || first_element > place.elements - count) {
    return Status(Code::kInvalidArgument, "elements " + std::to_string(first_element) + " to " +
                                              std::to_string(first_element + count) +
                                              " of a tensor with " +
                                              std::to_string(place.elements));
  }
  return opened.reader->Read(place.offset_bytes[static_cast<size_t>(array)] +
                                 first_element * static_cast<int64_t>(sizeof(float)),
                             std::as_writable_bytes(out));
}

}  // namespace oom
