#include "runtime/checkpoint/crc32c.h"

#include <gtest/gtest.h>

#include <random>
#include <string_view>
#include <vector>

namespace oom {
namespace {

std::span<const std::byte> Bytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

TEST(Crc32cTest, GivesThePublishedValues) {
  // RFC 3720, B.4, and the check value of the polynomial.
  EXPECT_EQ(Crc32c(Bytes("123456789")), 0xE3069283u);
  EXPECT_EQ(Crc32c(std::vector<std::byte>(32)), 0x8A9136AAu);
  EXPECT_EQ(Crc32c(std::vector<std::byte>(32, std::byte{0xFF})), 0x62A8AB43u);
  EXPECT_EQ(Crc32c({}), 0u);
}

// Goal: the instruction, the tables and any way of cutting the bytes give one value.
// Method: random bytes of lengths around the lanes of the hardware version, cut at random places,
// continued or combined.
TEST(Crc32cTest, EveryWayOfComputingAgrees) {
  std::mt19937_64 random(17);
  for (const size_t length : {size_t{1}, size_t{7}, size_t{8}, size_t{4095}, size_t{49151},
                              size_t{49152}, size_t{49153}, size_t{200001}}) {
    std::vector<std::byte> bytes(length);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
    const uint32_t whole = Crc32c(bytes);
    EXPECT_EQ(whole, Crc32cSoftware(bytes)) << length;
    for (int round = 0; round < 8; ++round) {
      const size_t cut = random() % (length + 1);
      const std::span<const std::byte> all(bytes);
      const uint32_t first = Crc32c(all.first(cut));
      EXPECT_EQ(Crc32c(all.subspan(cut), first), whole) << length << " cut at " << cut;
      EXPECT_EQ(CombineCrc32c(first, Crc32c(all.subspan(cut)), static_cast<int64_t>(length - cut)),
                whole)
          << length << " cut at " << cut;
    }
  }
}

}  // namespace
}  // namespace oom
