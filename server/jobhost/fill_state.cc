#include "server/jobhost/fill_state.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "runtime/base/mutex.h"
#include "runtime/base/units.h"
#include "runtime/checkpoint/raw_state.h"

namespace oom {
namespace {

constexpr int64_t kPieceElements = int64_t{1} << 18;
constexpr int64_t kTouchBytes = 64_MiB;
constexpr int64_t kPageBytes = 4096;

// A range of one pool (touch) or of one chunk (fill).
struct Piece {
  int64_t index = 0;
  int64_t first = 0;
  int64_t count = 0;
};

// Runs `work` on every piece, those of node n by the threads that are bound to it.
Status ForEachByNode(const FillOptions& options, const std::vector<std::vector<Piece>>& by_node,
                     const std::function<Status(const Piece&)>& work) {
  Mutex mutex;
  Status first_failure;
  std::atomic<bool> failed{false};
  std::vector<std::atomic<size_t>> next(by_node.size());
  std::vector<std::thread> threads;
  for (size_t node = 0; node < by_node.size(); ++node) {
    if (by_node[node].empty()) continue;
    const int thread_count =
        node < options.threads_by_node.size() ? std::max(1, options.threads_by_node[node]) : 1;
    for (int i = 0; i < thread_count; ++i) {
      threads.emplace_back([&, node] {
        if (static_cast<int>(node) < options.topology->node_count()) {
          // Not permitted in some containers; then the kernel places the pages.
          static_cast<void>(options.topology->BindThread(static_cast<int>(node)));
        }
        while (!failed.load()) {
          const size_t mine = next[node].fetch_add(1);
          if (mine >= by_node[node].size()) return;
          Status status = options.cancelled && options.cancelled()
                              ? Status(Code::kAborted, "the attempt was aborted while loading")
                              : work(by_node[node][mine]);
          if (status.ok()) continue;
          failed.store(true);
          MutexLock lock(mutex);
          if (first_failure.ok()) first_failure = std::move(status);
        }
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  return first_failure;
}

void AddPieces(int64_t index, int64_t total, int64_t piece, std::vector<Piece>* out) {
  for (int64_t first = 0; first < total; first += piece) {
    out->push_back({.index = index, .first = first, .count = std::min(piece, total - first)});
  }
}

std::vector<Piece>& NodeList(int node, std::vector<std::vector<Piece>>* by_node) {
  if (node >= static_cast<int>(by_node->size())) by_node->resize(static_cast<size_t>(node) + 1);
  return (*by_node)[static_cast<size_t>(node)];
}

// The values of a unit's elements [first, first + out.size()), padding zero.
Status ReadUnitRange(const StateSource& source, const ParameterUnit& unit, StateArray array,
                     int64_t first, std::span<float> out) {
  std::fill(out.begin(), out.end(), 0.0f);
  const int64_t end = first + static_cast<int64_t>(out.size());
  for (size_t t = 0; t < unit.tensors.size(); ++t) {
    const TensorSpec& tensor = unit.tensors[t];
    const int64_t begin_here = std::max(first, tensor.offset_elements);
    const int64_t end_here = std::min(end, tensor.offset_elements + tensor.elements);
    if (begin_here >= end_here) continue;
    OOM_RETURN_IF_ERROR(source.Read(unit.index, static_cast<int64_t>(t), array,
                                    begin_here - tensor.offset_elements,
                                    out.subspan(static_cast<size_t>(begin_here - first),
                                                static_cast<size_t>(end_here - begin_here))));
  }
  return Status::Ok();
}

}  // namespace

Status TouchPools(const FillOptions& options) {
  std::vector<std::vector<Piece>> by_node;
  const std::vector<PoolSpec>& pools = options.layout->pools();
  for (size_t pool = 0; pool < pools.size(); ++pool) {
    AddPieces(static_cast<int64_t>(pool), pools[pool].bytes, kTouchBytes,
              &NodeList(pools[pool].numa_node, &by_node));
  }
  return ForEachByNode(options, by_node, [&options](const Piece& piece) {
    std::byte* base = options.pools->bases[static_cast<size_t>(piece.index)] + piece.first;
    options.topology->NoteAccess(base, piece.count, MemoryAccess::kFirstTouch);
    for (int64_t offset = 0; offset < piece.count; offset += kPageBytes) {
      // A write that changes nothing, also beside a worker that already uses the page.
      std::atomic_ref<uint8_t>(reinterpret_cast<uint8_t&>(base[offset])).fetch_or(0);
    }
    return Status::Ok();
  });
}

Status FillStreamedState(const FillOptions& options, const StateSource& source) {
  const SharedLayout& layout = *options.layout;
  std::vector<std::vector<Piece>> by_node;
  for (const Chunk& chunk : layout.chunks()) {
    if (chunk.owner_rank >= 0) continue;
    AddPieces(chunk.index, chunk.elements, kPieceElements, &NodeList(chunk.numa_node, &by_node));
  }
  const Precision precision = layout.float32() ? Precision::kFloat32 : Precision::kBfloat16;
  return ForEachByNode(options, by_node, [&](const Piece& piece) {
    const Chunk& chunk = layout.chunks()[static_cast<size_t>(piece.index)];
    const ParameterUnit& unit = layout.units()[static_cast<size_t>(chunk.unit)];
    std::vector<float> arrays[3];
    for (const StateArray array :
         {StateArray::kMaster, StateArray::kMoment1, StateArray::kMoment2}) {
      std::vector<float>& values = arrays[static_cast<size_t>(array)];
      values.resize(static_cast<size_t>(piece.count));
      OOM_RETURN_IF_ERROR(
          ReadUnitRange(source, unit, array, chunk.first_element + piece.first, values));
    }
    FloatToRaw(precision, arrays[0], arrays[1], arrays[2], piece.first,
               {.weights = options.pools->At(layout.weights(chunk.index)),
                .rest = options.pools->At(layout.rest(chunk.index)),
                .elements = chunk.elements});
    return Status::Ok();
  });
}

}  // namespace oom
