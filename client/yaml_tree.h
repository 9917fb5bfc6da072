// YamlTree is a parsed YAML document as plain values that know their line. It is built from
// yaml-cpp's events, so anchors, aliases and tags, which a job file never needs, are refused
// instead of expanded: a hostile file costs at most its own size. Values; thread-compatible.

#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "runtime/base/status.h"

namespace oom {

struct YamlTree {
  enum class Kind { kNull, kScalar, kList, kMap };

  Kind kind = Kind::kNull;
  // From 1.
  int line = 1;
  // Of a scalar; `quoted` scalars are never numbers or booleans.
  std::string text;
  bool quoted = false;
  // Of a list: the items. Of a map: the values, beside `keys`, which are unique.
  std::vector<YamlTree> items;
  std::vector<YamlTree> keys;
};

// "a text", "a list", ...
std::string_view YamlKindName(YamlTree::Kind kind);

// Parses the only document of `text`; an empty one is a kNull. Fails with kInvalidArgument and a
// message that starts with `file`:line on a syntax error, a second document, a repeated key, an
// alias.
Result<YamlTree> ParseYaml(const std::string& text, const std::string& file);

}  // namespace oom
