#include "runtime/checkpoint/state_file_writer.h"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/base/units.h"
#include "runtime/checkpoint/crc32c.h"
#include "runtime/checkpoint/manifest.h"
#include "runtime/model/safetensors_writer.h"

namespace oom {
namespace {

// What O_DIRECT asks of offset, length and memory on every file system that we know.
constexpr int64_t kDirectAlignmentBytes = 4096;
// Shorter ranges are not worth a transfer of their own.
constexpr int64_t kDirectMinimumBytes = 64 << 10;

Status StorageStatus(int error_number, const std::string& what, const std::string& path) {
  Status status = WriteErrnoStatus(error_number, what);
  if (status.code() != Code::kResourceExhausted) return status;
  return std::move(status).WithReason("STORAGE_FULL").WithField(path);
}

// Takes the space. Without support for that in the file system, at least looks whether there is
// enough.
int Reserve(int fd, int64_t bytes) {
  int failed = 0;
  do {
    failed = ::fallocate(fd, 0, 0, bytes) == 0 ? 0 : errno;
  } while (failed == EINTR);
  if (failed != EOPNOTSUPP && failed != ENOSYS) return failed;
  struct statvfs info {};
  if (::fstatvfs(fd, &info) == 0 &&
      static_cast<uint64_t>(info.f_bavail) * info.f_frsize < static_cast<uint64_t>(bytes)) {
    return ENOSPC;
  }
  return ::ftruncate(fd, bytes) == 0 ? 0 : errno;
}

}  // namespace

StateFileWriter::StateFileWriter(std::string path, int64_t bytes)
    : path_(std::move(path)), bytes_(bytes), pieces_(static_cast<size_t>(PieceCount(bytes))) {}

Result<std::unique_ptr<StateFileWriter>> StateFileWriter::Create(const std::string& path,
                                                                 int64_t bytes) {
  OOM_CHECK(bytes > 0);
  std::unique_ptr<StateFileWriter> writer(new StateFileWriter(path, bytes));
  writer->fd_ = UniqueFd(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  if (!writer->fd_.valid()) return StorageStatus(errno, "cannot create " + path, path);
  const int failed = Reserve(writer->fd_.get(), bytes);
  if (failed != 0) {
    return StorageStatus(failed, "cannot reserve " + FormatBytes(bytes) + " for " + path, path);
  }
  writer->direct_fd_ = UniqueFd(::open(path.c_str(), O_WRONLY | O_DIRECT | O_CLOEXEC));
  return writer;
}

Status StateFileWriter::Write(int64_t offset_bytes, std::span<const std::byte> bytes) {
  const auto count = static_cast<int64_t>(bytes.size());
  OOM_CHECK(offset_bytes >= 0 && count <= bytes_ - offset_bytes);
  OOM_RETURN_IF_ERROR(WriteRange(offset_bytes, bytes));
  for (int64_t done = 0; done < count;) {
    const int64_t piece = (offset_bytes + done) / kPieceBytes;
    const int64_t begin = (offset_bytes + done) % kPieceBytes;
    const int64_t length = std::min(kPieceBytes - begin, count - done);
    const uint32_t crc =
        Crc32c(bytes.subspan(static_cast<size_t>(done), static_cast<size_t>(length)));
    OOM_RETURN_IF_ERROR(AddSegment(piece, begin, {.end_bytes = begin + length, .crc = crc}));
    done += length;
  }
  return Status::Ok();
}

Status StateFileWriter::WriteRange(int64_t offset_bytes, std::span<const std::byte> bytes) {
  const auto count = static_cast<int64_t>(bytes.size());
  // [direct_begin, direct_end) of the range goes past the page cache.
  int64_t direct_begin = 0, direct_end = 0;
  if (direct_fd_.valid()) {
    const int64_t first = RoundUp(offset_bytes, kDirectAlignmentBytes) - offset_bytes;
    const int64_t last =
        (offset_bytes + count) / kDirectAlignmentBytes * kDirectAlignmentBytes - offset_bytes;
    const auto address = reinterpret_cast<uintptr_t>(bytes.data()) + static_cast<uintptr_t>(first);
    if (last - first >= kDirectMinimumBytes && address % kDirectAlignmentBytes == 0) {
      direct_begin = first;
      direct_end = last;
    }
  }
  int error = 0;
  const auto part = [&](int64_t begin, int64_t end) {
    return bytes.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
  };
  if (direct_end > direct_begin && !WriteFully(direct_fd_.get(), offset_bytes + direct_begin,
                                               part(direct_begin, direct_end), &error)) {
    if (error != EINVAL) return StorageStatus(error, "cannot write " + path_, path_);
    direct_begin = direct_end = 0;  // Wants another alignment than ours: through the page cache.
  }
  if (!WriteFully(fd_.get(), offset_bytes, part(0, direct_begin), &error) ||
      !WriteFully(fd_.get(), offset_bytes + direct_end, part(direct_end, count), &error)) {
    return StorageStatus(error, "cannot write " + path_, path_);
  }
  if (count - (direct_end - direct_begin) >= kDirectMinimumBytes) {
    // Starts writing back, so that dirty pages do not pile up until Finish. Only a hint.
    static_cast<void>(::sync_file_range(fd_.get(), offset_bytes, count, SYNC_FILE_RANGE_WRITE));
  }
  return Status::Ok();
}

bool StateFileWriter::WriteFully(int fd, int64_t offset_bytes, std::span<const std::byte> bytes,
                                 int* error_number) {
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t written = ::pwrite(fd, bytes.data() + done, bytes.size() - done,
                                     static_cast<off_t>(offset_bytes + static_cast<int64_t>(done)));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      *error_number = written < 0 ? errno : EIO;
      return false;
    }
    done += static_cast<size_t>(written);
  }
  return true;
}

