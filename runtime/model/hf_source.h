// HfSource is the weights of a Hugging Face directory as canonical state: masters from BF16, F16 or
// F32 files, moments zero, step 0. Open finds out which of the family's layouts the files have and holds
// them against the model: every published tensor is there with its shape and a type that training reads,
// and there is nothing else, except what is known to pass through (other towers, heads that predict
// further tokens, rotary inverse frequencies) and a tied head that repeats the embedding.
// Read-only; thread-safe.

#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/model/safetensors_directory.h"
#include "runtime/model/state_source.h"

namespace oom {

// A tensor of a checkpoint that training leaves alone and an export copies.
bool IsPassThroughTensor(Family family, std::string_view name);

// The head's name, which a checkpoint with tied embedding may repeat.
inline constexpr char kHeadTensorName[] = "lm_head.weight";

// Where the embedding lies in a layout.
std::string EmbeddingTensorName(const NameLayout& layout);

// How `files` name the model's tensors, as far as their names tell.
NameLayout LayoutOf(const SafetensorsDirectory& files, const ModelDescription& model);

class HfSource : public StateSource {
 public:
  // Fails with kNotFound, kPermissionDenied or kInvalidArgument; the message names file and tensor.
  static Result<std::unique_ptr<HfSource>> Open(const std::string& directory,
                                                const ModelDescription& model,
                                                const std::vector<ParameterUnit>& units);

  Status Read(int64_t unit, int64_t tensor, StateArray array, int64_t first_element,
              std::span<float> out) const override;
  int64_t step() const override { return 0; }

  const SafetensorsDirectory& files() const { return *files_; }

 private:
  // One file tensor in the canonical tensor that it is a part of.
  struct Piece {
    int64_t offset_elements = 0;
    SafetensorsDirectory::Location location;
  };

  HfSource() = default;

  std::unique_ptr<SafetensorsDirectory> files_;
  std::vector<std::vector<std::vector<Piece>>> pieces_;  // [unit][tensor], by offset.
};

// Whether `files` holds the model, as HfSource::Open requires. The message lists the first ten tensors that are missing,
// left over or of another shape or type, and their number.
Status CheckAgainstModel(const SafetensorsDirectory& files, const ModelDescription& model,
                         const NameLayout& layout, const std::vector<FileTensor>& published);

}  // namespace oom
