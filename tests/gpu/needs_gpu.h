// The end of a test program that lacks what it tests. That there is a GPU every program of
// oom_gpu_test makes sure of by itself, before its first test: needs_gpu.cc is part of it.

#pragma once

namespace oom::testing {

// Says why, and exits with 77, which CTest reads as skipped.
[[noreturn]] void SkipProgram(const char* reason);

}  // namespace oom::testing
