#include "runtime/ipc/frame.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace oom {
namespace {

std::vector<std::string> TakeAll(FrameDecoder* decoder) {
  std::vector<std::string> taken;
  while (auto payload = decoder->Next()) taken.push_back(std::move(*payload));
  return taken;
}

TEST(FrameTest, HeaderIsTheLittleEndianLength) {
  EXPECT_EQ(EncodeFrame("abc"), std::string("\x03\x00\x00\x00"
                                            "abc",
                                            7));
  EXPECT_EQ(EncodeFrame(std::string(0x0102, 'x')).substr(0, 4), std::string("\x02\x01\x00\x00", 4));
}

// Goal: how a stream is cut into reads does not change what is decoded.
// Method: random payloads, random cuts; the seed is printed on failure.
TEST(FrameTest, AnyCutOfAStreamYieldsTheSamePayloads) {
  for (unsigned seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    std::vector<std::string> payloads(random() % 8);
    std::string stream;
    for (std::string& payload : payloads) {
      payload.resize(random() % 4 == 0 ? 0 : random() % 3000);
      for (char& byte : payload) byte = static_cast<char>(random());
      stream += EncodeFrame(payload);
    }
    FrameDecoder decoder;
    std::vector<std::string> decoded;
    size_t position = 0;
    while (position < stream.size()) {
      const size_t count = std::min<size_t>(stream.size() - position, random() % 700);
      ASSERT_TRUE(decoder.Append(std::string_view(stream).substr(position, count)).ok());
      position += count;
      if (random() % 3 == 0) {
        for (std::string& payload : TakeAll(&decoder)) decoded.push_back(std::move(payload));
      }
    }
    for (std::string& payload : TakeAll(&decoder)) decoded.push_back(std::move(payload));
    EXPECT_EQ(decoded, payloads);
    EXPECT_EQ(decoder.buffered_bytes(), 0);
  }
}

TEST(FrameTest, APartOfAFrameYieldsNothing) {
  const std::string frame = EncodeFrame("hello");
  for (size_t cut = 0; cut < frame.size(); ++cut) {
    FrameDecoder decoder;
    ASSERT_TRUE(decoder.Append(frame.substr(0, cut)).ok());
    EXPECT_FALSE(decoder.Next().has_value()) << cut;
  }
}

TEST(FrameTest, TheLargestFrameIsTaken) {
  FrameDecoder decoder;
  ASSERT_TRUE(decoder.Append(EncodeFrame(std::string(kFrameLimitBytes, 'x'))).ok());
  EXPECT_EQ(decoder.Next()->size(), static_cast<size_t>(kFrameLimitBytes));
}

TEST(FrameTest, ALengthAboveTheLimitIsRefusedForGoodAfterTheFramesBeforeIt) {
  FrameDecoder decoder;
  const uint32_t length = static_cast<uint32_t>(kFrameLimitBytes) + 1;
  std::string bad(4, '\0');
  for (int index = 0; index < 4; ++index) bad[index] = static_cast<char>(length >> (8 * index));
  const Status status = decoder.Append(EncodeFrame("good") + bad + "tail");
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("4194305"), std::string::npos) << status.message();
  EXPECT_EQ(decoder.Append(EncodeFrame("later")).code(), Code::kInvalidArgument);
  EXPECT_EQ(TakeAll(&decoder), std::vector<std::string>{"good"});
}

}  // namespace
}  // namespace oom
