// A worker without LibTorch: it plays the data plane of a real one (waits for versions, writes
// gradients, publishes words, updates and copies its resident chunks) with made-up arithmetic that
// depends on the weights, so that a step on stale or torn state shows in the losses.
// OOM_FAKE_WORKER makes it misbehave:
//   "<rank> <attempt> <point> <action>"   the action is taken when the worker has published `point`
//   words:
//     kill (SIGKILL self), exit (code 9), hang, fail (INVALID_INPUT), nan (a loss that is not
//     finite)
//   with point -1: before it is ready; action graph: a wrong graph hash.

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <sstream>
#include <string>

#include "oom/internal/v1/control.pb.h"
#include "runtime/base/build_id.h"
#include "runtime/base/check.h"
#include "runtime/checkpoint/checkpoint_source.h"
#include "runtime/checkpoint/raw_state.h"
#include "runtime/graph/graph_builder.h"
#include "runtime/ipc/channel.h"
#include "runtime/memory/pool.h"
#include "runtime/model/hf_config.h"
#include "runtime/optim/chunk_update.h"
#include "runtime/optim/schedule.h"

namespace oom {
namespace {

struct Misbehaviour {
  int rank = -1;
  int attempt = 0;
  int64_t point = 0;
  std::string action;
};

Misbehaviour ReadMisbehaviour() {
  Misbehaviour wanted;
  const char* text = std::getenv("OOM_FAKE_WORKER");
  if (text != nullptr) {
    std::istringstream stream(text);
    stream >> wanted.rank >> wanted.attempt >> wanted.point >> wanted.action;
  }
  return wanted;
}

template <class T>
T Must(Result<T> result) {
  if (!result.ok()) std::fprintf(stderr, "fake worker: %s\n", result.status().ToString().c_str());
  OOM_CHECK(result.ok());
  return std::move(result).value();
}

class FakeWorker {
 public:
  FakeWorker(Channel channel, internal::v1::WorkerStart start, std::vector<UniqueFd> fds)
      : channel_(std::move(channel)), start_(std::move(start)), wanted_(ReadMisbehaviour()) {
    misbehaves_ = wanted_.rank == rank() && wanted_.attempt == start_.attempt();
    const v1::JobSpec& spec = start_.spec();
    model_ = Must(ReadHfConfig(spec.model().config()));
    batch_ = {.micro_batch_sequences = start_.plan().micro_batch_tokens() / spec.sequence_length(),
              .sequence_length = spec.sequence_length(),
              .accumulation = start_.plan().accumulation()};
    layout_ = std::make_unique<SharedLayout>(SharedLayout::Build(model_, start_.plan(), batch_));
    page_ = Must(ControlPage::Map(std::move(fds[0]), layout_->control_page()));
    for (size_t i = 1; i < fds.size(); ++i) {
      mappings_.push_back(
          Must(PoolMapping::Map(fds[i].get(), start_.pools(static_cast<int>(i) - 1).bytes())));
      pools_.bases.push_back(mappings_.back().data());
    }
    for (const ParameterUnit& unit : layout_->units()) {
      std::vector<char>& in_use = in_use_.emplace_back(static_cast<size_t>(unit.elements), 0);
      for (const TensorSpec& tensor : unit.tensors) {
        std::fill_n(in_use.begin() + tensor.offset_elements, tensor.elements, 1);
      }
    }
    update_ = std::make_unique<ChunkUpdate>(layout_.get(), &pools_, start_.plan().accumulation(),
                                            SimdLevel::kScalar);
  }

