#include "client/yaml_tree.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/mark.h>
#include <yaml-cpp/parser.h>

#include <set>
#include <sstream>
#include <utility>

#include "client/utf8.h"

namespace oom {
namespace {

// Comes after the text. yaml-cpp closes a quoted scalar that the file leaves open; then this is in
// it.
constexpr std::string_view kEndComment = "# end of the file";

Status ErrorAt(const std::string& file, int line, const std::string& message) {
  return Status(Code::kInvalidArgument, file + ":" + std::to_string(line) + ": " + message)
      .WithField(file);
}

// Remembers the first error and ignores what follows; yaml-cpp has no way to stop a document early.
class TreeBuilder : public YAML::EventHandler {
 public:
  explicit TreeBuilder(const std::string& file) : file_(file) {}

  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    Add(mark, anchor, YamlTree::Kind::kNull);
  }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override {
    Fail(mark, "aliases are not supported");
    Add(mark, 0, YamlTree::Kind::kNull);
  }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    // yaml-cpp gives "?" to plain and "!" to quoted scalars that have no tag of their own.
    if (!tag.empty() && tag != "?" && tag != "!") Fail(mark, "tags are not supported");
    if (!IsUtf8(value)) Fail(mark, "not UTF-8");
    YamlTree& scalar = Add(mark, anchor, YamlTree::Kind::kScalar);
    scalar.text = value;
    scalar.quoted = tag == "!";
    if (scalar.quoted && value.ends_with(kEndComment)) Fail(mark, "the quotes are not closed");
    // An unquoted null comes as a scalar in some places and as OnNull in others.
    if (!scalar.quoted && (value == "~" || value == "null" || value.empty())) {
      scalar.kind = YamlTree::Kind::kNull;
    }
    Close();
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    Open(mark, anchor, YamlTree::Kind::kList);
  }
  void OnSequenceEnd() override { End(); }
  void OnMapStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    Open(mark, anchor, YamlTree::Kind::kMap);
  }
  void OnMapEnd() override { End(); }

  const Status& status() const { return status_; }
  YamlTree TakeRoot() { return std::move(root_); }

 private:
  // A node that is still open, with the map key that waits for its value.
  struct Frame {
    YamlTree node;
    bool has_key = false;
  };

  static int Line(const YAML::Mark& mark) { return mark.line + 1; }

  void Fail(const YAML::Mark& mark, const std::string& message) {
    if (status_.ok()) status_ = ErrorAt(file_, Line(mark), message);
  }

  YamlTree& Add(const YAML::Mark& mark, YAML::anchor_t anchor, YamlTree::Kind kind) {
    if (anchor != 0) Fail(mark, "anchors are not supported");
    pending_ = YamlTree();
    pending_.kind = kind;
    pending_.line = Line(mark);
    if (kind == YamlTree::Kind::kNull) Close();
    return pending_;
  }

  void Open(const YAML::Mark& mark, YAML::anchor_t anchor, YamlTree::Kind kind) {
    Add(mark, anchor, kind);
    stack_.push_back({std::move(pending_)});
  }

  void End() {
    pending_ = std::move(stack_.back().node);
    stack_.pop_back();
    Close();
  }

  // Puts `pending_` where it belongs: key or value of the open map, item of the open list, or root.
  void Close() {
    YamlTree node = std::move(pending_);
    if (stack_.empty()) {
      root_ = std::move(node);
      return;
    }
    Frame& parent = stack_.back();
    if (parent.node.kind == YamlTree::Kind::kList || parent.has_key) {
      parent.node.items.push_back(std::move(node));
      parent.has_key = false;
      return;
    }
    parent.node.keys.push_back(std::move(node));
    parent.has_key = true;
  }

  const std::string& file_;
  Status status_;
  YamlTree root_;
  YamlTree pending_;
  std::vector<Frame> stack_;
};

Status CheckKeys(const YamlTree& tree, const std::string& file) {
  std::set<std::string_view> seen;
  for (const YamlTree& key : tree.keys) {
    if (key.kind != YamlTree::Kind::kScalar) {
      return ErrorAt(file, key.line, "a key must be a text");
    }
    if (!seen.insert(key.text).second) {
      return ErrorAt(file, key.line, "'" + key.text + "' is there twice");
    }
  }
  for (const YamlTree& item : tree.items) OOM_RETURN_IF_ERROR(CheckKeys(item, file));
  return Status::Ok();
}

}  // namespace

std::string_view YamlKindName(YamlTree::Kind kind) {
  switch (kind) {
    case YamlTree::Kind::kNull:
      return "nothing";
    case YamlTree::Kind::kScalar:
      return "a single value";
    case YamlTree::Kind::kList:
      return "a list";
    case YamlTree::Kind::kMap:
      return "a map";
  }
  return "";
}

Result<YamlTree> ParseYaml(const std::string& text, const std::string& file) {
  std::istringstream input(text + "\n" + std::string(kEndComment));
  TreeBuilder builder(file);
  TreeBuilder next(file);
  try {
    YAML::Parser parser(input);
    if (!parser.HandleNextDocument(builder)) return YamlTree();
    OOM_RETURN_IF_ERROR(builder.status());
    if (parser.HandleNextDocument(next)) {
      return Status(Code::kInvalidArgument, file + ": more than one YAML document").WithField(file);
    }
  } catch (const YAML::Exception& error) {
    return ErrorAt(file, error.mark.line + 1, error.msg);
  }
  YamlTree root = builder.TakeRoot();
  OOM_RETURN_IF_ERROR(CheckKeys(root, file));
  return root;
}

}  // namespace oom
