#include "tests/graph/fake_worker.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>

#include "runtime/base/check.h"
#include "tests/graph/reference_job.h"

namespace oom::testing {
namespace {

Status Broken(const Node& node, int64_t step, const std::string& what) {
  return Status(Code::kDataLoss, std::string(NodeKindName(node.kind)) + " of unit " +
                                     std::to_string(node.unit) + ", layer " +
                                     std::to_string(node.layer) + ", step " + std::to_string(step) +
                                     ": " + what);
}

}  // namespace

FakeWorker::FakeWorker(const Options& options)
    : options_(options),
      plane_({.layout = options.job->layout.get(),
              .pools = options.pools,
              .page = options.page,
              .rank = options.rank,
              .accumulation = options.job->plan.accumulation(),
              .update_mode = options.job->plan.update_mode(),
              .hyper = ReferenceJob::Hyper(),
              .schedule = ReferenceJob::ScheduleOf(),
              .simd = options.simd,
              .wait = {.timeout = std::chrono::seconds(20)}}) {
  auto arena = BufferArena::Create({&options_.job->graph}, &device_);
  OOM_CHECK(arena.ok());
  arena_ = std::move(arena).value();
  const auto layers = static_cast<size_t>(options_.job->model.layer_count());
  layer_unit_.resize(layers);
  mixture_unit_.assign(layers, -1);
  for (const ParameterUnit& unit : options_.job->layout->units()) {
    if (unit.kind == UnitKind::kLayer) layer_unit_[static_cast<size_t>(unit.layer)] = unit.index;
    if (unit.kind == UnitKind::kExperts)
      mixture_unit_[static_cast<size_t>(unit.layer)] = unit.index;
  }
  for (size_t layer = 0; layer < layers; ++layer) {
    if (mixture_unit_[layer] < 0) mixture_unit_[layer] = layer_unit_[layer];
  }
  const auto elements = static_cast<size_t>(options_.job->batch.micro_batch_tokens() *
                                            options_.job->model.hidden_size);
  activation_.assign(layers + 1, std::vector<float>(elements));
  device_boundary_.assign(layers, std::vector<float>(elements));
  boundary_in_.resize(layers);
  digest_.resize(options_.job->layout->units().size());
  batches_.resize(static_cast<size_t>(options_.job->plan.accumulation()) * 2);

  executor_ = std::make_unique<Executor>(
      Executor::Options{
          .rank = options_.rank,
          .make_stream =
              [](Resource resource) {
                return MakeCpuStream(std::string(ResourceName(resource)), nullptr);
              },
          .on_node = nullptr,
          .on_failure = [page = options_.page](const Status&) { page->Abort(); },
      },
      this);
  graph_ = executor_->AddGraph(&options_.job->graph);
}

FakeWorker::~FakeWorker() = default;

Status FakeWorker::RunSteps(int64_t first, int64_t last) {
  for (int64_t step = first; step < last; ++step) {
    // As the job host grants steps: the one two before is complete, so that nobody reads its rows'
    // numbers any more.
    const auto complete = static_cast<uint64_t>(std::max<int64_t>(step - 1, 0));
    if (options_.page->updates_done().WaitAtLeast(complete, options_.page->aborted(), {}) !=
        WaitResult::kReached) {
      break;
    }
    const Status status = executor_->Issue(graph_, step, [this, step] {
      options_.page->step_done(options_.rank).Publish(static_cast<uint64_t>(step + 1));
      options_.page->bell().Ring();
    });
    if (!status.ok()) break;
  }
  return executor_->Drain();
}

float FakeWorker::BoundaryValue(int64_t layer, int64_t step, int micro_batch) const {
  return static_cast<float>(Mix(static_cast<uint64_t>(layer), static_cast<uint64_t>(step),
                                static_cast<uint64_t>(micro_batch)) %
                            1000000);
}

Result<const std::byte*> FakeWorker::UnitBase(int64_t unit, int64_t buffer, int64_t step) {
  const std::byte* window = arena_->At(options_.job->graph, buffer);
  if (window != nullptr) return window;
  OOM_ASSIGN_OR_RETURN(std::byte* const base, plane_.WeightsInPlace(unit, step));
  return static_cast<const std::byte*>(base);
}

Status FakeWorker::ReadUnit(int64_t unit, int64_t buffer, int64_t step, bool whole,
                            Digest* digest) {
  OOM_ASSIGN_OR_RETURN(const std::byte* const base, UnitBase(unit, buffer, step));
  const SharedLayout& layout = *options_.job->layout;
  const int64_t blocks = layout.units()[static_cast<size_t>(unit)].elements / kBlockElements;
  const auto block_bytes = static_cast<size_t>(kBlockElements * layout.weight_bytes());
  const auto lane_bytes = static_cast<size_t>(kLanes * layout.weight_bytes());
  digest->clear();
  for (int64_t block = 0; block < blocks; ++block) {
    const std::byte* at = base + static_cast<size_t>(block) * block_bytes;
    // A block holds 16 values over and over: whatever is torn does not.
    if (whole && std::memcmp(at, at + lane_bytes, block_bytes - lane_bytes) != 0) {
      return Status(Code::kDataLoss, "weights of unit " + std::to_string(unit) +
                                         " are torn in step " + std::to_string(step));
    }
    const Lanes lanes = ReadLanes(at, layout.float32());
    digest->insert(digest->end(), lanes.begin(), lanes.end());
  }
  return Status::Ok();
}

Status FakeWorker::ReadUnitAgain(int64_t unit, int64_t buffer, int64_t step) {
  Digest now;
  OOM_RETURN_IF_ERROR(ReadUnit(unit, buffer, step, /*whole=*/false, &now));
  if (now == digest_[static_cast<size_t>(unit)]) return Status::Ok();
  return Status(Code::kDataLoss, "unit " + std::to_string(unit) +
                                     " changed between forward and backward of step " +
                                     std::to_string(step));
}

Status FakeWorker::ExchangeRouterCounts(const Node& node, int64_t step) {
  const auto experts = static_cast<size_t>(options_.page->layout().expert_count);
  const auto count = [&](int rank, uint64_t e) {
    return static_cast<int64_t>(
        Mix(options_.seed, static_cast<uint64_t>(step), static_cast<uint64_t>(rank), e) %
        (uint64_t{1} << 40));
  };
  std::vector<int64_t> own, sum(experts), expected(experts);
  int64_t expected_tokens = 0;
  for (size_t e = 0; e < experts; ++e) own.push_back(count(options_.rank, e));
  OOM_RETURN_IF_ERROR(plane_.PublishRouterCounts(step, own.data(), count(options_.rank, experts)));
  OOM_ASSIGN_OR_RETURN(const int64_t tokens, plane_.SumRouterCounts(step, sum.data()));
  for (int rank = 0; rank < options_.job->plan.rank_count(); ++rank) {
    expected_tokens += count(rank, experts);
    for (size_t e = 0; e < experts; ++e) expected[e] += count(rank, e);
  }
  if (tokens == expected_tokens && sum == expected) return Status::Ok();
  return Broken(node, step, "router counts of another step");
}

void FakeWorker::FillGradient(int64_t unit, int64_t buffer, const Node& node, int64_t step) {
  auto* gradient = reinterpret_cast<float*>(arena_->At(options_.job->graph, buffer));
  const Digest& digest = digest_[static_cast<size_t>(unit)];
  const auto blocks = static_cast<int64_t>(digest.size()) / kLanes;
  for (int64_t block = 0; block < blocks; ++block) {
    Lanes weights;
    std::copy_n(digest.begin() + block * kLanes, kLanes, weights.begin());
    Repeat(ReferenceJob::Gradient(options_.seed, step, options_.rank, node.micro_batch, unit, block,
                                  weights),
           kBlockElements, gradient + block * kBlockElements);
  }
  if (options_.spoil) options_.spoil(unit, step, gradient);
}

Status FakeWorker::GatherRows(const Node& node, int64_t step) {
  const SharedLayout& layout = *options_.job->layout;
  const int64_t width = options_.job->model.hidden_size;
  const int accumulation = options_.job->plan.accumulation();
  Batch& batch = batches_[static_cast<size_t>((step % 2) * accumulation + node.micro_batch)];
  batch.tokens = ReferenceJob::Tokens(options_.seed, step, options_.rank, node.micro_batch,
                                      options_.job->batch.micro_batch_tokens(),
                                      options_.job->model.vocabulary_size);
  if (node.micro_batch == 0) row_set_.clear();
  row_set_.insert(batch.tokens.begin(), batch.tokens.end());
  if (node.micro_batch + 1 == accumulation) {
    OOM_RETURN_IF_ERROR(
        plane_.PublishRowSet(step, std::vector<int32_t>(row_set_.begin(), row_set_.end())));
  }
  batch.rows.clear();
  std::vector<std::byte> row(static_cast<size_t>(width * layout.weight_bytes()));
  for (const int64_t token : batch.tokens) {
    const auto number = static_cast<int32_t>(token);
    OOM_RETURN_IF_ERROR(plane_.GatherRows(node, step, width, {&number, 1}, &number, row.data()));
    const auto lane_bytes = static_cast<size_t>(kLanes * layout.weight_bytes());
    if (std::memcmp(row.data(), row.data() + lane_bytes, row.size() - lane_bytes) != 0) {
      return Broken(node, step, "a row is torn");
    }
    const Lanes lanes = ReadLanes(row.data(), layout.float32());
    batch.rows.insert(batch.rows.end(), lanes.begin(), lanes.end());
  }
  std::fill(activation_[0].begin(), activation_[0].end(), BoundaryValue(0, step, node.micro_batch));
  return Status::Ok();
}

void FakeWorker::EmbeddingBackward(const Node& node, int64_t step) {
  const int accumulation = options_.job->plan.accumulation();
  if (node.micro_batch + 1 < accumulation) return;
  const int64_t width = options_.job->model.hidden_size;
  std::map<int64_t, Lanes> sums;
  for (int a = 0; a < accumulation; ++a) {
    const Batch& batch = batches_[static_cast<size_t>((step % 2) * accumulation + a)];
    std::map<int64_t, Lanes> of_batch;
    for (size_t i = 0; i < batch.tokens.size(); ++i) {
      Lanes weights;
      std::copy_n(batch.rows.begin() + static_cast<int64_t>(i) * kLanes, kLanes, weights.begin());
      of_batch[batch.tokens[i]] = ReferenceJob::Gradient(options_.seed, step, options_.rank, a,
                                                         node.unit, batch.tokens[i], weights);
    }
    for (const auto& [row, part] : of_batch) {
      Lanes& sum = sums.try_emplace(row, Lanes{}).first->second;
      for (int64_t i = 0; i < kLanes; ++i) sum[i] += part[i];
    }
  }
  row_sums_.assign(sums.size() * static_cast<size_t>(width), 0.0f);
  float* at = row_sums_.data();
  for (const auto& [row, sum] : sums) {
    Repeat(sum, width, at);
    at += width;
  }
}

Status FakeWorker::Run(const Node& node, int64_t step) {
  if (options_.before_node) OOM_RETURN_IF_ERROR(options_.before_node(node, step));
  switch (node.kind) {
    case NodeKind::kGatherRows:
      return GatherRows(node, step);
    case NodeKind::kLoadUnit:
      return plane_.LoadUnit(node, step, arena_->At(options_.job->graph, node.buffer));
    case NodeKind::kGatherUnit:
      return plane_.GatherUnit(node, arena_->At(options_.job->graph, node.buffer));
    case NodeKind::kReduceGradient:
      return plane_.ReduceGradient(
          node, reinterpret_cast<const float*>(arena_->At(options_.job->graph, node.gradient)),
          arena_->At(options_.job->graph, node.buffer));
    case NodeKind::kStoreGradient:
      return plane_.StoreGradient(node, step, arena_->At(options_.job->graph, node.buffer));
    case NodeKind::kStoreRows:
      return plane_.StoreRows(node, step, row_sums_.data(), static_cast<int64_t>(row_sums_.size()));
    case NodeKind::kStoreBoundary:
      return plane_.StoreBoundary(node, reinterpret_cast<const std::byte*>(
                                            activation_[static_cast<size_t>(node.layer)].data()));
    case NodeKind::kLoadBoundary:
      return plane_.LoadBoundary(node, BoundaryPlace(node));
    case NodeKind::kNorm:
      return plane_.Norm(node, step);
    case NodeKind::kUpdate:
      return plane_.Update(node, step);
    default:
      OOM_RETURN_IF_ERROR(Compute(node, step));
      for (const int64_t layer : node.takes) {
        boundary_in_[static_cast<size_t>(layer)].resize(BoundaryBytes());
      }
      return Status::Ok();
  }
}

size_t FakeWorker::BoundaryBytes() const {
  return static_cast<size_t>(options_.job->batch.micro_batch_tokens() *
                             options_.job->model.hidden_size *
                             options_.job->layout->activation_bytes());
}

std::byte* FakeWorker::BoundaryPlace(const Node& node) {
  std::byte* const planned = arena_->At(options_.job->graph, node.buffer);
  if (planned != nullptr) return planned;
  std::vector<std::byte>& taken = boundary_in_[static_cast<size_t>(node.layer)];
  OOM_CHECK(taken.size() == BoundaryBytes());  // Taken, and by the edges' order visible here.
  return taken.data();
}

Status FakeWorker::Compute(const Node& node, int64_t step) {
  const auto layer = static_cast<size_t>(std::max<int64_t>(node.layer, 0));
  const float value = BoundaryValue(node.layer, step, node.micro_batch);
  const auto ordinary = static_cast<size_t>(layer_unit_[layer]);
  const auto mixture = static_cast<size_t>(mixture_unit_[layer]);
  switch (node.kind) {
    case NodeKind::kForwardMixer: {
      const std::vector<float>& x = activation_[layer];
      if (x.front() != value || x.back() != value) return Broken(node, step, "wrong input");
      const v1::LayerPlan& plan = options_.job->plan.layers(static_cast<int>(node.layer));
      if (plan.boundary() == v1::BOUNDARY_HOME_DEVICE) device_boundary_[layer] = x;
      return ReadUnit(node.unit, node.weights, step, /*whole=*/true, &digest_[ordinary]);
    }
    case NodeKind::kForwardMixture: {
      OOM_RETURN_IF_ERROR(ReadUnitAgain(layer_unit_[layer], node.weights, step));
      if (mixture != ordinary) {
        OOM_RETURN_IF_ERROR(ReadUnit(mixture_unit_[layer], node.mixture_weights, step,
                                     /*whole=*/true, &digest_[mixture]));
      }
      std::vector<float>& out = activation_[layer + 1];
      std::fill(out.begin(), out.end(), BoundaryValue(node.layer + 1, step, node.micro_batch));
      return Status::Ok();
    }
    case NodeKind::kHead: {
      const std::vector<float>& x = activation_.back();
      const float expected =
          BoundaryValue(options_.job->model.layer_count(), step, node.micro_batch);
      if (x.front() != expected || x.back() != expected) return Broken(node, step, "wrong input");
      OOM_RETURN_IF_ERROR(ReadUnit(node.unit, node.weights, step, /*whole=*/true,
                                   &digest_[static_cast<size_t>(node.unit)]));
      FillGradient(node.unit, node.gradient, node, step);
      if (node.micro_batch + 1 < options_.job->plan.accumulation()) return Status::Ok();
      if (options_.job->plan.rank_count() > 1) {
        OOM_RETURN_IF_ERROR(ExchangeRouterCounts(node, step));
      }
      RankRecord& record = options_.page->rank_record(options_.rank, step);
      record.step = step;
      record.loss_sum = ReferenceJob::Loss(options_.seed, step, options_.rank);
      if (options_.loss) record.loss_sum = options_.loss(step, record.loss_sum);
      record.auxiliary_loss = 0.0;
      record.valid_targets = 17;
      options_.page->loss_known(options_.rank).Publish(static_cast<uint64_t>(step + 1));
      options_.page->bell().Ring();
      return Status::Ok();
    }
    case NodeKind::kReplayMixer: {
      if (node.buffer >= 0) {
        // The boundary went out as the raw bytes at the front of the activation.
        float first;
        std::memcpy(&first, BoundaryPlace(node), sizeof(first));
        boundary_in_[layer] = {};
        if (first != value) return Broken(node, step, "another boundary came back");
      } else if (device_boundary_[layer].front() != value) {
        return Broken(node, step, "another boundary was kept");
      }
      return ReadUnitAgain(layer_unit_[layer], node.weights, step);
    }
    case NodeKind::kReplayMixture:
      OOM_RETURN_IF_ERROR(ReadUnitAgain(layer_unit_[layer], node.weights, step));
      return ReadUnitAgain(mixture_unit_[layer], node.mixture_weights, step);
    case NodeKind::kBackwardMixture: {
      OOM_RETURN_IF_ERROR(ReadUnitAgain(layer_unit_[layer], node.weights, step));
      OOM_RETURN_IF_ERROR(ReadUnitAgain(mixture_unit_[layer], node.mixture_weights, step));
      const auto bytes = static_cast<size_t>(options_.job->layout->units()[ordinary].elements *
                                             static_cast<int64_t>(sizeof(float)));
      std::memset(arena_->At(options_.job->graph, node.gradient), 0, bytes);
      if (mixture != ordinary)
        FillGradient(mixture_unit_[layer], node.mixture_gradient, node, step);
      return Status::Ok();
    }
    case NodeKind::kBackwardMixer:
      OOM_RETURN_IF_ERROR(ReadUnitAgain(layer_unit_[layer], node.weights, step));
      FillGradient(layer_unit_[layer], node.gradient, node, step);
      return Status::Ok();
    case NodeKind::kEmbeddingBackward:
      EmbeddingBackward(node, step);
      return Status::Ok();
    default:
      return Broken(node, step, "not a compute node");
  }
}

}  // namespace oom::testing
