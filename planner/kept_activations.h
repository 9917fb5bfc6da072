// KeepActivations spends device memory that nothing else of a plan needs on what backward would replay otherwise
// (paper, retained activations): a layer's mixer or mixture at a time, the one whose replay costs most a byte first.
// Pure function of its arguments.

#pragma once

#include <cstdint>

#include "oom/v1/plan.pb.h"
#include "runtime/memory/shm_layout.h"
#include "runtime/model/description.h"

namespace oom {

// `room_bytes` of one device's memory; what is kept by the account of operators (memory_account.h), and a sixteenth of it
// all for fragmentation, take no more.
void KeepActivations(const ModelDescription& model, const BatchShape& batch, bool float32,
                     int64_t room_bytes, v1::Plan* plan);

}  // namespace oom
