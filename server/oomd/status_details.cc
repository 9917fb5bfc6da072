#include "server/oomd/status_details.h"

#include <string>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace oom {

grpc::Status ToGrpc(const Status& status) {
  if (status.ok()) return grpc::Status::OK;
  google::rpc::Status details;
  details.set_code(static_cast<int>(status.code()));
  details.set_message(status.message());

  google::rpc::ErrorInfo info;
  info.set_reason(status.reason().empty() ? std::string(CodeName(status.code())) : status.reason());
  info.set_domain("oomd");
  if (!status.field().empty()) (*info.mutable_metadata())["field"] = status.field();
  details.add_details()->PackFrom(info);

  bool retry = false;
  switch (status.code()) {
    case Code::kInvalidArgument: {
      google::rpc::BadRequest bad;
      auto* violation = bad.add_field_violations();
      violation->set_field(status.field());
      violation->set_description(status.message());
      details.add_details()->PackFrom(bad);
      break;
    }
    case Code::kFailedPrecondition: {
      google::rpc::PreconditionFailure failure;
      auto* violation = failure.add_violations();
      violation->set_type(info.reason());
      violation->set_subject(status.field());
      violation->set_description(status.message());
      details.add_details()->PackFrom(failure);
      break;
    }
    case Code::kResourceExhausted: {
      google::rpc::QuotaFailure failure;
      auto* violation = failure.add_violations();
      violation->set_subject(status.field().empty() ? "node" : status.field());
      violation->set_description(status.message());
      details.add_details()->PackFrom(failure);
      // A queue drains and a watcher resumes; a job that is too large stays too large.
      retry = info.reason() == "QUEUE_FULL" || info.reason() == "WATCH_OVERFLOW";
      break;
    }
    case Code::kNotFound:
    case Code::kAlreadyExists: {
      google::rpc::ResourceInfo resource;
      resource.set_resource_name(status.field());
      details.add_details()->PackFrom(resource);
      break;
    }
    case Code::kUnavailable:
      retry = true;
      break;
    default:
      break;
  }
  if (retry) {
    google::rpc::RetryInfo again;
    again.mutable_retry_delay()->set_seconds(info.reason() == "QUEUE_FULL" ? 30 : 1);
    details.add_details()->PackFrom(again);
  }
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), status.message(),
                      details.SerializeAsString());
}

}  // namespace oom
