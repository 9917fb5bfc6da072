// The two streams of JobService. Each deletes itself when gRPC is done with it.

#pragma once

#include <grpcpp/support/server_callback.h>

#include "oom/v1/job.pb.h"
#include "server/oomd/service_context.h"

namespace oom {

grpc::ServerWriteReactor<v1::JobEvent>* WatchJobs(ServiceContext& services,
                                                  grpc::CallbackServerContext& context,
                                                  const v1::WatchJobsRequest& request);
grpc::ServerWriteReactor<v1::LogChunk>* StreamLogs(ServiceContext& services,
                                                   grpc::CallbackServerContext& context,
                                                   const v1::StreamLogsRequest& request);

}  // namespace oom
