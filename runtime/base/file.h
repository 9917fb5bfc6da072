// Small files read and written whole, and directories made durable. Thread-safe.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "runtime/base/status.h"

namespace oom {

// Fails with kNotFound, kPermissionDenied, or kResourceExhausted when larger than `limit_bytes`.
Result<std::string> ReadFile(const std::string& path, int64_t limit_bytes = int64_t{1} << 30);

// Writes `name.tmp.<random>`, syncs it, renames it over `path` and syncs the directory: after a crash
// or a power loss the file is the old one or the new one, never a part. Codes of ErrnoStatus.
Status WriteFileAtomically(const std::string& path, std::string_view content);

// mkdir -p. Codes of ErrnoStatus.
Status MakeDirectories(const std::string& path);

Status SyncDirectory(const std::string& path);

// `path` if absolute, else `base`/`path`, lexically normalised.
std::string ResolvePath(const std::string& base, const std::string& path);

// "did you mean" support: the candidate within an edit distance of at most a third of the word, or "".
template <class Range>
std::string ClosestName(std::string_view word, const Range& candidates);

// Levenshtein distance.
int EditDistance(std::string_view a, std::string_view b);

template <class Range>
std::string ClosestName(std::string_view word, const Range& candidates) {
  std::string best;
  int best_distance = static_cast<int>(word.size()) / 3 + 1;
  for (const auto& candidate : candidates) {
    const int distance = EditDistance(word, candidate);
    if (distance <= best_distance) {
      if (distance < best_distance || best.empty()) best = std::string(candidate);
      best_distance = distance;
    }
  }
  return best;
}

}  // namespace oom
