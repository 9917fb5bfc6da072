// The manifest of a checkpoint: what it holds, and by which sizes and checksums its files are known
// to be whole. JSON text whose last key is the CRC32C of everything before it; written last, so a
// directory with a good manifest is a complete checkpoint. The text comes from disk and may be
// anything: the parser accepts exactly what FormatManifest writes, apart from white space. Values
// and pure functions; thread-safe.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/model/description.h"

namespace oom {

inline constexpr std::string_view kManifestName = "manifest.json";
// Each file is checksummed in pieces of this size; the last one of a file is shorter.
inline constexpr int64_t kPieceBytes = int64_t{8} << 20;
inline constexpr int64_t kManifestLimitBytes = int64_t{256} << 20;

struct ManifestFile {
  std::string name;  // "unit-0003.safetensors"
  int64_t bytes = 0;
  std::vector<uint32_t> piece_crcs;
};

struct Manifest {
  int64_t step = 0;  // Completed optimizer steps.
  std::string job_name;
  std::string job_uid;
  Precision precision = Precision::kBfloat16;
  uint64_t seed = 0;
  int64_t data_cursor = 0;  // Position of the next sequence in the endless stream of epochs.
  ModelDescription model;
  std::vector<ManifestFile> files;  // One a parameter unit, in unit order.
};

int64_t PieceCount(int64_t file_bytes);

std::string FormatManifest(const Manifest& manifest);

// `where` starts each message. Fails with kDataLoss: a checksum that does not fit, a key too many
// or too few, a value out of its range.
Result<Manifest> ParseManifest(std::string_view text, std::string_view where);

std::string_view PrecisionName(Precision precision);

// The first field in which two models differ, as "hidden_size 64 against 128"; empty if they are
// equal.
std::string ModelDifference(const ModelDescription& a, const ModelDescription& b);

}  // namespace oom
