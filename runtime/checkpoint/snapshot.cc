#include "runtime/checkpoint/snapshot.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/base/units.h"
#include "runtime/model/unit.h"

namespace oom {
namespace {

// Elements converted and written at a time: 4 MiB an array, large enough for the disk.
constexpr int64_t kSliceElements = int64_t{1} << 20;

int64_t LargestChunkBytes(const std::vector<SnapshotChunk>& chunks) {
  int64_t elements = 0;
  for (const SnapshotChunk& chunk : chunks) elements = std::max(elements, chunk.elements);
  return elements * kStateBytesPerElement;
}

struct FreeDeleter {
  void operator()(void* memory) const { std::free(memory); }
};
template <class T>
using AlignedArray = std::unique_ptr<T[], FreeDeleter>;

// Page-aligned, so that writes can bypass the page cache.
template <class T>
AlignedArray<T> AllocateAligned(int64_t count) {
  const auto bytes = static_cast<size_t>(RoundUp(count * static_cast<int64_t>(sizeof(T)), 4096));
  void* memory = std::aligned_alloc(4096, std::max<size_t>(bytes, 4096));
  OOM_CHECK_MSG(memory != nullptr, "no memory for the snapshot's buffers");
  return AlignedArray<T>(static_cast<T*>(memory));
}

}  // namespace

// One writer thread's memory: a raw chunk, and three slices of FP32.
class Snapshot::WriterBuffers {
 public:
  explicit WriterBuffers(int64_t raw_bytes)
      : raw_bytes_(raw_bytes), raw_(AllocateAligned<std::byte>(raw_bytes)) {
    const int64_t elements = std::min(kSliceElements, raw_bytes / kStateBytesPerElement);
    for (auto& array : arrays_) array = AllocateAligned<float>(elements);
  }
  std::span<std::byte> raw() { return {raw_.get(), static_cast<size_t>(raw_bytes_)}; }
  std::span<float> array(size_t index, int64_t elements) {
    return {arrays_[index].get(), static_cast<size_t>(elements)};
  }

