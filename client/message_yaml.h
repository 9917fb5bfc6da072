// Messages as YAML, by protobuf reflection; the rules are those of a job file (docs/CLI.md):
//   - a key is the field's name; `<name>_bytes` fields are also reached by `<name>`, and then (and
//   only
//     then) values such as 24GiB are allowed; a list may be given as one value;
//   - an enum value is its name without the common prefix, in lower case: DEVICE_KIND_CPU is `cpu`.
// Pure functions.

#pragma once

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <string>

#include "client/yaml_tree.h"
#include "runtime/base/status.h"

namespace oom {

// Fills `message` from `tree`. Fails with kInvalidArgument; the message starts with `file`:line and
// says which key is unknown ("did you mean") or which value has the wrong type.
Status MessageFromYaml(const YamlTree& tree, const std::string& file,
                       google::protobuf::Message* message);

// The block form of every field that is set. Byte counts of whole binary units come as `24GiB`
// under the short key, doubles in the fewest digits that read back as the same value, uint64 and
// int64 exactly.
std::string MessageToYaml(const google::protobuf::Message& message);

// Whether the field counts bytes, and its key in a file: "gpu_memory" of `gpu_memory_bytes`.
bool IsByteField(const google::protobuf::FieldDescriptor& field);
std::string YamlKey(const google::protobuf::FieldDescriptor& field);

// DEVICE_KIND_CPU -> "cpu".
std::string ShortEnumName(const google::protobuf::EnumValueDescriptor& value);

}  // namespace oom
