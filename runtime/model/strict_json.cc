#include "runtime/model/strict_json.h"

#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace oom {

Result<nlohmann::json> ParseStrictJson(std::string_view text, std::string_view where) {
  using nlohmann::json;
  std::vector<std::unordered_set<std::string>> open_objects;
  std::string repeated_key;
  bool repeated = false;
  const auto watch = [&](int /*depth*/, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::object_start) {
      open_objects.emplace_back();
    } else if (event == json::parse_event_t::object_end) {
      open_objects.pop_back();
    } else if (event == json::parse_event_t::key) {
      const std::string& key = parsed.get_ref<const std::string&>();
      if (!open_objects.back().insert(key).second && !repeated) {
        repeated = true;
        repeated_key = key;
      }
    }
    return true;
  };
  json value = json::parse(text.begin(), text.end(), watch, /*allow_exceptions=*/false);
  if (value.is_discarded()) {
    return Status(Code::kInvalidArgument, std::string(where) + ": not valid JSON");
  }
  if (repeated) {
    return Status(Code::kInvalidArgument,
                  std::string(where) + ": key \"" + repeated_key + "\" appears twice");
  }
  return value;
}

}  // namespace oom