 private:
  const int64_t raw_bytes_;
  AlignedArray<std::byte> raw_;
  AlignedArray<float> arrays_[3];
};

int64_t Snapshot::BufferBytes(int64_t largest_chunk_elements, int writer_thread_count) {
  const int64_t slice_elements = std::min(kSliceElements, largest_chunk_elements);
  return writer_thread_count * (largest_chunk_elements + slice_elements) * kStateBytesPerElement;
}

Snapshot::Snapshot(Options options)
    : options_(std::move(options)),
      slot_bytes_(LargestChunkBytes(options_.chunks)),
      states_(options_.chunks.size()) {
  OOM_CHECK(options_.order.size() == options_.chunks.size());
  OOM_CHECK(options_.writer_thread_count > 0);
  for (auto& state : states_) state.store(State::kSaved);
  const int64_t slot_count =
      slot_bytes_ == 0 ? 0 : static_cast<int64_t>(options_.staging.size()) / slot_bytes_;
  for (int64_t slot = 0; slot < slot_count; ++slot) free_slots_.push_back(slot);
}

Snapshot::~Snapshot() { Wait(); }

Status Snapshot::Begin(std::unique_ptr<CheckpointWriter> writer, Completion completion) {
  MutexLock begin_lock(begin_mutex_);
  if (active()) {
    return Status(Code::kFailedPrecondition, "the last checkpoint is still being written");
  }
  if (thread_.joinable()) thread_.join();
  {
    MutexLock lock(mutex_);
    OOM_CHECK(staged_.empty() && copying_count_ == 0);
    status_ = Status::Ok();
    next_in_order_ = 0;
    for (auto& state : states_) state.store(State::kUnsaved, std::memory_order_relaxed);
    active_.store(true, std::memory_order_release);
  }
  thread_ =
      std::thread([this, writer = std::move(writer), completion = std::move(completion)]() mutable {
        Run(std::move(writer), std::move(completion));
      });
  return Status::Ok();
}

void Snapshot::Wait() {
  MutexLock begin_lock(begin_mutex_);
  if (thread_.joinable()) thread_.join();
}

std::span<std::byte> Snapshot::Slot(int64_t slot) const {
  return options_.staging.subspan(static_cast<size_t>(slot * slot_bytes_),
                                  static_cast<size_t>(slot_bytes_));
}

void Snapshot::BeforeUpdate(int64_t chunk) {
  OOM_CHECK(chunk >= 0 && chunk < static_cast<int64_t>(states_.size()));
  if (state(chunk).load(std::memory_order_acquire) == State::kSaved) return;
  Staged staged{.chunk = chunk, .slot = -1};
  {
    MutexLock lock(mutex_);
    bool waited = false;
    while (true) {
      const State now = state(chunk).load(std::memory_order_relaxed);
      if (now == State::kSaved) {
        if (waited) waited_count_.fetch_add(1);
        return;
      }
      if (now == State::kUnsaved && !free_slots_.empty()) break;
      waited = true;
      changed_.Wait(mutex_);
    }
    if (waited) waited_count_.fetch_add(1);
    staged.slot = free_slots_.back();
    free_slots_.pop_back();
    state(chunk).store(State::kCopying, std::memory_order_relaxed);
    ++copying_count_;
  }
  Status status = options_.read_chunk(
      chunk, PlaceState(options_.precision, options_.chunks[static_cast<size_t>(chunk)].elements,
                        Slot(staged.slot)));
  if (!status.ok()) Fail(std::move(status));
  MutexLock lock(mutex_);
  state(chunk).store(State::kSaved, std::memory_order_release);
  --copying_count_;
  staged_.push_back(staged);
  staged_count_.fetch_add(1);
  changed_.NotifyAll();
}

int64_t Snapshot::TakeUnsaved() {
  while (next_in_order_ < options_.order.size()) {
    const int64_t chunk = options_.order[next_in_order_++];
    if (state(chunk).load(std::memory_order_relaxed) != State::kUnsaved) continue;
    state(chunk).store(State::kReading, std::memory_order_relaxed);
    return chunk;
  }
  return -1;
}

void Snapshot::Fail(Status status) {
  MutexLock lock(mutex_);
  if (status_.ok()) status_ = std::move(status);
  // What is being copied becomes kSaved when its thread is done.
  for (auto& state : states_) {
    if (state.load(std::memory_order_relaxed) == State::kUnsaved) {
      state.store(State::kSaved, std::memory_order_release);
    }
  }
  changed_.NotifyAll();
}

Status Snapshot::WriteChunk(CheckpointWriter* writer, int64_t chunk, std::span<std::byte> raw,
                            WriterBuffers* buffers) {
  const SnapshotChunk& spec = options_.chunks[static_cast<size_t>(chunk)];
  const StateBuffer state = PlaceState(options_.precision, spec.elements, raw);
  for (int64_t done = 0; done < spec.elements;) {
    const int64_t elements = std::min(kSliceElements, spec.elements - done);
    const auto masters = buffers->array(0, elements);
    const auto moment1 = buffers->array(1, elements);
    const auto moment2 = buffers->array(2, elements);
    RawToFloat(options_.precision, state, done, masters, moment1, moment2);
    OOM_RETURN_IF_ERROR(
        writer->WriteBlocks(spec.unit, spec.first_element + done, masters, moment1, moment2));
    done += elements;
  }
  return Status::Ok();
}

// Staged chunks first, since updates may wait for their slots; then the live ones in order.
void Snapshot::WriteChunks(CheckpointWriter* writer) {
  WriterBuffers buffers(slot_bytes_);
  while (true) {
    Staged staged{.chunk = -1, .slot = -1};
    {
      MutexLock lock(mutex_);
      while (staged.chunk < 0) {
        if (!staged_.empty()) {
          staged = staged_.front();
          staged_.erase(staged_.begin());
        } else if (staged.chunk = TakeUnsaved(); staged.chunk < 0) {
          if (copying_count_ == 0) return;
          changed_.Wait(mutex_);
        }
      }
      if (!status_.ok()) {  // Nothing is written any more; only slots and states are given back.
        if (staged.slot >= 0) free_slots_.push_back(staged.slot);
        if (staged.slot < 0) state(staged.chunk).store(State::kSaved, std::memory_order_release);
        changed_.NotifyAll();
        continue;
      }
    }
    Status status;
    std::span<std::byte> raw = staged.slot >= 0 ? Slot(staged.slot) : buffers.raw();
    if (staged.slot < 0) {
      const int64_t elements = options_.chunks[static_cast<size_t>(staged.chunk)].elements;
      status = options_.read_chunk(staged.chunk, PlaceState(options_.precision, elements, raw));
      MutexLock lock(mutex_);
      state(staged.chunk).store(State::kSaved, std::memory_order_release);
      changed_.NotifyAll();
    }
    if (status.ok()) status = WriteChunk(writer, staged.chunk, raw, &buffers);
    if (!status.ok()) Fail(std::move(status));
    if (staged.slot >= 0) {
      MutexLock lock(mutex_);
      free_slots_.push_back(staged.slot);
      changed_.NotifyAll();
    }
  }
}

void Snapshot::Run(std::unique_ptr<CheckpointWriter> writer, Completion completion) {
  std::vector<std::thread> helpers;
  for (int i = 1; i < options_.writer_thread_count; ++i) {
    helpers.emplace_back([this, &writer] { WriteChunks(writer.get()); });
  }
  WriteChunks(writer.get());
  for (std::thread& helper : helpers) helper.join();
  Status status;
  {
    MutexLock lock(mutex_);
    status = status_;
  }
  Result<CheckpointReport> result =
      status.ok() ? writer->Commit() : Result<CheckpointReport>(std::move(status));
  writer.reset();  // After a failure this removes what was written.
  completion(result);
  active_.store(false, std::memory_order_release);
}

}  // namespace oom
