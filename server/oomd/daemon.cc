#include "server/oomd/daemon.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <future>
#include <string_view>
#include <thread>

#include "runtime/base/file.h"
#include "runtime/base/units.h"
#include "runtime/memory/host_memory.h"
#include "server/oomd/process_launcher.h"
#include "server/oomd/rpc_server.h"
#include "server/oomd/gpu_inventory.h"
#include "server/oomd/service_context.h"
#include "server/oomd/sqlite_store.h"

namespace oom {
namespace {

std::string HostName() {
  char name[256] = {};
  return gethostname(name, sizeof(name) - 1) == 0 ? name : "localhost";
}

// A job host listens on <state_dir>/jobs/<uid>/host.sock: what would be too long is refused here,
// not job by job.
Status CheckJobSockets(const std::string& directory) {
  constexpr size_t kBelowLength = std::string_view("/jobs//host.sock").size() + 36;
  constexpr size_t kLongest = sizeof(sockaddr_un::sun_path) - 1 - kBelowLength;
  if (directory.size() <= kLongest) return Status::Ok();
  return Status(Code::kInvalidArgument,
                "state_dir: " + directory + " is longer than " + std::to_string(kLongest) +
                    " characters, which leaves no room for the paths of sockets in it")
      .WithReason("INVALID_INPUT")
      .WithField("state_dir");
}

Result<UniqueFd> LockState(const std::string& directory) {
  OOM_RETURN_IF_ERROR(CheckJobSockets(directory));
  OOM_RETURN_IF_ERROR(MakeDirectories(directory));
  OOM_RETURN_IF_ERROR(MakeDirectories(directory + "/jobs"));
  if (chmod(directory.c_str(), 0700) != 0) {
    return ErrnoStatus(errno, "the state directory " + directory).Annotate("state_dir");
  }
  const std::string path = directory + "/oomd.lock";
  UniqueFd lock(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!lock.valid()) return ErrnoStatus(errno, path);
  if (flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    return Status(Code::kAlreadyExists, "another oomd uses the state directory " + directory)
        .WithReason("ALREADY_RUNNING")
        .WithField("state_dir");
  }
  return lock;
}

}  // namespace

struct Daemon::Impl {
  explicit Impl(Options options_in) : options(std::move(options_in)), metrics(options.version) {}

  Status Start();
  void Tick();
  void UpdateGauges();

  // In the order in which they depend on each other; they go in the reverse one.
  Options options;
  SystemClock clock;
  UniqueFd state_lock;
  std::unique_ptr<SqliteStore> store;
  Metrics metrics;
  EventLog events;
  JobView view;
  ControlLoop loop;
  std::unique_ptr<ProcessLauncher> launcher;
  std::unique_ptr<Controller> controller;
  ServiceContext services;
  std::unique_ptr<RpcServer> server;
  std::unique_ptr<boost::asio::steady_timer> ticker;
  int ticks = 0;
  bool stopped = false;
  bool ready = false;

