// SafetensorsDirectory opens the weights of a Hugging Face directory: `model.safetensors`, or the
// shards that `model.safetensors.index.json` names. Index and shards must agree: every tensor of
// the index is in its shard, every tensor of a shard is in the index. Thread-safe; read-only.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/model/safetensors.h"

namespace oom {

inline constexpr char kSingleFileName[] = "model.safetensors";
inline constexpr char kIndexFileName[] = "model.safetensors.index.json";

class SafetensorsDirectory {
 public:
  struct Location {
    const SafetensorsFile* file = nullptr;
    const SafetensorInfo* info = nullptr;
  };

  // Fails with kNotFound (no weights, or a shard is missing), kPermissionDenied or
  // kInvalidArgument.
  static Result<std::unique_ptr<SafetensorsDirectory>> Open(const std::string& directory);

  const std::string& directory() const { return directory_; }
  // In the order of the shards' names.
  const std::vector<std::unique_ptr<SafetensorsFile>>& files() const { return files_; }
  bool sharded() const { return sharded_; }
  // Both nullptr if there is none.
  Location Find(std::string_view name) const;

 private:
  SafetensorsDirectory() = default;

  std::string directory_;
  bool sharded_ = false;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::unordered_map<std::string_view, Location> by_name_;
};

}  // namespace oom
