// Safetensors files: strict reading, writing, types.

#include "runtime/model/safetensors.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "runtime/model/safetensors_directory.h"
#include "runtime/model/safetensors_writer.h"
#include "tests/model/model_testing.h"

namespace oom {
namespace {

using testing::IsError;
using testing::ReadText;
using testing::TempDirectory;
using testing::WriteRawFile;
using testing::WriteRawSafetensors;
using testing::WriteText;

TEST(SafetensorsFile, ReadsWhatWasWritten) {
  TempDirectory directory;
  const std::string path = directory / "a.safetensors";
  WriteRawSafetensors(
      path, {{"w", TensorType::kF32, {2, 2}, std::string("\0\0\x80?\0\0\0@\0\0@@\0\0\x80@", 16)},
             {"none", TensorType::kI64, {0, 3}, ""},
             {"scalar", TensorType::kU8, {}, "x"}});
  auto file = SafetensorsFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status().ToString();
  EXPECT_EQ((*file)->header().metadata.at("format"), "pt");
  ASSERT_EQ((*file)->header().tensors.size(), 3u);
  const SafetensorInfo* w = (*file)->Find("w");
  ASSERT_NE(w, nullptr);
  EXPECT_EQ(w->shape, (std::vector<int64_t>{2, 2}));
  std::vector<float> values(2);
  ASSERT_TRUE((*file)->ReadFloats(*w, 1, values).ok());
  EXPECT_EQ(values, (std::vector<float>{2, 3}));
  EXPECT_EQ((*file)->bytes(*(*file)->Find("scalar"))[0], std::byte{'x'});
  EXPECT_EQ((*file)->Find("none")->elements(), 0);
  EXPECT_EQ((*file)->Find("other"), nullptr);
}

TEST(SafetensorsFile, RefusesAMissingOrTruncatedFileAtEveryLength) {
  TempDirectory directory;
  const std::string path = directory / "a.safetensors";
  EXPECT_TRUE(IsError(SafetensorsFile::Open(path), Code::kNotFound, {path}));
  EXPECT_TRUE(
      IsError(SafetensorsFile::Open(directory.path()), Code::kInvalidArgument, {directory.path()}));
  WriteRawSafetensors(path, {{"w", TensorType::kBF16, {4}, "12345678"}});
  const std::string whole = ReadText(path);
  for (size_t length = 0; length < whole.size(); ++length) {
    WriteText(path, whole.substr(0, length));
    EXPECT_TRUE(IsError(SafetensorsFile::Open(path), Code::kInvalidArgument, {path})) << length;
  }
  WriteText(path, whole + "x");
  EXPECT_TRUE(IsError(SafetensorsFile::Open(path), Code::kInvalidArgument, {path, "9 bytes"}));
}

TEST(SafetensorsFile, AFileThatShrinksAfterOpenIsAnErrorAndNoSignal) {
  TempDirectory directory;
  const std::string path = directory / "a.safetensors";
  WriteRawSafetensors(path, {{"w", TensorType::kF32, {65536}, std::string(262144, 'x')}});
  auto file = SafetensorsFile::Open(path);
  ASSERT_TRUE(file.ok());
  ASSERT_EQ(::truncate(path.c_str(), 4096), 0);
  std::vector<float> values(65536);
  EXPECT_TRUE(IsError((*file)->ReadFloats(*(*file)->Find("w"), 0, values), Code::kDataLoss,
                      {path, "4096"}));
}

// Each header is wrong in one way; the message names the file and what is wrong.
TEST(SafetensorsFile, RefusesEveryMalformedHeader) {
  struct Case {
    const char* header;
    size_t data_bytes;
    std::vector<std::string> parts;
  };
  const Case cases[] = {
      {"", 0, {"'{'"}},
      {" {}", 0, {"'{'"}},
      {"{", 0, {"JSON"}},
      {"{}{}", 0, {"JSON"}},
      {"{\"\xff\": 1}", 0, {"JSON"}},
      {"{}", 1, {"1 bytes"}},
      {R"({"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},
           "w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
       1,
       {"\"w\"", "twice"}},
      {R"({"w":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1, {"twice"}},
      {R"({"w":1})", 0, {"\"w\""}},
      {R"({"w":{"dtype":"U8","shape":[1]}})", 1, {"\"w\"", "data_offsets"}},
      {R"({"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":1}})",
       1,
       {"\"w\"", "unknown key"}},
      {R"({"w":{"dtype":"Q4","shape":[1],"data_offsets":[0,1]}})", 1, {"\"w\"", "Q4"}},
      {R"({"w":{"dtype":4,"shape":[1],"data_offsets":[0,1]}})", 1, {"\"w\"", "dtype"}},
      {R"({"w":{"dtype":"U8","shape":1,"data_offsets":[0,1]}})", 1, {"\"w\"", "shape"}},
      {R"({"w":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})", 1, {"\"w\"", "shape"}},
      {R"({"w":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}})", 1, {"\"w\"", "shape"}},
      {R"({"w":{"dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,1]}})", 1, {"\"w\""}},
      {R"({"w":{"dtype":"F64","shape":[4611686018427387904,4],"data_offsets":[0,0]}})",
       0,
       {"\"w\"", "too many"}},
      {R"({"w":{"dtype":"U8","shape":[1],"data_offsets":[0]}})", 1, {"\"w\"", "data_offsets"}},
      {R"({"w":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}})", 1, {"\"w\"", "data_offsets"}},
      {R"({"w":{"dtype":"U8","shape":[1],"data_offsets":[0,-1]}})", 1, {"\"w\"", "data_offsets"}},
      {R"({"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", 1, {"\"w\"", "beyond"}},
      {R"({"w":{"dtype":"U8","shape":[9223372036854775807],
           "data_offsets":[0,9223372036854775807]}})",
       1,
       {"\"w\"", "beyond"}},
      {R"({"w":{"dtype":"U16","shape":[2],"data_offsets":[0,2]}})", 2, {"\"w\"", "4 bytes"}},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},
           "b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
       3,
       {"\"b\"", "overlaps"}},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},
           "b":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})",
       2,
       {"\"b\"", "overlaps"}},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},
           "b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})",
       3,
       {"\"b\"", "hole"}},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})", 2, {"\"a\"", "hole"}},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 2, {"2 bytes"}},
      {R"({"__metadata__":{"format":1}})", 0, {"format"}},
      {R"({"__metadata__":[]})", 0, {"__metadata__"}},
  };
  TempDirectory directory;
  const std::string path = directory / "bad.safetensors";
  for (const Case& test : cases) {
    WriteRawFile(path, test.header, std::string(test.data_bytes, 'd'));
    std::vector<std::string> parts = test.parts;
    parts.push_back(path);
    EXPECT_TRUE(IsError(SafetensorsFile::Open(path), Code::kInvalidArgument, parts)) << test.header;
  }
  WriteText(path, std::string("\x01\xE1\xF5\x05\0\0\0\0{}", 10));  // 100,000,001
  EXPECT_TRUE(IsError(SafetensorsFile::Open(path), Code::kInvalidArgument, {path, "100000001"}));
  WriteText(path, std::string(8, '\xff') + "{}");
  EXPECT_TRUE(IsError(SafetensorsFile::Open(path), Code::kInvalidArgument, {path}));
}

