// Identifiers that make a submission safe to repeat. Thread-safe.

#pragma once

#include <string>

namespace oom {

// 36 characters, random (UUID version 4): a CreateJobRequest.request_id.
std::string RandomRequestId();

}  // namespace oom
