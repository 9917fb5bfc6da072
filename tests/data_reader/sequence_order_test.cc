// The order of sequences over epochs: a permutation each, evenly spread, without state.

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>
#include <vector>

#include "runtime/data/dataset.h"

namespace oom {
namespace {

TEST(SequenceOrder, WithoutShuffleStepsTakeSequencesInOrderAndWrapAround) {
  const SequenceOrder order(10, 4, false, 1);
  EXPECT_EQ(order.At(0, 0), 0);
  EXPECT_EQ(order.At(1, 3), 7);
  EXPECT_EQ(order.At(2, 1), 9);
  EXPECT_EQ(order.At(2, 2), 0);
  EXPECT_EQ(order.Epoch(2), 0);
  EXPECT_EQ(order.Epoch(3), 1);
}

TEST(SequenceOrder, EveryEpochIsAPermutationWhateverTheBatch) {
  for (const int64_t count : {1, 2, 3, 5, 16, 17, 100, 1000, 4096, 5000}) {
    for (const int64_t batch : {1, 7, 64}) {
      const SequenceOrder order(count, batch, true, 42);
      std::vector<std::set<int64_t>> epochs(3);
      for (int64_t position = 0; position < 3 * count; ++position) {
        const int64_t index = order.At(position / batch, position % batch);
        ASSERT_GE(index, 0);
        ASSERT_LT(index, count);
        EXPECT_TRUE(epochs[static_cast<size_t>(position / count)].insert(index).second)
            << count << " " << batch << " " << position;
      }
    }
  }
}

TEST(SequenceOrder, DependsOnSeedAndEpochButNotOnTheBatch) {
  const auto epoch = [](uint64_t seed, int64_t batch, int64_t number) {
    const SequenceOrder order(1000, batch, true, seed);
    std::vector<int64_t> sequence;
    for (int64_t p = number * 1000; p < (number + 1) * 1000; ++p) {
      sequence.push_back(order.At(p / batch, p % batch));
    }
    return sequence;
  };
  EXPECT_EQ(epoch(1, 8, 0), epoch(1, 50, 0));
  EXPECT_NE(epoch(1, 8, 0), epoch(1, 8, 1));
  EXPECT_NE(epoch(1, 8, 0), epoch(2, 8, 0));
}

// 24 orders of 4 sequences over 24,000 epochs: the chi-squared statistic has 23 degrees of freedom;
// above 60 has a probability of 4e-5. Positions of a large permutation: no correlation with the
// identity.
TEST(SequenceOrder, ShufflesEvenly) {
  std::map<std::vector<int64_t>, int> seen;
  const SequenceOrder small(4, 4, true, 7);
  for (int64_t step = 0; step < 24'000; ++step) {
    std::vector<int64_t> order;
    for (int64_t slot = 0; slot < 4; ++slot) order.push_back(small.At(step, slot));
    ++seen[order];
  }
  ASSERT_EQ(seen.size(), 24u);
  double chi_squared = 0;
  for (const auto& [order, count] : seen)
    chi_squared += (count - 1000.0) * (count - 1000.0) / 1000.0;
  EXPECT_LT(chi_squared, 60);
  const int64_t n = 100'000;
  const SequenceOrder large(n, 1, true, 7);
  double covariance = 0;
  for (int64_t i = 0; i < n; ++i) {
    covariance +=
        (static_cast<double>(i) / n - 0.5) * (static_cast<double>(large.At(i, 0)) / n - 0.5);
  }
  // Each factor has variance 1/12, so the correlation has deviation 1/sqrt(n).
  EXPECT_LT(std::abs(covariance * 12 / n), 5 / std::sqrt(static_cast<double>(n)));
}

TEST(SequenceOrder, WorksForHugeDatasetsWithoutState) {
  const int64_t count = (int64_t{1} << 61) + 12345;
  const SequenceOrder order(count, 1, true, 3);
  std::set<int64_t> seen;
  for (int64_t step = 0; step < 1000; ++step) {
    const int64_t index = order.At(step, 0);
    EXPECT_GE(index, 0);
    EXPECT_LT(index, count);
    seen.insert(index);
  }
  EXPECT_EQ(seen.size(), 1000u);
}

}  // namespace
}  // namespace oom
