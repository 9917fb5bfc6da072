#include "client/message_yaml.h"

#include <google/protobuf/descriptor.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <utility>
#include <vector>

#include "runtime/base/file.h"
#include "runtime/base/units.h"

namespace oom {
namespace {

using google::protobuf::EnumDescriptor;
using google::protobuf::EnumValueDescriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

constexpr std::string_view kBytesSuffix = "_bytes";

std::string Lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

template <class Number>
bool ParseWhole(std::string_view text, Number* value) {
  if (text.starts_with('+')) text.remove_prefix(1);
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size();
}

// Reads one document into one message; holds what every error needs.
class Reader {
 public:
  explicit Reader(const std::string& file) : file_(file) {}

  Status Read(const YamlTree& tree, const std::string& path, Message* message) {
    if (tree.kind == YamlTree::Kind::kNull) return Status::Ok();
    if (tree.kind != YamlTree::Kind::kMap) {
      return Error(tree, path,
                   (path.empty() ? "the file" : "'" + path + "'") + " must be a map of keys, not " +
                       Kind(tree));
    }
    for (size_t i = 0; i < tree.keys.size(); ++i) {
      const YamlTree& key = tree.keys[i];
      OOM_ASSIGN_OR_RETURN(const Key found, Find(key, path, message->GetDescriptor()));
      const std::string name = path.empty() ? key.text : path + "." + key.text;
      for (size_t j = 0; j < i; ++j) {
        const auto other = Find(tree.keys[j], path, message->GetDescriptor());
        if (other.ok() && other->field == found.field) {
          return Error(key, name, "'" + name + "' and '" + tree.keys[j].text + "' are one field");
        }
      }
      OOM_RETURN_IF_ERROR(ReadField(tree.items[i], name, found, message));
    }
    return Status::Ok();
  }

 private:
  struct Key {
    const FieldDescriptor* field = nullptr;
    // The short key of a `_bytes` field: units are allowed.
    bool with_units = false;
  };

  Status Error(const YamlTree& at, const std::string& field, const std::string& message) const {
    return Status(Code::kInvalidArgument, file_ + ":" + std::to_string(at.line) + ": " + message)
        .WithField(field);
  }

  static std::string Kind(const YamlTree& tree) { return std::string(YamlKindName(tree.kind)); }

  Result<Key> Find(const YamlTree& key, const std::string& path,
                   const google::protobuf::Descriptor* descriptor) const {
    std::vector<std::string> names;
    for (int i = 0; i < descriptor->field_count(); ++i) {
      const FieldDescriptor* field = descriptor->field(i);
      if (field->name() == key.text) return Key{field, false};
      if (YamlKey(*field) == key.text) return Key{field, true};
      names.push_back(YamlKey(*field));
    }
    const std::string name = path.empty() ? key.text : path + "." + key.text;
    std::string message = "unknown key '" + name + "'";
    const std::string closest = ClosestName(key.text, names);
    if (!closest.empty()) {
      message += "; did you mean '" + closest + "'?";
    } else {
      std::sort(names.begin(), names.end());
      message += "; keys here are";
      for (const std::string& known : names) message += " " + known;
    }
    return Error(key, name, message);
  }

  Status ReadField(const YamlTree& tree, const std::string& name, const Key& key,
                   Message* message) {
    const Reflection* reflection = message->GetReflection();
    if (key.field->is_map()) return ReadMap(tree, name, *key.field, message);
    if (key.field->is_repeated()) {
      if (tree.kind != YamlTree::Kind::kList) return ReadValue(tree, name, key, message);
      for (const YamlTree& item : tree.items) {
        OOM_RETURN_IF_ERROR(ReadValue(item, name, key, message));
      }
      return Status::Ok();
    }
    if (key.field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      return Read(tree, name, reflection->MutableMessage(message, key.field));
    }
    return ReadValue(tree, name, key, message);
  }

  Status ReadMap(const YamlTree& tree, const std::string& name, const FieldDescriptor& field,
                 Message* message) {
    if (tree.kind == YamlTree::Kind::kNull) return Status::Ok();
    if (tree.kind != YamlTree::Kind::kMap) {
      return Error(tree, name, "'" + name + "' must be a map of keys, not " + Kind(tree));
    }
    const auto* entry = field.message_type();
    for (size_t i = 0; i < tree.keys.size(); ++i) {
      Message* item = message->GetReflection()->AddMessage(message, &field);
      const std::string item_name = name + "." + tree.keys[i].text;
      OOM_RETURN_IF_ERROR(ReadValue(tree.keys[i], item_name, {entry->field(0), false}, item));
      OOM_RETURN_IF_ERROR(ReadValue(tree.items[i], item_name, {entry->field(1), false}, item));
    }
    return Status::Ok();
  }

