#include "runtime/base/status.h"

#include <cerrno>
#include <cstring>

namespace oom {

std::string_view CodeName(Code code) {
  switch (code) {
    case Code::kOk: return "OK";
    case Code::kCancelled: return "CANCELLED";
    case Code::kInvalidArgument: return "INVALID_ARGUMENT";
    case Code::kDeadlineExceeded: return "DEADLINE_EXCEEDED";
    case Code::kNotFound: return "NOT_FOUND";
    case Code::kAlreadyExists: return "ALREADY_EXISTS";
    case Code::kPermissionDenied: return "PERMISSION_DENIED";
    case Code::kResourceExhausted: return "RESOURCE_EXHAUSTED";
    case Code::kFailedPrecondition: return "FAILED_PRECONDITION";
    case Code::kAborted: return "ABORTED";
    case Code::kOutOfRange: return "OUT_OF_RANGE";
    case Code::kInternal: return "INTERNAL";
    case Code::kUnavailable: return "UNAVAILABLE";
    case Code::kDataLoss: return "DATA_LOSS";
    case Code::kUnauthenticated: return "UNAUTHENTICATED";
  }
  return "UNKNOWN";
}

Status Status::Annotate(std::string_view context) const {
  Status annotated = *this;
  annotated.message_ = std::string(context) + ": " + message_;
  return annotated;
}

std::string Status::ToString() const {
  if (ok()) return "OK";
  return std::string(CodeName(code_)) + ": " + message_;
}

Status ErrnoStatus(int error_number, std::string_view what) {
  Code code = Code::kInternal;
  switch (error_number) {
    case ENOENT: code = Code::kNotFound; break;
    case EACCES:
    case EPERM:
    case EROFS: code = Code::kPermissionDenied; break;
    case ENOSPC:
    case ENOMEM:
    case EDQUOT: code = Code::kResourceExhausted; break;
    case EEXIST: code = Code::kAlreadyExists; break;
    default: break;
  }
  return Status(code, std::string(what) + ": " + std::strerror(error_number));
}

}  // namespace oom
