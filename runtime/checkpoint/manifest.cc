#include "runtime/checkpoint/manifest.h"

#include <charconv>
#include <cmath>
#include <cstdio>
#include <limits>
#include <set>
#include <utility>

#include "runtime/checkpoint/crc32c.h"
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

std::string_view FamilyName(Family family) {
  return family == Family::kMixtral ? "mixtral" : "qwen3_moe";
}

// An integer field of ModelDescription and the range that keeps products of dimensions within
// int64.
struct SizeField {
  const char* name;
  int64_t ModelDescription::*member;
  int64_t minimum, maximum;
};
constexpr SizeField kSizeFields[] = {
    {"hidden_size", &ModelDescription::hidden_size, 1, 1 << 20},
    {"layer_count", &ModelDescription::layer_count, 1, 1 << 12},
    {"vocabulary_size", &ModelDescription::vocabulary_size, 1, 1 << 26},
    {"query_head_count", &ModelDescription::query_head_count, 1, 1 << 14},
    {"kv_head_count", &ModelDescription::kv_head_count, 1, 1 << 14},
    {"head_size", &ModelDescription::head_size, 1, 1 << 14},
    {"expert_count", &ModelDescription::expert_count, 0, 1 << 16},
    {"experts_per_token", &ModelDescription::experts_per_token, 0, 1 << 16},
    {"expert_width", &ModelDescription::expert_width, 0, 1 << 20},
    {"dense_width", &ModelDescription::dense_width, 0, 1 << 20},
    {"sliding_window", &ModelDescription::sliding_window, 0, int64_t{1} << 40},
    {"max_positions", &ModelDescription::max_positions, 0, int64_t{1} << 40},
};
struct BoolField {
  const char* name;
  bool ModelDescription::*member;
};
constexpr BoolField kBoolFields[] = {
    {"query_key_norm", &ModelDescription::query_key_norm},
    {"renormalize_top_k", &ModelDescription::renormalize_top_k},
    {"tied_embedding", &ModelDescription::tied_embedding},
};
struct RealField {
  const char* name;
  double ModelDescription::*member;
};
constexpr RealField kRealFields[] = {
    {"rms_epsilon", &ModelDescription::rms_epsilon},
    {"rope_theta", &ModelDescription::rope_theta},
    {"initializer_range", &ModelDescription::initializer_range},
};

Json ModelJson(const ModelDescription& model) {
  Json json = {{"family", FamilyName(model.family)}};
  for (const SizeField& field : kSizeFields) json[field.name] = model.*field.member;
  for (const BoolField& field : kBoolFields) json[field.name] = model.*field.member;
  for (const RealField& field : kRealFields) json[field.name] = model.*field.member;
  Json mixtures = Json::array();
  for (const MixtureKind kind : model.mixtures) {
    mixtures.push_back(kind == MixtureKind::kRoutedExperts ? "routed" : "dense");
  }
  json["mixtures"] = std::move(mixtures);
  // Only where there is one: manifests of before it had no key.
  if (model.yarn) {
    json["yarn"] = {{"factor", model.yarn->factor},
                    {"original_positions", model.yarn->original_positions},
                    {"beta_fast", model.yarn->beta_fast},
                    {"beta_slow", model.yarn->beta_slow},
                    {"attention_factor", model.yarn->attention_factor},
                    {"truncate", model.yarn->truncate}};
  }
  return json;
}

// Takes the fields of one object; the first fault is kept, and a key that nobody took is one.
class Fields {
 public:
  Fields(const Json* object, std::string where) : object_(object), where_(std::move(where)) {
    if (!object_->is_object()) {
      Fail("is not an object");
      object_ = nullptr;
    }
  }

