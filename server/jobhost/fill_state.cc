#include "server/jobhost/fill_state.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "runtime/base/mutex.h"
#include "runtime/base/units.h"
#include "runtime/checkpoint/fill_chunk.h"

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

}  // namespace

Status TouchPools(const FillOptions& options) {
  std::vector<std::vector<Piece>> by_node;
  const std::vector<PoolSpec>& pools = options.layout->pools();
  for (size_t pool = 0; pool < pools.size(); ++pool) {
    // What a checkpoint alone needs is taken when the first one is.
    if (pools[pool].on_gpu || pools[pool].name.rfind("snapshot.", 0) == 0) continue;
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
  return ForEachByNode(options, by_node, [&](const Piece& piece) {
    return FillChunk(source, layout, piece.index, piece.first, piece.count,
                     options.pools->At(layout.weights(piece.index)),
                     options.pools->At(layout.rest(piece.index)));
  });
}

}  // namespace oom
