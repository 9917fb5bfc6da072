#include "server/oomd/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/exposer.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <spdlog/spdlog.h>

#include <set>

#include "runtime/base/clock.h"
#include "runtime/base/mutex.h"
#include "server/oomd/job_state.h"

namespace oom {
namespace {

using prometheus::BuildCounter;
using prometheus::BuildGauge;
using prometheus::BuildHistogram;
using prometheus::Counter;
using prometheus::Family;
using prometheus::Gauge;
using prometheus::Histogram;
using Buckets = Histogram::BucketBoundaries;

const Buckets kRpcSeconds = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1,
                             0.25,  0.5,    1,     2.5,  10,    30};
const Buckets kStoreSeconds = {0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01,
                               0.02,   0.05,   0.1,   0.5,   1,     5};
const Buckets kWaitSeconds = {1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, 86400};
const Buckets kStepSeconds = {0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 150, 300};

constexpr size_t kMaxJobLabels = 200;
constexpr double kJobLabelSeconds = 300;  // How long a job's own series stay after its end.

}  // namespace

struct Metrics::Impl {
  std::shared_ptr<prometheus::Registry> registry = std::make_shared<prometheus::Registry>();
  prometheus::Registry& r = *registry;

  Family<Gauge>& build_info =
      BuildGauge().Name("oomd_build_info").Help("Version of this daemon; always 1.").Register(r);
  Gauge& ready = Single("oomd_ready", "1 while the daemon takes jobs.");
  Gauge& draining = Single("oomd_draining", "1 while the daemon stops and starts no job.");
  Family<Gauge>& jobs = BuildGauge().Name("oomd_jobs").Help("Jobs by state.").Register(r);
  Family<Counter>& transitions = BuildCounter()
                                     .Name("oomd_job_transitions_total")
                                     .Help("Recorded job state transitions.")
                                     .Register(r);
  Family<Counter>& requests = BuildCounter()
                                  .Name("oomd_grpc_requests_total")
                                  .Help("Finished gRPC calls by method and status code.")
                                  .Register(r);
  Family<Histogram>& request_seconds = BuildHistogram()
                                           .Name("oomd_grpc_request_duration_seconds")
                                           .Help("Duration of unary gRPC calls.")
                                           .Register(r);
  Gauge& watch_streams = Single("oomd_watch_streams", "Open watches.");
  Counter& watch_overflows = BuildCounter()
                                 .Name("oomd_watch_overflows_total")
                                 .Help("Watches ended because they fell behind.")
                                 .Register(r)
                                 .Add({});
  Counter& store_errors = BuildCounter()
                              .Name("oomd_store_errors_total")
                              .Help("Failed commits of the job store.")
                              .Register(r)
                              .Add({});
  Histogram& store_seconds = BuildHistogram()
                                 .Name("oomd_store_commit_duration_seconds")
                                 .Help("Duration of durable commits of the job store.")
                                 .Register(r)
                                 .Add({}, kStoreSeconds);
  Histogram& queue_seconds = BuildHistogram()
                                 .Name("oomd_queue_wait_seconds")
                                 .Help("Time from submission to first start.")
                                 .Register(r)
                                 .Add({}, kWaitSeconds);
  Family<Gauge>& pool_capacity = BuildGauge()
                                     .Name("oomd_pool_capacity_bytes")
                                     .Help("Host memory that jobs may take, by NUMA node.")
                                     .Register(r);
  Family<Gauge>& pool_used = BuildGauge()
                                 .Name("oomd_pool_used_bytes")
                                 .Help("Host memory that running jobs hold, by NUMA node.")
                                 .Register(r);
  Family<Counter>& worker_restarts =
      BuildCounter()
          .Name("oomd_worker_restarts_total")
          .Help("Attempts that failed and are made again, by reason.")
          .Register(r);
  Family<Counter>& log_messages = BuildCounter()
                                      .Name("oomd_log_messages_total")
                                      .Help("Log messages of this daemon by level.")
                                      .Register(r);

