// oomd: the node daemon.
#include <signal.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <map>
#include <optional>
#include <string>

#include "planner/plan_job.h"
#include "server/oomd/daemon.h"
#include "server/oomd/log_setup.h"

extern char** environ;

namespace oom {
namespace {

constexpr const char* kVersion = "0.1.0";

// What a flag gave, by configuration key.
using Settings = std::map<std::string, std::string>;

int Fail(const Status& status) {
  std::fprintf(stderr, "oomd: %s\n", status.message().c_str());
  if (status.code() == Code::kInvalidArgument) return 2;
  return status.code() == Code::kPermissionDenied ? 5 : 1;
}

std::map<std::string, std::string> Environment() {
  std::map<std::string, std::string> variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const size_t equals = text.find('=');
    if (equals != std::string::npos) variables[text.substr(0, equals)] = text.substr(equals + 1);
  }
  return variables;
}

std::string ProgramPath() {
  char path[4096];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof(path));
  return length > 0 ? std::string(path, static_cast<size_t>(length)) : "oomd";
}

Result<Config> ReadConfig(const std::string& path, const Settings& flags) {
  const std::map<std::string, std::string> environment = Environment();
  Config config;
  if (!path.empty()) {
    OOM_RETURN_IF_ERROR(ApplyFile(path, &config));
  } else {
    const auto home = environment.find("XDG_CONFIG_HOME");
    const std::string folder = home != environment.end()      ? home->second
                               : environment.contains("HOME") ? environment.at("HOME") + "/.config"
                                                              : "/root/.config";
    for (const std::string& standard :
         {std::string("/etc/oom/oomd.yaml"), folder + "/oom/oomd.yaml"}) {
      const Status status = ApplyFile(standard, &config);
      if (!status.ok() && status.code() != Code::kNotFound) return status;
    }
  }
  OOM_RETURN_IF_ERROR(ApplyEnvironment(environment, &config));
  for (const auto& [key, value] : flags)
    OOM_RETURN_IF_ERROR(ApplySetting(key, value, "command line", &config));
  FillDefaults(environment, ProgramPath(), &config);
  return config;
}

int Main(int argc, char** argv) {
  CLI::App app("oomd, the node daemon of OOM: keeps the queue of jobs and starts them.");
  std::string config_path;
  Settings flags;
  bool foreground = false;
  app.set_version_flag("--version", kVersion);
  app.add_option("--config", config_path, "Configuration file (YAML)");
  app.add_flag("--foreground", foreground,
               "Stay in the foreground (oomd always does; for service files)");
  app.add_flag_callback(
      "--ephemeral", [&] { flags["ephemeral"] = "true"; },
      "On SIGTERM, checkpoint and end the running jobs");
  const auto option = [&](const std::string& flag, const std::string& key,
                          const std::string& help) {
    app.add_option_function<std::string>(
        flag, [&flags, key](const std::string& value) { flags[key] = value; }, help);
  };
  option("--state-dir", "state_dir", "Where jobs are kept; on a local disk");
  option("--socket", "socket", "Unix socket to serve on");
  option("--metrics-port", "metrics_port",
         "Port of the Prometheus endpoint on 127.0.0.1; 0: any, -1: none");
  option("--log-format", "log_format", "text or json");
  option("--log-level", "log_level", "debug, info, warning or error");
  option("--jobhost-path", "jobhost_path", "The oom-jobhost program");
  option("--worker-path", "worker_path", "The oom-worker program");
  option("--backoff-initial", "backoff_initial",
         "Wait before the first new attempt of a failed job, such as 10s");
  option("--backoff-max", "backoff_max", "Longest wait before a new attempt");
  option("--pool-capacity", "pool_capacity",
         "Host memory for jobs, such as 64GiB; a list by NUMA node with commas");
  option("--cpu-devices", "cpu_devices", "How many cpu devices this node offers");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  Result<Config> config = ReadConfig(config_path, flags);
  if (!config.ok()) return Fail(config.status());
  SetUpLog(config->log_format, config->log_level);

  // Before any thread is made, so that all of them inherit the mask and only sigwait sees these.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGPIPE, SIG_IGN);
  signal(SIGHUP, SIG_IGN);

  Daemon::Options options{
      .config = config.value(), .plan = PlanJob, .topology = nullptr, .version = kVersion};
  Result<std::unique_ptr<Daemon>> daemon = Daemon::Start(std::move(options));
  if (!daemon.ok()) return Fail(daemon.status());
  std::printf(
      "oomd ready on %s, metrics on %s\n", (*daemon)->socket().c_str(),
      (*daemon)->metrics_address().empty() ? "no port" : (*daemon)->metrics_address().c_str());
  std::fflush(stdout);
  int received = 0;
  sigwait(&signals, &received);
  spdlog::info("stopping on {}", received == SIGTERM ? "SIGTERM" : "SIGINT");
  // A second signal ends it at once.
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
  (*daemon)->Shutdown();
  // Everything is closed and on the disk. The metrics server's threads would take two more seconds
  // to notice.
  std::fflush(nullptr);
  _exit(0);
}

}  // namespace
}  // namespace oom

int main(int argc, char** argv) { return oom::Main(argc, argv); }
