#include "server/jobhost/checkpointer.h"

#include <spdlog/spdlog.h>
#include <sys/mman.h>

#include <cstring>
#include <utility>

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

namespace {

// Chunks in the order in which updates reach them: overlapped ones follow the backward from the
// last unit to the first, deferred ones the next forward. Resident chunks last: nobody waits for
// those.
std::vector<int64_t> UpdateOrder(const SharedLayout& layout, v1::UpdateMode mode) {
  std::vector<int64_t> order;
  std::vector<int64_t> resident;
  const auto unit_count = static_cast<int64_t>(layout.units().size());
  for (int64_t i = 0; i < unit_count; ++i) {
    const int64_t unit = mode == v1::UPDATE_MODE_OVERLAPPED ? unit_count - 1 - i : i;
    for (int64_t c = layout.first_chunk(unit); c < layout.first_chunk(unit + 1); ++c) {
      (layout.resident(unit) ? resident : order).push_back(c);
    }
  }
  order.insert(order.end(), resident.begin(), resident.end());
  return order;
}

}  // namespace

Checkpointer::Checkpointer(Options options) : options_(std::move(options)) {
  const SharedLayout& layout = options_.context->layout();
  staging_ = std::make_unique<Staging>(options_.context->plan().snapshot_staging_bytes());
  Snapshot::Options snapshot;
  for (const Chunk& chunk : layout.chunks()) {
    snapshot.chunks.push_back(
        {.unit = chunk.unit, .first_element = chunk.first_element, .elements = chunk.elements});
  }
  snapshot.order = UpdateOrder(layout, options_.context->plan().update_mode());
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
    const SharedWord& taken = options_.page->snapshot_taken(chunk);
    static_cast<void>(taken.WaitAtLeast(step, options_.page->aborted()));
    // A copy that was whole before the abort is as good as any: nobody touches it until the next
    // cut.
    if (taken.Load() < step) {
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
