// NcclCommunicator is one rank's end of the exchanges between the GPUs of a job (engine rules, section 10). Every rank
// makes the same exchanges in the same order. One thread makes them; each goes onto that thread's CUDA stream and the
// call returns at once. A thread of its own ends what is under way when the attempt is aborted: a kernel that waits for
// a dead peer would never end by itself (section 7).

#pragma once

#include <nccl.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>

#include "runtime/base/mutex.h"
#include "runtime/base/status.h"
#include "runtime/memory/control_page.h"

namespace oom {

class NcclCommunicator {
 public:
  // Of the current device; returns when all ranks are here. `page` must outlive the object. Fails with kAborted, or
  // kInternal (reason COLLECTIVE_FAILED, NCCL's own words).
  static Result<std::unique_ptr<NcclCommunicator>> Join(int rank, const ControlPage* page);
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // `data` [ranks, slice_bytes]: this rank's slice lies in its place, the others come to theirs.
  Status AllGather(std::byte* data, int64_t slice_bytes);
  // `values` [ranks, slice_elements] of all ranks, added up in FP32 or BF16: part `rank` of the sum to `slice`.
  Status ReduceScatter(const float* values, int64_t slice_elements, float* slice);
  Status ReduceScatter(const uint16_t* bfloat16_values, int64_t slice_elements, uint16_t* slice);
  // The owner's `from` to everybody's `to`. `from` is not read elsewhere.
  Status Broadcast(int owner, const std::byte* from, std::byte* to, int64_t bytes);
  // Everybody's `from` to the owner's `to` [ranks, bytes]. `to` is not written elsewhere.
  Status GatherTo(int owner, const std::byte* from, int64_t bytes, std::byte* to);

 private:
  NcclCommunicator(int rank, const ControlPage* page) : rank_(rank), page_(page) {}

  // Makes one exchange by `call` unless the attempt has ended, and waits until it is on the stream.
  template <class Call>
  Status Exchange(const char* what, const Call& call);
  Status Settle(ncclResult_t result, const char* what) OOM_REQUIRES(mutex_);
  void Watch();
  void Abort() OOM_REQUIRES(mutex_);

  const int rank_;
  const ControlPage* const page_;
  Mutex mutex_;
  ncclComm_t communicator_ OOM_GUARDED_BY(mutex_) = nullptr;
  std::atomic<bool> stop_{false};
  std::thread watcher_;
};

}  // namespace oom