  void Run() {
    if (misbehaves_ && wanted_.point < 0) Misbehave();
    FillResident();
    internal::v1::WorkerFrame frame;
    uint64_t hash =
        BuildTrainingGraph(
            {.model = &model_, .plan = &start_.plan(), .layout = layout_.get(), .batch = batch_})
            .Hash();
    if (misbehaves_ && wanted_.action == "graph") ++hash;
    frame.mutable_ready()->set_build_id(misbehaves_ && wanted_.action == "build" ? "another"
                                                                                : std::string(BuildId()));
    frame.mutable_ready()->set_graph_hash(hash);
    OOM_CHECK(channel_.Send(frame).ok());
    int64_t step = start_.first_step();
    while (MayBegin(step)) {
      Step(step);
      ++step;
    }
    internal::v1::WorkerFrame done;
    done.mutable_done()->set_step(step);
    OOM_CHECK(channel_.Send(done).ok());
  }

 private:
  int rank() const { return start_.rank(); }
  bool Owns(const Chunk& chunk) const { return chunk.owner_rank == rank(); }

  void Misbehave() {
    if (wanted_.action == "kill") ::kill(::getpid(), SIGKILL);
    if (wanted_.action == "exit") {
      std::printf("the last words\n");
      std::fflush(stdout);
      ::_exit(9);
    }
    if (wanted_.action == "hang") {
      while (true) ::pause();
    }
    if (wanted_.action == "fail") {
      internal::v1::WorkerFrame frame;
      frame.mutable_failed()->set_code(static_cast<int>(Code::kInvalidArgument));
      frame.mutable_failed()->set_message("token 12 is beyond the vocabulary");
      frame.mutable_failed()->set_field("data.train");
      static_cast<void>(channel_.Send(frame));
      ::_exit(1);
    }
  }

  // A word of this worker: the places where a real one can die between.
  void Publish(SharedWord& word, int64_t value) {
    if (misbehaves_ && points_++ == wanted_.point) Misbehave();
    word.Publish(static_cast<uint64_t>(value));
    page_->bell().Ring();
    page_->heartbeat(rank()).Publish(++beats_);
  }

  void Await(const SharedWord& word, int64_t target) {
    const WaitResult result =
        word.WaitAtLeast(static_cast<uint64_t>(std::max<int64_t>(target, 0)), page_->aborted());
    if (result == WaitResult::kAborted) ::_exit(4);
  }

  bool MayBegin(int64_t step) {
    while (true) {
      const WaitResult result =
          page_->step_limit().WaitAtLeast(static_cast<uint64_t>(step) + 1, page_->aborted(),
                                          {.timeout = std::chrono::milliseconds(2)});
      if (result == WaitResult::kReached) return true;
      if (result == WaitResult::kAborted) ::_exit(4);
      const uint64_t stop = page_->stop_step().Load();
      if (stop != 0 && static_cast<uint64_t>(step) + 1 >= stop) return false;
    }
  }

  void FillResident() {
    std::unique_ptr<StateSource> source;
    if (start_.checkpoint_path().empty()) {
      source = MakeRandomSource(model_, layout_->units(), start_.spec().seed());
    } else {
      source = Must(CheckpointSource::Open(start_.checkpoint_path(), layout_->units()));
      OOM_CHECK(source->step() == start_.first_step());
    }
    for (const Chunk& chunk : layout_->chunks()) {
      if (!Owns(chunk)) continue;
      const ParameterUnit& unit = layout_->units()[chunk.unit];
      std::vector<float> arrays[3];
      for (int a = 0; a < 3; ++a) {
        std::vector<float> whole(static_cast<size_t>(unit.elements), 0.0f);
        for (size_t t = 0; t < unit.tensors.size(); ++t) {
          const TensorSpec& tensor = unit.tensors[t];
          OOM_CHECK(source
                        ->Read(unit.index, static_cast<int64_t>(t), static_cast<StateArray>(a), 0,
                               std::span(whole).subspan(tensor.offset_elements, tensor.elements))
                        .ok());
        }
        arrays[a].assign(whole.begin() + chunk.first_element,
                         whole.begin() + chunk.first_element + chunk.elements);
      }
      FloatToRaw(Precision::kFloat32, arrays[0], arrays[1], arrays[2], 0,
                 {.weights = pools_.At(layout_->weights(chunk.index)),
                  .rest = pools_.At(layout_->rest(chunk.index)),
                  .elements = chunk.elements});
      Publish(page_->version(chunk.index), start_.first_step());
    }
  }

