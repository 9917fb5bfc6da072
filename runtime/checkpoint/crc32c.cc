#include "runtime/checkpoint/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace oom {
namespace {

// Reflected polynomial: bit 31 stands for x^0.
constexpr uint32_t kPolynomial = 0x82F63B78u;

// a * b mod P.
constexpr uint32_t Multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = (b & 1) != 0 ? (b >> 1) ^ kPolynomial : b >> 1;
  }
  return product;
}

// x^(8 * bytes) mod P: what a CRC is multiplied with when `bytes` more bytes follow.
constexpr uint32_t ShiftFactor(int64_t bytes) {
  uint32_t power = 1u << 23;  // x^8
  uint32_t factor = 1u << 31;
  for (; bytes > 0; bytes >>= 1) {
    if ((bytes & 1) != 0) factor = Multiply(factor, power);
    power = Multiply(power, power);
  }
  return factor;
}

// tables[k][b]: the CRC register after byte b and k zero bytes.
constexpr std::array<std::array<uint32_t, 256>, 8> MakeTables() {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) {
      value = (value & 1) != 0 ? (value >> 1) ^ kPolynomial : value >> 1;
    }
    tables[0][byte] = value;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 0xFF];
    }
  }
  return tables;
}

constexpr auto kTables = MakeTables();

#if defined(__x86_64__)
// The instruction has a latency of three cycles and starts one a cycle, so three lanes run at once.
constexpr int64_t kLaneBytes = 16384;
constexpr uint32_t kLaneShift = ShiftFactor(kLaneBytes);

__attribute__((target("sse4.2"))) uint32_t Crc32cHardware(std::span<const std::byte> bytes,
                                                          uint32_t crc) {
  const std::byte* data = bytes.data();
  int64_t left = static_cast<int64_t>(bytes.size());
  uint64_t state = ~crc;
  const auto word = [](const std::byte* at) {
    uint64_t value;
    std::memcpy(&value, at, sizeof(value));
    return value;
  };
  while (left >= 3 * kLaneBytes) {
    uint64_t second = 0, third = 0;
    for (int64_t i = 0; i < kLaneBytes; i += 8) {
      state = _mm_crc32_u64(state, word(data + i));
      second = _mm_crc32_u64(second, word(data + kLaneBytes + i));
      third = _mm_crc32_u64(third, word(data + 2 * kLaneBytes + i));
    }
    state = Multiply(kLaneShift, static_cast<uint32_t>(state)) ^ second;
    state = Multiply(kLaneShift, static_cast<uint32_t>(state)) ^ third;
    data += 3 * kLaneBytes;
    left -= 3 * kLaneBytes;
  }
  for (; left >= 8; left -= 8, data += 8) state = _mm_crc32_u64(state, word(data));
  auto narrow = static_cast<uint32_t>(state);
  for (; left > 0; --left, ++data) narrow = _mm_crc32_u8(narrow, static_cast<uint8_t>(*data));
  return ~narrow;
}
#endif

}  // namespace

uint32_t Crc32cSoftware(std::span<const std::byte> bytes, uint32_t crc) {
  uint32_t state = ~crc;
  const std::byte* data = bytes.data();
  size_t left = bytes.size();
  for (; left >= 8; left -= 8, data += 8) {
    uint64_t word;
    std::memcpy(&word, data, sizeof(word));
    word ^= state;
    state = 0;
    for (size_t k = 0; k < 8; ++k) state ^= kTables[7 - k][(word >> (8 * k)) & 0xFF];
  }
  for (; left > 0; --left, ++data) {
    state = (state >> 8) ^ kTables[0][(state ^ static_cast<uint8_t>(*data)) & 0xFF];
  }
  return ~state;
}

uint32_t Crc32c(std::span<const std::byte> bytes, uint32_t crc) {
#if defined(__x86_64__)
  static const bool hardware = __builtin_cpu_supports("sse4.2") != 0;
  if (hardware) return Crc32cHardware(bytes, crc);
#endif
  return Crc32cSoftware(bytes, crc);
}

uint32_t CombineCrc32c(uint32_t crc_a, uint32_t crc_b, int64_t bytes_b) {
  return Multiply(ShiftFactor(bytes_b), crc_a) ^ crc_b;
}

}  // namespace oom
