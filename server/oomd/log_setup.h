// The daemon's log: to stderr, as text or as one JSON object a line. Call once, before threads.

#pragma once

#include <string>

namespace oom {

// `format`: "text" or "json"; `level`: "debug", "info", "warning", "error".
void SetUpLog(const std::string& format, const std::string& level);

// `text` as the inside of a JSON string: control characters, quotes and backslashes escaped, bytes
// that are no UTF-8 replaced.
std::string EscapeJson(const std::string& text);

}  // namespace oom