  // One value of a singular field, or one more of a repeated one.
  Status ReadValue(const YamlTree& tree, const std::string& name, const Key& key,
                   Message* message) {
    const FieldDescriptor& field = *key.field;
    const Reflection* reflection = message->GetReflection();
    if (field.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      return Read(tree, name, reflection->AddMessage(message, &field));
    }
    if (tree.kind == YamlTree::Kind::kNull) return Error(tree, name, "'" + name + "' has no value");
    if (tree.kind != YamlTree::Kind::kScalar) {
      return Error(tree, name, "'" + name + "' must be " + Wanted(key) + ", not " + Kind(tree));
    }
    const Status wrong =
        Error(tree, name, "'" + name + "' must be " + Wanted(key) + ", not '" + tree.text + "'");
    // A quoted number is a text: only texts and enums may be quoted.
    if (tree.quoted && field.cpp_type() != FieldDescriptor::CPPTYPE_STRING &&
        field.cpp_type() != FieldDescriptor::CPPTYPE_ENUM) {
      if (!key.with_units) return wrong;
    }
    switch (field.cpp_type()) {
      case FieldDescriptor::CPPTYPE_STRING:
        Store(field, message, std::string(tree.text), &Reflection::SetString,
              &Reflection::AddString);
        return Status::Ok();
      case FieldDescriptor::CPPTYPE_BOOL: {
        const std::string text = Lower(tree.text);
        if (text != "true" && text != "false") return wrong;
        Store(field, message, text == "true", &Reflection::SetBool, &Reflection::AddBool);
        return Status::Ok();
      }
      case FieldDescriptor::CPPTYPE_INT32:
        return StoreNumber<int32_t>(tree, wrong, field, message, &Reflection::SetInt32,
                                    &Reflection::AddInt32);
      case FieldDescriptor::CPPTYPE_UINT32:
        return StoreNumber<uint32_t>(tree, wrong, field, message, &Reflection::SetUInt32,
                                     &Reflection::AddUInt32);
      case FieldDescriptor::CPPTYPE_UINT64:
        return StoreNumber<uint64_t>(tree, wrong, field, message, &Reflection::SetUInt64,
                                     &Reflection::AddUInt64);
      case FieldDescriptor::CPPTYPE_INT64:
        if (key.with_units) {
          // A plain number is exact; with a unit it goes through a double.
          int64_t bytes = 0;
          if (!ParseWhole(tree.text, &bytes) || bytes < 0) {
            const Result<int64_t> with_unit = ParseBytes(tree.text);
            if (!with_unit.ok()) return wrong;
            bytes = *with_unit;
          }
          Store(field, message, bytes, &Reflection::SetInt64, &Reflection::AddInt64);
          return Status::Ok();
        }
        return StoreNumber<int64_t>(tree, wrong, field, message, &Reflection::SetInt64,
                                    &Reflection::AddInt64);
      case FieldDescriptor::CPPTYPE_DOUBLE: {
        double value = 0.0;
        if (!ParseWhole(tree.text, &value) || !std::isfinite(value)) return wrong;
        Store(field, message, value, &Reflection::SetDouble, &Reflection::AddDouble);
        return Status::Ok();
      }
      case FieldDescriptor::CPPTYPE_ENUM:
        return ReadEnum(tree, name, field, message);
      case FieldDescriptor::CPPTYPE_FLOAT:
      case FieldDescriptor::CPPTYPE_MESSAGE:
        break;
    }
    return Error(tree, name, "'" + name + "' cannot be set here");
  }

  Status ReadEnum(const YamlTree& tree, const std::string& name, const FieldDescriptor& field,
                  Message* message) const {
    std::vector<std::string> names;
    for (int i = 0; i < field.enum_type()->value_count(); ++i) {
      const EnumValueDescriptor* value = field.enum_type()->value(i);
      if (value->number() == 0) continue;  // "unspecified" is what an absent key says.
      names.push_back(ShortEnumName(*value));
      if (names.back() != tree.text) continue;
      Store(field, message, value, &Reflection::SetEnum, &Reflection::AddEnum);
      return Status::Ok();
    }
    std::string text = "'" + name + "' cannot be '" + tree.text + "'; ";
    const std::string closest = ClosestName(Lower(tree.text), names);
    if (!closest.empty()) {
      text += "did you mean '" + closest + "'?";
    } else {
      text += "it is one of";
      for (const std::string& known : names) text += " " + known;
    }
    return Error(tree, name, text);
  }

  template <class Value, class Set, class Add>
  static void Store(const FieldDescriptor& field, Message* message, Value value, Set set, Add add) {
    const Reflection* reflection = message->GetReflection();
    if (field.is_repeated()) {
      (reflection->*add)(message, &field, std::move(value));
    } else {
      (reflection->*set)(message, &field, std::move(value));
    }
  }

  template <class Number, class Set, class Add>
  static Status StoreNumber(const YamlTree& tree, const Status& wrong, const FieldDescriptor& field,
                            Message* message, Set set, Add add) {
    Number value = 0;
    if (!ParseWhole(tree.text, &value)) return wrong;
    Store(field, message, value, set, add);
    return Status::Ok();
  }

  static std::string Wanted(const Key& key) {
    if (key.with_units) return "a number of bytes (such as 24GiB)";
    switch (key.field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_STRING:
        return "a text";
      case FieldDescriptor::CPPTYPE_BOOL:
        return "true or false";
      case FieldDescriptor::CPPTYPE_DOUBLE:
        return "a number";
      case FieldDescriptor::CPPTYPE_ENUM:
        return "a name";
      case FieldDescriptor::CPPTYPE_UINT32:
      case FieldDescriptor::CPPTYPE_UINT64:
        return "a whole number from 0";
      default:
        return "a whole number";
    }
  }

  const std::string& file_;
};

}  // namespace

bool IsByteField(const FieldDescriptor& field) {
  return field.cpp_type() == FieldDescriptor::CPPTYPE_INT64 && field.name().ends_with(kBytesSuffix);
}

std::string YamlKey(const FieldDescriptor& field) {
  if (!IsByteField(field)) return field.name();
  return field.name().substr(0, field.name().size() - kBytesSuffix.size());
}

std::string ShortEnumName(const EnumValueDescriptor& value) {
  const std::string& zero = value.type()->value(0)->name();
  const size_t prefix = zero.size() - std::string_view("UNSPECIFIED").size();
  return Lower(value.name().substr(prefix));
}

Status MessageFromYaml(const YamlTree& tree, const std::string& file, Message* message) {
  return Reader(file).Read(tree, "", message);
}

}  // namespace oom
