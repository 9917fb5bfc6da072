// Any bytes as the four files of a dataset: Open fails with a Status, or every sequence keeps the
// reader's promises. The input is cut at its first three separators ("----\n"): dataset.json,
// documents.npy, loss_mask.npy, tokens.npy; an empty mask part means that there is no mask.

#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <string>
#include <string_view>

#include "runtime/base/check.h"
#include "runtime/data/dataset.h"

namespace {

constexpr std::string_view kSeparator = "----\n";
constexpr const char* kNames[] = {"dataset.json", "documents.npy", "loss_mask.npy", "tokens.npy"};

// One directory for the process: shared memory if there is some, since nothing needs to last.
class ScratchDirectory {
 public:
  ScratchDirectory() {
    path_ = ::access("/dev/shm", W_OK) == 0 ? "/dev/shm/oom_dataset_fuzz_XXXXXX"
                                            : "/tmp/oom_dataset_fuzz_XXXXXX";
    OOM_CHECK(::mkdtemp(path_.data()) != nullptr);
  }
  ~ScratchDirectory() {
    for (const char* name : kNames) ::unlink((path_ + "/" + name).c_str());
    ::rmdir(path_.c_str());
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

const std::string& Directory() {
  static const ScratchDirectory directory;
  return directory.path();
}

void WriteParts(std::string_view input) {
  for (size_t part = 0; part < 4; ++part) {
    const size_t end = part == 3 ? std::string_view::npos : input.find(kSeparator);
    const std::string_view content = input.substr(0, end);
    input = end == std::string_view::npos ? "" : input.substr(end + kSeparator.size());
    const std::string path = Directory() + "/" + kNames[part];
    ::unlink(path.c_str());
    if (part == 2 && content.empty()) continue;
    std::ofstream file(path, std::ios::binary);
    file.write(content.data(), static_cast<std::streamsize>(content.size()));
  }
}

void CheckSequence(const oom::Dataset& dataset, int64_t index, int64_t length,
                   int64_t vocabulary_size) {
  const oom::Sequence sequence = dataset.Read(index);
  const size_t count = static_cast<size_t>(length);
  OOM_CHECK(sequence.tokens.size() == count && sequence.targets.size() == count &&
            sequence.positions.size() == count);
  OOM_CHECK(!sequence.document_starts.empty() && sequence.document_starts.front() == 0);
  int64_t valid = 0;
  for (size_t j = 0; j < count; ++j) {
    OOM_CHECK(sequence.tokens[j] >= 0 && sequence.tokens[j] < vocabulary_size);
    OOM_CHECK(sequence.targets[j] >= -1 && sequence.targets[j] < vocabulary_size);
    const bool starts = std::find(sequence.document_starts.begin(), sequence.document_starts.end(),
                                  static_cast<int32_t>(j)) != sequence.document_starts.end();
    OOM_CHECK(sequence.positions[j] == (starts ? 0 : sequence.positions[j - 1] + 1));
    OOM_CHECK(!starts || j == 0 || sequence.targets[j - 1] == -1);
    valid += sequence.targets[j] >= 0 ? 1 : 0;
  }
  OOM_CHECK(dataset.ValidTargets(index) == valid);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  WriteParts({reinterpret_cast<const char*>(data), size});
  constexpr int64_t kLength = 4;
  constexpr int64_t kVocabularySize = 300;
  const auto dataset = oom::Dataset::Open(
      {.directory = Directory(), .sequence_length = kLength, .vocabulary_size = kVocabularySize});
  if (!dataset.ok()) {
    OOM_CHECK(dataset.status().message().find(Directory()) != std::string::npos);
    return 0;
  }
  for (int64_t i = 0; i < (*dataset)->sequence_count(); ++i) {
    CheckSequence(**dataset, i, kLength, kVocabularySize);
  }
  return 0;
}
