#include "runtime/base/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <random>
#include <vector>

#include "runtime/base/unique_fd.h"

namespace oom {

Result<std::string> ReadFile(const std::string& path, int64_t limit_bytes) {
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return ErrnoStatus(errno, "cannot open " + path);
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return ErrnoStatus(errno, "cannot stat " + path);
  if (S_ISDIR(info.st_mode)) return Status(Code::kInvalidArgument, path + " is a directory");
  if (info.st_size > limit_bytes) {
    return Status(Code::kResourceExhausted, path + " has " + std::to_string(info.st_size) +
                                                " bytes; at most " + std::to_string(limit_bytes) +
                                                " are read");
  }
  std::string content;
  char buffer[65536];
  while (true) {
    const ssize_t got = ::read(fd.get(), buffer, sizeof(buffer));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoStatus(errno, "cannot read " + path);
    if (got == 0) return content;
    content.append(buffer, static_cast<size_t>(got));
    if (static_cast<int64_t>(content.size()) > limit_bytes) {
      return Status(Code::kResourceExhausted, path + " is larger than the limit");
    }
  }
}

Status WriteFileAtomically(const std::string& path, std::string_view content) {
  std::random_device random;
  const std::string temporary = path + ".tmp." + std::to_string(random());
  UniqueFd fd(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  if (!fd.valid()) return ErrnoStatus(errno, "cannot create " + temporary);
  Status status;
  size_t done = 0;
  while (done < content.size() && status.ok()) {
    const ssize_t written = ::write(fd.get(), content.data() + done, content.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      status = ErrnoStatus(errno, "cannot write " + temporary);
    } else {
      done += static_cast<size_t>(written);
    }
  }
  if (status.ok() && ::fsync(fd.get()) != 0) status = ErrnoStatus(errno, "cannot sync " + temporary);
  fd.Reset();
  if (status.ok() && ::rename(temporary.c_str(), path.c_str()) != 0) {
    status = ErrnoStatus(errno, "cannot rename to " + path);
  }
  if (!status.ok()) {
    ::unlink(temporary.c_str());
    return status;
  }
  const std::string parent = std::filesystem::path(path).parent_path().string();
  return SyncDirectory(parent.empty() ? "." : parent);
}

Status MakeDirectories(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) return ErrnoStatus(error.value(), "cannot create directory " + path);
  return Status::Ok();
}

Status SyncDirectory(const std::string& path) {
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.valid()) return ErrnoStatus(errno, "cannot open directory " + path);
  if (::fsync(fd.get()) != 0) return ErrnoStatus(errno, "cannot sync directory " + path);
  return Status::Ok();
}

std::string ResolvePath(const std::string& base, const std::string& path) {
  const std::filesystem::path given(path);
  if (given.is_absolute()) return given.lexically_normal().string();
  return (std::filesystem::path(base) / given).lexically_normal().string();
}

int EditDistance(std::string_view a, std::string_view b) {
  std::vector<int> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = static_cast<int>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    int diagonal = row[0];
    row[0] = static_cast<int>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const int replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row[b.size()];
}

}  // namespace oom
