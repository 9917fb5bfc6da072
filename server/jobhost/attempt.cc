#include "server/jobhost/attempt.h"

#include <signal.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "planner/job_settings.h"
#include "runtime/base/build_id.h"
#include "runtime/checkpoint/checkpoint_source.h"
#include "runtime/optim/adamw.h"
#include "server/jobhost/fill_state.h"
#include "server/jobhost/host_bytes.h"
#include "server/jobhost/transfer_report.h"

namespace oom {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kTermGrace = std::chrono::seconds(10);
constexpr auto kStartTime = std::chrono::seconds(60);
// A look at the job's memory costs a walk over its page tables.
constexpr auto kHostBytesInterval = std::chrono::seconds(10);

HostOptimizer::Options OptimizerOptions(const JobContext& context) {
  const v1::JobSpec& spec = context.spec();
  HostOptimizer::Options options;
  options.layout = &context.layout();
  options.pools = &context.pools();
  options.update_mode = context.plan().update_mode();
  options.accumulation = context.plan().accumulation();
  options.hyper = HyperparametersOf(spec);
  options.schedule = ScheduleOf(spec);
  options.max_gradient_norm = spec.optimizer().max_gradient_norm();
  options.threads_by_node = context.optimizer_threads();
  options.simd = DetectSimdLevel();
  options.device_produces = context.plan().cuda_devices();
  return options;
}

}  // namespace

Attempt::Attempt(const Options& options)
    : options_(options), tracer_(options.context->spec(), &options.context->layout()) {}

Attempt::~Attempt() = default;

Attempt::Outcome Attempt::Run() {
  completed_steps_ = options_.start.completed_steps;
  busy_seconds_before_ = options_.status->progress().optimizer_busy_seconds();
  Status status = Prepare();
  if (status.ok()) {
    Result<int64_t> completed = Train();
    status = completed.ok() ? FinishWorkers() : completed.status();
  }
  return Describe(status);
}

Status Attempt::Prepare() {
  OOM_ASSIGN_OR_RETURN(reporter_,
                       StepReporter::Open(options_.output->path(), options_.start.completed_steps));
  OOM_ASSIGN_OR_RETURN(page_, ControlPage::Create(options_.context->layout().control_page()));
  checkpointer_ = std::make_unique<Checkpointer>(Checkpointer::Options{
      .context = options_.context,
      .page = page_.get(),
      .output_directory = options_.output->path(),
      .on_done = [this](const Checkpointer::Outcome& outcome) { OnCheckpoint(outcome); },
  });
  // Workers start first: their libraries load while the host fills the pools.
  OOM_RETURN_IF_ERROR(StartWorkers());
  OOM_RETURN_IF_ERROR(Load());
  return CompareGraphs();
}

Status Attempt::StartWorkers() {
  const int rank_count = options_.context->layout().rank_count();
  std::vector<WorkerProcess*> borrowed;
  if (!tracer_.PartPath(0).empty())
    OOM_RETURN_IF_ERROR(options_.output->MakeDirectory("trace/parts"));
  for (int rank = 0; rank < rank_count; ++rank) {
    OOM_ASSIGN_OR_RETURN(
        const std::string log_path,
        options_.output->LogPath(options_.number, "rank-" + std::to_string(rank) + ".log"));
    OOM_ASSIGN_OR_RETURN(
        auto worker,
        WorkerProcess::Start({.program = options_.context->start().worker_path(),
                              .rank = rank,
                              .log = {.path = log_path, .cap_bytes = options_.log_cap_bytes}}));
    spdlog::info("rank {} runs as process {}", rank, worker->pid());
    borrowed.push_back(worker.get());
    workers_.push_back(std::move(worker));
  }
  watchdog_ = std::make_unique<Watchdog>(Watchdog::Options{
      .page = page_.get(),
      .workers = borrowed,
      .silence_limit = options_.worker_silence_limit,
      .must_abort = [this] { return options_.stop->must_abort(); },
      .host_is_busy = [this] { return checkpointer_->holds_up_updates(); },
  });
  for (const auto& worker : workers_) {
    const Status sent = SendStart(worker.get());
    // A worker that died before it listened: the watchdog says how.
    if (!sent.ok() && sent.code() != Code::kUnavailable) return sent;
  }
  return Status::Ok();
}