TEST(SafetensorsWriter, InOrderAndByRangesGiveTheSameFile) {
  TempDirectory directory;
  SafetensorsWriter::Options options;
  options.tensors = {{"b", TensorType::kF32, {3}},
                     {"a", TensorType::kBF16, {2, 2}},
                     {"empty", TensorType::kU8, {0}}};
  options.metadata = {{"format", "pt"}};
  const std::string data = "0123456789abABCDEFGH";
  const auto bytes = std::as_bytes(std::span(data));
  options.path = directory / "append.safetensors";
  auto append = SafetensorsWriter::Create(options);
  ASSERT_TRUE(append.ok());
  ASSERT_TRUE((*append)->Append(bytes.first(7)).ok());
  ASSERT_TRUE((*append)->Append(bytes.subspan(7)).ok());
  ASSERT_TRUE((*append)->Finish().ok());
  options.path = directory / "ranges.safetensors";
  options.preallocate = true;
  auto ranges = SafetensorsWriter::Create(options);
  ASSERT_TRUE(ranges.ok()) << ranges.status().ToString();
  std::thread second([&] { EXPECT_TRUE((*ranges)->WriteAt(1, 0, bytes.subspan(12, 8)).ok()); });
  EXPECT_TRUE((*ranges)->WriteAt(0, 4, bytes.subspan(4, 8)).ok());
  EXPECT_TRUE((*ranges)->WriteAt(0, 0, bytes.first(4)).ok());
  second.join();
  ASSERT_TRUE((*ranges)->Finish().ok());
  EXPECT_EQ(ReadText(directory / "append.safetensors"), ReadText(directory / "ranges.safetensors"));
  auto file = SafetensorsFile::Open(options.path);
  ASSERT_TRUE(file.ok()) << file.status().ToString();
  EXPECT_EQ((*file)->header_text().size() % 8, 0u);
  const auto a = (*file)->bytes(*(*file)->Find("a"));
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(a.data()), a.size()), "ABCDEFGH");
}

