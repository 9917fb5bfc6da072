// Any text as a config.json: refused with a Status that names the file, or a model whose units and
// published tensors agree.

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "runtime/base/check.h"
#include "runtime/model/hf_config.h"
#include "runtime/model/unit.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto model = oom::ParseHfConfig(text, "config.json");
  if (!model.ok()) {
    OOM_CHECK(model.status().message().find("config.json") != std::string::npos);
    return 0;
  }
  // Units of larger models are right by the same code and would only cost time.
  if (model->layer_count() * model->expert_count > 4096) return 0;
  const auto units = oom::BuildUnits(*model, 3);
  int64_t published_elements = 0;
  for (const oom::FileTensor& tensor : oom::PublishedTensors(*model, units)) {
    OOM_CHECK(tensor.elements > 0);
    published_elements += tensor.elements;
  }
  OOM_CHECK(published_elements == oom::ParameterCount(units));
  return 0;
}