  // Of all weights of a chunk: a stale or torn one changes it.
  double Digest(const Chunk& chunk) const {
    const auto* weights = reinterpret_cast<const float*>(pools_.At(layout_->weights(chunk.index)));
    double sum = 0.0;
    for (int64_t i = 0; i < chunk.elements; ++i)
      sum += static_cast<double>(weights[i]) * (1 + i % 7);
    return sum;
  }

  void Step(int64_t step) {
    double loss = 1000.0 + rank();
    std::vector<double> digests;
    for (const Chunk& chunk : layout_->chunks()) {
      Await(page_->version(chunk.index), step);
      // Nobody updates beyond this step before this rank's loss is known.
      OOM_CHECK(page_->version(chunk.index).Load() == static_cast<uint64_t>(step));
      digests.push_back(Digest(chunk));
      loss += digests.back();
    }
    RankRecord& record = page_->rank_record(rank(), step);
    record = {.step = step,
              .loss_sum = loss,
              .valid_targets = 100,
              .auxiliary_loss = 0.25,
              .step_seconds = 0.001,
              .device_bytes_peak = 4096};
    if (misbehaves_ && wanted_.action == "nan" && step == wanted_.point) {
      record.loss_sum = std::numeric_limits<double>::quiet_NaN();
    }
    PublishRowSet(step);
    Publish(page_->loss_known(rank()), step + 1);
    // In the order of the ring: the backward's, from the last unit to the first.
    for (int64_t unit = static_cast<int64_t>(layout_->units().size()) - 1; unit >= 0; --unit) {
      for (int64_t c = layout_->first_chunk(unit); c < layout_->first_chunk(unit + 1); ++c) {
        StoreGradient(layout_->chunks()[c], step, digests[c]);
      }
    }
    for (const Chunk& chunk : layout_->chunks()) {
      if (Owns(chunk)) UpdateResident(chunk, step);
    }
    record.exposed_wait_seconds = 0.0005;
    if (EvaluationIsDue(step + 1)) {
      for (const Chunk& chunk : layout_->chunks()) Await(page_->version(chunk.index), step + 1);
      record.evaluation_loss_sum = 50.0 + static_cast<double>(step);
      record.evaluation_targets = 10;
    }
    Publish(page_->step_done(rank()), step + 1);
  }

  bool EvaluationIsDue(int64_t completed) const {
    const int64_t every = start_.spec().evaluation().every_steps();
    return completed == start_.spec().steps() || (every > 0 && completed % every == 0);
  }

  void StoreGradient(const Chunk& chunk, int64_t step, double digest) {
    const bool is_embedding = layout_->units()[chunk.unit].kind == UnitKind::kEmbedding;
    if (is_embedding && chunk.index == layout_->first_chunk(chunk.unit)) {
      auto* rows = reinterpret_cast<float*>(pools_.At(layout_->embedding_rows(rank()).region) +
                                            layout_->embedding_rows(rank()).rows_offset_bytes);
      for (int64_t i = 0; i < RowCount() * model_.hidden_size; ++i) {
        rows[i] = Gradient(digest, step, i % model_.hidden_size);
      }
    }
    if (!is_embedding) {
      const int64_t sequence = layout_->ring_sequence(chunk.index, step);
      if (sequence >= 0) Await(page_->backlog_freed(), sequence - layout_->ring_slot_count() + 1);
      auto* values =
          reinterpret_cast<float*>(pools_.At(layout_->gradient(chunk.index, rank(), step)));
      const std::vector<char>& in_use = in_use_[chunk.unit];
      for (int64_t i = 0; i < chunk.elements; ++i) {
        values[i] = in_use[chunk.first_element + i] ? Gradient(digest, step, i) : 0.0f;
      }
    }
    Publish(page_->landed(rank(), chunk.index), step + 1);
  }

