#include "runtime/model/rope_config.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>

namespace oom {
namespace {

using nlohmann::json;

constexpr char kScaling[] = "rope_scaling";
constexpr char kParameters[] = "rope_parameters";
constexpr char kPartial[] = "partial_rotary_factor";
constexpr char kOriginal[] = "original_max_position_embeddings";

constexpr std::string_view kYarnKeys[] = {"factor",    kOriginal,       "attention_factor",
                                          "beta_fast", "beta_slow",     "truncate",
                                          "mscale",    "mscale_all_dim"};

bool IsYarnKey(std::string_view name) {
  return std::find(std::begin(kYarnKeys), std::end(kYarnKeys), name) != std::end(kYarnKeys);
}

// Of positions in images and videos; the three positions of a token of text are equal.
bool IsTextPosition(std::string_view name) {
  return name == "mrope_section" || name == "mrope_interleaved";
}

// Whether `rope` is YaRN. Fails on another kind, and on a key that its kind does not have.
bool ReadKind(ConfigReader& reader, const std::string& key, const json& rope,
              const RopeReading& reading) {
  const auto is = [&](const char* name, const char* kind) {
    const auto found = rope.find(name);
    return found != rope.end() && *found == kind;
  };
  const bool yarn = reading.may_be_yarn && (is("rope_type", "yarn") || is("type", "yarn"));
  const auto refuse = [&](const std::string& name, const json& value) {
    reader.Fail(key + "." + name,
                "is " + ConfigReader::Excerpt(value) + ", which training does not implement");
  };
  // The kind first: of another one, it is what to name.
  for (const char* name : {"rope_type", "type"}) {
    const auto found = rope.find(name);
    if (found == rope.end() || found->is_null()) continue;
    if (*found != (yarn ? "yarn" : "default")) refuse(name, *found);
  }
  for (const auto& [name, value] : rope.items()) {
    const bool harmless = value.is_null() || name == "rope_type" || name == "type" ||
                          name == "rope_theta" || (yarn && IsYarnKey(name)) || name == kPartial ||
                          IsTextPosition(name);
    if (!harmless) refuse(name, value);
  }
  return yarn;
}

// As transformers reads it; what it takes for false or none where a number belongs is refused.
YarnScaling ReadYarn(ConfigReader& reader, const std::string& key, const json& rope,
                     int64_t max_positions) {
  const bool beside = reader.Find(kOriginal) != nullptr;
  const int64_t original =
      reader.Count(beside ? reader.root() : rope, kOriginal,
                   std::min(max_positions, kMostYarnPositions), kMostYarnPositions);
  if (!rope.contains("factor")) reader.Fail(key + ".factor", "is missing");
  const double factor = reader.Positive(
      rope, "factor", static_cast<double>(max_positions) / static_cast<double>(original));
  if (factor < 1.0) reader.Fail(key + ".factor", "is below 1");
  YarnScaling yarn = MakeYarn(factor, original);
  yarn.beta_fast = reader.Positive(rope, "beta_fast", yarn.beta_fast);
  yarn.beta_slow = reader.Positive(rope, "beta_slow", yarn.beta_slow);
  constexpr double kNone = 0.0;
  const double mscale = reader.Positive(rope, "mscale", kNone);
  const double mscale_all_dim = reader.Positive(rope, "mscale_all_dim", kNone);
  if (mscale != kNone && mscale_all_dim != kNone) {
    yarn.attention_factor =
        YarnAttentionFactor(factor, mscale) / YarnAttentionFactor(factor, mscale_all_dim);
  }
  yarn.attention_factor = reader.Positive(rope, "attention_factor", yarn.attention_factor);
  if (const auto truncate = rope.find("truncate"); truncate != rope.end()) {
    if (truncate->is_boolean()) {
      yarn.truncate = truncate->get<bool>();
    } else {
      reader.Fail(key + ".truncate",
                  "is " + ConfigReader::Excerpt(*truncate) + "; it must be true or false");
    }
  }
  return yarn;
}

}  // namespace

RotaryRule ReadRope(ConfigReader& reader, const RopeReading& reading) {
  RotaryRule rule;
  rule.theta = reader.Positive("rope_theta", reading.default_theta);
  double partial = reader.Positive(kPartial, reading.default_partial);
  bool is_second = false;
  for (const char* key : {kScaling, kParameters}) {
    const json* rope = reader.Find(key);
    if (rope == nullptr) continue;
    if (!rope->is_object()) {
      reader.Fail(key, "is " + ConfigReader::Excerpt(*rope) + "; it must be an object");
      continue;
    }
    std::optional<YarnScaling> yarn;
    if (ReadKind(reader, key, *rope, reading)) {
      yarn = ReadYarn(reader, key, *rope, reading.max_positions);
    }
    if (is_second && yarn != rule.yarn) {
      reader.Fail(key, "differs from \"" + std::string(kScaling) + "\"");
    }
    rule.yarn = yarn;
    is_second = true;
    const auto read = [&](const char* name, double value) {
      const double inner = reader.Positive(*rope, name, value);
      if (reader.Find(name) != nullptr && inner != value) {
        reader.Fail(std::string(key) + "." + name, "differs from \"" + std::string(name) + "\"");
      }
      return inner;
    };
    rule.theta = read("rope_theta", rule.theta);
    partial = read(kPartial, partial);
  }
  if (rule.yarn && !(rule.theta > 1.0)) {
    reader.Fail("rope_theta", "is not above 1, which YaRN needs");
  }
  if (partial != 1.0 && reading.default_partial == 1.0) {
    reader.Fail(
        reader.Find(kPartial) != nullptr ? kPartial : std::string(kParameters) + "." + kPartial,
        "is " + std::to_string(partial) + ", which training does not implement");
  }
  // A part above the whole is refused below; no product of it leaves the range of sizes.
  rule.size = static_cast<int64_t>(static_cast<double>(reading.head_size) * std::min(partial, 2.0));
  if (rule.size < 2 || rule.size % 2 != 0 || rule.size > reading.head_size) {
    reader.Fail(kPartial, "of head_dim is not an even number of elements of a head");
    rule.size = reading.head_size;
  }
  rule.pair_count = rule.size / 2;
  return rule;
}

void WriteRope(const ModelDescription& model, nlohmann::ordered_json* config) {
  const std::optional<YarnScaling> yarn = model.yarn();
  nlohmann::ordered_json rope = {{"rope_type", "default"}};
  if (yarn) {
    const YarnScaling usual = MakeYarn(yarn->factor, yarn->original_positions);
    rope = {{"rope_type", "yarn"}, {"factor", yarn->factor}, {kOriginal, yarn->original_positions}};
    if (yarn->beta_fast != usual.beta_fast) rope["beta_fast"] = yarn->beta_fast;
    if (yarn->beta_slow != usual.beta_slow) rope["beta_slow"] = yarn->beta_slow;
    if (yarn->truncate != usual.truncate) rope["truncate"] = yarn->truncate;
    if (yarn->attention_factor != usual.attention_factor) {
      rope["attention_factor"] = yarn->attention_factor;
    }
  }
  // It would overrule what is written here.
  config->erase(std::string(kOriginal));
  const auto parameters = config->find(kParameters);
  const bool has_parameters = parameters != config->end() && !parameters->is_null();
  if (!has_parameters) {
    (*config)[kScaling] = yarn ? rope : nlohmann::ordered_json();
    return;
  }
  config->erase(std::string(kScaling));
  rope["rope_theta"] = model.rotary()->theta;
  // What does not speak of scaling stays.
  for (const auto& [name, value] : parameters->items()) {
    if (name == kPartial || IsTextPosition(name)) rope[name] = value;
  }
  (*config)[kParameters] = rope;
}

}  // namespace oom
