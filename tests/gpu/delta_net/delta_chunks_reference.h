// Chunks of documents as runtime/kernels/delta_chunks.h gives them, made plainly on the host.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "runtime/kernels/gated_delta_rule.h"

namespace oom::testing {

struct DeltaChunks {
  explicit DeltaChunks(const std::vector<int64_t>& cu_seqlens) {
    document_chunks.push_back(0);
    for (size_t document = 0; document + 1 < cu_seqlens.size(); ++document) {
      const int64_t end = cu_seqlens[document + 1];
      for (int64_t first = cu_seqlens[document]; first < end;) {
        const int64_t next = std::min(end, (first / kDeltaChunk + 1) * kDeltaChunk);
        chunks.push_back({.first = first,
                          .count = static_cast<int32_t>(next - first),
                          .document = static_cast<int32_t>(document)});
        first = next;
      }
      document_chunks.push_back(static_cast<int32_t>(chunks.size()));
    }
  }

  std::vector<DeltaChunk> chunks;
  std::vector<int32_t> document_chunks;
};

}  // namespace oom::testing
