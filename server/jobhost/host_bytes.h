// Host memory of a job: PSS of its processes, and its pools on hugetlb pages, which the kernel
// counts in no process (engine rules, section 13). Thread-safe functions.

#pragma once

#include <sys/types.h>

#include <cstdint>
#include <vector>

#include "oom/internal/v1/control.pb.h"

namespace oom {

// Of the processes that are still there.
int64_t ProportionalSetBytes(const std::vector<pid_t>& processes);

int64_t HugetlbPoolBytes(const internal::v1::JobStart& start);

}  // namespace oom
