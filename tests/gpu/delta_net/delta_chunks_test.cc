// Goal: the lists of a segment's documents and chunks that the device makes are those made plainly
// on the host: for whole batches and segments, empty documents, more documents than threads.

#include "runtime/kernels/delta_chunks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "runtime/ops/cuda/gated_delta_net_cuda.h"
#include "tests/gpu/delta_net/delta_chunks_reference.h"
#include "tests/gpu/delta_net/delta_net_testing.h"

namespace oom::testing {
namespace {

// Documents of many lengths, some empty.
std::vector<int64_t> Documents(int count) {
  const std::vector<int64_t> lengths = {1, 64, 0, 63, 65, 200, 0, 0, 7, 1000};
  std::vector<int64_t> starts = {0};
  for (int i = 0; i < count; ++i) starts.push_back(starts.back() + lengths[i % lengths.size()]);
  return starts;
}

void ExpectTheHostsLists(const std::vector<int64_t>& batch, int64_t first, int64_t end) {
  SCOPED_TRACE(::testing::Message()
               << batch.size() - 1 << " documents, tokens " << first << " to " << end);
  const SequenceSegment segment =
      CutSegment(batch, OnGpu(at::tensor(batch, at::kLong).to(at::kInt)), first, end);
  const DeltaNetBatch lists(segment);
  const DeltaChunks expected(segment.cu_seqlens);
  ASSERT_EQ(lists.chunks, static_cast<int64_t>(expected.chunks.size()));
  EXPECT_TRUE(at::equal(lists.cu_seqlens.cpu(), at::tensor(segment.cu_seqlens, at::kLong)));
  EXPECT_TRUE(
      at::equal(lists.document_chunks.cpu(), at::tensor(expected.document_chunks, at::kInt)));
  const at::Tensor chunks = lists.chunk_list.cpu();
  EXPECT_EQ(std::memcmp(chunks.const_data_ptr(), expected.chunks.data(), chunks.nbytes()), 0);
}

TEST(DeltaChunksTest, TheDeviceMakesTheHostsLists) {
  for (const int count : {1, 3, 10, 255, 256, 257, 2000}) {
    const std::vector<int64_t> batch = Documents(count);
    const int64_t tokens = batch.back();
    ExpectTheHostsLists(batch, 0, tokens);
    for (const int64_t segment : {int64_t{64}, int64_t{100}, int64_t{4096}}) {
      for (const int64_t first : {int64_t{0}, tokens / 3, std::max<int64_t>(0, tokens - segment)}) {
        ExpectTheHostsLists(batch, first, std::min(tokens, first + segment));
      }
    }
  }
  ExpectTheHostsLists({0, 131072}, 0, 131072);
}

}  // namespace
}  // namespace oom::testing
