#include "tests/parity/golden_case.h"

#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/model/hf_config.h"
#include "runtime/model/hf_source.h"
#include "runtime/model/safetensors.h"

namespace oom::testing {
namespace {

template <class T>
T Checked(Result<T> result) {
  OOM_CHECK_MSG(result.ok(), result.status().ToString().c_str());
  return std::move(result).value();
}

void Check(const Status& status) { OOM_CHECK_MSG(status.ok(), status.ToString().c_str()); }

std::span<float> Floats(const at::Tensor& tensor) {
  return {tensor.mutable_data_ptr<float>(), static_cast<size_t>(tensor.numel())};
}

TensorsByName ReadMasters(const std::string& folder, const GoldenCase& golden) {
  const std::unique_ptr<HfSource> source =
      Checked(HfSource::Open(folder, golden.model, golden.units));
  TensorsByName masters;
  for (const ParameterUnit& unit : golden.units) {
    for (size_t i = 0; i < unit.tensors.size(); ++i) {
      at::Tensor master = at::empty(unit.tensors[i].shape, at::kFloat);
      Check(source->Read(unit.index, static_cast<int64_t>(i), StateArray::kMaster, 0,
                         Floats(master)));
      masters[unit.tensors[i].name] = master;
    }
  }
  return masters;
}

void ReadBatch(const std::string& path, GoldenCase* golden) {
  const nlohmann::json batch = nlohmann::json::parse(std::ifstream(path));
  const auto ints = [](const nlohmann::json& list) {
    return at::tensor(list.get<std::vector<int64_t>>(), at::kLong);
  };
  golden->token_T = ints(batch.at("tokens"));
  golden->target_T = ints(batch.at("targets"));
  golden->cu_seqlens = batch.at("documents").get<std::vector<int64_t>>();
  golden->auxiliary_coefficient = batch.at("auxiliary_coefficient").get<double>();
  for (const nlohmann::json& layer : batch.at("chosen_experts")) {
    std::vector<at::Tensor> tokens;
    for (const nlohmann::json& token : layer) tokens.push_back(ints(token));
    golden->chosen_experts.push_back(at::stack(tokens));
  }
}

}  // namespace

TensorsByName GoldenCase::ReferenceWithPrefix(const std::string& prefix) const {
  TensorsByName result;
  for (const auto& [key, tensor] : reference) {
    if (key.starts_with(prefix)) result[key.substr(prefix.size())] = tensor;
  }
  return result;
}

TensorsByName ReadTensors(const std::string& path) {
  const std::unique_ptr<SafetensorsFile> file = Checked(SafetensorsFile::Open(path));
  TensorsByName tensors;
  for (const SafetensorInfo& info : file->header().tensors) {
    at::Tensor tensor = at::empty(info.shape, at::kFloat);
    Check(file->ReadFloats(info, 0, Floats(tensor)));
    tensors[info.name] = tensor;
  }
  return tensors;
}

GoldenCase ReadGoldenCase(const std::string& name) {
  const std::string folder = std::string(OOM_MODEL_FIXTURE) + "/" + name;
  GoldenCase golden;
  golden.name = name;
  golden.model = Checked(ReadHfConfig(folder));
  golden.units = BuildUnits(golden.model, 1);
  golden.masters = ReadMasters(folder, golden);
  ReadBatch(folder + "/batch.json", &golden);
  golden.reference = ReadTensors(folder + "/reference.safetensors");
  return golden;
}

TensorsByName Published(const GoldenCase& golden, const TensorsByName& canonical) {
  TensorsByName result;
  for (const FileTensor& file : PublishedTensors(golden.model, golden.units)) {
    const TensorSpec& spec =
        golden.units[static_cast<size_t>(file.unit)].tensors[static_cast<size_t>(file.tensor)];
    result[file.name] = canonical.at(spec.name)
                            .flatten()
                            .narrow(0, file.offset_elements, file.elements)
                            .view(file.shape);
  }
  return result;
}

}  // namespace oom::testing