Status Attempt::SendStart(WorkerProcess* worker) {
  const JobContext& context = *options_.context;
  internal::v1::HostToWorkerFrame frame;
  internal::v1::WorkerStart& start = *frame.mutable_start();
  start.set_rank(worker->rank());
  *start.mutable_spec() = context.spec();
  *start.mutable_plan() = context.plan();
  start.set_first_step(options_.start.completed_steps);
  start.set_checkpoint_path(options_.start.checkpoint_path);
  *start.mutable_pools() = context.start().pools();
  start.set_trace_path(tracer_.PartPath(worker->rank()));
  start.set_attempt(options_.number);
  start.set_device(worker->rank() < context.start().devices_size()
                       ? context.start().devices(worker->rank())
                       : worker->rank());
  std::vector<int> descriptors = {page_->fd()};
  for (const int fd : context.pool_descriptors()) descriptors.push_back(fd);
  return worker->channel().Send(frame, descriptors, Clock::now() + kStartTime);
}

Status Attempt::Load() {
  const JobContext& context = *options_.context;
  const FillOptions fill = {
      .layout = &context.layout(),
      .pools = &context.pools(),
      .topology = &context.topology(),
      .threads_by_node = context.optimizer_threads(),
      .cancelled = [this] { return page_->aborted().Load() != 0; },
  };
  const Clock::time_point begin = Clock::now();
  if (options_.pools_are_new) {
    OOM_RETURN_IF_ERROR(TouchPools(fill));
    spdlog::info("pools are touched ({:.1f} s)",
                 std::chrono::duration<double>(Clock::now() - begin).count());
  }
  std::unique_ptr<StateSource> source;
  if (options_.start.checkpoint_path.empty()) {
    OOM_ASSIGN_OR_RETURN(source, context.OpenModel());
  } else {
    OOM_ASSIGN_OR_RETURN(
        source, CheckpointSource::Open(options_.start.checkpoint_path, context.layout().units()));
  }
  OOM_RETURN_IF_ERROR(FillStreamedState(fill, *source));
  spdlog::info("state after {} steps is in the pools ({:.1f} s)", options_.start.completed_steps,
               std::chrono::duration<double>(Clock::now() - begin).count());
  return Status::Ok();
}

Status Attempt::CompareGraphs() {
  OOM_ASSIGN_OR_RETURN(const std::vector<internal::v1::WorkerReady> ready, watchdog_->WaitReady());
  for (size_t rank = 0; rank < ready.size(); ++rank) {
    const auto differs = [rank](const std::string& what) {
      return Status(Code::kInternal, "rank " + std::to_string(rank) + " " + what)
          .WithReason("INTERNAL");
    };
    if (ready[rank].build_id() != BuildId()) {
      return differs("is of another build than the job host: install oom-jobhost and oom-worker together");
    }
    if (ready[rank].graph_hash() != options_.context->graph_hash()) {
      return differs("built another graph than the job host");
    }
  }
  return Status::Ok();
}

