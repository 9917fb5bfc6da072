#include "runtime/comm/nccl_communicator.h"

#include <chrono>
#include <cstring>
#include <string>

#include "runtime/base/check.h"
#include "runtime/device/cuda_stream.h"

namespace oom {
namespace {

static_assert(sizeof(ncclUniqueId) == ControlPage::kCommunicatorIdBytes);

constexpr std::chrono::milliseconds kWatchSlice{100};

Status Aborted() { return Status(Code::kAborted, "the attempt was aborted"); }

Status Failed(const char* what, ncclResult_t result, ncclComm_t communicator) {
  std::string message = std::string(what) + ": " + ncclGetErrorString(result) + " (NCCL error " +
                        std::to_string(result) + ")";
  const char* detail = ncclGetLastError(communicator);
  if (detail != nullptr && *detail != '\0') message += ": " + std::string(detail);
  return Status(Code::kInternal,
                message + "; oomd started with NCCL_DEBUG=INFO has more in the ranks' logs, and "
                          "sudo dmesg | grep -i xid what failed under it")
      .WithReason("COLLECTIVE_FAILED");
}

}  // namespace

Result<std::unique_ptr<NcclCommunicator>> NcclCommunicator::Join(int rank,
                                                                 const ControlPage* page) {
  ncclUniqueId id;
  const std::span<std::byte> shared = page->communicator_id();
  if (rank == 0) {
    if (const ncclResult_t made = ncclGetUniqueId(&id); made != ncclSuccess) {
      return Failed("GPUs cannot be connected", made, nullptr);
    }
    std::memcpy(shared.data(), &id, sizeof(id));
    page->communicator_known().Publish(1);
  } else if (page->communicator_known().WaitAtLeast(1, page->aborted()) != WaitResult::kReached) {
    return Aborted();
  }
  std::memcpy(&id, shared.data(), sizeof(id));

  std::unique_ptr<NcclCommunicator> self(new NcclCommunicator(rank, page));
  // Calls return at once, so that a wait for a peer that died can be given up.
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  {
    MutexLock lock(self->mutex_);
    const ncclResult_t begun = ncclCommInitRankConfig(
        &self->communicator_, page->layout().rank_count, id, rank, &config);
    OOM_RETURN_IF_ERROR(self->Settle(begun, "GPUs cannot be connected"));
  }
  self->watcher_ = std::thread([raw = self.get()] { raw->Watch(); });
  return self;
}

NcclCommunicator::~NcclCommunicator() {
  stop_ = true;
  if (watcher_.joinable()) watcher_.join();
  MutexLock lock(mutex_);
  // Not destroyed: that would wait for the peers.
  Abort();
}

void NcclCommunicator::Abort() {
  if (communicator_ == nullptr) return;
  static_cast<void>(ncclCommAbort(communicator_));
  communicator_ = nullptr;
}

void NcclCommunicator::Watch() {
  while (!stop_) {
    // Nothing is ever 2: the wait ends with its time or the attempt.
    if (page_->communicator_known().WaitAtLeast(2, page_->aborted(), {.timeout = kWatchSlice}) ==
        WaitResult::kAborted) {
      MutexLock lock(mutex_);
      Abort();
      return;
    }
  }
}

Status NcclCommunicator::Settle(ncclResult_t result, const char* what) {
  while (result == ncclInProgress) {
    if (page_->aborted().Load() != 0) {
      Abort();
      return Aborted();
    }
    std::this_thread::yield();
    if (const ncclResult_t asked = ncclCommGetAsyncError(communicator_, &result);
        asked != ncclSuccess) {
      result = asked;
    }
  }
  return result == ncclSuccess ? Status::Ok() : Failed(what, result, communicator_);
}

template <class Call>
Status NcclCommunicator::Exchange(const char* what, const Call& call) {
  MutexLock lock(mutex_);
  if (communicator_ == nullptr) return Aborted();
  return Settle(call(communicator_, CurrentCudaStream()), what);
}

Status NcclCommunicator::AllGather(std::byte* data, int64_t slice_bytes) {
  return Exchange("weights between GPUs", [&](ncclComm_t communicator, cudaStream_t stream) {
    return ncclAllGather(data + rank_ * slice_bytes, data, static_cast<size_t>(slice_bytes),
                         ncclInt8, communicator, stream);
  });
}

Status NcclCommunicator::ReduceScatter(const float* values, int64_t slice_elements, float* slice) {
  return Exchange("gradients between GPUs", [&](ncclComm_t communicator, cudaStream_t stream) {
    return ncclReduceScatter(values, slice, static_cast<size_t>(slice_elements), ncclFloat32,
                             ncclSum, communicator, stream);
  });
}

Status NcclCommunicator::ReduceScatter(const uint16_t* bfloat16_values, int64_t slice_elements,
                                       uint16_t* slice) {
  return Exchange("gradients between GPUs", [&](ncclComm_t communicator, cudaStream_t stream) {
    return ncclReduceScatter(bfloat16_values, slice, static_cast<size_t>(slice_elements),
                             ncclBfloat16, ncclSum, communicator, stream);
  });
}

Status NcclCommunicator::Broadcast(int owner, const std::byte* from, std::byte* to,
                                   int64_t bytes) {
  return Exchange("weights between GPUs", [&](ncclComm_t communicator, cudaStream_t stream) {
    return ncclBroadcast(from, to, static_cast<size_t>(bytes), ncclInt8, owner, communicator,
                         stream);
  });
}

Status NcclCommunicator::GatherTo(int owner, const std::byte* from, int64_t bytes, std::byte* to) {
  return Exchange("gradients between GPUs", [&](ncclComm_t communicator, cudaStream_t stream) {
    const auto size = static_cast<size_t>(bytes);
    ncclResult_t result = ncclGroupStart();
    if (result != ncclSuccess) return result;
    const auto keep = [&](ncclResult_t next) {
      if (result == ncclSuccess || result == ncclInProgress) result = next;
    };
    keep(ncclSend(from, size, ncclInt8, owner, communicator, stream));
    for (int rank = 0; rank_ == owner && rank < page_->layout().rank_count; ++rank) {
      keep(ncclRecv(to + rank * bytes, size, ncclInt8, rank, communicator, stream));
    }
    // The group is ended in any case: it is the thread's.
    const ncclResult_t ended = ncclGroupEnd();
    keep(ended);
    return result;
  });
}

}  // namespace oom
