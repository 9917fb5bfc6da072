#include "runtime/checkpoint/snapshot.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <atomic>
#include <bit>
#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <future>
#include <random>
#include <thread>

#include "runtime/checkpoint/checkpoint_directory.h"
#include "runtime/checkpoint/checkpoint_source.h"
#include "tests/checkpoint/checkpoint_testing.h"

namespace oom {
namespace {

using testing::TemporaryDirectory;
using testing::TinyModel;

// The live state of a model in raw layout, one array a unit, with chunks of `chunk_elements`.
class LiveState {
 public:
  LiveState(const ModelDescription& model, Precision precision, int64_t chunk_elements)
      : precision_(precision), units_(BuildUnits(model, 1)) {
    for (const ParameterUnit& unit : units_) {
      bytes_.emplace_back(static_cast<size_t>(unit.elements * kStateBytesPerElement));
      for (int64_t first = 0; first < unit.elements; first += chunk_elements) {
        chunks_.push_back({.unit = unit.index,
                           .first_element = first,
                           .elements = std::min(chunk_elements, unit.elements - first)});
      }
    }
    for (size_t i = 0; i < chunks_.size(); ++i) Update(static_cast<int64_t>(i), 0);
  }

  // Overwrites a chunk with the state of `step`.
  void Update(int64_t chunk, int64_t step) {
    const SnapshotChunk& spec = chunks_[static_cast<size_t>(chunk)];
    const ParameterUnit& unit = units_[static_cast<size_t>(spec.unit)];
    const auto values = testing::ValuesOf(unit, step, spec.first_element, spec.elements);
    FloatToRaw(precision_, values.masters, values.moment1, values.moment2, spec.first_element,
               Whole(spec.unit));
  }

  Status Read(int64_t chunk, const StateBuffer& out) const {
    const SnapshotChunk& spec = chunks_[static_cast<size_t>(chunk)];
    const StateBuffer whole = Whole(spec.unit);
    const int64_t weight_bytes = WeightBytesPerElement(precision_);
    const int64_t rest_bytes = kStateBytesPerElement - weight_bytes;
    std::memcpy(out.weights, whole.weights + spec.first_element * weight_bytes,
                static_cast<size_t>(spec.elements * weight_bytes));
    std::memcpy(out.rest, whole.rest + spec.first_element * rest_bytes,
                static_cast<size_t>(spec.elements * rest_bytes));
    return Status::Ok();
  }

