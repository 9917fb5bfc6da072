// The version of oom; `oom version` prints it beside oomd's.

#pragma once

namespace oom {

inline constexpr char kVersion[] = "0.1.0";

}  // namespace oom
