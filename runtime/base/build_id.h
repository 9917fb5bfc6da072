// BuildId tells builds of the engine apart: a job host and its workers share memory whose meaning both must know
// alike, so they have to be of one build.

#pragma once

#include <string_view>

namespace oom {

// A hash of the sources of the engine, the job host and the worker.
std::string_view BuildId();

}  // namespace oom