Result<int64_t> Attempt::Train() {
  NumaTopology& topology = options_.context->topology();
  HostOptimizer::Options optimizer = OptimizerOptions(*options_.context);
  optimizer.page = page_.get();
  optimizer.first_step = options_.start.completed_steps;
  optimizer.bind_thread = [&topology](int node) {
    if (node >= topology.node_count()) return;
    const Status bound = topology.BindThread(node);
    if (!bound.ok())
      spdlog::warn("an optimizer thread is not bound to node {}: {}", node, bound.ToString());
  };
  optimizer.before_update = [this, &topology](int64_t chunk, int64_t) {
    checkpointer_->BeforeUpdate(chunk);
    const Region weights = options_.context->layout().weights(chunk);
    topology.NoteAccess(options_.context->pools().At(weights), weights.bytes,
                        MemoryAccess::kUpdate);
  };
  optimizer.on_update = [this](int node, int64_t chunk, int64_t step, double start, double end) {
    tracer_.OnUpdate(node, chunk, step, start, end);
  };
  OOM_ASSIGN_OR_RETURN(optimizer_, HostOptimizer::Start(optimizer));
  options_.on_running();
  TrainingLoop loop({
      .context = options_.context,
      .page = page_.get(),
      .optimizer = optimizer_.get(),
      .checkpointer = checkpointer_.get(),
      .reporter = reporter_.get(),
      .stop = options_.stop,
      .first_step = options_.start.completed_steps,
      .host_bytes_peak = [this] { return HostBytesPeak(); },
      .on_step = [this](const StepReport& report,
                        const TrainingLoop::StepCosts& costs) { OnStep(report, costs); },
      .on_ending = options_.on_ending,
      .on_cut =
          [this](int64_t step, const std::vector<int64_t>& requests) {
            spdlog::info("checkpoint after {} steps", step);
            MutexLock lock(mutex_);
            requests_.insert(requests_.end(), requests.begin(), requests.end());
          },
  });
  return loop.Run();
}

Status Attempt::FinishWorkers() {
  watchdog_->ExpectEnd();
  OOM_ASSIGN_OR_RETURN(const std::vector<internal::v1::WorkerDone> done, watchdog_->WaitDone());
  // Who still waits for a word of a worker waits for ever.
  page_->Abort();
  checkpointer_->Wait();
  Status traced = options_.output->MakeDirectory("trace");
  if (traced.ok()) traced = tracer_.Write();
  if (traced.ok()) {
    traced = WriteTransferReport(options_.output->path() + "/trace/transfers.json",
                                 completed_steps_ - options_.start.completed_steps,
                                 options_.context->layout(), done, *optimizer_);
  }
  if (!traced.ok()) spdlog::warn("the trace was not written: {}", traced.ToString());
  MutexLock lock(mutex_);
  const bool must_be_durable = completed_steps_ == options_.context->spec().steps() &&
                               last_checkpoint_.step == completed_steps_;
  return must_be_durable ? last_checkpoint_.status.Annotate("the last checkpoint") : Status::Ok();
}

// The order of engine rules, section 7: aborted first, then the optimizer at a chunk boundary, then
// the workers.
void Attempt::EndWorkers() {
  std::optional<Watchdog::Failure> failure;
  if (page_) page_->Abort();
  if (optimizer_) optimizer_->Stop();
  if (watchdog_) failure = watchdog_->failure();
  watchdog_.reset();
  for (const auto& worker : workers_) worker->Signal(SIGTERM);
  const Clock::time_point deadline = Clock::now() + kTermGrace;
  for (const auto& worker : workers_) {
    // A stopped process cannot see a SIGTERM.
    if (failure && failure->hung && failure->rank == worker->rank()) worker->Kill();
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
    if (!worker->WaitFor(std::max(left, std::chrono::milliseconds(0)))) worker->Kill();
  }
  ReapOrphans();
}

Attempt::Outcome Attempt::Describe(const Status& status) {
  Outcome outcome = {.status = status};
  std::optional<Watchdog::Failure> failure;
  if (watchdog_) {
    // A failure of the host's own must release the workers too. What a worker died of comes before
    // what the host saw of it.
    if (!status.ok()) watchdog_->Fail(status);
    failure = watchdog_->failure();
  }
  if (!status.ok() && failure) {
    outcome.status = failure->status;
    if (failure->rank >= 0) {
      outcome.failed_log_path = workers_[static_cast<size_t>(failure->rank)]->log_path();
    }
  }
  EndWorkers();
  if (checkpointer_) checkpointer_->Wait();
  Checkpointer::Outcome last;
  std::vector<int64_t> requests = options_.stop->TakeCheckpoints();
  {
    MutexLock lock(mutex_);
    last = last_checkpoint_;
    requests.insert(requests.end(), requests_.begin(), requests_.end());
  }
  if (last.status.ok() && last.path.empty()) {
    last.status = Status(Code::kAborted, "the job ended before a checkpoint was taken");
  }
  AnswerRequests(requests, last);
  outcome.completed_steps = completed_steps_;
  return outcome;
}

