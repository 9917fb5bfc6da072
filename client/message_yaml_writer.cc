// The writing half of message_yaml.h; message_yaml.cc reads.

#include <google/protobuf/descriptor.h>
#include <yaml-cpp/emitter.h>
#include <yaml-cpp/emittermanip.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdio>
#include <string_view>
#include <utility>
#include <vector>

#include "client/message_yaml.h"
#include "runtime/base/units.h"

namespace oom {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

bool IsNumber(std::string_view text, double* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size();
}

// The fewest digits that read back as the same value: 0.0003, 1e-08.
std::string FormatDouble(double value) {
  char buffer[32];
  for (int digits = 1; digits <= 17; ++digits) {
    std::snprintf(buffer, sizeof(buffer), "%.*g", digits, value);
    double again = 0.0;
    if (IsNumber(buffer, &again) && again == value) break;
  }
  return buffer;
}

// "24GiB" when that is exact, else the plain number.
std::string FormatExactBytes(int64_t bytes) {
  constexpr std::pair<int64_t, const char*> kUnits[] = {
      {int64_t{1} << 40, "TiB"}, {1_GiB, "GiB"}, {1_MiB, "MiB"}, {1_KiB, "KiB"}};
  for (const auto& [unit, name] : kUnits) {
    if (bytes > 0 && bytes % unit == 0) return std::to_string(bytes / unit) + name;
  }
  return std::to_string(bytes);
}

// A text that would read as something else is quoted.
bool NeedsQuotes(const std::string& text) {
  double number = 0.0;
  std::string lower = text;
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text.empty() || IsNumber(text, &number) || lower == "true" || lower == "false" ||
         lower == "null" || lower == "~" || lower == "yes" || lower == "no" || lower == "on" ||
         lower == "off" || std::any_of(text.begin(), text.end(), [](unsigned char c) {
           return c < 0x20 || c == 0x7f;
         });
}

void WriteText(const std::string& text, YAML::Emitter& out) {
  if (NeedsQuotes(text)) out << YAML::DoubleQuoted;
  out << text;
}

void WriteMessage(const Message& message, YAML::Emitter& out);

// Value `index` of a repeated field, or the singular one when index is -1.
void WriteValue(const Message& message, const FieldDescriptor& field, int index,
                YAML::Emitter& out) {
  const Reflection* reflection = message.GetReflection();
  const auto pick = [&](auto get, auto get_repeated) {
    return index < 0 ? (reflection->*get)(message, &field)
                     : (reflection->*get_repeated)(message, &field, index);
  };
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_STRING:
      return WriteText(pick(&Reflection::GetString, &Reflection::GetRepeatedString), out);
    case FieldDescriptor::CPPTYPE_BOOL:
      out << pick(&Reflection::GetBool, &Reflection::GetRepeatedBool);
      return;
    case FieldDescriptor::CPPTYPE_INT32:
      out << pick(&Reflection::GetInt32, &Reflection::GetRepeatedInt32);
      return;
    case FieldDescriptor::CPPTYPE_UINT32:
      out << pick(&Reflection::GetUInt32, &Reflection::GetRepeatedUInt32);
      return;
    case FieldDescriptor::CPPTYPE_UINT64:
      out << std::to_string(pick(&Reflection::GetUInt64, &Reflection::GetRepeatedUInt64));
      return;
    case FieldDescriptor::CPPTYPE_INT64: {
      const int64_t value = pick(&Reflection::GetInt64, &Reflection::GetRepeatedInt64);
      out << (IsByteField(field) ? FormatExactBytes(value) : std::to_string(value));
      return;
    }
    case FieldDescriptor::CPPTYPE_DOUBLE:
      out << FormatDouble(pick(&Reflection::GetDouble, &Reflection::GetRepeatedDouble));
      return;
    case FieldDescriptor::CPPTYPE_FLOAT:
      out << FormatDouble(pick(&Reflection::GetFloat, &Reflection::GetRepeatedFloat));
      return;
    case FieldDescriptor::CPPTYPE_ENUM:
      out << ShortEnumName(*pick(&Reflection::GetEnum, &Reflection::GetRepeatedEnum));
      return;
    case FieldDescriptor::CPPTYPE_MESSAGE:
      WriteMessage(index < 0 ? reflection->GetMessage(message, &field)
                             : reflection->GetRepeatedMessage(message, &field, index),
                   out);
      return;
  }
}

void WriteMap(const Message& message, const FieldDescriptor& field, YAML::Emitter& out) {
  const auto* entry = field.message_type();
  const Reflection* reflection = message.GetReflection();
  // Hash order is not stable; the file should be.
  std::vector<std::pair<std::string, int>> order;
  for (int i = 0; i < reflection->FieldSize(message, &field); ++i) {
    const Message& item = reflection->GetRepeatedMessage(message, &field, i);
    order.emplace_back(item.GetReflection()->GetString(item, entry->field(0)), i);
  }
  std::sort(order.begin(), order.end());
  out << YAML::BeginMap;
  for (const auto& [key, i] : order) {
    out << YAML::Key;
    WriteText(key, out);
    out << YAML::Value;
    WriteValue(reflection->GetRepeatedMessage(message, &field, i), *entry->field(1), -1, out);
  }
  out << YAML::EndMap;
}

void WriteMessage(const Message& message, YAML::Emitter& out) {
  std::vector<const FieldDescriptor*> fields;
  message.GetReflection()->ListFields(message, &fields);
  out << YAML::BeginMap;
  for (const FieldDescriptor* field : fields) {
    out << YAML::Key << YamlKey(*field) << YAML::Value;
    if (field->is_map()) {
      WriteMap(message, *field, out);
    } else if (field->is_repeated()) {
      const bool flow = field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE;
      if (flow) out << YAML::Flow;
      out << YAML::BeginSeq;
      const int count = message.GetReflection()->FieldSize(message, field);
      for (int i = 0; i < count; ++i) WriteValue(message, *field, i, out);
      out << YAML::EndSeq;
    } else {
      WriteValue(message, *field, -1, out);
    }
  }
  out << YAML::EndMap;
}

}  // namespace

std::string MessageToYaml(const Message& message) {
  YAML::Emitter out;
  WriteMessage(message, out);
  return std::string(out.c_str(), out.size()) + "\n";
}

}  // namespace oom
