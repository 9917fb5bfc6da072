// WorkerMain is the program of one rank of a job, --rank R --control-fd N. oom-jobhost starts it, sends a WorkerStart
// with the descriptors of the control page and of the job's pools, and expects WorkerReady, then WorkerDone or
// WorkerFailed. Nothing travels on the socket while steps run.

#pragma once

#include <functional>
#include <memory>

#include "oom/internal/v1/control.pb.h"
#include "runtime/base/status.h"
#include "worker/worker_device.h"

namespace oom {

using MakeDevice =
    std::function<Result<std::unique_ptr<WorkerDevice>>(const internal::v1::WorkerStart&)>;

// Returns the exit code.
int WorkerMain(int argc, char** argv, const MakeDevice& make_device);

}  // namespace oom
