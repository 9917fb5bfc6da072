// The gRPC services. Callback API: no handler blocks; what changes jobs is posted to the control
// loop.

#pragma once

#include <grpcpp/impl/service_type.h>

#include <memory>

namespace oom {

struct ServiceContext;

// `services` outlive the server.
std::unique_ptr<grpc::Service> MakeJobService(ServiceContext& services);
std::unique_ptr<grpc::Service> MakeNodeService(ServiceContext& services);

}  // namespace oom
