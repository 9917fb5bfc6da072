// StagedDirectory builds a directory beside its place and puts it there whole: everything is
// written into
// `<target>.tmp.<random>`, Commit renames that over the target. A reader, or a crash at any moment,
// sees the old directory or the new one. Without Commit the destructor removes what was staged. Not
// thread-safe (files inside may be written by any thread).

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "runtime/base/status.h"

namespace oom {

class StagedDirectory {
 public:
  // What a directory lacks to be one of the kind that is staged ("config.json"), or "".
  using Lacks = std::function<std::string(const std::string& directory)>;

  // An existing target is replaced only if it is an empty directory or lacks nothing, so that a
  // mistyped path never costs somebody's files. Fails with kFailedPrecondition (not replaceable) or
  // codes of ErrnoStatus (not writable, disk full).
  static Result<std::unique_ptr<StagedDirectory>> Create(const std::string& target, Lacks lacks);
  ~StagedDirectory();
  StagedDirectory(const StagedDirectory&) = delete;
  StagedDirectory& operator=(const StagedDirectory&) = delete;

  // Where to write.
  const std::string& path() const { return path_; }
  // Syncs the staged directories and puts them in place. REQUIRES: the files themselves are synced.
  Status Commit();

 private:
  StagedDirectory() = default;
  Status CheckTarget() const;

  std::string target_;
  std::string path_;
  Lacks lacks_;
  bool committed_ = false;
};

// kResourceExhausted, with numbers, if the file system of `path` has less than `needed_bytes` free.
Status CheckFreeSpace(const std::string& path, int64_t needed_bytes);

}  // namespace oom
