// The daemon's configuration: defaults, then the file, then its drop-ins ("<file>.d/*.yaml" by
// name), then OOMD_* variables, then flags. A key that is not known is an error with its line and
// the nearest key. Values; the functions are pure but for reading the files.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "runtime/base/status.h"

namespace oom {

struct Config {
  std::string socket;     // Default: $XDG_RUNTIME_DIR/oomd.sock, else <state_dir>/oomd.sock.
  std::string state_dir;  // Default: $XDG_STATE_HOME/oom, else ~/.local/state/oom.
  bool ephemeral = false;
  int metrics_port = 0;  // 0: the system picks; see NodeService.metrics_address. -1: none.
  std::string log_format = "text";  // Or "json".
  std::string log_level = "info";
  std::string jobhost_path;  // Default: oom-jobhost beside this program.
  std::string worker_path;   // Default: oom-worker beside this program.
  double backoff_initial_seconds = 10;
  double backoff_max_seconds = 600;
  double stop_slack_seconds = 30;
  // One value for the node or one for each NUMA node; empty: what the machine and its cgroups
  // allow.
  std::vector<int64_t> pool_capacity_bytes;
  int cpu_devices = 0;  // 0: as many as CPUs.
  int max_queued_jobs = 1000;
  bool hugepages = true;
};

// Applies one YAML text. Fails with kInvalidArgument; field() is the key, the message has `origin`
// and line.
Status ApplyYaml(const std::string& text, const std::string& origin, Config* config);

// One setting, as OOMD_<KEY> and flags give them: keys as in the file, lists separated by commas.
Status ApplySetting(const std::string& key, const std::string& value, const std::string& origin,
                    Config* config);

// The file and its drop-ins. REQUIRES nothing of `path`: fails with kNotFound if it is not there.
Status ApplyFile(const std::string& path, Config* config);

// Every OOMD_<KEY> of `environment`; an unknown one is an error too.
Status ApplyEnvironment(const std::map<std::string, std::string>& environment, Config* config);

// Fills in what is still empty. `program` is the path of this executable.
void FillDefaults(const std::map<std::string, std::string>& environment, const std::string& program,
                  Config* config);

// The keys of the file, sorted.
std::vector<std::string> ConfigKeys();

}  // namespace oom
