// The exchanges of one rank with itself: what is on the wire with more ranks takes machines with more GPUs
// (tests/gpu/e2e), but every call, its sizes and its end by an abort are the same.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <vector>

#include "runtime/comm/nccl_communicator.h"
#include "tests/gpu/elementwise/device_array.h"

namespace oom::testing {
namespace {

class NcclCommunicatorTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto page = ControlPage::Create({.rank_count = 1, .chunk_count = 1, .block_count = 1});
    ASSERT_TRUE(page.ok()) << page.status().ToString();
    page_ = std::move(page).value();
  }

  std::unique_ptr<NcclCommunicator> Join() {
    auto joined = NcclCommunicator::Join(0, page_.get());
    EXPECT_TRUE(joined.ok()) << joined.status().ToString();
    return joined.ok() ? std::move(joined).value() : nullptr;
  }

  static std::vector<float> Values(int64_t count) {
    std::vector<float> values(static_cast<size_t>(count));
    std::iota(values.begin(), values.end(), 1.0f);
    return values;
  }

  std::unique_ptr<ControlPage> page_;
};

TEST_F(NcclCommunicatorTest, ExchangesOfOneRankLeaveItsValues) {
  const auto communicator = Join();
  ASSERT_NE(communicator, nullptr);
  constexpr int64_t kCount = 4096;
  const std::vector<float> values = Values(kCount);
  const DeviceArray<float> from(values);
  DeviceArray<float> reduced(kCount), sent(kCount), received(kCount);
  DeviceArray<float> gathered(values);
  ASSERT_TRUE(communicator->ReduceScatter(from.get(), kCount, reduced.get()).ok());
  ASSERT_TRUE(communicator
                  ->AllGather(reinterpret_cast<std::byte*>(gathered.get()),
                              kCount * static_cast<int64_t>(sizeof(float)))
                  .ok());
  ASSERT_TRUE(communicator
                  ->Broadcast(0, reinterpret_cast<const std::byte*>(from.get()),
                              reinterpret_cast<std::byte*>(sent.get()),
                              kCount * static_cast<int64_t>(sizeof(float)))
                  .ok());
  ASSERT_TRUE(communicator
                  ->GatherTo(0, reinterpret_cast<const std::byte*>(from.get()),
                             kCount * static_cast<int64_t>(sizeof(float)),
                             reinterpret_cast<std::byte*>(received.get()))
                  .ok());
  CheckCuda(cudaDeviceSynchronize());
  for (const DeviceArray<float>* result : {&reduced, &gathered, &sent, &received}) {
    EXPECT_EQ(result->ToHost(), values);
  }
}

TEST_F(NcclCommunicatorTest, RoundedPartialsAreReducedAsTheyAre) {
  const auto communicator = Join();
  ASSERT_NE(communicator, nullptr);
  const std::vector<uint16_t> values = {0x3F80, 0xC000, 0x0000, 0x8000, 0x7F80, 0x0001, 0x4049, 0xBF80};
  const DeviceArray<uint16_t> from(values);
  DeviceArray<uint16_t> slice(static_cast<int64_t>(values.size()));
  ASSERT_TRUE(
      communicator->ReduceScatter(from.get(), static_cast<int64_t>(values.size()), slice.get()).ok());
  CheckCuda(cudaDeviceSynchronize());
  EXPECT_EQ(slice.ToHost(), values);
}

TEST_F(NcclCommunicatorTest, NothingIsExchangedOnceTheAttemptIsAborted) {
  const auto communicator = Join();
  ASSERT_NE(communicator, nullptr);
  page_->Abort();
  // Until the watcher has seen it, an exchange may still be made.
  DeviceArray<float> values(1024);
  Status status = Status::Ok();
  for (int i = 0; i < 1000000 && status.ok(); ++i) {
    status = communicator->AllGather(reinterpret_cast<std::byte*>(values.get()), 4096);
  }
  EXPECT_EQ(status.code(), Code::kAborted) << status.ToString();
}

}  // namespace
}  // namespace oom::testing