TEST(SafetensorsWriter, RefusesAnExistingFileAndAMissingDirectory) {
  TempDirectory directory;
  SafetensorsWriter::Options options;
  options.path = directory / "there";
  WriteText(options.path, "precious");
  EXPECT_TRUE(IsError(SafetensorsWriter::Create(options), Code::kAlreadyExists, {options.path}));
  EXPECT_EQ(ReadText(options.path), "precious");
  options.path = directory / "missing/file";
  EXPECT_TRUE(IsError(SafetensorsWriter::Create(options), Code::kNotFound, {options.path}));
}

TEST(SafetensorsWriterDeathTest, AForgottenByteIsABug) {
  TempDirectory directory;
  SafetensorsWriter::Options options;
  options.path = directory / "a.safetensors";
  options.tensors = {{"a", TensorType::kU8, {2}}};
  auto writer = SafetensorsWriter::Create(options);
  ASSERT_TRUE(writer.ok());
  EXPECT_DEATH(static_cast<void>((*writer)->Finish()), "written_bytes_");
}

TEST(SafetensorsDirectory, IndexAndShardsMustAgree) {
  TempDirectory directory;
  const std::string index = directory / "model.safetensors.index.json";
  EXPECT_TRUE(IsError(SafetensorsDirectory::Open(directory.path()), Code::kNotFound,
                      {directory.path(), "model.safetensors"}));
  WriteRawSafetensors(directory / "1.safetensors", {{"a", TensorType::kU8, {1}, "a"}});
  WriteRawSafetensors(directory / "2.safetensors", {{"b", TensorType::kU8, {1}, "b"}});
  const auto open = [&](const std::string& text) {
    WriteText(index, text);
    return SafetensorsDirectory::Open(directory.path());
  };
  const auto good = open(R"({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}})");
  ASSERT_TRUE(good.ok()) << good.status().ToString();
  EXPECT_TRUE((*good)->sharded());
  EXPECT_EQ((*good)->Find("b").file->path(), directory / "2.safetensors");
  EXPECT_EQ((*good)->Find("c").file, nullptr);
  EXPECT_TRUE(IsError(open(R"({"weight_map": {"a": "1.safetensors", "b": "3.safetensors"}})"),
                      Code::kNotFound, {"3.safetensors"}));
  EXPECT_TRUE(IsError(open(R"({"weight_map": {"a": "2.safetensors", "b": "2.safetensors"}})"),
                      Code::kInvalidArgument, {"\"a\"", "2.safetensors"}));
  EXPECT_TRUE(IsError(open(R"({"weight_map": {"b": "2.safetensors", "c": "2.safetensors"}})"),
                      Code::kInvalidArgument, {"\"c\"", "2.safetensors"}));
  // A tensor of a shard that the index does not know.
  WriteRawSafetensors(directory / "2.safetensors",
                      {{"b", TensorType::kU8, {1}, "b"}, {"a", TensorType::kU8, {1}, "z"}});
  EXPECT_TRUE(IsError(open(R"({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}})"),
                      Code::kInvalidArgument, {"\"a\"", "2.safetensors"}));
  for (const char* text :
       {"", "[]", "{}", R"({"weight_map": {}})", R"({"weight_map": {"a": 1}})",
        R"({"weight_map": {"a": "../1.safetensors"}})", R"({"weight_map": {"a": "/etc/passwd"}})",
        R"({"weight_map": {"a": "1.safetensors", "a": "1.safetensors"}})"}) {
    EXPECT_TRUE(IsError(open(text), Code::kInvalidArgument, {index})) << text;
  }
}

