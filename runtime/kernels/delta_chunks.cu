#include "runtime/kernels/delta_chunks.h"
#include "runtime/kernels/launch.h"

namespace oom {
namespace {

constexpr int kThreads = 256;

// Of tokens [start, end), start < end.
__host__ __device__ int64_t ChunksOf(int64_t start, int64_t end) {
  return (end - 1) / kDeltaChunk - start / kDeltaChunk + 1;
}

// What the segment has of a document of the batch, in the segment's tokens; perhaps nothing.
struct Piece {
  __device__ Piece(const DeltaChunkArguments& a, int64_t document)
      : start(max(int64_t{a.batch_starts[document]} - a.first_token, int64_t{0})),
        end(min(int64_t{a.batch_starts[document + 1]} - a.first_token, a.tokens)) {}
  __device__ bool empty() const { return start >= end; }

  int64_t start;
  int64_t end;
};

// The last document whose chunks begin at `chunk` or before.
__device__ int64_t DocumentOf(const DeltaChunkArguments& a, int64_t chunk) {
  int64_t low = 0, high = a.documents - 1;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (a.document_chunks[middle] <= chunk) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// One block. Each thread has a run of the batch's documents: it counts, then it knows where to
// write; then all chunks at once look for their document.
__global__ void __launch_bounds__(kThreads) MakeDeltaChunksKernel(DeltaChunkArguments a) {
  __shared__ int64_t documents_of[kThreads], chunks_of[kThreads];
  const int64_t run = (a.batch_documents + kThreads - 1) / kThreads;
  const int64_t begin = min(threadIdx.x * run, a.batch_documents);
  const int64_t end = min(begin + run, a.batch_documents);
  int64_t documents = 0, chunks = 0;
  for (int64_t document = begin; document < end; ++document) {
    const Piece piece(a, document);
    if (piece.empty()) continue;
    ++documents;
    chunks += ChunksOf(piece.start, piece.end);
  }
  documents_of[threadIdx.x] = documents;
  chunks_of[threadIdx.x] = chunks;
  __syncthreads();
  documents = 0;
  chunks = 0;
  for (unsigned before = 0; before < threadIdx.x; ++before) {
    documents += documents_of[before];
    chunks += chunks_of[before];
  }
  for (int64_t document = begin; document < end; ++document) {
    const Piece piece(a, document);
    if (piece.empty()) continue;
    a.cu_seqlens[documents] = piece.start;
    a.document_chunks[documents] = static_cast<int32_t>(chunks);
    ++documents;
    chunks += ChunksOf(piece.start, piece.end);
  }
  if (threadIdx.x == kThreads - 1) {
    a.cu_seqlens[documents] = a.tokens;
    a.document_chunks[documents] = static_cast<int32_t>(chunks);
  }
  __syncthreads();
  for (int64_t chunk = threadIdx.x; chunk < a.chunk_count; chunk += kThreads) {
    const int64_t document = DocumentOf(a, chunk);
    const int64_t start = a.cu_seqlens[document];
    const int64_t within = chunk - a.document_chunks[document];
    const int64_t first = within == 0 ? start : (start / kDeltaChunk + within) * kDeltaChunk;
    const int64_t next = min(a.cu_seqlens[document + 1], (first / kDeltaChunk + 1) * kDeltaChunk);
    a.chunks[chunk] = {.first = first,
                       .count = static_cast<int32_t>(next - first),
                       .document = static_cast<int32_t>(document)};
  }
}

}  // namespace

int64_t DeltaChunkCount(const std::vector<int64_t>& cu_seqlens) {
  int64_t count = 0;
  for (size_t i = 1; i < cu_seqlens.size(); ++i) {
    OOM_CHECK_MSG(cu_seqlens[i - 1] < cu_seqlens[i], "a segment's document is empty");
    count += ChunksOf(cu_seqlens[i - 1], cu_seqlens[i]);
  }
  return count;
}

void MakeDeltaChunks(const DeltaChunkArguments& arguments, cudaStream_t stream) {
  OOM_CHECK(arguments.batch_documents > 0 && arguments.first_token >= 0 && arguments.tokens > 0);
  OOM_CHECK(arguments.documents > 0 && arguments.chunk_count >= arguments.documents);
  MakeDeltaChunksKernel<<<1, kThreads, 0, stream>>>(arguments);
  CheckLaunch("MakeDeltaChunks");
}

}  // namespace oom
