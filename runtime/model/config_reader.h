// ConfigReader is typed access to the keys of a config.json. The first failure is kept; later reads
// return defaults, so that a parser reads as a list. It knows which keys were asked for, and so
// which nobody knows. Internal to runtime/model. Thread-compatible.

#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "runtime/base/status.h"
#include "runtime/model/strict_json.h"

namespace oom {

class ConfigReader {
 public:
  using json = nlohmann::json;
  // Keeps every size of a hostile configuration far from overflow.
  static constexpr int64_t kDimensionLimit = int64_t{1} << 24;

  // `root` must outlive the reader.
  ConfigReader(const json& root, std::string where) : root_(root), where_(std::move(where)) {}

  // Null counts as absent, as it does for transformers.
  const json* Find(std::string_view key) const {
    known_.emplace(key);
    const auto found = root_.find(key);
    return found == root_.end() || found->is_null() ? nullptr : &*found;
  }

  int64_t Count(const json& object, std::string_view key, std::optional<int64_t> fallback,
                int64_t limit = kDimensionLimit) {
    known_.emplace(key);
    const auto value = object.find(key);
    if (value == object.end() || value->is_null()) {
      if (!fallback) Fail(key, "is missing");
      return fallback.value_or(1);
    }
    if (!value->is_number_integer() || value->get<double>() < 1 ||
        value->get<double>() > static_cast<double>(limit)) {
      Fail(key, "is " + Excerpt(*value) + "; it must be a whole number from 1 to " +
                    std::to_string(limit));
      return 1;
    }
    return value->get<int64_t>();
  }

  int64_t Count(std::string_view key, std::optional<int64_t> fallback,
                int64_t limit = kDimensionLimit) {
    return Count(root_, key, fallback, limit);
  }

  double Positive(const json& object, std::string_view key, double fallback) {
    known_.emplace(key);
    const auto found = object.find(key);
    if (found == object.end() || found->is_null()) return fallback;
    const double number = found->is_number() ? found->get<double>() : 0.0;
    if (!(number > 0) || !std::isfinite(number)) {
      Fail(key, "is " + Excerpt(*found) + "; it must be a positive number");
      return fallback;
    }
    return number;
  }
  double Positive(std::string_view key, double fallback) { return Positive(root_, key, fallback); }

  bool Flag(std::string_view key, bool fallback) {
    const json* value = Find(key);
    if (value == nullptr) return fallback;
    if (!value->is_boolean()) {
      Fail(key, "is " + Excerpt(*value) + "; it must be true or false");
      return fallback;
    }
    return value->get<bool>();
  }

  // Refuses the key unless it is absent, null or one of the `harmless` values.
  void RefuseUnless(std::string_view key, std::initializer_list<json> harmless) {
    const json* value = Find(key);
    if (value == nullptr) return;
    for (const json& allowed : harmless) {
      if (*value == allowed) return;
    }
    Fail(key, "is " + Excerpt(*value) + ", which training does not implement");
  }

  // Keys that say nothing about training.
  void Ignore(std::initializer_list<std::string_view> keys) {
    for (const std::string_view key : keys) known_.emplace(key);
  }

  // Refuses every key that was neither asked for nor ignored, unless its value switches nothing on.
  void RefuseUnknown() {
    for (const auto& [key, value] : root_.items()) {
      const bool off = value.is_null() || value == false || value == 0 || value == "" ||
                       (value.is_structured() && value.empty());
      if (!off && !known_.contains(key)) {
        Fail(key, "is " + Excerpt(value) + ", a key that training does not know; it may be removed if it changes no numbers");
      }
    }
  }

  void Fail(std::string_view key, const std::string& what) {
    if (!status_.ok()) return;
    status_ = Status(Code::kInvalidArgument, where_ + ": \"" + std::string(key) + "\" " + what)
                  .WithField(where_);
  }

  static std::string Excerpt(const json& value) {
    std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
    if (text.size() > 200) text = text.substr(0, 200) + "...";
    return text;
  }

  const json& root() const { return root_; }
  const std::string& where() const { return where_; }
  const Status& status() const { return status_; }

 private:
  const json& root_;
  const std::string where_;
  mutable std::set<std::string, std::less<>> known_;
  Status status_;
};

}  // namespace oom
