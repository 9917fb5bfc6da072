#include "tests/checkpoint/checkpoint_testing.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <filesystem>
#include <limits>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/base/unique_fd.h"

namespace oom::testing {

TemporaryDirectory::TemporaryDirectory() {
  std::string pattern = (std::filesystem::temp_directory_path() / "oom-test-XXXXXX").string();
  OOM_CHECK(::mkdtemp(pattern.data()) != nullptr);
  path_ = pattern;
}

TemporaryDirectory::~TemporaryDirectory() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

ModelDescription TinyModel(int64_t hidden_size, int64_t vocabulary_size) {
  ModelDescription model;
  model.family = Family::kQwen3Moe;
  model.hidden_size = hidden_size;
  model.vocabulary_size = vocabulary_size;
  model.expert_count = 3;
  model.experts_per_token = 2;
  model.expert_width = 20;
  model.dense_width = 40;
  model.max_positions = 128;
  model.layers.resize(2);
  for (LayerDescription& layer : model.layers) {
    layer.attention = {.query_head_count = 4,
                       .kv_head_count = 2,
                       .head_size = 8,
                       .query_key_norm = true,
                       .rotary = {.size = 8, .pair_count = 4}};
  }
  model.layers[1].mixture = MixtureKind::kDense;
  return model;
}

float ValueAt(int64_t step, int64_t unit, StateArray array, int64_t element) {
  uint64_t mixed = static_cast<uint64_t>(element) * 0x9E3779B97F4A7C15u;
  mixed ^= static_cast<uint64_t>(step * 1000003 + unit * 1009 + static_cast<int64_t>(array)) *
           0xC2B2AE3D27D4EB4Fu;
  mixed ^= mixed >> 29;
  mixed *= 0xBF58476D1CE4E5B9u;
  mixed ^= mixed >> 32;
  // Sign and mantissa from the hash, an exponent of ordinary weights.
  const auto bits = static_cast<uint32_t>(mixed);
  return std::bit_cast<float>((bits & 0x807FFFFFu) | (0x3C000000u + ((bits >> 4) & 0x03800000u)));
}

Manifest ManifestOf(const ModelDescription& model, int64_t step, const std::string& uid) {
  Manifest manifest;
  manifest.step = step;
  manifest.job_name = "tiny";
  manifest.job_uid = uid;
  manifest.seed = 7;
  manifest.data_cursor = step * 16;
  manifest.model = model;
  return manifest;
}

StateValues ValuesOf(const ParameterUnit& unit, int64_t step, int64_t first_element,
                     int64_t elements) {
  const auto size = static_cast<size_t>(elements);
  const float garbage = std::numeric_limits<float>::quiet_NaN();
  StateValues values{std::vector<float>(size, garbage), std::vector<float>(size, garbage),
                     std::vector<float>(size, garbage)};
  for (const TensorSpec& tensor : unit.tensors) {
    const int64_t begin = std::max(first_element, tensor.offset_elements);
    const int64_t end =
        std::min(first_element + elements, tensor.offset_elements + tensor.elements);
    for (int64_t element = begin; element < end; ++element) {
      const auto at = static_cast<size_t>(element - first_element);
      values.masters[at] = ValueAt(step, unit.index, StateArray::kMaster, element);
      values.moment1[at] = ValueAt(step, unit.index, StateArray::kMoment1, element);
      values.moment2[at] = ValueAt(step, unit.index, StateArray::kMoment2, element);
    }
  }
  return values;
}

Result<CheckpointReport> WriteCheckpoint(CheckpointWriter::Options options,
                                         int64_t range_elements) {
  const std::vector<ParameterUnit> units = options.units;
  const int64_t step = options.manifest.step;
  OOM_ASSIGN_OR_RETURN(auto writer, CheckpointWriter::Create(std::move(options)));
  for (const ParameterUnit& unit : units) {
    for (int64_t first = 0; first < unit.elements; first += range_elements) {
      const int64_t elements = std::min(range_elements, unit.elements - first);
      const StateValues values = ValuesOf(unit, step, first, elements);
      OOM_RETURN_IF_ERROR(
          writer->WriteBlocks(unit.index, first, values.masters, values.moment1, values.moment2));
    }
  }
  return writer->Commit();
}

Result<CheckpointReport> WriteCheckpoint(const std::string& output_directory,
                                         const ModelDescription& model, int64_t step, int keep,
                                         const std::string& uid) {
  return WriteCheckpoint({.output_directory = output_directory,
                          .manifest = ManifestOf(model, step, uid),
                          .units = BuildUnits(model, 1),
                          .keep = keep});
}

std::string CompareWithValues(const StateSource& source, const std::vector<ParameterUnit>& units,
                              int64_t step) {
  for (const ParameterUnit& unit : units) {
    for (size_t tensor = 0; tensor < unit.tensors.size(); ++tensor) {
      const TensorSpec& spec = unit.tensors[tensor];
      for (const StateArray array : kStateArrays) {
        std::vector<float> values(static_cast<size_t>(spec.elements));
        const Status status =
            source.Read(unit.index, static_cast<int64_t>(tensor), array, 0, values);
        if (!status.ok()) return status.ToString();
        for (int64_t i = 0; i < spec.elements; ++i) {
          const float expected = ValueAt(step, unit.index, array, spec.offset_elements + i);
          if (std::bit_cast<uint32_t>(values[static_cast<size_t>(i)]) !=
              std::bit_cast<uint32_t>(expected)) {
            return StateTensorName(array, spec.name) + "[" + std::to_string(i) + "]";
          }
        }
      }
    }
  }
  return "";
}

std::vector<std::string> Names(const std::string& directory) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(directory, error)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

void FlipBit(const std::string& path, int64_t offset_bytes) {
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  char byte = 0;
  OOM_CHECK(fd.valid() && ::pread(fd.get(), &byte, 1, offset_bytes) == 1);
  byte = static_cast<char>(byte ^ 0x10);
  OOM_CHECK(::pwrite(fd.get(), &byte, 1, offset_bytes) == 1);
}

}  // namespace oom::testing
