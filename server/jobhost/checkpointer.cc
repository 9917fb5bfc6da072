#include "server/jobhost/checkpointer.h"

#include <sys/mman.h>

#include <cstring>
#include <utility>

#include <spdlog/spdlog.h>

namespace oom {

// Anonymous memory of the plan's size. Pages are taken as they are used, and stay for the attempt.
class Checkpointer::Staging {
 public:
  explicit Staging(int64_t bytes) : bytes_(bytes > 0 ? bytes : 0) {
    if (bytes_ == 0) return;
    void* address = ::mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    // Without it updates wait for the disk instead.
    if (address != MAP_FAILED) address_ = static_cast<std::byte*>(address);
  }
  ~Staging() {
    if (address_ != nullptr) ::munmap(address_, static_cast<size_t>(bytes_));
  }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  std::span<std::byte> bytes() const {
    return address_ == nullptr ? std::span<std::byte>()
                               : std::span<std::byte>(address_, static_cast<size_t>(bytes_));
  }

 private:
  const int64_t bytes_;
  std::byte* address_ = nullptr;
};

Checkpointer::Checkpointer(Options options) : options_(std::move(options)) {
  const SharedLayout& layout = options_.context->layout();
  staging_ = std::make_unique<Staging>(options_.context->plan().snapshot_staging_bytes());
  Snapshot::Options snapshot;
  std::vector<int64_t> streamed;
  std::vector<int64_t> resident;
  for (const Chunk& chunk : layout.chunks()) {
    snapshot.chunks.push_back(
        {.unit = chunk.unit, .first_element = chunk.first_element, .elements = chunk.elements});
    (chunk.owner_rank < 0 ? streamed : resident).push_back(chunk.index);
  }
  // Overlapped updates come in the order of the backward, deferred ones in the order of next use.
  const bool overlapped = options_.context->plan().update_mode() == v1::UPDATE_MODE_OVERLAPPED;
  snapshot.order = overlapped ? std::vector<int64_t>(streamed.rbegin(), streamed.rend()) : streamed;
  snapshot.order.insert(snapshot.order.end(), resident.begin(), resident.end());
  snapshot.precision = options_.context->precision();
  snapshot.staging = staging_->bytes();
  snapshot.read_chunk = [this](int64_t chunk, const StateBuffer& buffer) {
    return ReadChunk(chunk, buffer);
  };
  snapshot_ = std::make_unique<Snapshot>(std::move(snapshot));
}

Checkpointer::~Checkpointer() = default;

Status Checkpointer::ReadChunk(int64_t chunk, const StateBuffer& buffer) const {
  const SharedLayout& layout = options_.context->layout();
  const PoolMap& pools = options_.context->pools();
  const int64_t weight_bytes = layout.weights(chunk).bytes;
  const int64_t rest_bytes = layout.rest(chunk).bytes;
  const std::byte* weights = nullptr;
  const std::byte* rest = nullptr;
  if (layout.chunks()[static_cast<size_t>(chunk)].owner_rank < 0) {
    weights = pools.At(layout.weights(chunk));
    rest = pools.At(layout.rest(chunk));
  } else {
    const auto step = static_cast<uint64_t>(step_.load());
    const WaitResult taken =
        options_.page->snapshot_taken(chunk).WaitAtLeast(step, options_.page->aborted());
    if (taken != WaitResult::kReached) {
      return Status(Code::kAborted, "the attempt ended before its resident state was copied");
    }
    weights = pools.At(layout.snapshot(chunk));
    rest = weights + weight_bytes;
  }
  std::memcpy(buffer.weights, weights, static_cast<size_t>(weight_bytes));
  std::memcpy(buffer.rest, rest, static_cast<size_t>(rest_bytes));
  return Status::Ok();
}

Manifest Checkpointer::MakeManifest(int64_t step) const {
  const JobContext& context = *options_.context;
  return {.step = step,
          .job_name = context.spec().name(),
          .job_uid = context.start().uid(),
          .precision = context.precision(),
          .seed = context.spec().seed(),
          .data_cursor = step * context.spec().global_batch(),
          .model = context.model()};
}

void Checkpointer::Begin(int64_t step) {
  step_.store(step);
  auto writer = CheckpointWriter::Create({.output_directory = options_.output_directory,
                                          .manifest = MakeManifest(step),
                                          .units = options_.context->layout().units(),
                                          .keep = options_.context->spec().checkpoint().keep()});
  Status status = writer.ok() ? Status::Ok() : writer.status();
  if (status.ok()) {
    status = snapshot_->Begin(
        std::move(writer).value(), [this, step](const Result<CheckpointReport>& result) {
          if (!result.ok()) return options_.on_done({.status = result.status(), .step = step});
          if (!result->retention.ok()) {
            spdlog::warn("old checkpoints were not removed: {}", result->retention.ToString());
          }
          options_.on_done({.step = step, .path = result->path, .bytes = result->bytes});
        });
  }
  if (!status.ok()) options_.on_done({.status = std::move(status), .step = step});
}

void Checkpointer::BeforeUpdate(int64_t chunk) {
  blocked_updates_.fetch_add(1);
  snapshot_->BeforeUpdate(chunk);
  blocked_updates_.fetch_sub(1);
}

}  // namespace oom