Status StateFileWriter::AddSegment(int64_t piece, int64_t begin_bytes, Segment segment) {
  MutexLock lock(mutex_);
  Segments& segments = pieces_[static_cast<size_t>(piece)];
  auto next = segments.lower_bound(begin_bytes);
  const bool overlaps_next = next != segments.end() && next->first < segment.end_bytes;
  const bool has_previous = next != segments.begin();
  if (overlaps_next || (has_previous && std::prev(next)->second.end_bytes > begin_bytes)) {
    return Status(Code::kInvalidArgument,
                  path_ + ": bytes of piece " + std::to_string(piece) + " were written twice");
  }
  if (next != segments.end() && next->first == segment.end_bytes) {
    const Segment& after = next->second;
    segment.crc = CombineCrc32c(segment.crc, after.crc, after.end_bytes - next->first);
    segment.end_bytes = after.end_bytes;
    next = segments.erase(next);
  }
  if (has_previous && std::prev(next)->second.end_bytes == begin_bytes) {
    Segment& before = std::prev(next)->second;
    before.crc = CombineCrc32c(before.crc, segment.crc, segment.end_bytes - begin_bytes);
    before.end_bytes = segment.end_bytes;
  } else {
    segments.emplace_hint(next, begin_bytes, segment);
  }
  return Status::Ok();
}

Result<std::vector<uint32_t>> StateFileWriter::Finish() {
  std::vector<uint32_t> crcs;
  {
    MutexLock lock(mutex_);
    for (size_t piece = 0; piece < pieces_.size(); ++piece) {
      const Segments& segments = pieces_[piece];
      const int64_t piece_bytes =
          std::min(kPieceBytes, bytes_ - static_cast<int64_t>(piece) * kPieceBytes);
      const bool whole = segments.size() == 1 && segments.begin()->first == 0 &&
                         segments.begin()->second.end_bytes == piece_bytes;
      if (!whole) {
        return Status(Code::kFailedPrecondition,
                      path_ + ": piece " + std::to_string(piece) + " was not written whole");
      }
      crcs.push_back(segments.begin()->second.crc);
    }
  }
  direct_fd_.Reset();
  // A failed sync is final: the kernel may have dropped the pages, so it is never repeated.
  if (::fsync(fd_.get()) != 0) return StorageStatus(errno, "cannot sync " + path_, path_);
  static_cast<void>(::posix_fadvise(fd_.get(), 0, 0, POSIX_FADV_DONTNEED));
  if (::close(fd_.Release()) != 0) return StorageStatus(errno, "cannot close " + path_, path_);
  return crcs;
}

}  // namespace oom
