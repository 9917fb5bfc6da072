// What of a descriptor set a later one must keep: every message, field (number, name, type, label),
// enum value, service and method. Additions are fine. A pure function.

#pragma once

#include <google/protobuf/descriptor.pb.h>

#include <string>
#include <vector>

namespace oom {

// One line for each thing of `golden` in package oom.v1 that `current` has not or has otherwise.
std::vector<std::string> IncompatibleChanges(const google::protobuf::FileDescriptorSet& golden,
                                             const google::protobuf::FileDescriptorSet& current);

}  // namespace oom
