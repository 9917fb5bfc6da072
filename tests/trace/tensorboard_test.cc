#include "runtime/trace/tensorboard.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>

#include "runtime/base/file.h"

namespace oom {
namespace {

TEST(TensorboardTest, ARecordIsFramedAsPublished) {
  // Length, masked CRC32C of the length, payload, masked CRC32C of the payload; "a" worked out by
  // hand from crc32c("a") = c1d04330.
  const std::string record = FrameRecord("a");
  ASSERT_EQ(record.size(), 17u);
  EXPECT_EQ(record.substr(0, 8), std::string("\1\0\0\0\0\0\0\0", 8));
  EXPECT_EQ(record[12], 'a');
  const uint32_t crc = 0xC1D04330u;
  const uint32_t masked = ((crc >> 15) | (crc << 17)) + 0xA282EAD8u;
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(static_cast<uint8_t>(record[13 + static_cast<size_t>(i)]),
              (masked >> (8 * i)) & 0xFF);
  }
}

// Goal: each attempt has its own file, sorting after those before even within one second.
TEST(TensorboardTest, LaterAttemptsSortLater) {
  std::string pattern = (std::filesystem::temp_directory_path() / "oom-test-XXXXXX").string();
  ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
  std::string previous;
  for (int attempt = 0; attempt < 12; ++attempt) {
    const auto writer = TensorboardWriter::Create(
        {.directory = pattern + "/tensorboard", .completed_steps = attempt, .unix_seconds = 1.7e9});
    ASSERT_TRUE(writer.ok()) << writer.status().ToString();
    EXPECT_LT(previous, (*writer)->path());
    previous = (*writer)->path();
  }
  std::filesystem::remove_all(pattern);
}

TEST(TensorboardTest, AnUnusableDirectoryIsNamed) {
  std::string pattern = (std::filesystem::temp_directory_path() / "oom-test-XXXXXX").string();
  ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
  ASSERT_TRUE(WriteFileAtomically(pattern + "/file", "x").ok());
  const auto writer = TensorboardWriter::Create({.directory = pattern + "/file"});
  ASSERT_FALSE(writer.ok());
  EXPECT_NE(writer.status().message().find(pattern + "/file"), std::string::npos);
  std::filesystem::remove_all(pattern);
}

}  // namespace
}  // namespace oom