  std::vector<int64_t> ForwardOrder() const {
    std::vector<int64_t> order(chunks_.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
    return order;
  }

  const std::vector<SnapshotChunk>& chunks() const { return chunks_; }
  const std::vector<ParameterUnit>& units() const { return units_; }

 private:
  StateBuffer Whole(int64_t unit) const {
    const auto index = static_cast<size_t>(unit);
    return PlaceState(precision_, units_[index].elements,
                      std::span(const_cast<std::vector<std::byte>&>(bytes_[index])));
  }

  const Precision precision_;
  const std::vector<ParameterUnit> units_;
  std::vector<std::vector<std::byte>> bytes_;
  std::vector<SnapshotChunk> chunks_;
};

std::unique_ptr<CheckpointWriter> MakeWriter(const std::string& directory, const LiveState& state,
                                             int64_t step) {
  auto writer = CheckpointWriter::Create({.output_directory = directory,
                                          .manifest = testing::ManifestOf(TinyModel(64, 512), step),
                                          .units = state.units()});
  EXPECT_TRUE(writer.ok()) << writer.status().ToString();
  if (!writer.ok()) return nullptr;
  return std::move(writer).value();
}

std::string SavedState(const std::string& path, const LiveState& state, int64_t step) {
  const auto source = CheckpointSource::Open(path, state.units());
  if (!source.ok()) return source.status().ToString();
  return testing::CompareWithValues(**source, state.units(), step);
}

struct Case {
  Precision precision;
  int64_t staged_chunks;  // Slots; 0: none.
  int writer_threads;
};

class SnapshotCases : public ::testing::TestWithParam<Case> {};

// Goal: a checkpoint holds the state of its cut, whatever the optimizer threads do meanwhile, with
// any staging. Method: six threads update all chunks in a random order, several steps on end, while
// snapshots are taken at each step whose forerunner is done; every checkpoint is compared in full.
// Run under TSan too.
TEST_P(SnapshotCases, HoldsTheCutWhileAllChunksAreUpdated) {
  const Case test = GetParam();
  constexpr int64_t kChunkElements = 2 * kBlockElements;
  constexpr int kThreads = 6;
  LiveState state(TinyModel(64, 512), test.precision, kChunkElements);
  const auto chunk_count = static_cast<int64_t>(state.chunks().size());
  std::vector<std::byte> staging(
      static_cast<size_t>(test.staged_chunks * kChunkElements * kStateBytesPerElement));
  TemporaryDirectory directory;
  Snapshot snapshot(
      {.chunks = state.chunks(),
       .order = state.ForwardOrder(),
       .precision = test.precision,
       .staging = staging,
       .read_chunk = [&](int64_t chunk, const StateBuffer& out) { return state.Read(chunk, out); },
       .writer_thread_count = test.writer_threads});
  std::mt19937_64 random(99);
  int checkpoint_count = 0;
  for (int64_t step = 0; step < 12; ++step) {
    if (!snapshot.active()) {
      const Status begun = snapshot.Begin(MakeWriter(directory.path(), state, step),
                                          [&, step](const Result<CheckpointReport>& result) {
                                            ASSERT_TRUE(result.ok()) << result.status().ToString();
                                            EXPECT_EQ(SavedState(result->path, state, step), "")
                                                << "step " << step;
                                            ++checkpoint_count;  // Read after Wait.
                                          });
      ASSERT_TRUE(begun.ok()) << begun.ToString();
    }
    std::vector<int64_t> order = state.ForwardOrder();
    std::shuffle(order.begin(), order.end(), random);
    std::atomic<int64_t> next{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&] {
        for (int64_t at = next++; at < chunk_count; at = next++) {
          const int64_t chunk = order[static_cast<size_t>(at)];
          snapshot.BeforeUpdate(chunk);
          state.Update(chunk, step + 1);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  snapshot.Wait();
  EXPECT_GE(checkpoint_count, 1);
  if (test.staged_chunks == 0) {
    EXPECT_EQ(snapshot.staged_count(), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(All, SnapshotCases,
                         ::testing::Values(Case{Precision::kBfloat16, 4, 1},
                                           Case{Precision::kBfloat16, 1, 2},
                                           Case{Precision::kBfloat16, 0, 1},
                                           Case{Precision::kFloat32, 1000, 1},
                                           Case{Precision::kFloat32, 2, 3}));

// Goal: with room in staging an update never waits for the disk; without, it waits until its chunk
// is saved. Method: the writer is held in the read of the first chunk, so nothing is written
// meanwhile.
TEST(SnapshotTest, UpdatesWaitOnlyWhenStagingIsFull) {
  constexpr int64_t kChunkElements = 2 * kBlockElements;
  LiveState state(TinyModel(64, 512), Precision::kBfloat16, kChunkElements);
  std::vector<std::byte> staging(2 * kChunkElements * kStateBytesPerElement);
  TemporaryDirectory directory;
  std::promise<void> reading, release;
  std::shared_future<void> released = release.get_future().share();
  std::thread::id writer_thread;
  Snapshot snapshot({.chunks = state.chunks(),
                     .order = state.ForwardOrder(),
                     .precision = Precision::kBfloat16,
                     .staging = staging,
                     .read_chunk = [&](int64_t chunk, const StateBuffer& out) {
                       if (chunk == 0) {
                         reading.set_value();
                         released.wait();
                       }
                       return state.Read(chunk, out);
                     }});
  std::string saved = "no completion";
  ASSERT_TRUE(snapshot
                  .Begin(MakeWriter(directory.path(), state, 0),
                         [&](const Result<CheckpointReport>& result) {
                           saved = result.ok() ? SavedState(result->path, state, 0)
                                               : result.status().ToString();
                         })
                  .ok());
  reading.get_future().wait();
  // The two that fit return at once, on this thread, though the writer stands still.
  for (const int64_t chunk : {3, 4}) {
    snapshot.BeforeUpdate(chunk);
    state.Update(chunk, 1);
  }
  EXPECT_EQ(snapshot.staged_count(), 2);
  EXPECT_EQ(snapshot.waited_count(), 0);
  // The next one, and the one that the writer is reading, wait.
  std::atomic<int> returned{0};
  std::vector<std::thread> waiting;
  for (const int64_t chunk : {5, 0}) {
    waiting.emplace_back([&, chunk] {
      snapshot.BeforeUpdate(chunk);
      EXPECT_EQ(released.wait_for(std::chrono::seconds(0)), std::future_status::ready);
      ++returned;
      state.Update(chunk, 1);
    });
  }
  EXPECT_EQ(returned, 0);
  EXPECT_EQ(snapshot.Begin(nullptr, nullptr).code(), Code::kFailedPrecondition);
  release.set_value();
  for (std::thread& thread : waiting) thread.join();
  snapshot.Wait();
  EXPECT_EQ(saved, "");
}

// Goal: what is updated first is saved first, and what nobody updates last.
TEST(SnapshotTest, SavesInTheGivenOrder) {
  LiveState state(TinyModel(64, 512), Precision::kFloat32, 2 * kBlockElements);
  TemporaryDirectory directory;
  std::vector<int64_t> order = state.ForwardOrder();
  std::shuffle(order.begin(), order.end(), std::mt19937_64(5));
  std::vector<int64_t> read;
  Snapshot snapshot({.chunks = state.chunks(),
                     .order = order,
                     .precision = Precision::kFloat32,
                     .read_chunk = [&](int64_t chunk, const StateBuffer& out) {
                       read.push_back(chunk);
                       return state.Read(chunk, out);
                     }});
  ASSERT_TRUE(snapshot
                  .Begin(MakeWriter(directory.path(), state, 0),
                         [](const Result<CheckpointReport>& result) { EXPECT_TRUE(result.ok()); })
                  .ok());
  snapshot.Wait();
  EXPECT_EQ(read, order);
}

// Goal: a write or a read that fails releases every waiter; training and the next snapshot go on;
// the older checkpoint stands. Method: no staging, so each update waits for the writer; the
// writer's third read fails while they wait.
TEST(SnapshotTest, AFailureReleasesEveryWaiterAndTheNextOneWorks) {
  LiveState state(TinyModel(64, 512), Precision::kBfloat16, 2 * kBlockElements);
  TemporaryDirectory directory;
  std::atomic<int> read_count{0};
  std::atomic<bool> fail{true};
  Snapshot snapshot({.chunks = state.chunks(),
                     .order = state.ForwardOrder(),
                     .precision = Precision::kBfloat16,
                     .read_chunk = [&](int64_t chunk, const StateBuffer& out) {
                       if (fail && ++read_count == 3) return Status(Code::kInternal, "planted");
                       return state.Read(chunk, out);
                     }});
  Status seen;
  ASSERT_TRUE(snapshot
                  .Begin(MakeWriter(directory.path(), state, 0),
                         [&](const Result<CheckpointReport>& result) {
                           ASSERT_FALSE(result.ok());
                           seen = result.status();
                         })
                  .ok());
  std::vector<std::thread> threads;
  for (int64_t chunk = static_cast<int64_t>(state.chunks().size()) - 1; chunk >= 3; --chunk) {
    threads.emplace_back([&, chunk] {
      snapshot.BeforeUpdate(chunk);
      state.Update(chunk, 1);
    });
  }
  for (std::thread& thread : threads) thread.join();
  snapshot.Wait();
  EXPECT_EQ(seen.message(), "planted");
  EXPECT_TRUE(testing::Names(directory.path() + "/checkpoints").empty());
  fail = false;
  for (const int64_t chunk : {0, 1, 2}) state.Update(chunk, 1);
  std::string saved = "no completion";
  ASSERT_TRUE(snapshot
                  .Begin(MakeWriter(directory.path(), state, 1),
                         [&](const Result<CheckpointReport>& result) {
                           saved = result.ok() ? SavedState(result->path, state, 1)
                                               : result.status().ToString();
                         })
                  .ok());
  snapshot.Wait();
  EXPECT_EQ(saved, "");
}

// Goal: a disk that fails after the space was taken, in the middle of the state, is a status too.
// Method: the files' size limit is lowered once the writer has reserved them.
TEST(SnapshotTest, ADiskErrorInTheMiddleReleasesEveryWaiter) {
  LiveState state(TinyModel(64, 512), Precision::kBfloat16, 2 * kBlockElements);
  TemporaryDirectory directory;
  ::signal(SIGXFSZ, SIG_IGN);
  struct rlimit before {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  auto writer = MakeWriter(directory.path(), state, 0);
  ASSERT_NE(writer, nullptr);
  struct rlimit small = before;
  small.rlim_cur = 16384;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  std::vector<std::byte> staging(2 * kBlockElements * kStateBytesPerElement);
  Status seen;
  {
    Snapshot snapshot({.chunks = state.chunks(),
                       .order = state.ForwardOrder(),
                       .precision = Precision::kBfloat16,
                       .staging = staging,
                       .read_chunk = [&](int64_t chunk, const StateBuffer& out) {
                         return state.Read(chunk, out);
                       }});
    ASSERT_TRUE(snapshot
                    .Begin(std::move(writer),
                           [&](const Result<CheckpointReport>& result) {
                             ASSERT_FALSE(result.ok());
                             seen = result.status();
                           })
                    .ok());
    for (int64_t chunk = static_cast<int64_t>(state.chunks().size()) - 1; chunk >= 0; --chunk) {
      snapshot.BeforeUpdate(chunk);
      state.Update(chunk, 1);
    }
  }
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_EQ(seen.code(), Code::kResourceExhausted) << seen.ToString();
  EXPECT_EQ(seen.reason(), "STORAGE_FULL");
  EXPECT_TRUE(testing::Names(directory.path() + "/checkpoints").empty());
}

// A master comes back with all its bits from both layouts: infinities, denormals and the sign of
// zero too.
TEST(SnapshotTest, RawStateKeepsEveryBit) {
  std::mt19937 random(3);
  for (const Precision precision : {Precision::kBfloat16, Precision::kFloat32}) {
    const int64_t elements = 3 * kBlockElements;
    std::vector<float> in[3], out[3];
    for (auto& values : in) {
      for (int64_t i = 0; i < elements; ++i) {
        const float value = std::bit_cast<float>(static_cast<uint32_t>(random()));
        values.push_back(std::isnan(value) ? -0.0f : value);
      }
    }
    for (auto& values : out) values.resize(static_cast<size_t>(elements));
    std::vector<std::byte> bytes(static_cast<size_t>(elements * kStateBytesPerElement));
    const StateBuffer state = PlaceState(precision, elements, bytes);
    FloatToRaw(precision, in[0], in[1], in[2], 0, state);
    RawToFloat(precision, state, 0, out[0], out[1], out[2]);
    for (int array = 0; array < 3; ++array) {
      EXPECT_EQ(std::memcmp(in[array].data(), out[array].data(), in[array].size() * 4), 0) << array;
    }
    // A part of it, from the second block.
    std::vector<float> part[3];
    for (auto& values : part) values.resize(static_cast<size_t>(kBlockElements));
    RawToFloat(precision, state, kBlockElements, part[0], part[1], part[2]);
    for (int array = 0; array < 3; ++array) {
      EXPECT_EQ(std::memcmp(in[array].data() + kBlockElements, part[array].data(),
                            static_cast<size_t>(kBlockElements) * 4),
                0);
    }
  }
}

}  // namespace
}  // namespace oom
