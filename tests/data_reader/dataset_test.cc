// The dataset reader against a plain re-statement of its rules (engine rules, section 14), and
// every bad input by name.

#include "runtime/data/dataset.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "runtime/data/npy.h"

namespace oom {
namespace {

namespace fs = std::filesystem;

class TempDirectory {
 public:
  TempDirectory() {
    std::string pattern = (fs::temp_directory_path() / "oom_data_test_XXXXXX").string();
    OOM_CHECK(::mkdtemp(pattern.data()) != nullptr);
    path_ = pattern;
  }
  ~TempDirectory() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

void WriteText(const std::string& path, const std::string& content) {
  std::ofstream file(path, std::ios::binary);
  file << content;
  OOM_CHECK(file.good());
}

// The header that numpy writes, padded to 64 bytes.
std::string NpyHeaderText(const std::string& dictionary, int major = 1) {
  const size_t fixed = major == 1 ? 10 : 12;
  std::string text = dictionary;
  while ((fixed + text.size() + 1) % 64 != 0) text += ' ';
  text += '\n';
  std::string header = "\x93NUMPY";
  header += static_cast<char>(major);
  header += '\0';
  for (size_t i = 0; i < fixed - 8; ++i) header += static_cast<char>(text.size() >> (8 * i));
  return header + text;
}

template <class T>
std::string Npy(const std::string& descr, const std::vector<T>& values, int major = 1) {
  std::string data(values.size() * sizeof(T), '\0');
  if (!values.empty()) std::memcpy(data.data(), values.data(), data.size());
  return NpyHeaderText("{'descr': '" + descr + "', 'fortran_order': False, 'shape': (" +
                           std::to_string(values.size()) + ",), }",
                       major) +
         data;
}

struct Content {
  std::vector<uint32_t> tokens;
  std::vector<int64_t> documents;
  std::vector<uint8_t> mask;
  bool has_mask = true;
  int64_t vocabulary_size = 50;
};

Content Small() {
  // Documents of 3, 1, 7 and 10 tokens.
  Content content;
  content.documents = {0, 3, 4, 11, 21};
  for (uint32_t i = 0; i < 21; ++i) content.tokens.push_back(10 + i);
  content.mask.assign(21, 1);
  return content;
}

void Write(const std::string& directory, const Content& content) {
  WriteText(directory + "/tokens.npy", Npy("<u4", content.tokens));
  WriteText(directory + "/documents.npy", Npy("<i8", content.documents));
  if (content.has_mask) WriteText(directory + "/loss_mask.npy", Npy("|u1", content.mask));
  WriteText(directory + "/dataset.json",
            "{\"vocabulary_size\": " + std::to_string(content.vocabulary_size) +
                ", \"tokens\": " + std::to_string(content.tokens.size()) + ", \"documents\": " +
                std::to_string(content.documents.size() - 1) + ", \"tokenizer\": \"x\"}");
}

Result<std::unique_ptr<Dataset>> Open(const std::string& directory, int64_t length,
                                      int64_t vocabulary_size = 50) {
  return Dataset::Open(
      {.directory = directory, .sequence_length = length, .vocabulary_size = vocabulary_size});
}

::testing::AssertionResult IsError(const Result<std::unique_ptr<Dataset>>& result, Code code,
                                   const std::vector<std::string>& parts) {
  if (result.ok()) return ::testing::AssertionFailure() << "it opened";
  if (result.status().code() != code) {
    return ::testing::AssertionFailure() << result.status().ToString();
  }
  for (const std::string& part : parts) {
    if (result.status().message().find(part) == std::string::npos) {
      return ::testing::AssertionFailure()
             << result.status().message() << " does not name " << part;
    }
  }
  return ::testing::AssertionSuccess();
}

TEST(Dataset, CutsSequencesAndTargetsAsTheRuleSays) {
  TempDirectory directory;
  Content content = Small();
  content.mask[9] = 0;
  Write(directory.path(), content);
  auto dataset = Open(directory.path(), 5);
  ASSERT_TRUE(dataset.ok()) << dataset.status().ToString();
  EXPECT_EQ((*dataset)->token_count(), 21);
  EXPECT_EQ((*dataset)->sequence_count(), 4);
  const Sequence first = (*dataset)->Read(0);
  EXPECT_EQ(first.tokens, (std::vector<int32_t>{10, 11, 12, 13, 14}));
  EXPECT_EQ(first.targets, (std::vector<int32_t>{11, 12, -1, -1, 15}));
  EXPECT_EQ(first.positions, (std::vector<int32_t>{0, 1, 2, 0, 0}));
  EXPECT_EQ(first.document_starts, (std::vector<int32_t>{0, 3, 4}));
  // Starts in the middle of a document, which begins again at position 0; token 9 is masked.
  const Sequence second = (*dataset)->Read(1);
  EXPECT_EQ(second.tokens, (std::vector<int32_t>{15, 16, 17, 18, 19}));
  EXPECT_EQ(second.targets, (std::vector<int32_t>{16, 17, 18, -1, 20}));
  EXPECT_EQ(second.positions, (std::vector<int32_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(second.document_starts, (std::vector<int32_t>{0}));
  // A document starts right after its first token; the last target is token 15.
  const Sequence third = (*dataset)->Read(2);
  EXPECT_EQ(third.targets, (std::vector<int32_t>{-1, 22, 23, 24, 25}));
  EXPECT_EQ(third.document_starts, (std::vector<int32_t>{0, 1}));
}

// Random documents, masks and lengths against one line per position.
TEST(Dataset, AgreesWithThePlainRuleOnRandomDatasets) {
  std::mt19937 random(11);
  for (int round = 0; round < 60; ++round) {
    Content content;
    const int64_t tokens = 2 + static_cast<int64_t>(random() % 300);
    std::vector<int64_t> document_of;
    content.documents = {0};
    for (int64_t i = 0; i < tokens; ++i) {
      content.tokens.push_back(random() % 50);
      content.mask.push_back(random() % 4 != 0);
      if (i > 0 && random() % (1 + static_cast<unsigned>(round)) == 0)
        content.documents.push_back(i);
      document_of.push_back(static_cast<int64_t>(content.documents.size()) - 1);
    }
    content.documents.push_back(tokens);
    content.has_mask = round % 3 != 0;
    TempDirectory directory;
    Write(directory.path(), content);
    const int64_t length = 1 + static_cast<int64_t>(random() % static_cast<unsigned>(tokens - 1));
    auto dataset = Open(directory.path(), length);
    ASSERT_TRUE(dataset.ok()) << dataset.status().ToString();
    ASSERT_EQ((*dataset)->sequence_count(), (tokens - 1) / length);
    for (int64_t i = 0; i < (*dataset)->sequence_count(); ++i) {
      const Sequence sequence = (*dataset)->Read(i);
      ASSERT_EQ(sequence.tokens.size(), static_cast<size_t>(length));
      int64_t valid = 0;
      int32_t position = 0;
      std::vector<int32_t> starts;
      for (int64_t j = 0; j < length; ++j) {
        const size_t at = static_cast<size_t>(i * length + j);
        const bool starts_here = j == 0 || document_of[at] != document_of[at - 1];
        if (starts_here) starts.push_back(static_cast<int32_t>(j));
        position = starts_here ? 0 : position + 1;
        const bool counts = document_of[at + 1] == document_of[at] &&
                            (!content.has_mask || content.mask[at + 1] != 0);
        valid += counts ? 1 : 0;
        const size_t slot = static_cast<size_t>(j);
        ASSERT_EQ(sequence.tokens[slot], static_cast<int32_t>(content.tokens[at]));
        ASSERT_EQ(sequence.targets[slot],
                  counts ? static_cast<int32_t>(content.tokens[at + 1]) : -1);
        ASSERT_EQ(sequence.positions[slot], position);
      }
      EXPECT_EQ(sequence.document_starts, starts);
      EXPECT_EQ((*dataset)->ValidTargets(i), valid);
    }
  }
}

TEST(Dataset, AcceptsABooleanMaskAndFormatTwo) {
  TempDirectory directory;
  const Content content = Small();
  Write(directory.path(), content);
  WriteText(directory / "loss_mask.npy", Npy("|b1", content.mask));
  WriteText(directory / "tokens.npy", Npy("<u4", content.tokens, 2));
  EXPECT_TRUE(Open(directory.path(), 5).ok());
}

TEST(Dataset, NamesTheFileThatIsMissing) {
  for (const char* name : {"tokens.npy", "documents.npy", "dataset.json"}) {
    TempDirectory directory;
    Write(directory.path(), Small());
    fs::remove(directory / name);
    EXPECT_TRUE(IsError(Open(directory.path(), 5), Code::kNotFound, {directory / name}));
  }
}

TEST(Dataset, RefusesEveryContradictionByName) {
  struct Case {
    std::string what;
    std::function<void(Content&)> change;
    std::vector<std::string> parts;
  };
  const Case cases[] = {
      {"empty",
       [](Content& c) {
         c.tokens = {};
         c.mask = {};
         c.documents = {0, 0};
       },
       {"tokens.npy", "empty"}},
      {"mask too short", [](Content& c) { c.mask.pop_back(); }, {"loss_mask.npy", "20", "21"}},
      {"mask too long", [](Content& c) { c.mask.push_back(1); }, {"loss_mask.npy", "22", "21"}},
      {"no documents", [](Content& c) { c.documents = {0}; }, {"documents.npy"}},
      {"first offset", [](Content& c) { c.documents[0] = 1; }, {"documents.npy", "at 1"}},
      {"falling", [](Content& c) { c.documents[2] = 2; }, {"documents.npy", "offset 2"}},
      {"repeated", [](Content& c) { c.documents[2] = 3; }, {"documents.npy", "offset 2"}},
      {"negative", [](Content& c) { c.documents[1] = -3; }, {"documents.npy", "offset 1", "-3"}},
      {"last offset", [](Content& c) { c.documents.back() = 20; }, {"documents.npy", "20", "21"}},
      {"beyond", [](Content& c) { c.documents.back() = 22; }, {"documents.npy", "22", "21"}},
      {"token id", [](Content& c) { c.tokens[17] = 50; }, {"tokens.npy", "token 17", "50"}},
      {"huge id", [](Content& c) { c.tokens[3] = 0xFFFFFFFFu; }, {"token 3", "4294967295"}},
      {"dataset's own vocabulary",
       [](Content& c) { c.vocabulary_size = 30; },
       {"token 20", "dataset's vocabulary of 30"}},
  };
  for (const Case& test : cases) {
    TempDirectory directory;
    Content content = Small();
    test.change(content);
    Write(directory.path(), content);
    EXPECT_TRUE(IsError(Open(directory.path(), 5), Code::kInvalidArgument, test.parts))
        << test.what;
  }
}

TEST(Dataset, RefusesTokensBeyondTheModelsVocabulary) {
  TempDirectory directory;
  Write(directory.path(), Small());
  EXPECT_TRUE(IsError(Open(directory.path(), 5, 30), Code::kInvalidArgument,
                      {"tokens.npy", "token 20", "id 30", "model's vocabulary of 30"}));
  EXPECT_TRUE(Open(directory.path(), 5, 31).ok());
}

TEST(Dataset, NeedsOneSequenceAndItsLastTarget) {
  TempDirectory directory;
  Write(directory.path(), Small());
  EXPECT_TRUE(Open(directory.path(), 20).ok());
  EXPECT_TRUE(IsError(Open(directory.path(), 21), Code::kInvalidArgument, {"21 tokens", "22"}));
  EXPECT_TRUE(IsError(Open(directory.path(), 0), Code::kInvalidArgument, {"sequence_length"}));
}

TEST(Dataset, RefusesADescriptionThatDiffersFromTheFiles) {
  TempDirectory directory;
  Write(directory.path(), Small());
  const std::pair<const char*, const char*> cases[] = {
      {R"({"vocabulary_size": 50, "tokens": 20, "documents": 4})", "tokens"},
      {R"({"vocabulary_size": 50, "tokens": 21, "documents": 5})", "documents"},
      {R"({"vocabulary_size": 50, "documents": 4})", "tokens"},
      {R"({"tokens": 21, "documents": 4})", "vocabulary_size"},
      {R"({"vocabulary_size": -1, "tokens": 21, "documents": 4})", "vocabulary_size"},
      {R"({"vocabulary_size": 50, "tokens": "21", "documents": 4})", "tokens"},
      {"[]", "object"},
      {"{", "object"},
  };
  for (const auto& [text, part] : cases) {
    WriteText(directory / "dataset.json", text);
    EXPECT_TRUE(IsError(Open(directory.path(), 5), Code::kInvalidArgument, {"dataset.json", part}))
        << text;
  }
  WriteText(directory / "dataset.json", R"({"vocabulary_size": 50, "tokens": 21, "documents": 4})");
  EXPECT_TRUE(Open(directory.path(), 5).ok());
}

TEST(Dataset, RefusesFilesOfAnotherTypeShapeOrLength) {
  const Content content = Small();
  const std::string tokens = Npy("<u4", content.tokens);
  const std::vector<int64_t> wide(content.tokens.begin(), content.tokens.end());
  const std::string data = tokens.substr(tokens.size() - 84);
  const std::string cases[] = {
      Npy("<i8", wide),
      Npy("<i4", content.tokens),
      Npy(">u4", content.tokens),
      NpyHeaderText("{'descr': '<u4', 'fortran_order': False, 'shape': (3, 7), }") + data,
      NpyHeaderText("{'descr': '<u4', 'fortran_order': False, 'shape': (), }") + data.substr(80),
      NpyHeaderText("{'descr': '<u4', 'fortran_order': True, 'shape': (21,), }") + data,
      NpyHeaderText("{'descr': '<u4', 'fortran_order': False, 'shape': (22,), }") + data,
      NpyHeaderText("{'descr': '<u4', 'fortran_order': False, 'shape': (20,), }") + data,
      NpyHeaderText("{'descr': '<u4', 'fortran_order': False, 'shape': (4611686018427387925,), }") +
          data,
      NpyHeaderText(
          "{'descr': '<u4', 'fortran_order': False, 'shape': (99999999999999999999,), }") +
          data,
      NpyHeaderText("{'descr': '<u4', 'fortran_order': False, 'shape': (-21,), }") + data,
      NpyHeaderText("{'descr': '<u4', 'fortran_order': False, 'shape': (21), }") + data,
      NpyHeaderText("{'descr': '<u4', 'fortran_order': False, }") + data,
      NpyHeaderText("{'descr': '<u4', 'descr': '<u4', 'fortran_order': False, 'shape': (21,), }") +
          data,
      NpyHeaderText("{'descr': '<u4', 'fortran_order': False, 'shape': (21,), 'x': 1}") + data,
      NpyHeaderText("{'descr': '<u4', 'fortran_order': False, 'shape': (21,), } {}") + data,
      NpyHeaderText("{'descr': '|O', 'fortran_order': False, 'shape': (21,), }") + data,
      NpyHeaderText("{'descr': [('a', '<u4')], 'fortran_order': False, 'shape': (21,), }") + data,
      NpyHeaderText("{'descr': '<u4', 'fortran_order': False, 'shape': (21,), }", 3) + data,
      "PK\x03\x04 not an array",
      "",
  };
  for (const std::string& file : cases) {
    TempDirectory directory;
    Write(directory.path(), content);
    WriteText(directory / "tokens.npy", file);
    EXPECT_TRUE(
        IsError(Open(directory.path(), 5), Code::kInvalidArgument, {directory / "tokens.npy"}))
        << file.substr(0, 128);
  }
  // Cut anywhere.
  for (size_t length = 0; length < tokens.size(); ++length) {
    TempDirectory directory;
    Write(directory.path(), content);
    WriteText(directory / "tokens.npy", tokens.substr(0, length));
    EXPECT_TRUE(IsError(Open(directory.path(), 5), Code::kInvalidArgument, {"tokens.npy"}))
        << length;
  }
}

}  // namespace
}  // namespace oom
