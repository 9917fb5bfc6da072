// What a job would go on from, looked at when it is submitted: another job's output, and a checkpoint of another
// precision or model, are refused before anything waits in a queue. The job host looks again when the job starts, with
// every byte of the checkpoint. Reads the output directory and, of a checkpoint, the manifest; thread-safe.

#pragma once

#include "oom/v1/job.pb.h"
#include "runtime/base/status.h"
#include "runtime/model/description.h"
#include "runtime/model/unit.h"

namespace oom {

// REQUIRES: a normalized specification. Fails with kInvalidArgument or kFailedPrecondition, kNotFound and kDataLoss for
// a checkpoint that `resume` names; the reason is INVALID_INPUT, the field "output", "resume", "precision" or "model".
Status CheckResumable(const v1::JobSpec& spec, const ModelDescription& model, Precision precision);

}  // namespace oom
