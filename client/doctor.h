// `oom doctor`: what of this machine slows OOM down or stops it, each with the command that fixes
// it. ExamineMachine reads files only.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "client/output.h"

namespace oom {

enum class FindingLevel { kOk, kWarning, kError };

struct Finding {
  // "hugepages".
  std::string name;
  FindingLevel level = FindingLevel::kOk;
  std::string text;
  // A command; empty when nothing needs fixing.
  std::string fix;
};

struct MachineFiles {
  // In front of /proc, /sys and /dev; tests put a tree of their own there.
  std::string root;
  // Of the disk that checkpoints go to.
  std::string disk_folder = ".";
  // The limit for locked memory; -1: unlimited, -2: ask the system.
  int64_t locked_memory_limit_bytes = -2;
};

// driver, hugepages, locked memory, cgroup, numa, disk, cpu: in this order, one or more each.
std::vector<Finding> ExamineMachine(const MachineFiles& files);

// A table, JSON (a list), JSON lines, YAML, or the names of what is not ok.
void WriteFindings(const std::vector<Finding>& findings, Output* output);

}  // namespace oom
