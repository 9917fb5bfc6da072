// CRC32C (Castagnoli), with the CPU's instruction where there is one. CRCs are the finished values
// that other programs print ("123456789" gives e3069283). Pure functions; thread-safe.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace oom {

// Of `bytes`, or of what `crc` stands for followed by `bytes`.
uint32_t Crc32c(std::span<const std::byte> bytes, uint32_t crc = 0);

// The same without the CPU's instruction.
uint32_t Crc32cSoftware(std::span<const std::byte> bytes, uint32_t crc = 0);

// Of A followed by B, from the CRCs of both and the length of B.
uint32_t CombineCrc32c(uint32_t crc_a, uint32_t crc_b, int64_t bytes_b);

}  // namespace oom
