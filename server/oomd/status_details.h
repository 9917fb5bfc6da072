// From the core's Status to gRPC's, with the google.rpc details that the API promises: always one
// ErrorInfo (domain "oomd"), and what fits the code: BadRequest, PreconditionFailure, QuotaFailure,
// RetryInfo, ResourceInfo. Pure functions.

#pragma once

#include <grpcpp/support/status.h>

#include "runtime/base/status.h"

namespace oom {

grpc::Status ToGrpc(const Status& status);

}  // namespace oom
