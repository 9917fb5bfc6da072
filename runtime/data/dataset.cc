#include "runtime/data/dataset.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/base/file.h"
#include "runtime/data/npy.h"

namespace oom {
namespace {

namespace fs = std::filesystem;

Status Malformed(const std::string& path, const std::string& what) {
  return Status(Code::kInvalidArgument, path + ": " + what).WithField(path);
}

struct Declared {
  int64_t vocabulary_size = 0;
  int64_t tokens = 0;
  int64_t documents = 0;
};

Result<Declared> ReadDeclared(const std::string& path) {
  OOM_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, int64_t{16} << 20));
  const nlohmann::json root = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!root.is_object()) return Malformed(path, "is not a JSON object");
  Declared declared;
  const std::pair<const char*, int64_t*> keys[] = {{"vocabulary_size", &declared.vocabulary_size},
                                                   {"tokens", &declared.tokens},
                                                   {"documents", &declared.documents}};
  for (const auto& [key, out] : keys) {
    const auto found = root.find(key);
    if (found == root.end()) return Malformed(path, "\"" + std::string(key) + "\" is missing");
    if (!found->is_number_unsigned() ||
        found->get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return Malformed(path, "\"" + std::string(key) + "\" is not a count");
    }
    *out = found->get<int64_t>();
  }
  return declared;
}

// The first token id at or above `limit`, or -1. Blocks are reduced to their largest id first: that
// loop vectorises, so opening a dataset costs one pass at memory speed.
int64_t FirstBeyond(std::span<const uint32_t> tokens, uint64_t limit) {
  constexpr size_t kBlock = 1 << 16;
  for (size_t begin = 0; begin < tokens.size(); begin += kBlock) {
    const std::span<const uint32_t> block =
        tokens.subspan(begin, std::min(kBlock, tokens.size() - begin));
    uint32_t largest = 0;
    for (const uint32_t token : block) largest = std::max(largest, token);
    if (largest < limit) continue;
    for (size_t i = 0; i < block.size(); ++i) {
      if (block[i] >= limit) return static_cast<int64_t>(begin + i);
    }
  }
  return -1;
}

Status CheckTokens(std::span<const uint32_t> tokens, int64_t declared_size, int64_t model_size,
                   const std::string& path) {
  // Ids are int32 from here on, whatever the vocabulary claims.
  const int64_t limit =
      std::min({declared_size, model_size, int64_t{std::numeric_limits<int32_t>::max()} + 1});
  const int64_t beyond = FirstBeyond(tokens, static_cast<uint64_t>(std::max<int64_t>(limit, 0)));
  if (beyond < 0) return Status::Ok();
  return Malformed(path, "token " + std::to_string(beyond) + " has id " +
                             std::to_string(tokens[static_cast<size_t>(beyond)]) + ", beyond the " +
                             (model_size <= declared_size ? "model's" : "dataset's") +
                             " vocabulary of " + std::to_string(limit));
}

Status CheckDocuments(std::span<const int64_t> documents, int64_t token_count,
                      const std::string& path) {
  if (documents.size() < 2) return Malformed(path, "holds no document");
  if (documents.front() != 0) {
    return Malformed(path, "starts at " + std::to_string(documents.front()) + ", not at 0");
  }
  for (size_t i = 1; i < documents.size(); ++i) {
    if (documents[i] <= documents[i - 1]) {
      return Malformed(path, "offset " + std::to_string(i) + " is " + std::to_string(documents[i]) +
                                 ", not above the one before it (" +
                                 std::to_string(documents[i - 1]) + ")");
    }
  }
  if (documents.back() != token_count) {
    return Malformed(path, "ends at " + std::to_string(documents.back()) + ", but tokens.npy has " +
                               std::to_string(token_count) + " tokens");
  }
  return Status::Ok();
}

constexpr std::array<std::string_view, 1> kTokenTypes = {"<u4"};
constexpr std::array<std::string_view, 1> kDocumentTypes = {"<i8"};
constexpr std::array<std::string_view, 2> kMaskTypes = {"|u1", "|b1"};

}  // namespace

struct Dataset::Impl {
  std::unique_ptr<NpyFile> token_file;
  std::unique_ptr<NpyFile> document_file;
  std::unique_ptr<NpyFile> mask_file;  // nullptr: every target counts.
  std::span<const uint32_t> tokens;
  std::span<const int64_t> documents;
  std::span<const uint8_t> mask;
  int64_t sequence_length = 0;
  int64_t sequence_count = 0;

  // Calls visit(first, last) for each run of tokens [first, last) of one document within [begin,
  // end).
  template <class Visit>
  void ForEachDocument(int64_t begin, int64_t end, const Visit& visit) const {
    auto next = std::upper_bound(documents.begin(), documents.end(), begin);
    while (begin < end) {
      const int64_t last = std::min(*next, end);
      visit(begin, last);
      begin = last;
      ++next;
    }
  }
};

