#include "worker/worker.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "planner/job_settings.h"
#include "runtime/base/check.h"
#include "runtime/base/clock.h"
#include "runtime/base/mutex.h"
#include "runtime/checkpoint/checkpoint_source.h"
#include "runtime/data/dataset.h"
#include "runtime/graph/executor.h"
#include "runtime/graph/graph_builder.h"
#include "runtime/memory/pool.h"
#include "runtime/trace/chrome_trace.h"
#include "worker/batch_reader.h"
#include "worker/buffer_arena.h"
#include "worker/data_plane.h"
#include "worker/node_trace.h"
#include "worker/step_runner.h"
#include "worker/worker_device.h"

namespace oom {

struct Worker::Impl {
  internal::v1::WorkerStart start;
  ModelDescription model;
  BatchShape batch;
  std::unique_ptr<SharedLayout> layout;
  std::vector<PoolMapping> mappings;
  PoolMap pools;
  std::unique_ptr<ControlPage> page;
  // After the memory that it has registered, before everything that lies in its own.
  std::unique_ptr<WorkerDevice> device;
  StepGraph training;
  StepGraph evaluation;
  std::unique_ptr<BufferArena> arena;
  std::unique_ptr<Dataset> train_data;
  std::unique_ptr<Dataset> evaluation_data;
  std::unique_ptr<BatchReader> reader;
  std::unique_ptr<DataPlane> data_plane;
  std::unique_ptr<StepRunner> runner;
  std::unique_ptr<NodeTrace> trace;
  // Last: its stream threads use everything above.
  std::unique_ptr<Executor> executor;

  // Written by the `done` of a step on a stream thread, one step after the other.
  double last_step_end_seconds = 0.0;
  double last_wait_seconds = 0.0;
  std::array<int64_t, kResourceCount> last_bytes{};

  const v1::JobSpec& spec() const { return start.spec(); }
  const v1::Plan& plan() const { return start.plan(); }
  int rank() const { return start.rank(); }

