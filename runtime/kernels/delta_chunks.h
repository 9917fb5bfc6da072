// The documents of a segment and their chunks as the kernels of Gated DeltaNet read them, made on
// the device from the batch's document starts, which are there already: nothing is copied from the
// host. Documents are those of runtime/ops/segment.h: what the segment has of each, none empty.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "runtime/kernels/gated_delta_rule.h"

namespace oom {

// Of the segment's documents; what the lists below have room for.
int64_t DeltaChunkCount(const std::vector<int64_t>& cu_seqlens);

struct DeltaChunkArguments {
  const int32_t* batch_starts = nullptr;  // [batch_documents + 1]; documents may be empty.
  int64_t batch_documents = 0;
  // Of the segment.
  int64_t first_token = 0;
  int64_t tokens = 0;
  int64_t documents = 0;
  int64_t chunk_count = 0;
  int64_t* cu_seqlens = nullptr;       // [D + 1], from 0 to the segment's tokens.
  DeltaChunk* chunks = nullptr;        // In documents' order.
  int32_t* document_chunks = nullptr;  // [D + 1]: where each document's chunks begin.
};

void MakeDeltaChunks(const DeltaChunkArguments& arguments, cudaStream_t stream);

}  // namespace oom