  float Gradient(double digest, int64_t step, int64_t index) const {
    return static_cast<float>(
        std::sin(digest + static_cast<double>(step * 31 + index % 97 + rank())));
  }

  int64_t RowCount() const { return std::min<int64_t>(layout_->embedding_rows(rank()).max_rows, 3); }

  void PublishRowSet(int64_t step) {
    const SharedLayout::RowGradient rows = layout_->embedding_rows(rank());
    std::byte* set = pools_.At(rows.region) + rows.row_set_offset_bytes(step);
    const int64_t count = RowCount();
    std::memcpy(set, &count, sizeof(count));
    auto* numbers = reinterpret_cast<int32_t*>(set + rows.kRowNumbersOffset);
    for (int64_t row = 0; row < count; ++row) numbers[row] = static_cast<int32_t>(row * 5 + rank());
  }

  void UpdateResident(const Chunk& chunk, int64_t step) {
    for (int peer = 0; peer < layout_->rank_count(); ++peer) {
      Await(page_->landed(peer, chunk.index), step + 1);
      Await(page_->loss_known(peer), step + 1);
    }
    const int64_t blocks = chunk.elements / kBlockElements;
    ChunkUpdate::Scratch scratch;
    OOM_CHECK(update_->Squares(chunk.index, step, 0,
                               page_->norm_squares().subspan(chunk.first_block, blocks), &scratch));
    Publish(page_->norm_known(chunk.index), step + 1);
    Await(page_->clip_known(), step + 1);
    const v1::OptimizerSpec& optimizer = start_.spec().optimizer();
    const AdamWHyperparameters hyper = {.beta1 = optimizer.betas(0),
                                        .beta2 = optimizer.betas(1),
                                        .epsilon = optimizer.epsilon(),
                                        .weight_decay = optimizer.weight_decay()};
    const double clip = page_->clip_record(step).clip;
    const ScopedOptimizerMxcsr mxcsr;
    update_->Apply(chunk.index, step, 0, blocks,
                   MakeAdamWScalars(hyper, optimizer.learning_rate(), step + 1, true, clip),
                   MakeAdamWScalars(hyper, optimizer.learning_rate(), step + 1, false, clip),
                   &scratch);
    if (page_->checkpoint_step().Load() == static_cast<uint64_t>(step) + 1) {
      const Region weights = layout_->weights(chunk.index);
      const Region rest = layout_->rest(chunk.index);
      std::byte* to = pools_.At(layout_->snapshot(chunk.index));
      std::memcpy(to, pools_.At(weights), static_cast<size_t>(weights.bytes));
      std::memcpy(to + weights.bytes, pools_.At(rest), static_cast<size_t>(rest.bytes));
      Publish(page_->snapshot_taken(chunk.index), step + 1);
    }
    Publish(page_->version(chunk.index), step + 1);
  }

  Channel channel_;
  const internal::v1::WorkerStart start_;
  const Misbehaviour wanted_;
  bool misbehaves_ = false;
  int64_t points_ = 0;
  uint64_t beats_ = 0;
  ModelDescription model_;
  BatchShape batch_;
  std::unique_ptr<SharedLayout> layout_;
  std::unique_ptr<ControlPage> page_;
  std::vector<PoolMapping> mappings_;
  PoolMap pools_;
  std::unique_ptr<ChunkUpdate> update_;
  std::vector<std::vector<char>>
      in_use_;  // By unit and element: 0 for padding, whose gradient is 0.
};

int RunFakeWorker() {
  Channel channel{UniqueFd(3)};
  internal::v1::HostToWorkerFrame frame;
  std::vector<UniqueFd> fds;
  if (!channel.Receive(&frame, &fds).ok()) return 5;
  FakeWorker worker(std::move(channel), frame.start(), std::move(fds));
  worker.Run();
  return 0;
}

}  // namespace
}  // namespace oom

int main() { return oom::RunFakeWorker(); }
