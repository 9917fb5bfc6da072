// JSON as a file format: one value, valid UTF-8, no key twice in an object. Included by sources
// only, since the library's header is large. Thread-safe.

#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

#include "runtime/base/status.h"

namespace oom {

// Fails with kInvalidArgument; the message starts with `where` (a file) and names a repeated key.
Result<nlohmann::json> ParseStrictJson(std::string_view text, std::string_view where);

}  // namespace oom
