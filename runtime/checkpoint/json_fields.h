// Fields takes the fields of one JSON object, strictly: the first fault is kept, and a key that nobody took is one.
// Internal to runtime/checkpoint. Thread-compatible.

#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <utility>

#include "runtime/base/status.h"
#include "runtime/model/strict_json.h"

namespace oom {

class Fields {
 public:
  Fields(const nlohmann::json* object, std::string where) : object_(object), where_(std::move(where)) {
    if (!object_->is_object()) {
      Fail("is not an object");
      object_ = nullptr;
    }
  }

  // Null where there is none.
  const nlohmann::json* TakeOptional(const char* name) {
    if (object_ == nullptr) return nullptr;
    taken_.insert(name);
    const auto found = object_->find(name);
    return found == object_->end() ? nullptr : &*found;
  }
  const nlohmann::json* Take(const char* name) {
    const nlohmann::json* value = TakeOptional(name);
    if (value == nullptr) Fail("has no \"" + std::string(name) + "\"");
    return value;
  }
  int64_t Integer(const char* name, int64_t minimum, int64_t maximum) {
    const nlohmann::json* value = Take(name);
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
    const nlohmann::json* value = Take(name);
    if (value == nullptr) return 0;
    if (!value->is_number_unsigned()) {
      Fail(std::string(name) + " is not a number of 64 bits");
      return 0;
    }
    return value->get<uint64_t>();
  }
  std::string String(const char* name) {
    const nlohmann::json* value = Take(name);
    if (value == nullptr) return "";
    if (!value->is_string()) {
      Fail(std::string(name) + " is not a string");
      return "";
    }
    return value->get<std::string>();
  }
  double Real(const char* name) {
    const nlohmann::json* value = Take(name);
    if (value == nullptr) return 0;
    if (!value->is_number()) {
      Fail(std::string(name) + " is not a number");
      return 0;
    }
    return value->get<double>();
  }
  bool Bool(const char* name) {
    const nlohmann::json* value = Take(name);
    if (value == nullptr) return false;
    if (!value->is_boolean()) {
      Fail(std::string(name) + " is not true or false");
      return false;
    }
    return value->get<bool>();
  }
  const nlohmann::json* Array(const char* name) {
    const nlohmann::json* value = Take(name);
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
  const nlohmann::json* object_;
  const std::string where_;
  std::set<std::string, std::less<>> taken_;
  Status status_;
};

}  // namespace oom
