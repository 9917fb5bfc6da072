// oomd with the fake planner, as a process of its own: `test_oomd <state dir> <job host>`. Serves
// until SIGTERM.
#include <signal.h>

#include <cstdio>

#include "server/oomd/daemon.h"
#include "server/oomd/log_setup.h"
#include "tests/server/fake_planner.h"

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  oom::SetUpLog("text", "warning");
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGPIPE, SIG_IGN);
  oom::Daemon::Options options;
  options.config.state_dir = argv[1];
  options.config.socket = std::string(argv[1]) + "/oomd.sock";
  options.config.jobhost_path = argv[2];
  options.config.worker_path = "/nonexistent";
  options.config.metrics_port = -1;
  options.config.backoff_initial_seconds = 0.01;
  options.config.max_queued_jobs = 100000;
  options.config.cpu_devices = 1;
  options.plan = oom::FakePlan;
  options.version = "test";
  auto daemon = oom::Daemon::Start(std::move(options));
  if (!daemon.ok()) {
    std::fprintf(stderr, "%s\n", daemon.status().ToString().c_str());
    return 1;
  }
  std::printf("oomd ready\n");
  std::fflush(stdout);
  int received = 0;
  sigwait(&signals, &received);
  (*daemon)->Shutdown();
  return 0;
}
