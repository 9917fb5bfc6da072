#include "runtime/model/hf_source.h"

#include <algorithm>
#include <initializer_list>
#include <string>
#include <unordered_set>
#include <utility>

#include "runtime/base/check.h"

namespace oom {
namespace {

Status Refused(const std::string& path, std::string_view tensor, const std::string& what) {
  return Status(Code::kInvalidArgument, path + ": tensor \"" + std::string(tensor) + "\" " + what)
      .WithField(path);
}

// A tied head has no parameters of its own; a file may repeat the embedding under its name.
Status CheckTiedHead(const SafetensorsDirectory& files, const NameLayout& layout) {
  const auto head = files.Find(kHeadTensorName);
  if (head.file == nullptr) return Status::Ok();
  const auto embedding = files.Find(EmbeddingTensorName(layout));
  bool equal = head.info->type == embedding.info->type && head.info->shape == embedding.info->shape;
  std::vector<std::byte> head_bytes(1 << 20);
  std::vector<std::byte> embedding_bytes(1 << 20);
  for (int64_t offset = 0; equal && offset < head.info->bytes;) {
    const size_t count = static_cast<size_t>(std::min<int64_t>(1 << 20, head.info->bytes - offset));
    const std::span<std::byte> a(head_bytes.data(), count);
    const std::span<std::byte> b(embedding_bytes.data(), count);
    OOM_RETURN_IF_ERROR(head.file->Read(*head.info, offset, a));
    OOM_RETURN_IF_ERROR(embedding.file->Read(*embedding.info, offset, b));
    equal = std::equal(a.begin(), a.end(), b.begin());
    offset += static_cast<int64_t>(count);
  }
  if (equal) return Status::Ok();
  return Refused(head.file->path(), kHeadTensorName,
                 "differs from the embedding, though config.json ties them (tie_word_embeddings)");
}

// What does not fit, with the file or folder where it shows.
struct Misfit {
  std::string path;
  std::string tensor;
  std::string what;
};

std::vector<Misfit> FindMisfits(const SafetensorsDirectory& files, const ModelDescription& model,
                                const std::vector<FileTensor>& published) {
  std::vector<Misfit> misfits;
  std::unordered_set<std::string_view> known;
  for (const FileTensor& tensor : published) {
    known.insert(tensor.name);
    const auto location = files.Find(tensor.name);
    if (location.file == nullptr) {
      misfits.push_back({files.directory(), tensor.name,
                         "of shape " + FormatShape(tensor.shape) + " is missing"});
      continue;
    }
    const SafetensorInfo& info = *location.info;
    if (info.shape != tensor.shape) {
      misfits.push_back({location.file->path(), tensor.name,
                         "has shape " + FormatShape(info.shape) + "; config.json asks for " +
                             FormatShape(tensor.shape)});
    } else if (!IsTrainableType(info.type)) {
      misfits.push_back({location.file->path(), tensor.name,
                         "has type " + std::string(TensorTypeName(info.type)) +
                             "; BF16, F16 and F32 can be trained"});
    }
  }
  for (const auto& file : files.files()) {
    for (const SafetensorInfo& info : file->header().tensors) {
      if (known.contains(info.name) || IsPassThroughTensor(model.family, info.name)) continue;
      if (model.tied_embedding && info.name == kHeadTensorName) continue;
      misfits.push_back(
          {file->path(), std::string(info.name),
           "is not part of the architecture: it would be neither trained nor kept"});
    }
  }
  return misfits;
}

}  // namespace

bool IsPassThroughTensor(Family family, std::string_view name) {
  if (name.ends_with(".rotary_emb.inv_freq")) return true;
  const auto starts = [&](std::initializer_list<std::string_view> prefixes) {
    return std::any_of(prefixes.begin(), prefixes.end(),
                       [&](std::string_view prefix) { return name.starts_with(prefix); });
  };
  switch (family) {
    case Family::kQwen35Moe:
      return starts({"model.visual.", "mtp."});
    case Family::kGemma4:
      return starts({"model.vision_tower.", "model.embed_vision.", "model.audio_tower.",
                     "model.embed_audio."});
    case Family::kMixtral:
    case Family::kQwen3Moe:
      return false;
  }
  return false;
}

std::string EmbeddingTensorName(const NameLayout& layout) {
  return layout.prefix + "embed_tokens.weight";
}

NameLayout LayoutOf(const SafetensorsDirectory& files, const ModelDescription& model) {
  NameLayout layout = DefaultLayout(model.family);
  const bool may_be_nested =
      model.family == Family::kQwen35Moe || model.family == Family::kGemma4;
  const NameLayout nested = {.prefix = "model.language_model."};
  if (may_be_nested && files.Find(EmbeddingTensorName(nested)).file != nullptr) {
    layout.prefix = nested.prefix;
  }
  for (const auto& file : files.files()) {
    for (const SafetensorInfo& info : file->header().tensors) {
      if (!info.name.starts_with(layout.prefix + "layers.")) continue;
      if (info.name.find(".experts.") == std::string::npos) continue;
      layout.packed_experts = info.name.ends_with(".gate_up_proj") || info.name.ends_with(".down_proj");
      return layout;
    }
  }
  return layout;
}

Status CheckAgainstModel(const SafetensorsDirectory& files, const ModelDescription& model,
                         const NameLayout& layout, const std::vector<FileTensor>& published) {
  constexpr size_t kListed = 10;
  const std::vector<Misfit> misfits = FindMisfits(files, model, published);
  if (misfits.size() == 1) return Refused(misfits[0].path, misfits[0].tensor, misfits[0].what);
  if (!misfits.empty()) {
    std::string text = files.directory() + ": " + std::to_string(misfits.size()) +
                       " tensors do not fit config.json";
    for (size_t i = 0; i < std::min(kListed, misfits.size()); ++i) {
      text += (i == 0 ? ": \"" : "; \"") + misfits[i].tensor + "\" " + misfits[i].what;
    }
    if (misfits.size() > kListed) {
      text += "; and " + std::to_string(misfits.size() - kListed) + " more";
    }
    return Status(Code::kInvalidArgument, text).WithField(files.directory());
  }
  if (model.tied_embedding) OOM_RETURN_IF_ERROR(CheckTiedHead(files, layout));
  return Status::Ok();
}

Result<std::unique_ptr<HfSource>> HfSource::Open(const std::string& directory,
                                                 const ModelDescription& model,
                                                 const std::vector<ParameterUnit>& units) {
  std::unique_ptr<HfSource> source(new HfSource());
  OOM_ASSIGN_OR_RETURN(source->files_, SafetensorsDirectory::Open(directory));
  const NameLayout layout = LayoutOf(*source->files_, model);
  const std::vector<FileTensor> published = PublishedTensors(model, units, layout);
  OOM_RETURN_IF_ERROR(CheckAgainstModel(*source->files_, model, layout, published));
  for (const ParameterUnit& unit : units) source->pieces_.emplace_back(unit.tensors.size());
  // Published tensors come in rising order of their offset, so the pieces need no sort.
  for (const FileTensor& tensor : published) {
    source->pieces_[static_cast<size_t>(tensor.unit)][static_cast<size_t>(tensor.tensor)].push_back(
        {tensor.offset_elements, source->files_->Find(tensor.name)});
  }
  return source;
}

Status HfSource::Read(int64_t unit, int64_t tensor, StateArray array, int64_t first_element,
                      std::span<float> out) const {
  const std::vector<Piece>& pieces =
      pieces_.at(static_cast<size_t>(unit)).at(static_cast<size_t>(tensor));
  const Piece& last = pieces.back();
  OOM_CHECK(first_element >= 0 && first_element + static_cast<int64_t>(out.size()) <=
                                      last.offset_elements + last.location.info->elements());
  if (array != StateArray::kMaster) {
    std::fill(out.begin(), out.end(), 0.0f);
    return Status::Ok();
  }
  auto piece =
      std::upper_bound(pieces.begin(), pieces.end(), first_element,
                       [](int64_t element, const Piece& p) { return element < p.offset_elements; });
  --piece;
  while (!out.empty()) {
    const SafetensorInfo& info = *piece->location.info;
    const int64_t first = first_element - piece->offset_elements;
    const size_t count = std::min(out.size(), static_cast<size_t>(info.elements() - first));
    OOM_RETURN_IF_ERROR(piece->location.file->ReadFloats(info, first, out.first(count)));
    out = out.subspan(count);
    first_element += static_cast<int64_t>(count);
    ++piece;
  }
  return Status::Ok();
}

}  // namespace oom
