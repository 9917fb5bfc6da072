#include "runtime/model/safetensors_directory.h"

#include <filesystem>
#include <map>
#include <utility>

#include "runtime/base/file.h"
#include "runtime/model/strict_json.h"

namespace oom {
namespace {

using nlohmann::json;

Status Malformed(const std::string& path, const std::string& what) {
  return Status(Code::kInvalidArgument, path + ": " + what).WithField(path);
}

// A shard lies in the directory itself: an index must not make us read elsewhere.
bool IsPlainFileName(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos &&
         name.find('\0') == std::string::npos;
}

// Shard file name by tensor name.
Result<std::map<std::string, std::string>> ReadIndex(const std::string& path) {
  OOM_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  OOM_ASSIGN_OR_RETURN(const json root, ParseStrictJson(text, path));
  if (!root.is_object() || !root.contains("weight_map") || !root["weight_map"].is_object()) {
    return Malformed(path, "has no \"weight_map\" object");
  }
  std::map<std::string, std::string> shards;
  for (const auto& [tensor, file] : root["weight_map"].items()) {
    if (!file.is_string() || !IsPlainFileName(file.get_ref<const std::string&>())) {
      return Malformed(path, "tensor \"" + tensor + "\" is not mapped to a file of the directory");
    }
    shards[tensor] = file.get<std::string>();
  }
  if (shards.empty()) return Malformed(path, "\"weight_map\" is empty");
  return shards;
}

}  // namespace

Result<std::unique_ptr<SafetensorsDirectory>> SafetensorsDirectory::Open(
    const std::string& directory) {
  const std::filesystem::path root(directory);
  std::unique_ptr<SafetensorsDirectory> opened(new SafetensorsDirectory());
  opened->directory_ = directory;
  const std::string single = (root / kSingleFileName).string();
  const std::string index = (root / kIndexFileName).string();
  std::error_code ignored;
  std::map<std::string, std::string> shards;
  // When both are there the single file wins, as it does for the tools that wrote them.
  if (std::filesystem::exists(single, ignored)) {
    OOM_ASSIGN_OR_RETURN(auto file, SafetensorsFile::Open(single));
    opened->files_.push_back(std::move(file));
  } else if (std::filesystem::exists(index, ignored)) {
    opened->sharded_ = true;
    OOM_ASSIGN_OR_RETURN(shards, ReadIndex(index));
    std::map<std::string, const SafetensorsFile*> open_files;
    for (const auto& [tensor, name] : shards) open_files[name] = nullptr;
    for (auto& [name, open_file] : open_files) {
      OOM_ASSIGN_OR_RETURN(auto file, SafetensorsFile::Open((root / name).string()));
      open_file = file.get();
      opened->files_.push_back(std::move(file));
    }
    for (const auto& [tensor, name] : shards) {
      if (open_files[name]->Find(tensor) == nullptr) {
        return Malformed(index, "tensor \"" + tensor + "\" is not in " + name);
      }
    }
  } else {
    return Status(Code::kNotFound,
                  directory + ": has neither " + kSingleFileName + " nor " + kIndexFileName)
        .WithField(directory);
  }
  for (const auto& file : opened->files_) {
    const std::string name = std::filesystem::path(file->path()).filename().string();
    for (const SafetensorInfo& info : file->header().tensors) {
      if (opened->sharded_) {
        const auto mapped = shards.find(info.name);
        if (mapped == shards.end() || mapped->second != name) {
          return Malformed(file->path(), "tensor \"" + info.name +
                                             "\" is not mapped to this file in " + kIndexFileName);
        }
      }
      opened->by_name_[info.name] = {file.get(), &info};
    }
  }
  return opened;
}

SafetensorsDirectory::Location SafetensorsDirectory::Find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? Location{} : found->second;
}

}  // namespace oom