  // Null where there is none.
  const Json* TakeOptional(const char* name) {
    if (object_ == nullptr) return nullptr;
    taken_.insert(name);
    const auto found = object_->find(name);
    return found == object_->end() ? nullptr : &*found;
  }
  const Json* Take(const char* name) {
    const Json* value = TakeOptional(name);
    if (value == nullptr) Fail("has no \"" + std::string(name) + "\"");
    return value;
  }
  int64_t Integer(const char* name, int64_t minimum, int64_t maximum) {
    const Json* value = Take(name);
    if (value == nullptr) return minimum;
    const bool fits =
        value->is_number_integer() &&
        !(value->is_number_unsigned() && value->get<uint64_t>() > static_cast<uint64_t>(maximum)) &&
        value->get<int64_t>() >= minimum && value->get<int64_t>() <= maximum;
    if (!fits) {
      Fail(std::string(name) + " is not an integer from " + std::to_string(minimum) + " to " +
           std::to_string(maximum));
      return minimum;
    }
    return value->get<int64_t>();
  }
  uint64_t Unsigned(const char* name) {
    const Json* value = Take(name);
    if (value == nullptr) return 0;
    if (!value->is_number_unsigned()) {
      Fail(std::string(name) + " is not a number of 64 bits");
      return 0;
    }
    return value->get<uint64_t>();
  }
  std::string String(const char* name) {
    const Json* value = Take(name);
    if (value == nullptr) return "";
    if (!value->is_string()) {
      Fail(std::string(name) + " is not a string");
      return "";
    }
    return value->get<std::string>();
  }
  double Real(const char* name) {
    const Json* value = Take(name);
    if (value == nullptr) return 0;
    if (!value->is_number()) {
      Fail(std::string(name) + " is not a number");
      return 0;
    }
    return value->get<double>();
  }
  bool Bool(const char* name) {
    const Json* value = Take(name);
    if (value == nullptr) return false;
    if (!value->is_boolean()) {
      Fail(std::string(name) + " is not true or false");
      return false;
    }
    return value->get<bool>();
  }
  const Json* Array(const char* name) {
    const Json* value = Take(name);
    if (value != nullptr && !value->is_array()) {
      Fail(std::string(name) + " is not an array");
      return nullptr;
    }
    return value;
  }
  void Fail(const std::string& message) {
    if (status_.ok()) status_ = Status(Code::kDataLoss, where_ + " " + message);
  }
  // REQUIRES: every field was taken.
  Status Finish() {
    if (!status_.ok() || object_ == nullptr) return status_;
    for (const auto& item : object_->items()) {
      if (!taken_.contains(item.key())) Fail("has an unknown key \"" + item.key() + "\"");
    }
    return status_;
  }

 private:
  const Json* object_;
  const std::string where_;
  std::set<std::string, std::less<>> taken_;
  Status status_;
};

Status ParseYarn(const Json& json, const std::string& where, ModelDescription* model) {
  Fields fields(&json, where);
  model->yarn =
      YarnScaling{.factor = fields.Real("factor"),
                  .original_positions = fields.Integer("original_positions", 1, kMostYarnPositions),
                  .beta_fast = fields.Real("beta_fast"),
                  .beta_slow = fields.Real("beta_slow"),
                  .attention_factor = fields.Real("attention_factor"),
                  .truncate = fields.Bool("truncate")};
  return fields.Finish();
}

Status ParseModel(const Json& json, const std::string& where, ModelDescription* model) {
  Fields fields(&json, where);
  const std::string family = fields.String("family");
  if (family == FamilyName(Family::kMixtral)) {
    model->family = Family::kMixtral;
  } else if (family == FamilyName(Family::kQwen3Moe)) {
    model->family = Family::kQwen3Moe;
  } else {
    fields.Fail("has an unknown family \"" + family + "\"");
  }
  for (const SizeField& field : kSizeFields) {
    model->*field.member = fields.Integer(field.name, field.minimum, field.maximum);
  }
  for (const BoolField& field : kBoolFields) model->*field.member = fields.Bool(field.name);
  for (const RealField& field : kRealFields) model->*field.member = fields.Real(field.name);
  const Json* mixtures = fields.Array("mixtures");
  if (mixtures != nullptr) {
    for (const Json& kind : *mixtures) {
      const bool routed = kind == "routed";
      if (!routed && kind != "dense") fields.Fail("has an unknown mixture");
      model->mixtures.push_back(routed ? MixtureKind::kRoutedExperts : MixtureKind::kDense);
    }
    if (static_cast<int64_t>(model->mixtures.size()) != model->layer_count) {
      fields.Fail("has " + std::to_string(model->mixtures.size()) + " mixtures for " +
                  std::to_string(model->layer_count) + " layers");
    }
  }
  if (const Json* yarn = fields.TakeOptional("yarn"); yarn != nullptr) {
    OOM_RETURN_IF_ERROR(ParseYarn(*yarn, where + ": yarn", model));
  }
  return fields.Finish();
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
  OOM_RETURN_IF_ERROR(ParseModel(*model, where + ": model", &manifest.model));
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