  Family<Gauge>& step =
      BuildGauge().Name("oomd_job_step").Help("Completed steps of a job.").Register(r);
  Family<Gauge>& durable_step =
      BuildGauge()
          .Name("oomd_job_durable_step")
          .Help("Steps that the newest complete checkpoint of a job holds.")
          .Register(r);
  Family<Gauge>& loss =
      BuildGauge().Name("oomd_job_loss").Help("Training loss of a job's last step.").Register(r);
  Family<Gauge>& last_progress = BuildGauge()
                                     .Name("oomd_job_last_progress_timestamp_seconds")
                                     .Help("When a job last completed a step.")
                                     .Register(r);
  Family<Counter>& tokens =
      BuildCounter()
          .Name("oomd_job_tokens_total")
          .Help("Tokens that a job has trained on since this daemon knows it.")
          .Register(r);
  Family<Histogram>& step_seconds = BuildHistogram()
                                        .Name("oomd_job_step_duration_seconds")
                                        .Help("Duration of training steps.")
                                        .Register(r);
  Family<Counter>& transfer_bytes =
      BuildCounter()
          .Name("oomd_transfer_bytes_total")
          .Help("Bytes copied between host and devices, by direction.")
          .Register(r);
  Counter& stall_seconds = BuildCounter()
                               .Name("oomd_transfer_stall_seconds_total")
                               .Help("Time in which devices waited for transfers or updates.")
                               .Register(r)
                               .Add({});
  Counter& optimizer_seconds = BuildCounter()
                                   .Name("oomd_optimizer_busy_seconds_total")
                                   .Help("Busy time of host optimizer threads.")
                                   .Register(r)
                                   .Add({});
  Counter& optimizer_steps = BuildCounter()
                                 .Name("oomd_optimizer_steps_total")
                                 .Help("Completed training steps of all jobs.")
                                 .Register(r)
                                 .Add({});
  Counter& checkpoint_bytes = BuildCounter()
                                  .Name("oomd_checkpoint_bytes_total")
                                  .Help("Bytes written to checkpoints.")
                                  .Register(r)
                                  .Add({});
  Family<Gauge>& checkpoint_time = BuildGauge()
                                       .Name("oomd_checkpoint_last_success_timestamp_seconds")
                                       .Help("When a job's durable step last rose.")
                                       .Register(r);

  Gauge& Single(const char* name, const char* help) {
    return BuildGauge().Name(name).Help(help).Register(r).Add({});
  }

  mutable Mutex mutex;
  std::unique_ptr<prometheus::Exposer> exposer OOM_GUARDED_BY(mutex);
  std::string address OOM_GUARDED_BY(mutex);
  int64_t seen_overflows OOM_GUARDED_BY(mutex) = 0;
  struct Series {
    Gauge* step;
    Gauge* durable_step;
    Gauge* loss;
    Gauge* last_progress;
    Gauge* checkpoint_time;
    Counter* tokens;
    Histogram* step_seconds;
    internal::v1::Progress last;
    double ended = 0;  // Monotonic; 0: not yet.
  };
  std::map<std::string, Series> series OOM_GUARDED_BY(mutex);  // By job name.

  void DropEnded() OOM_REQUIRES(mutex) {
    for (auto it = series.begin(); it != series.end();) {
      const Series& each = it->second;
      if (each.ended == 0 || MonotonicSeconds() - each.ended < kJobLabelSeconds) {
        ++it;
        continue;
      }
      step.Remove(each.step);
      durable_step.Remove(each.durable_step);
      loss.Remove(each.loss);
      last_progress.Remove(each.last_progress);
      checkpoint_time.Remove(each.checkpoint_time);
      tokens.Remove(each.tokens);
      step_seconds.Remove(each.step_seconds);
      it = series.erase(it);
    }
  }
  Series* Find(const std::string& name) OOM_REQUIRES(mutex) {
    if (const auto it = series.find(name); it != series.end()) return &it->second;
    if (series.size() >= kMaxJobLabels) return nullptr;
    const prometheus::Labels labels = {{"job", name.substr(name.find('/') + 1)}};
    return &series
                .emplace(name, Series{.step = &step.Add(labels),
                                      .durable_step = &durable_step.Add(labels),
                                      .loss = &loss.Add(labels),
                                      .last_progress = &last_progress.Add(labels),
                                      .checkpoint_time = &checkpoint_time.Add(labels),
                                      .tokens = &tokens.Add(labels),
                                      .step_seconds = &step_seconds.Add(labels, kStepSeconds),
                                      .last = {}})
                .first->second;
  }
};

Metrics::Metrics(const std::string& version) : impl_(std::make_unique<Impl>()) {
  impl_->build_info.Add({{"version", version}}).Set(1);
}
Metrics::~Metrics() = default;

Status Metrics::Serve(int port) {
  const MutexLock lock(impl_->mutex);
  try {
    impl_->exposer = std::make_unique<prometheus::Exposer>("127.0.0.1:" + std::to_string(port), 1);
  } catch (const std::exception& error) {
    return Status(Code::kAlreadyExists, "the metrics port 127.0.0.1:" + std::to_string(port) +
                                            " cannot be opened; choose another --metrics-port")
        .WithField("metrics_port");
  }
  impl_->exposer->RegisterCollectable(impl_->registry);
  const std::vector<int> ports = impl_->exposer->GetListeningPorts();
  impl_->address = "127.0.0.1:" + std::to_string(ports.empty() ? port : ports.front());
  return Status::Ok();
}

std::string Metrics::address() const {
  const MutexLock lock(impl_->mutex);
  return impl_->address;
}

