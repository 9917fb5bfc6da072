// Status and Result carry what a user, a peer, the OS or the device can cause. Bugs are OOM_CHECK.
// A Status has a gRPC code, a message for a human, and optionally a reason (UPPER_SNAKE, the
// `google.rpc.ErrorInfo.reason` of the API) and the field or file that it is about.
// Values; thread-compatible.

#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "runtime/base/check.h"

namespace oom {

// Only codes that some caller branches on. Values equal grpc::StatusCode, so the server casts.
enum class Code {
  kOk = 0,
  kCancelled = 1,
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kNotFound = 5,
  kAlreadyExists = 6,
  kPermissionDenied = 7,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kAborted = 10,
  kOutOfRange = 11,
  kInternal = 13,
  kUnavailable = 14,
  kDataLoss = 15,
  kUnauthenticated = 16,
};

// "INVALID_ARGUMENT" and so on, as gRPC spells them.
std::string_view CodeName(Code code);

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  static Status Ok() { return Status(); }

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }
  // Empty, or one of the reasons of docs/ERRORS.md, such as "OUT_OF_HOST_MEMORY".
  const std::string& reason() const { return reason_; }
  // Empty, or the request field ("model.path") or file that is at fault.
  const std::string& field() const { return field_; }

  Status&& WithReason(std::string reason) && {
    reason_ = std::move(reason);
    return std::move(*this);
  }
  Status&& WithField(std::string field) && {
    field_ = std::move(field);
    return std::move(*this);
  }
  // The same status with `context` and ": " before its message.
  Status Annotate(std::string_view context) const;

  // "INVALID_ARGUMENT: message", or "OK".
  std::string ToString() const;

 private:
  Code code_ = Code::kOk;
  std::string message_;
  std::string reason_;
  std::string field_;
};

// The status of a failed system call: ENOENT is kNotFound, EACCES kPermissionDenied, ENOSPC, ENOMEM and
// EDQUOT kResourceExhausted, everything else kInternal. The message ends with strerror(error_number).
Status ErrnoStatus(int error_number, std::string_view what);

template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}      // NOLINT: implicit, so `return x;` works.
  Result(Status error) : state_(std::move(error)) {  // NOLINT: so `return Status(...)` works.
    OOM_CHECK(!status().ok());
  }

  bool ok() const { return state_.index() == 0; }
  // REQUIRES: !ok().
  const Status& status() const { return std::get<1>(state_); }
  // REQUIRES: ok().
  T& value() & { return std::get<0>(state_); }
  const T& value() const& { return std::get<0>(state_); }
  T&& value() && { return std::get<0>(std::move(state_)); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }

 private:
  std::variant<T, Status> state_;
};

}  // namespace oom

// Returns from the enclosing function when `expression` (a Status) is not OK.
#define OOM_RETURN_IF_ERROR(expression)               \
  do {                                                \
    ::oom::Status oom_status_ = (expression);         \
    if (!oom_status_.ok()) return oom_status_;        \
  } while (false)

#define OOM_CONCAT_INNER_(a, b) a##b
#define OOM_CONCAT_(a, b) OOM_CONCAT_INNER_(a, b)

// OOM_ASSIGN_OR_RETURN(auto x, F()); declares x with F()'s value, or returns F()'s status.
#define OOM_ASSIGN_OR_RETURN(declaration, expression) \
  OOM_ASSIGN_OR_RETURN_(OOM_CONCAT_(oom_result_, __LINE__), declaration, expression)
#define OOM_ASSIGN_OR_RETURN_(result, declaration, expression) \
  auto result = (expression);                                  \
  if (!result.ok()) return result.status();                    \
  declaration = std::move(result).value()