TEST(TensorType, NamesAreUniqueAndKnown) {
  for (const char* name : {"BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "U16", "I16", "F16", "BF16",
                           "U32", "I32", "F32", "U64", "I64", "F64"}) {
    const auto type = TensorTypeFromName(name);
    ASSERT_TRUE(type.has_value()) << name;
    EXPECT_EQ(TensorTypeName(*type), name);
  }
  EXPECT_FALSE(TensorTypeFromName("f32").has_value());
}

// All 65,536 patterns of both 16-bit types survive the way to FP32 and back.
TEST(TensorType, SixteenBitValuesSurviveTheWayThroughFloat) {
  for (uint32_t pattern = 0; pattern <= 0xFFFF; ++pattern) {
    const uint16_t value = static_cast<uint16_t>(pattern);
    EXPECT_EQ(FloatBitsToBfloat16(pattern << 16), value);
    EXPECT_EQ(FloatBitsToHalf(HalfToFloatBits(value)), value);
    const bool half_is_nan = (value & 0x7FFF) > 0x7C00;
    EXPECT_EQ(std::isnan(std::bit_cast<float>(HalfToFloatBits(value))), half_is_nan);
  }
}

// Halves against their definition: sign * fraction * 2^exponent.
TEST(TensorType, HalfValuesAreTheirDefinition) {
  for (uint32_t pattern = 0; pattern < 0x7C00; ++pattern) {
    const int exponent = static_cast<int>(pattern >> 10);
    const double fraction = pattern & 0x3FF;
    const double value =
        exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
    EXPECT_EQ(std::bit_cast<float>(HalfToFloatBits(static_cast<uint16_t>(pattern))), value);
    // Halfway to the next one: ties go to the even pattern. 2^16 is what follows the largest.
    const double next =
        pattern + 1 == 0x7C00
            ? 65536.0
            : std::bit_cast<float>(HalfToFloatBits(static_cast<uint16_t>(pattern + 1)));
    const float middle = static_cast<float>((value + next) / 2);
    const uint16_t tie = static_cast<uint16_t>(pattern + (pattern & 1));
    const uint32_t bits = std::bit_cast<uint32_t>(middle);
    EXPECT_EQ(FloatBitsToHalf(bits), tie);
    EXPECT_EQ(FloatBitsToHalf(bits - 1), pattern);
    EXPECT_EQ(FloatBitsToHalf(bits + 1), pattern + 1);
    EXPECT_EQ(FloatBitsToHalf(bits | 0x80000000u), tie | 0x8000u);
  }
}

TEST(TensorType, Bfloat16RoundsHalfAwayFromZeroAndKeepsNans) {
  EXPECT_EQ(FloatBitsToBfloat16(0x3F807FFF), 0x3F80);
  EXPECT_EQ(FloatBitsToBfloat16(0x3F808000), 0x3F81);  // A tie, from an even pattern.
  EXPECT_EQ(FloatBitsToBfloat16(0xBF808000), 0xBF81);
  EXPECT_EQ(FloatBitsToBfloat16(0x80000000), 0x8000);
  EXPECT_EQ(FloatBitsToBfloat16(0x7F7FFFFF), 0x7F80);  // Rounds to infinity.
  EXPECT_EQ(FloatBitsToBfloat16(0x7FFFFFFF), 0x7FFF);
  EXPECT_EQ(FloatBitsToBfloat16(0x7F800001),
            0x7FC0);  // Its payload would be lost: quiet, not infinity.
  EXPECT_EQ(FloatBitsToBfloat16(0xFF800001), 0xFFC0);
}

TEST(TensorType, HalfReportsTheFirstValueBeyondItsRange) {
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> values = {1.0f, infinity, 65504.0f, 65519.0f, 65520.0f, 1e9f};
  std::vector<std::byte> out(values.size() * 2);
  EXPECT_EQ(ConvertFromFloat(TensorType::kF16, values, out), 4);
  EXPECT_EQ(ConvertFromFloat(TensorType::kF16, std::span(values).first(4), std::span(out).first(8)),
            -1);
  EXPECT_EQ(ConvertFromFloat(TensorType::kBF16, values, out), -1);
}

}  // namespace
}  // namespace oom
