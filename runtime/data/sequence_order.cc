// The shuffle: a permutation of [0, n) that is computed, not stored. A balanced Feistel network on
// 2h bits (the least even number of bits that holds n) is a bijection of [0, 4^h) for any round
// function; applying it until the value falls below n ("cycle walking") makes it a bijection of [0,
// n). At most four times as many values as n, so four applications on average at worst.

#include "runtime/base/check.h"
#include "runtime/data/dataset.h"

namespace oom {
namespace {

// Enough that the halves of even the smallest domain, one bit each, mix.
constexpr int kRounds = 12;

// The finaliser of SplitMix64: every input bit reaches every output bit.
uint64_t Mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

int64_t Permute(int64_t index, int64_t count, uint64_t key) {
  int half_bits = 1;
  while (half_bits < 31 && (uint64_t{1} << (2 * half_bits)) < static_cast<uint64_t>(count)) {
    ++half_bits;
  }
  const uint64_t half_mask = (uint64_t{1} << half_bits) - 1;
  uint64_t value = static_cast<uint64_t>(index);
  do {
    uint64_t left = value >> half_bits;
    uint64_t right = value & half_mask;
    for (int round = 0; round < kRounds; ++round) {
      const uint64_t mixed = Mix(key ^ Mix((static_cast<uint64_t>(round) << 32) | right));
      const uint64_t next = left ^ (mixed & half_mask);
      left = right;
      right = next;
    }
    value = (left << half_bits) | right;
  } while (value >= static_cast<uint64_t>(count));
  return static_cast<int64_t>(value);
}

}  // namespace

SequenceOrder::SequenceOrder(int64_t sequence_count, int64_t global_batch, bool shuffle,
                             uint64_t seed)
    : sequence_count_(sequence_count), global_batch_(global_batch), shuffle_(shuffle), seed_(seed) {
  OOM_CHECK(sequence_count > 0 && sequence_count < (int64_t{1} << 62));
  OOM_CHECK(global_batch > 0);
}

int64_t SequenceOrder::At(int64_t step, int64_t slot) const {
  OOM_CHECK(step >= 0 && slot >= 0 && slot < global_batch_);
  const int64_t position = step * global_batch_ + slot;
  const int64_t index = position % sequence_count_;
  if (!shuffle_) return index;
  const uint64_t epoch = static_cast<uint64_t>(position / sequence_count_);
  return Permute(index, sequence_count_, Mix(seed_ ^ Mix(epoch)));
}

int64_t SequenceOrder::Epoch(int64_t step) const { return step * global_batch_ / sequence_count_; }

}  // namespace oom
