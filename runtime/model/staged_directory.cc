#include "runtime/model/staged_directory.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <random>
#include <utility>

#include "runtime/base/file.h"
#include "runtime/base/units.h"

namespace oom {
namespace {

namespace fs = std::filesystem;

std::string RandomSuffix() {
  std::random_device random;
  return std::to_string(random());
}

// Swaps two directories in one step. False if the file system or the kernel cannot.
bool Exchange(const std::string& a, const std::string& b) {
  return ::syscall(SYS_renameat2, AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0;
}

}  // namespace

Result<std::unique_ptr<StagedDirectory>> StagedDirectory::Create(const std::string& target,
                                                                 Lacks lacks) {
  std::unique_ptr<StagedDirectory> staged(new StagedDirectory());
  std::error_code error;
  // A link to a directory stays a link: what it points to is replaced.
  const fs::path real = fs::weakly_canonical(fs::absolute(fs::path(target)), error);
  if (error) return ErrnoStatus(error.value(), "cannot use " + target);
  staged->target_ = real.string();
  if (staged->target_.ends_with('/') && staged->target_.size() > 1) staged->target_.pop_back();
  staged->lacks_ = std::move(lacks);
  OOM_RETURN_IF_ERROR(staged->CheckTarget());
  OOM_RETURN_IF_ERROR(MakeDirectories(fs::path(staged->target_).parent_path().string()));
  const std::string path = staged->target_ + ".tmp." + RandomSuffix();
  if (::mkdir(path.c_str(), 0755) != 0) {
    return ErrnoStatus(errno, "cannot create directory " + path).WithField(target);
  }
  staged->path_ = path;
  return staged;
}

StagedDirectory::~StagedDirectory() {
  std::error_code ignored;
  if (!committed_ && !path_.empty()) fs::remove_all(path_, ignored);
}

Status StagedDirectory::CheckTarget() const {
  std::error_code error;
  const fs::file_status status = fs::status(target_, error);
  if (status.type() == fs::file_type::not_found) return Status::Ok();
  if (error) return ErrnoStatus(error.value(), "cannot use " + target_);
  const auto refuse = [this](const std::string& what) {
    return Status(Code::kFailedPrecondition, target_ + " " + what).WithField(target_);
  };
  if (status.type() != fs::file_type::directory) return refuse("exists and is not a directory");
  const bool empty = fs::is_empty(target_, error);
  if (error) return ErrnoStatus(error.value(), "cannot read " + target_);
  if (empty) return Status::Ok();
  if (const std::string lack = lacks_(target_); !lack.empty()) {
    return refuse("exists, is not empty and holds no " + lack +
                  ", so it is not an earlier export; it is not replaced");
  }
  return Status::Ok();
}

Status StagedDirectory::Commit() {
  std::error_code error;
  for (const auto& entry : fs::recursive_directory_iterator(path_, error)) {
    if (entry.is_directory()) OOM_RETURN_IF_ERROR(SyncDirectory(entry.path().string()));
  }
  if (error) return ErrnoStatus(error.value(), "cannot read " + path_);
  OOM_RETURN_IF_ERROR(SyncDirectory(path_));
  OOM_RETURN_IF_ERROR(CheckTarget());  // It may have changed since Create.
  std::string old;
  if (::rename(path_.c_str(), target_.c_str()) != 0) {
    if (errno != ENOTEMPTY && errno != EEXIST) {
      return ErrnoStatus(errno, "cannot rename " + path_ + " to " + target_);
    }
    if (Exchange(path_, target_)) {
      old = path_;
    } else {
      // Without an exchange there is a moment in which the target is missing, but never one without
      // both.
      old = target_ + ".old." + RandomSuffix();
      if (::rename(target_.c_str(), old.c_str()) != 0) {
        return ErrnoStatus(errno, "cannot rename " + target_ + " to " + old);
      }
      if (::rename(path_.c_str(), target_.c_str()) != 0) {
        const int failed = errno;
        static_cast<void>(::rename(old.c_str(), target_.c_str()));
        return ErrnoStatus(failed, "cannot rename " + path_ + " to " + target_);
      }
    }
  }
  committed_ = true;
  OOM_RETURN_IF_ERROR(SyncDirectory(fs::path(target_).parent_path().string()));
  if (!old.empty()) fs::remove_all(old, error);
  return Status::Ok();
}

Status CheckFreeSpace(const std::string& path, int64_t needed_bytes) {
  struct statvfs info {};
  if (::statvfs(path.c_str(), &info) != 0) return ErrnoStatus(errno, "cannot examine " + path);
  const double free_bytes = static_cast<double>(info.f_bavail) * static_cast<double>(info.f_frsize);
  if (static_cast<double>(needed_bytes) <= free_bytes) return Status::Ok();
  return Status(Code::kResourceExhausted,
                path + " needs " + FormatBytes(needed_bytes) + " of disk space, " +
                    FormatBytes(static_cast<int64_t>(free_bytes)) + " are free")
      .WithReason("OUT_OF_DISK")
      .WithField(path);
}

}  // namespace oom
