// Reads a Hugging Face config.json into a ModelDescription. Every key that would change the numbers
// is either implemented or refused by name; keys that only inference or other tools read are
// ignored (output_router_logits and router_aux_loss_coef too: the job's `router.auxiliary_loss`
// decides). Pure functions; thread-safe.

#pragma once

#include <string>
#include <string_view>

#include "runtime/base/status.h"
#include "runtime/model/description.h"

namespace oom {

inline constexpr char kConfigFileName[] = "config.json";

// `where` starts every message. Fails with kInvalidArgument: not JSON, an unknown architecture, a
// missing key, a value out of range, a feature that training does not implement.
Result<ModelDescription> ParseHfConfig(std::string_view json_text, const std::string& where);

// `path` is a config.json or a directory that holds one. Also fails with codes of ReadFile.
Result<ModelDescription> ReadHfConfig(const std::string& path);

// "Qwen3MoeForCausalLM" and "qwen3_moe", and so on.
std::string_view ArchitectureName(Family family);
std::string_view ModelTypeName(Family family);

}  // namespace oom