void Metrics::SetGauges(const Gauges& gauges) {
  for (int state = v1::JOB_STATE_QUEUED; state <= v1::JOB_STATE_RECOVERING; ++state) {
    const auto it = gauges.jobs.find(static_cast<v1::JobState>(state));
    impl_->jobs.Add({{"state", StateName(static_cast<v1::JobState>(state))}})
        .Set(it == gauges.jobs.end() ? 0 : it->second);
  }
  for (size_t node = 0; node < gauges.pool_capacity_bytes.size(); ++node) {
    const prometheus::Labels labels = {{"numa_node", std::to_string(node)}};
    impl_->pool_capacity.Add(labels).Set(static_cast<double>(gauges.pool_capacity_bytes[node]));
    impl_->pool_used.Add(labels).Set(static_cast<double>(gauges.pool_used_bytes[node]));
  }
  impl_->watch_streams.Set(static_cast<double>(gauges.watch_streams));
  const MutexLock lock(impl_->mutex);
  impl_->watch_overflows.Increment(
      static_cast<double>(gauges.watch_overflows - impl_->seen_overflows));
  impl_->seen_overflows = gauges.watch_overflows;
  impl_->DropEnded();
}

void Metrics::SetReady(bool ready) { impl_->ready.Set(ready ? 1 : 0); }
void Metrics::SetDraining(bool draining) { impl_->draining.Set(draining ? 1 : 0); }

void Metrics::CountRequest(const std::string& method, const std::string& code, double seconds) {
  impl_->requests.Add({{"method", method}, {"grpc_code", code}}).Increment();
  impl_->request_seconds.Add({{"method", method}}, kRpcSeconds).Observe(seconds);
}

void Metrics::CountLogMessage(const std::string& level) {
  impl_->log_messages.Add({{"level", level}}).Increment();
}

void Metrics::JobTransitioned(const v1::Job& job) {
  impl_->transitions.Add({{"state", StateName(job.state())}, {"reason", job.reason()}}).Increment();
  if (job.state() == v1::JOB_STATE_RECOVERING)
    impl_->worker_restarts.Add({{"reason", job.reason()}}).Increment();
  spdlog::info("{} {} is {}{}{}", job.name(), job.uid(), StateName(job.state()),
               job.reason().empty() ? "" : ", " + job.reason(),
               job.message().empty() ? "" : ": " + job.message());
  const MutexLock lock(impl_->mutex);
  if (!IsTerminal(job.state())) return;
  if (const auto it = impl_->series.find(job.name()); it != impl_->series.end())
    it->second.ended = MonotonicSeconds();
}

void Metrics::QueueWaited(double seconds) { impl_->queue_seconds.Observe(seconds); }

void Metrics::Progressed(const v1::Job& job, const internal::v1::Progress& progress) {
  const MutexLock lock(impl_->mutex);
  Impl::Series* series = impl_->Find(job.name());
  if (series == nullptr) return;
  internal::v1::Progress& last = series->last;
  // Counters of a new attempt begin again at 0.
  const auto rise = [](double now, double before) { return now >= before ? now - before : now; };
  series->tokens->Increment(
      rise(static_cast<double>(progress.tokens()), static_cast<double>(last.tokens())));
  impl_->optimizer_seconds.Increment(
      rise(progress.optimizer_busy_seconds(), last.optimizer_busy_seconds()));
  impl_->stall_seconds.Increment(
      rise(progress.exposed_wait_seconds(), last.exposed_wait_seconds()));
  impl_->checkpoint_bytes.Increment(rise(static_cast<double>(progress.checkpoint_bytes()),
                                         static_cast<double>(last.checkpoint_bytes())));
  const auto moved = [&](const char* direction, int64_t now, int64_t before) {
    impl_->transfer_bytes.Add({{"direction", direction}})
        .Increment(rise(static_cast<double>(now), static_cast<double>(before)));
  };
  moved("host_to_device", progress.host_to_device_bytes(), last.host_to_device_bytes());
  moved("device_to_host", progress.device_to_host_bytes(), last.device_to_host_bytes());
  moved("boundary", progress.boundary_bytes(), last.boundary_bytes());
  moved("collective", progress.collective_bytes(), last.collective_bytes());
  if (progress.step() > last.step()) {
    impl_->optimizer_steps.Increment(static_cast<double>(progress.step() - last.step()));
    series->step_seconds->Observe(progress.step_seconds());
    series->last_progress->Set(UnixSeconds());
  }
  if (progress.durable_step() > last.durable_step()) series->checkpoint_time->Set(UnixSeconds());
  series->step->Set(static_cast<double>(progress.step()));
  series->durable_step->Set(static_cast<double>(job.durable_step()));
  series->loss->Set(progress.loss());
  last = progress;
}

void Metrics::StoreCommitted(double seconds) { impl_->store_seconds.Observe(seconds); }

void Metrics::StoreFailed(const Status& status) {
  impl_->store_errors.Increment();
  spdlog::error(
      "the job store failed: {}; nothing is changed from here on, restart oomd after the disk is "
      "repaired",
      status.ToString());
}

void Metrics::Warned(const std::string& message) { spdlog::warn("{}", message); }

}  // namespace oom
