#include "runtime/checkpoint/manifest.h"

#include <charconv>
#include <cmath>
#include <cstdio>
#include <limits>
#include <utility>

#include "runtime/checkpoint/crc32c.h"
#include "runtime/checkpoint/json_fields.h"
#include "runtime/checkpoint/manifest_model.h"
#include "runtime/model/strict_json.h"

namespace oom {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kFormat = "oom-checkpoint";
constexpr int64_t kVersion = 1;
// The text ends with this, eight hexadecimal digits and kTailEnd.
constexpr std::string_view kTail = ",\n \"checksum\": \"";
constexpr std::string_view kTailEnd = "\"}\n";

std::string Hex(uint32_t value) {
  char text[9];
  std::snprintf(text, sizeof(text), "%08x", value);
  return text;
}

bool ParseHex(std::string_view text, uint32_t* value) {
  if (text.size() != 8) return false;
  for (const char c : text) {
    if (!((c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'))) return false;
  }
  return std::from_chars(text.data(), text.data() + 8, *value, 16).ec == std::errc();
}

uint32_t TextCrc(std::string_view text) {
  return Crc32c(std::as_bytes(std::span(text.data(), text.size())));
}

// A name that stays in the checkpoint's directory: letters, digits, '-', '_', '.', not starting
// with '.'.
bool IsPlainFileName(std::string_view name) {
  if (name.empty() || name.size() > 200 || name.front() == '.' || name == kManifestName)
    return false;
  for (const char c : name) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                       c == '-' || c == '_' || c == '.';
    if (!plain) return false;
  }
  return true;
}

Status ParseFile(const Json& json, const std::string& where, ManifestFile* file) {
  Fields fields(&json, where);
  file->name = fields.String("name");
  if (!IsPlainFileName(file->name)) fields.Fail("has a name that is not a plain file name");
  file->bytes = fields.Integer("bytes", 1, int64_t{1} << 50);
  const Json* crcs = fields.Array("crc32c");
  if (crcs != nullptr) {
    for (const Json& crc : *crcs) {
      uint32_t value = 0;
      if (!crc.is_string() || !ParseHex(crc.get_ref<const std::string&>(), &value)) {
        fields.Fail("has a CRC that is not eight hexadecimal digits");
      }
      file->piece_crcs.push_back(value);
    }
    if (static_cast<int64_t>(file->piece_crcs.size()) != PieceCount(file->bytes)) {
      fields.Fail("has " + std::to_string(file->piece_crcs.size()) + " CRCs for " +
                  std::to_string(PieceCount(file->bytes)) + " pieces");
    }
  }
  return fields.Finish();
}

Result<Manifest> ParseBody(const Json& json, const std::string& where) {
  Manifest manifest;
  Fields fields(&json, where + ":");
  if (fields.String("format") != kFormat) fields.Fail("is not of format " + std::string(kFormat));
  const int64_t version = fields.Integer("version", 1, std::numeric_limits<int64_t>::max());
  if (version != kVersion) {
    fields.Fail("has version " + std::to_string(version) + "; this program reads version " +
                std::to_string(kVersion));
  }
  if (fields.Integer("piece_bytes", 1, int64_t{1} << 40) != kPieceBytes) {
    fields.Fail("has pieces of another size than " + std::to_string(kPieceBytes) + " bytes");
  }
  manifest.step = fields.Integer("step", 0, int64_t{1} << 53);
  manifest.job_name = fields.String("job_name");
  manifest.job_uid = fields.String("job_uid");
  const std::string precision = fields.String("precision");
  if (precision == PrecisionName(Precision::kFloat32)) {
    manifest.precision = Precision::kFloat32;
  } else if (precision != PrecisionName(Precision::kBfloat16)) {
    fields.Fail("has an unknown precision \"" + precision + "\"");
  }
  manifest.seed = fields.Unsigned("seed");
  manifest.data_cursor = fields.Integer("data_cursor", 0, std::numeric_limits<int64_t>::max());
  fields.Take("checksum");
  const Json* model = fields.Take("model");
  const Json* files = fields.Array("files");
  OOM_RETURN_IF_ERROR(fields.Finish());
  OOM_RETURN_IF_ERROR(ParseModelJson(*model, where + ": model", &manifest.model));
  std::set<std::string> names;
  for (const Json& entry : *files) {
    ManifestFile file;
    OOM_RETURN_IF_ERROR(ParseFile(entry, where + ": file " + std::to_string(names.size()), &file));
    if (!names.insert(file.name).second) {
      return Status(Code::kDataLoss, where + ": file " + file.name + " is listed twice");
    }
    manifest.files.push_back(std::move(file));
  }
  if (manifest.files.empty()) return Status(Code::kDataLoss, where + ": no files are listed");
  return manifest;
}

}  // namespace

int64_t PieceCount(int64_t file_bytes) { return (file_bytes + kPieceBytes - 1) / kPieceBytes; }

std::string_view PrecisionName(Precision precision) {
  return precision == Precision::kBfloat16 ? "bfloat16" : "float32";
}

std::string FormatManifest(const Manifest& manifest) {
  const auto quoted = [](std::string_view text) {
    return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
  };
  std::string text = "{\n \"format\": " + quoted(kFormat) +
                     ",\n \"version\": " + std::to_string(kVersion) +
                     ",\n \"step\": " + std::to_string(manifest.step) +
                     ",\n \"job_name\": " + quoted(manifest.job_name) +
                     ",\n \"job_uid\": " + quoted(manifest.job_uid) +
                     ",\n \"precision\": " + quoted(PrecisionName(manifest.precision)) +
                     ",\n \"seed\": " + std::to_string(manifest.seed) +
                     ",\n \"data_cursor\": " + std::to_string(manifest.data_cursor) +
                     ",\n \"model\": " + ModelJson(manifest.model).dump() +
                     ",\n \"piece_bytes\": " + std::to_string(kPieceBytes) + ",\n \"files\": [";
  const char* separator = "\n";
  for (const ManifestFile& file : manifest.files) {
    Json crcs = Json::array();
    for (const uint32_t crc : file.piece_crcs) crcs.push_back(Hex(crc));
    text += separator;
    text += "  {\"name\": " + quoted(file.name) + ", \"bytes\": " + std::to_string(file.bytes) +
            ", \"crc32c\": " + crcs.dump() + "}";
    separator = ",\n";
  }
  text += "\n ]";
  const uint32_t crc = TextCrc(text);
  text += std::string(kTail) + Hex(crc) + std::string(kTailEnd);
  return text;
}

Result<Manifest> ParseManifest(std::string_view text, std::string_view where) {
  const std::string place(where);
  const size_t tail_bytes = kTail.size() + 8 + kTailEnd.size();
  uint32_t expected = 0;
  const bool has_tail = text.size() > tail_bytes && text.ends_with(kTailEnd) &&
                        text.substr(text.size() - tail_bytes, kTail.size()) == kTail &&
                        ParseHex(text.substr(text.size() - kTailEnd.size() - 8, 8), &expected);
  if (!has_tail) {
    return Status(Code::kDataLoss, place + ": the checksum at its end is missing (cut short?)");
  }
  const uint32_t actual = TextCrc(text.substr(0, text.size() - tail_bytes));
  if (actual != expected) {
    return Status(Code::kDataLoss,
                  place + ": checksum " + Hex(actual) + " instead of " + Hex(expected));
  }
  auto json = ParseStrictJson(text, where);
  if (!json.ok()) return Status(Code::kDataLoss, json.status().message());
  return ParseBody(*json, place);
}

std::string ModelDifference(const ModelDescription& a, const ModelDescription& b) {
  Json json_a = ModelJson(a);
  Json json_b = ModelJson(b);
  // Null where only one has the key.
  for (const auto& item : json_b.items()) json_a.emplace(item.key(), nullptr);
  for (const auto& item : json_a.items()) {
    const Json& other = json_b[item.key()];
    if (item.value() != other)
      return item.key() + " " + item.value().dump() + " against " + other.dump();
  }
  return "";
}

}  // namespace oom
