// OOM_CHECK states what only a bug can break. It is on in release builds too: a worker that dies costs
// one attempt, a wrong number costs the run. Never reachable by input; input errors are Status.
// Thread-safe.

#pragma once

namespace oom::internal {

// Prints the place, the condition and the message to stderr, then aborts.
[[noreturn]] void CheckFailed(const char* file, int line, const char* condition,
                              const char* message);

}  // namespace oom::internal

#define OOM_CHECK(condition) OOM_CHECK_MSG(condition, "")
#define OOM_CHECK_MSG(condition, message)                                             \
  (static_cast<bool>(condition)                                                       \
       ? static_cast<void>(0)                                                         \
       : ::oom::internal::CheckFailed(__FILE__, __LINE__, #condition, message))