  Status Open(UniqueFd page_fd, std::vector<UniqueFd> pool_fds);
  Status FillResidentChunks();
  Status Evaluate(int graph, int64_t completed_steps);
  void RecordStep(int64_t step);
  void PublishDone(int64_t step);
};

Status Worker::Impl::Open(UniqueFd page_fd, std::vector<UniqueFd> pool_fds) {
  OOM_ASSIGN_OR_RETURN(model, ReadJobModel(spec()));
  OOM_RETURN_IF_ERROR(ValidatePlan(model, plan()));
  batch = BatchShapeOf(spec(), plan());
  layout = std::make_unique<SharedLayout>(SharedLayout::Build(model, plan(), batch));
  size_t given = 0;
  for (const PoolSpec& pool : layout->pools()) {
    if (pool.on_gpu) {
      pools.bases.push_back(nullptr);
      continue;
    }
    if (given == pool_fds.size()) {
      return Status(Code::kInternal, "the plan's pool " + pool.name + " was not given");
    }
    OOM_ASSIGN_OR_RETURN(PoolMapping mapping,
                         PoolMapping::Map(pool_fds[given++].get(), pool.bytes));
    pools.bases.push_back(mapping.data());
    mappings.push_back(std::move(mapping));
  }
  OOM_ASSIGN_OR_RETURN(page, ControlPage::Map(std::move(page_fd), layout->control_page()));
  OOM_RETURN_IF_ERROR(device->Prepare(*layout, rank(), *page, &pools));

  const GraphInputs inputs{
      .model = &model, .plan = &plan(), .layout = layout.get(), .batch = batch};
  training = BuildTrainingGraph(inputs);
  evaluation = BuildEvaluationGraph(inputs);
  OOM_ASSIGN_OR_RETURN(arena, BufferArena::Create({&training, &evaluation}, &device->allocator()));

  const auto open_data = [&](const std::string& directory) {
    return Dataset::Open({.directory = directory,
                          .sequence_length = spec().sequence_length(),
                          .vocabulary_size = model.vocabulary_size});
  };
  OOM_ASSIGN_OR_RETURN(train_data, open_data(spec().data().train()));
  if (!spec().data().evaluation().empty()) {
    OOM_ASSIGN_OR_RETURN(evaluation_data, open_data(spec().data().evaluation()));
  }
  reader = std::make_unique<BatchReader>(BatchReader::Options{
      .dataset = train_data.get(),
      .global_batch = spec().global_batch(),
      .rank = rank(),
      .rank_count = plan().rank_count(),
      .accumulation = plan().accumulation(),
      .shuffle = spec().data().shuffle(),
      .seed = spec().seed(),
  });
  const int busy_threads = plan().rank_count() * plan().worker_threads();
  data_plane = device->MakeDataPlane({
      .layout = layout.get(),
      .pools = &pools,
      .page = page.get(),
      .rank = rank(),
      .accumulation = plan().accumulation(),
      .update_mode = plan().update_mode(),
      .hyper = HyperparametersOf(spec()),
      .schedule = ScheduleOf(spec()),
      .simd = DetectSimdLevel(),
      .wait = {.spin_microseconds = SpinMicrosecondsFor(busy_threads + 2)},
  });
  trace = std::make_unique<NodeTrace>(NodeTrace::Options{
      .path = start.trace_path(),
      .process = "rank " + std::to_string(rank()),
      .first_step = spec().trace().first_step() - 1,
      .step_count = spec().trace().step_count(),
      .layout = layout.get(),
  });
  runner = std::make_unique<StepRunner>(StepRunner::Options{
      .model = &model,
      .layout = layout.get(),
      .arena = arena.get(),
      .device = device.get(),
      .data_plane = data_plane.get(),
      .train = reader.get(),
      .plan = &plan(),
      .trace = trace.get(),
      .rank = rank(),
      .auxiliary_loss = spec().router().auxiliary_loss(),
  });
  return Status::Ok();
}

Status Worker::Impl::FillResidentChunks() {
  std::vector<int64_t> own;
  for (const Chunk& chunk : layout->chunks()) {
    if (chunk.owner_rank == rank()) own.push_back(chunk.index);
  }
  if (own.empty()) return Status::Ok();
  std::unique_ptr<StateSource> source;
  if (start.checkpoint_path().empty()) {
    OOM_ASSIGN_OR_RETURN(source, OpenInitialState(spec(), model, layout->units()));
  } else {
    OOM_ASSIGN_OR_RETURN(source, CheckpointSource::Open(start.checkpoint_path(), layout->units()));
  }
  std::atomic<size_t> next{0};
  Mutex mutex;
  Status failure;
  const auto fill = [&] {
    for (size_t i = next++; i < own.size(); i = next++) {
      const Status filled = device->FillChunk(*source, *layout, pools, own[i],
                                              [this] { page->heartbeat(rank()).Ring(); });
      if (!filled.ok()) {
        MutexLock lock(mutex);
        failure = filled;
        next = own.size();
        return;
      }
      page->version(own[i]).Publish(static_cast<uint64_t>(start.first_step()));
    }
  };
  // Nothing else runs in this process yet; its peers fill theirs.
  const auto cores = static_cast<int>(std::thread::hardware_concurrency());
  std::vector<std::thread> threads;
  for (int i = 1; i < cores / plan().rank_count(); ++i) threads.emplace_back(fill);
  fill();
  for (std::thread& thread : threads) thread.join();
  return failure;
}

// Rank r takes every P-th sequence, a micro-batch at a time. Ranks may exchange weights in each of them, so all take as
// many: what is left over has no targets.
Status Worker::Impl::Evaluate(int graph, int64_t completed_steps) {
  const int64_t count =
      std::min(spec().evaluation().sequences(), evaluation_data->sequence_count());
  std::vector<Batch> batches;
  std::vector<int64_t> sequences;
  for (int64_t i = rank(); i < count; i += plan().rank_count()) {
    sequences.push_back(i);
    const bool last = i + plan().rank_count() >= count;
    if (last || static_cast<int64_t>(sequences.size()) == batch.micro_batch_sequences) {
      batches.push_back(MakeBatch(*evaluation_data, sequences));
      sequences.clear();
    }
  }
  const int64_t in_a_round = plan().rank_count() * batch.micro_batch_sequences;
  const auto batch_count = static_cast<size_t>((count + in_a_round - 1) / in_a_round);
  while (batches.size() < batch_count) {
    batches.push_back(MakeBatch(*evaluation_data, {0}));
    batches.back().targets.fill_(-1);
    batches.back().valid_targets = 0;
  }
  OOM_RETURN_IF_ERROR(executor->Drain());
  runner->BeginEvaluation(&evaluation, std::move(batches));
  for (size_t i = 0; i < batch_count; ++i) {
    OOM_RETURN_IF_ERROR(executor->Issue(graph, completed_steps, nullptr));
  }
  OOM_RETURN_IF_ERROR(executor->Drain());
  runner->BeginTraining(&training);
  return Status::Ok();
}

// Runs when the last node of the step is done; steps end in order.
void Worker::Impl::RecordStep(int64_t step) {
  RankRecord& record = page->rank_record(rank(), step);
  const double now = MonotonicSeconds();
  record.step_seconds = now - last_step_end_seconds;
  last_step_end_seconds = now;
  const double waited = executor->compute_wait_seconds();
  record.exposed_wait_seconds = waited - last_wait_seconds;
  last_wait_seconds = waited;
  // Each count is read once: the next step's loads go on meanwhile.
  const auto moved = [this](Resource resource) {
    const int64_t now = data_plane->transfers().bytes(resource);
    return now - std::exchange(last_bytes[static_cast<size_t>(resource)], now);
  };
  record.host_to_device_bytes = moved(Resource::kHostToDevice);
  record.device_to_host_bytes = moved(Resource::kDeviceToHost);
  record.boundary_bytes = moved(Resource::kBoundaryOut) + moved(Resource::kBoundaryIn);
  record.collective_bytes = moved(Resource::kCollective);
  record.device_bytes_peak = device->bytes_peak();
  record.evaluation_loss_sum = 0.0;
  record.evaluation_targets = 0;
  // Now, not at the end of a run of weeks. What is wrong with the file is said again at the end.
  if (trace->EndsWith(step)) static_cast<void>(trace->Write());
}

void Worker::Impl::PublishDone(int64_t step) {
  page->step_done(rank()).Publish(static_cast<uint64_t>(step + 1));
  page->bell().Ring();
}

Worker::Worker(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Worker::~Worker() = default;

uint64_t Worker::graph_hash() const { return impl_->training.Hash(); }

int64_t Worker::device_bytes_planned() const { return impl_->arena->bytes(); }

Result<std::unique_ptr<Worker>> Worker::Create(const internal::v1::WorkerStart& start,
                                               std::unique_ptr<WorkerDevice> device,
                                               UniqueFd page_fd, std::vector<UniqueFd> pool_fds) {
  auto impl = std::make_unique<Impl>();
  impl->start = start;
  impl->device = std::move(device);
  OOM_RETURN_IF_ERROR(impl->Open(std::move(page_fd), std::move(pool_fds)));
  // Before this rank is ready: in step 0 no word says that another owner's chunks are filled.
  OOM_RETURN_IF_ERROR(impl->FillResidentChunks());
  return std::unique_ptr<Worker>(new Worker(std::move(impl)));
}

Status Worker::Run(const std::function<void(const Status&)>& on_failure) {
  Impl& impl = *impl_;
  ControlPage& page = *impl.page;
  const int threads = impl.plan().worker_threads();
  impl.device->OnFault(on_failure);
  impl.executor = std::make_unique<Executor>(
      Executor::Options{
          .rank = impl.rank(),
          .make_stream =
              [&impl, threads](Resource resource) {
                return impl.device->MakeStream(resource, threads);
              },
          .on_node =
              [&impl, &page](const Node& node, int64_t step, double start, double end) {
                page.heartbeat(impl.rank()).RaiseTo(static_cast<uint64_t>(end * 1e6));
                impl.trace->Add(node, step, start, end);
              },
          .times_node =
              [&impl](const Node& node, int64_t step) {
                return impl.device->times_always(node) || impl.trace->Wants(step);
              },
          .on_failure = on_failure,
      },
      impl.runner.get());
  const int train = impl.executor->AddGraph(&impl.training);
  const int evaluate = impl.executor->AddGraph(&impl.evaluation);
  impl.runner->BeginTraining(&impl.training);
  impl.last_step_end_seconds = MonotonicSeconds();

  // The stop word has no waiter of its own; it is looked at this often while no step is granted.
  const WaitOptions poll{.timeout = std::chrono::milliseconds(50)};
  for (int64_t step = impl.start.first_step(); step < impl.spec().steps(); ++step) {
    const auto granted = static_cast<uint64_t>(step + 1);
    while (true) {
      const WaitResult result = page.step_limit().WaitAtLeast(granted, page.aborted(), poll);
      if (result == WaitResult::kReached) break;
      if (result == WaitResult::kAborted) {
        static_cast<void>(impl.executor->Drain());
        return Status(Code::kAborted, "the attempt was aborted");
      }
      const uint64_t stop = page.stop_step().Load();
      if (stop != 0 && static_cast<int64_t>(stop) <= step + 1) {
        OOM_RETURN_IF_ERROR(impl.executor->Drain());
        return impl.trace->Write();
      }
      page.heartbeat(impl.rank()).Ring();
    }
    const bool evaluation_follows = EvaluationFollows(impl.spec(), step + 1);
    OOM_RETURN_IF_ERROR(
        impl.executor->Issue(train, step, [&impl, step, evaluation_follows] {
          impl.RecordStep(step);
          if (!evaluation_follows) impl.PublishDone(step);
        }));
    if (!evaluation_follows) continue;
    OOM_RETURN_IF_ERROR(impl.Evaluate(evaluate, step + 1));
    RankRecord& record = page.rank_record(impl.rank(), step);
    record.evaluation_loss_sum = impl.runner->evaluation_loss_sum();
    record.evaluation_targets = impl.runner->evaluation_targets();
    impl.last_step_end_seconds = MonotonicSeconds();
    impl.PublishDone(step);
  }
  OOM_RETURN_IF_ERROR(impl.executor->Drain());
  return impl.trace->Write();
}

internal::v1::WorkerDone Worker::Summary() const {
  internal::v1::WorkerDone done;
  done.set_step(static_cast<int64_t>(impl_->page->step_done(impl_->rank()).Load()));
  done.set_device_bytes_peak(impl_->device->bytes_peak());
  const TransferCounts& moved = impl_->data_plane->transfers();
  for (int r = 0; r < kResourceCount; ++r) {
    const auto resource = static_cast<Resource>(r);
    for (const ParameterUnit& unit : impl_->layout->units()) {
      const int64_t bytes = moved.bytes(resource, unit.index);
      if (bytes == 0) continue;
      internal::v1::Transfer* transfer = done.add_transfers();
      transfer->set_resource(std::string(ResourceName(resource)));
      transfer->set_unit(unit.name);
      transfer->set_bytes(bytes);
    }
  }
  return done;
}

}  // namespace oom