Result<std::unique_ptr<Dataset>> Dataset::Open(const Options& options) {
  if (options.sequence_length < 1 ||
      options.sequence_length > std::numeric_limits<int32_t>::max()) {
    return Status(Code::kInvalidArgument, "sequence_length is " +
                                              std::to_string(options.sequence_length) +
                                              "; it must be a positive 32-bit number")
        .WithField("sequence_length");
  }
  const fs::path root(options.directory);
  const std::string json_path = (root / "dataset.json").string();
  const std::string token_path = (root / "tokens.npy").string();
  const std::string document_path = (root / "documents.npy").string();
  const std::string mask_path = (root / "loss_mask.npy").string();
  OOM_ASSIGN_OR_RETURN(const Declared declared, ReadDeclared(json_path));
  auto impl = std::make_unique<Impl>();
  OOM_ASSIGN_OR_RETURN(impl->token_file, NpyFile::Open(token_path, kTokenTypes));
  OOM_ASSIGN_OR_RETURN(impl->document_file, NpyFile::Open(document_path, kDocumentTypes));
  std::error_code ignored;
  if (fs::exists(fs::symlink_status(mask_path, ignored))) {
    OOM_ASSIGN_OR_RETURN(impl->mask_file, NpyFile::Open(mask_path, kMaskTypes));
    impl->mask = impl->mask_file->values<uint8_t>();
  }
  impl->tokens = impl->token_file->values<uint32_t>();
  impl->documents = impl->document_file->values<int64_t>();
  const int64_t token_count = impl->token_file->elements();
  if (token_count == 0) return Malformed(token_path, "the dataset is empty");
  if (declared.tokens != token_count) {
    return Malformed(json_path, "\"tokens\" is " + std::to_string(declared.tokens) +
                                    ", but tokens.npy has " + std::to_string(token_count));
  }
  OOM_RETURN_IF_ERROR(CheckDocuments(impl->documents, token_count, document_path));
  const int64_t document_count = impl->document_file->elements() - 1;
  if (declared.documents != document_count) {
    return Malformed(json_path, "\"documents\" is " + std::to_string(declared.documents) +
                                    ", but documents.npy has " + std::to_string(document_count));
  }
  if (impl->mask_file != nullptr && impl->mask_file->elements() != token_count) {
    return Malformed(mask_path, "has " + std::to_string(impl->mask_file->elements()) +
                                    " entries for " + std::to_string(token_count) + " tokens");
  }
  OOM_RETURN_IF_ERROR(
      CheckTokens(impl->tokens, declared.vocabulary_size, options.vocabulary_size, token_path));
  impl->sequence_length = options.sequence_length;
  impl->sequence_count = (token_count - 1) / options.sequence_length;
  if (impl->sequence_count == 0) {
    return Malformed(token_path, "has " + std::to_string(token_count) +
                                     " tokens; one sequence and its last target need " +
                                     std::to_string(options.sequence_length + 1));
  }
  return std::unique_ptr<Dataset>(new Dataset(std::move(impl)));
}

Dataset::Dataset(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Dataset::~Dataset() = default;

int64_t Dataset::sequence_count() const { return impl_->sequence_count; }
int64_t Dataset::token_count() const { return impl_->token_file->elements(); }

Sequence Dataset::Read(int64_t index) const {
  OOM_CHECK(index >= 0 && index < impl_->sequence_count);
  const int64_t length = impl_->sequence_length;
  const int64_t begin = index * length;
  Sequence sequence;
  sequence.tokens.assign(impl_->tokens.begin() + begin, impl_->tokens.begin() + begin + length);
  sequence.targets.assign(static_cast<size_t>(length), -1);
  sequence.positions.resize(static_cast<size_t>(length));
  // One token more than the sequence: the last position's target may belong to its document.
  impl_->ForEachDocument(begin, begin + length + 1, [&](int64_t first, int64_t last) {
    if (first < begin + length) {
      sequence.document_starts.push_back(static_cast<int32_t>(first - begin));
    }
    for (int64_t token = first; token < std::min(last, begin + length); ++token) {
      sequence.positions[static_cast<size_t>(token - begin)] = static_cast<int32_t>(token - first);
    }
    for (int64_t target = first + 1; target < last; ++target) {
      if (!impl_->mask.empty() && impl_->mask[static_cast<size_t>(target)] == 0) continue;
      sequence.targets[static_cast<size_t>(target - 1 - begin)] =
          static_cast<int32_t>(impl_->tokens[static_cast<size_t>(target)]);
    }
  });
  return sequence;
}

int64_t Dataset::ValidTargets(int64_t index) const {
  OOM_CHECK(index >= 0 && index < impl_->sequence_count);
  const int64_t length = impl_->sequence_length;
  const int64_t begin = index * length;
  int64_t valid = 0;
  impl_->ForEachDocument(begin, begin + length + 1, [&](int64_t first, int64_t last) {
    if (impl_->mask.empty()) {
      valid += last - first - 1;
      return;
    }
    for (int64_t target = first + 1; target < last; ++target) {
      valid += impl_->mask[static_cast<size_t>(target)] != 0 ? 1 : 0;
    }
  });
  return valid;
}

}  // namespace oom