void Attempt::OnCheckpoint(const Checkpointer::Outcome& outcome) {
  std::vector<int64_t> requests;
  {
    MutexLock lock(mutex_);
    requests = std::exchange(requests_, {});
    last_checkpoint_ = outcome;
  }
  if (outcome.status.ok()) {
    spdlog::info("checkpoint of step {} is durable: {}", outcome.step, outcome.path);
    options_.status->Update([&](internal::v1::Progress& progress) {
      progress.set_durable_step(outcome.step);
      progress.set_checkpoint_bytes(progress.checkpoint_bytes() + outcome.bytes);
    });
    if (page_->stop_step().Load() == static_cast<uint64_t>(outcome.step) + 1) {
      options_.stop->CheckpointIsDurable();
    }
  } else {
    spdlog::error("checkpoint of step {} failed: {}", outcome.step, outcome.status.ToString());
  }
  AnswerRequests(requests, outcome);
}

void Attempt::AnswerRequests(const std::vector<int64_t>& requests,
                             const Checkpointer::Outcome& outcome) {
  for (const int64_t request : requests) {
    internal::v1::CheckpointDone done;
    done.set_request(request);
    done.set_step(outcome.step);
    done.set_path(outcome.path);
    done.set_code(static_cast<int>(outcome.status.code()));
    done.set_message(outcome.status.message());
    options_.on_checkpoint(done);
  }
}

void Attempt::OnStep(const StepReport& report, const TrainingLoop::StepCosts& costs) {
  completed_steps_ = report.completed_steps;
  if (tracer_.EndsWith(report.completed_steps)) {
    const Status traced = tracer_.Write();
    if (!traced.ok()) spdlog::warn("the trace is not written yet: {}", traced.ToString());
  }
  double busy_seconds = busy_seconds_before_;
  for (size_t node = 0; node < options_.context->optimizer_threads().size(); ++node) {
    busy_seconds += optimizer_->busy_seconds(static_cast<int>(node));
  }
  const int64_t left = options_.context->spec().steps() - report.completed_steps;
  options_.status->Update([&](internal::v1::Progress& progress) {
    progress.set_step(report.completed_steps);
    progress.set_loss(report.loss);
    progress.set_step_seconds(report.step_seconds);
    progress.set_tokens_per_second(report.tokens_per_second());
    progress.set_tokens(progress.tokens() + report.tokens);
    progress.set_eta_seconds(static_cast<double>(left) * report.step_seconds);
    progress.set_optimizer_busy_seconds(busy_seconds);
    progress.set_exposed_wait_seconds(progress.exposed_wait_seconds() +
                                      report.exposed_wait_seconds);
    progress.set_host_to_device_bytes(progress.host_to_device_bytes() + costs.host_to_device_bytes);
    progress.set_device_to_host_bytes(progress.device_to_host_bytes() + costs.device_to_host_bytes);
    progress.set_boundary_bytes(progress.boundary_bytes() + costs.boundary_bytes);
    progress.set_collective_bytes(progress.collective_bytes() + costs.collective_bytes);
  });
}

int64_t Attempt::HostBytesPeak() {
  const Clock::time_point now = Clock::now();
  if (now < host_bytes_due_) return host_bytes_peak_;
  std::vector<pid_t> processes = {::getpid()};
  for (const auto& worker : workers_) processes.push_back(worker->pid());
  host_bytes_peak_ = std::max(host_bytes_peak_, ProportionalSetBytes(processes) +
                                                    HugetlbPoolBytes(options_.context->start()));
  // At most a hundredth of the time.
  host_bytes_due_ =
      Clock::now() + std::max<Clock::duration>(kHostBytesInterval, 100 * (Clock::now() - now));
  return host_bytes_peak_;
}

}  // namespace oom
