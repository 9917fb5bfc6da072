// Sizes at which operators of GPUs work in parts. The planner's memory account knows them.

#pragma once

#include <cstdint>

namespace oom {

// Tokens that one backward of attention takes at once, whole documents.
inline constexpr int64_t kCudnnBackwardTokens = 32768;

}  // namespace oom
