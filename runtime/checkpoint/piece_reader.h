// PieceReader reads a file of a checkpoint and gives out only bytes whose piece has the CRC of the
// manifest. A piece is checked when it is first needed. Thread-safe.

#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/base/mutex.h"
#include "runtime/base/status.h"
#include "runtime/base/unique_fd.h"
#include "runtime/checkpoint/manifest.h"

namespace oom {

class PieceReader {
 public:
  // Fails with kDataLoss (missing, another size) or kPermissionDenied.
  static Result<std::unique_ptr<PieceReader>> Open(const std::string& path,
                                                   const ManifestFile& file);

  // Reads a whole piece into `buffer` and checks it; the part of the buffer that holds it. Fails
  // with kDataLoss: file and piece are named. REQUIRES: the buffer is as large as the piece.
  Result<std::span<const std::byte>> ReadPiece(int64_t piece, std::span<std::byte> buffer) const;

  // Fails with kDataLoss. REQUIRES: the range lies in the file.
  Status Read(int64_t offset_bytes, std::span<std::byte> out) const;

  void DropFromCache(int64_t piece) const;

 private:
  PieceReader(std::string path, const ManifestFile& file);
  Status ReadFully(int64_t offset_bytes, std::span<std::byte> out) const;
  int64_t PieceBytes(int64_t piece) const;

  const std::string path_;
  const ManifestFile file_;
  UniqueFd fd_;

  // Set under the mutex of the piece (by its number), which is held while it is checked, so that
  // none is checked twice.
  mutable std::vector<std::atomic<bool>> checked_;
  mutable std::array<Mutex, 16> mutexes_;
};

}  // namespace oom
