#include "runtime/checkpoint/piece_reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/checkpoint/crc32c.h"

namespace oom {

PieceReader::PieceReader(std::string path, const ManifestFile& file)
    : path_(std::move(path)), file_(file), checked_(file.piece_crcs.size()) {}

Result<std::unique_ptr<PieceReader>> PieceReader::Open(const std::string& path,
                                                       const ManifestFile& file) {
  std::unique_ptr<PieceReader> reader(new PieceReader(path, file));
  reader->fd_ = UniqueFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  if (!reader->fd_.valid()) {
    const Status status = ErrnoStatus(errno, "cannot open " + path);
    if (status.code() == Code::kPermissionDenied) return status;
    return Status(Code::kDataLoss, status.message());
  }
  struct stat info {};
  if (::fstat(reader->fd_.get(), &info) != 0) return ErrnoStatus(errno, "cannot stat " + path);
  if (info.st_size != file.bytes) {
    return Status(Code::kDataLoss, path + " has " + std::to_string(info.st_size) +
                                       " bytes; its manifest says " + std::to_string(file.bytes));
  }
  return reader;
}

int64_t PieceReader::PieceBytes(int64_t piece) const {
  return std::min(kPieceBytes, file_.bytes - piece * kPieceBytes);
}

Status PieceReader::ReadFully(int64_t offset_bytes, std::span<std::byte> out) const {
  size_t done = 0;
  while (done < out.size()) {
    const ssize_t got = ::pread(fd_.get(), out.data() + done, out.size() - done,
                                static_cast<off_t>(offset_bytes + static_cast<int64_t>(done)));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      return Status(Code::kDataLoss, "cannot read " + path_ + " at byte " +
                                         std::to_string(offset_bytes + static_cast<int64_t>(done)) +
                                         ": " +
                                         (got == 0 ? "it ends there" : std::strerror(errno)));
    }
    done += static_cast<size_t>(got);
  }
  return Status::Ok();
}

Result<std::span<const std::byte>> PieceReader::ReadPiece(int64_t piece,
                                                          std::span<std::byte> buffer) const {
  const std::span<std::byte> bytes = buffer.first(static_cast<size_t>(PieceBytes(piece)));
  OOM_RETURN_IF_ERROR(ReadFully(piece * kPieceBytes, bytes));
  if (Crc32c(bytes) != file_.piece_crcs[static_cast<size_t>(piece)]) {
    return Status(Code::kDataLoss, path_ + ": piece " + std::to_string(piece) + " (bytes " +
                                       std::to_string(piece * kPieceBytes) + " to " +
                                       std::to_string(piece * kPieceBytes + PieceBytes(piece)) +
                                       ") has not the checksum of the manifest");
  }
  return std::span<const std::byte>(bytes);
}

Status PieceReader::Read(int64_t offset_bytes, std::span<std::byte> out) const {
  const auto count = static_cast<int64_t>(out.size());
  OOM_CHECK(offset_bytes >= 0 && count <= file_.bytes - offset_bytes);
  for (int64_t done = 0; done < count;) {
    const int64_t piece = (offset_bytes + done) / kPieceBytes;
    const int64_t begin = (offset_bytes + done) % kPieceBytes;
    const int64_t length = std::min(PieceBytes(piece) - begin, count - done);
    const auto part = out.subspan(static_cast<size_t>(done), static_cast<size_t>(length));
    done += length;
    std::atomic<bool>& checked = checked_[static_cast<size_t>(piece)];
    if (!checked) {
      MutexLock lock(mutexes_[static_cast<size_t>(piece) % mutexes_.size()]);
      if (!checked) {
        // Given out from the very bytes that were checked.
        std::vector<std::byte> buffer(static_cast<size_t>(PieceBytes(piece)));
        OOM_ASSIGN_OR_RETURN(const std::span<const std::byte> bytes, ReadPiece(piece, buffer));
        std::memcpy(part.data(), bytes.data() + begin, part.size());
        checked = true;
        continue;
      }
    }
    OOM_RETURN_IF_ERROR(ReadFully(piece * kPieceBytes + begin, part));
  }
  return Status::Ok();
}

void PieceReader::DropFromCache(int64_t piece) const {
  static_cast<void>(
      ::posix_fadvise(fd_.get(), piece * kPieceBytes, PieceBytes(piece), POSIX_FADV_DONTNEED));
}

}  // namespace oom
