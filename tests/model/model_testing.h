// Tiny models and synthetic checkpoints for the tests of runtime/model. Single-threaded.

#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/model/description.h"
#include "runtime/model/tensor_type.h"
#include "runtime/model/unit.h"

namespace oom::testing {

// A directory under the system's temporary one, removed with the object.
class TempDirectory {
 public:
  TempDirectory();
  ~TempDirectory();
  TempDirectory(const TempDirectory&) = delete;
  TempDirectory& operator=(const TempDirectory&) = delete;
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

void WriteText(const std::string& path, const std::string& content);
std::string ReadText(const std::string& path);
// Content by path relative to `directory`, of every regular file under it.
std::map<std::string, std::string> ReadTree(const std::string& directory);

// Equal bit by bit: NaNs equal themselves, -0.0 differs from 0.0.
bool SameBits(std::span<const float> a, std::span<const float> b);

// config.json texts. Qwen: three layers, the second one dense. Mixtral: two layers, a sliding
// window.
std::string TinyQwenConfig();
std::string TinyMixtralConfig();
// Qwen3.5, text alone: Gated DeltaNet in the first three of four layers.
std::string TinyQwen35Config();
// Gemma 4, text alone: six layers of which the last is global, keys for values there.
std::string TinyGemmaConfig();
// The same as the published files have it: within `text_config`, beside an image tower's.
std::string Multimodal(const std::string& gemma_config);
// The text with one key set to a JSON value, or removed (value "").
std::string WithKey(const std::string& config, const std::string& key, const std::string& value);

// An error that names every one of `parts`.
::testing::AssertionResult IsError(const Status& status, Code code,
                                   const std::vector<std::string>& parts);
template <class T>
::testing::AssertionResult IsError(const Result<T>& result, Code code,
                                   const std::vector<std::string>& parts) {
  return IsError(result.ok() ? Status::Ok() : result.status(), code, parts);
}

// One tensor to write, and its bytes.
struct RawTensor {
  std::string name;
  TensorType type;
  std::vector<int64_t> shape;
  std::string bytes;
};
// nullptr if there is none.
RawTensor* FindTensor(std::vector<RawTensor>& tensors, const std::string& name);

// A safetensors file without the writer under test: header from the tensors, data one after the
// other.
void WriteRawSafetensors(const std::string& path, const std::vector<RawTensor>& tensors);
// Any header text before any data.
void WriteRawFile(const std::string& path, const std::string& header, const std::string& data);

// Every published tensor of the model, as `layout` names it, in `type`: arbitrary bit patterns,
// -0.0, infinities and NaNs among them, from `seed`.
std::vector<RawTensor> RandomTensors(const ModelDescription& model, TensorType type, uint64_t seed,
                                     const NameLayout& layout);
std::vector<RawTensor> RandomTensors(const ModelDescription& model, TensorType type, uint64_t seed);

// A Hugging Face directory: config.json, tokenizer files, weights in `shard_count` files (with an
// index if above 1).
void WriteCheckpoint(const std::string& directory, const std::string& config,
                     const std::vector<RawTensor>& tensors, int shard_count);

}  // namespace oom::testing
