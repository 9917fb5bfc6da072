#include "tests/proto/descriptor_compatibility.h"

#include <map>

namespace oom {
namespace {

using google::protobuf::DescriptorProto;
using google::protobuf::EnumDescriptorProto;
using google::protobuf::FieldDescriptorProto;
using google::protobuf::FileDescriptorSet;

// Everything that must stay, as "what it is" -> "how it is".
using Facts = std::map<std::string, std::string>;

void AddEnum(const std::string& scope, const EnumDescriptorProto& type, Facts* facts) {
  const std::string name = scope + "." + type.name();
  (*facts)["enum " + name] = "";
  for (const auto& value : type.value()) {
    (*facts)["enum " + name + " number " + std::to_string(value.number())] = value.name();
  }
}

void AddMessage(const std::string& scope, const DescriptorProto& type, Facts* facts) {
  const std::string name = scope + "." + type.name();
  (*facts)["message " + name] = "";
  for (const FieldDescriptorProto& field : type.field()) {
    std::string form = field.name() + ", " + FieldDescriptorProto::Label_Name(field.label()) +
                       ", " + FieldDescriptorProto::Type_Name(field.type()) + " " +
                       field.type_name();
    // A field moves into or out of a oneof only by breaking somebody; "optional" is such a oneof,
    // too.
    if (field.proto3_optional()) form += ", optional";
    if (field.has_oneof_index() && !field.proto3_optional())
      form += ", oneof " + type.oneof_decl(field.oneof_index()).name();
    (*facts)["field " + name + " number " + std::to_string(field.number())] = form;
  }
  for (const DescriptorProto& nested : type.nested_type()) AddMessage(name, nested, facts);
  for (const EnumDescriptorProto& nested : type.enum_type()) AddEnum(name, nested, facts);
}

Facts FactsOf(const FileDescriptorSet& set) {
  Facts facts;
  for (const auto& file : set.file()) {
    if (file.package() != "oom.v1") continue;
    for (const DescriptorProto& type : file.message_type())
      AddMessage(file.package(), type, &facts);
    for (const EnumDescriptorProto& type : file.enum_type()) AddEnum(file.package(), type, &facts);
    for (const auto& service : file.service()) {
      const std::string name = file.package() + "." + service.name();
      facts["service " + name] = "";
      for (const auto& method : service.method()) {
        facts["method " + name + "." + method.name()] =
            method.input_type() + (method.client_streaming() ? " stream" : "") + " -> " +
            method.output_type() + (method.server_streaming() ? " stream" : "");
      }
    }
  }
  return facts;
}

}  // namespace

std::vector<std::string> IncompatibleChanges(const FileDescriptorSet& golden,
                                             const FileDescriptorSet& current) {
  const Facts now = FactsOf(current);
  std::vector<std::string> changes;
  for (const auto& [what, form] : FactsOf(golden)) {
    const auto it = now.find(what);
    if (it == now.end()) {
      changes.push_back(what + " (" + form + ") is gone");
    } else if (it->second != form) {
      changes.push_back(what + " was (" + form + "), is (" + it->second + ")");
    }
  }
  return changes;
}

}  // namespace oom