  Mutex mutex;
  CondVar changed;
  bool idle OOM_GUARDED_BY(mutex) = false;
};

Daemon::Daemon(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Daemon::~Daemon() { Shutdown(); }

Result<std::unique_ptr<Daemon>> Daemon::Start(Options options) {
  auto impl = std::make_unique<Impl>(std::move(options));
  const Status started = impl->Start();
  if (!started.ok()) {
    impl->loop.Stop();
    return started;
  }
  return std::unique_ptr<Daemon>(new Daemon(std::move(impl)));
}

Status Daemon::Impl::Start() {
  const Config& config = options.config;
  if (options.topology == nullptr) options.topology = MakeSystemTopology();
  OOM_ASSIGN_OR_RETURN(const HostMemoryLimit limit, ReadHostMemoryLimit());
  OOM_ASSIGN_OR_RETURN(const PoolCapacity capacity,
                       ComputePoolCapacity(*options.topology, limit, config.pool_capacity_bytes));
  // The socket before the state: whoever is refused has changed nothing.
  const size_t slash = config.socket.rfind('/');
  if (slash != std::string::npos && slash > 0)
    OOM_RETURN_IF_ERROR(MakeDirectories(config.socket.substr(0, slash)));
  OOM_ASSIGN_OR_RETURN(ListeningSocket socket, ListeningSocket::Listen(config.socket));
  OOM_ASSIGN_OR_RETURN(state_lock, LockState(config.state_dir));
  OOM_ASSIGN_OR_RETURN(store, SqliteStore::Open({.path = config.state_dir + "/oomd.sqlite"}));
  OOM_RETURN_IF_ERROR(store->Compact(clock.UnixSeconds()));

  const int cpus = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  const GpuInventory inventory = FindGpus();
  const std::vector<Gpu>& gpus = inventory.gpus;
  if (inventory.has_driver && !inventory.problem.empty()) spdlog::warn("{}", inventory.problem);
  const int cpu_devices = config.cpu_devices > 0 ? config.cpu_devices : std::max(4, cpus);
  Controller::Options core{
      .node = {.capacity_bytes = capacity.bytes_by_node,
               .device_counts = {{v1::DEVICE_KIND_CPU, cpu_devices},
                                 {v1::DEVICE_KIND_CUDA, static_cast<int>(gpus.size())}},
               .gpu_problem = inventory.problem},
      .job_directory_root = config.state_dir + "/jobs",
      .worker_path = config.worker_path,
      .ephemeral = config.ephemeral,
      .backoff_initial_seconds = config.backoff_initial_seconds,
      .backoff_max_seconds = config.backoff_max_seconds,
      .stop_slack_seconds = config.stop_slack_seconds,
      .max_queued_jobs = config.max_queued_jobs};
  OOM_CHECK(getrandom(&core.seed, sizeof(core.seed), 0) == sizeof(core.seed));
  launcher = std::make_unique<ProcessLauncher>(
      ProcessLauncher::Options{.job_directory_root = core.job_directory_root,
                               .jobhost_path = config.jobhost_path,
                               .allow_hugetlb = config.hugepages},
      loop.context(), *options.topology);
  controller = std::make_unique<Controller>(core, Controller::Parts{.clock = &clock,
                                                                    .store = store.get(),
                                                                    .launcher = launcher.get(),
                                                                    .observer = &metrics,
                                                                    .events = &events,
                                                                    .view = &view});
  launcher->SetEvents(controller.get(), [this] { loop.ScheduleFlush(); });
  loop.SetController(controller.get());
  // Before any other thread runs.
  OOM_RETURN_IF_ERROR(controller->Recover());

  if (config.metrics_port >= 0) OOM_RETURN_IF_ERROR(metrics.Serve(config.metrics_port));
  services.loop = &loop;
  services.view = &view;
  services.events = &events;
  services.store = store.get();
  services.metrics = &metrics;
  services.topology = options.topology.get();
  services.plan = options.plan;
  services.limits = {.pool_capacity_bytes = capacity.bytes_by_node, .cpu_count = cpus};
  for (const Gpu& gpu : gpus) {
    int64_t& smallest = services.limits.gpu_memory_bytes;
    smallest = smallest == 0 ? gpu.memory_bytes : std::min(smallest, gpu.memory_bytes);
  }
  services.gpus = gpus;
  services.allow_hugetlb = config.hugepages;
  // Where there is no driver, nobody expects GPUs.
  if (inventory.has_driver) services.gpu_problem = inventory.problem;
  services.store_id = controller->store_id();
  services.node_name = HostName();
  services.version = options.version;
  services.memory_limit_source = capacity.source;
  services.allowed_uids = {0, geteuid()};
  UpdateGauges();
  ticker = std::make_unique<boost::asio::steady_timer>(loop.context());
  loop.Start([this] {
    if (controller->store_failed() && ready) {
      ready = false;
      server->SetReady(false);
      metrics.SetReady(false);
    }
    const MutexLock lock(mutex);
    idle = controller->idle();
    changed.NotifyAll();
  });
  OOM_ASSIGN_OR_RETURN(server, RpcServer::Start(services, std::move(socket)));
  loop.Post([this](Controller&) {
    ready = true;
    Tick();
  });
  server->SetReady(true);
  metrics.SetReady(true);
  return Status::Ok();
}

// Each half second: gauges. Each ten: a bookmark. Each hour: compaction.
void Daemon::Impl::Tick() {
  UpdateGauges();
  if (ticks % 20 == 19) controller->PublishBookmark();
  if (ticks % 7200 == 7199) {
    if (const Status status = store->Compact(clock.UnixSeconds()); !status.ok())
      metrics.Warned(status.ToString());
  }
  ++ticks;
  ticker->expires_after(std::chrono::milliseconds(500));
  ticker->async_wait([this](const boost::system::error_code& error) {
    if (!error) Tick();
  });
}

void Daemon::Impl::UpdateGauges() {
  metrics.SetGauges({.jobs = view.CountByState(),
                     .pool_capacity_bytes = controller->resources().capacity_bytes(),
                     .pool_used_bytes = controller->resources().used_bytes(),
                     .watch_streams = events.watcher_count(),
                     .watch_overflows = events.overflow_count()});
}

void Daemon::Shutdown() {
  Impl& impl = *impl_;
  if (impl.stopped) return;
  impl.stopped = true;
  impl.server->SetReady(false);
  impl.metrics.SetReady(false);
  impl.metrics.SetDraining(true);
  impl.loop.Post([](Controller& controller) { controller.BeginShutdown(); });
  if (impl.options.config.ephemeral) {
    // The controller kills hosts that outstay their grace, so this ends; the bound is for a broken
    // kernel.
    const auto deadline =
        std::chrono::steady_clock::now() +
        std::chrono::duration_cast<std::chrono::steady_clock::duration>(
            std::chrono::duration<double>(90 + impl.options.config.stop_slack_seconds));
    const MutexLock lock(impl.mutex);
    impl.idle = false;
    impl.loop.Post([](Controller&) {});  // Says whether it is idle now.
    while (!impl.idle && std::chrono::steady_clock::now() < deadline) {
      impl.changed.WaitFor(impl.mutex, std::chrono::milliseconds(200));
    }
  }
  impl.services.stopping = true;
  std::promise<void> barrier;
  impl.loop.Post([&](Controller& controller) {
    controller.EndWaits(DaemonStopping());
    impl.events.EndAll(DaemonStopping());
    barrier.set_value();
  });
  // Whoever comes to the loop from here on sees `stopping` and asks the planners nothing.
  barrier.get_future().wait();
  impl.services.planners.join();
  impl.server->Shutdown();
  impl.loop.Stop();
  impl.server.reset();  // And with it the socket's file.
}

const std::string& Daemon::socket() const { return impl_->options.config.socket; }
std::string Daemon::metrics_address() const { return impl_->metrics.address(); }

}  // namespace oom
