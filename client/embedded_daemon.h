// EmbeddedDaemon is a private `oomd --ephemeral --foreground` for one `oom train --embedded`: it
// listens on a socket of its own and ends with this object, or with this process however that ends.
// Not thread-safe. Start it before this process has other threads.

#pragma once

#include <sys/types.h>

#include <memory>
#include <string>

#include "runtime/base/status.h"

namespace oom {

// "/usr/bin/NAME" of the running "/usr/bin/oom", whether it is there or not.
Result<std::string> PathBeside(const std::string& name);
// The same of a program, "oomd". kNotFound when there is no such program.
Result<std::string> ProgramBeside(const std::string& name);

class EmbeddedDaemon {
 public:
  // `state_dir` empty: a temporary folder, removed at the end. The daemon may not serve yet.
  static Result<std::unique_ptr<EmbeddedDaemon>> Start(const std::string& state_dir);
  // SIGTERM, which makes an ephemeral oomd end its jobs after a checkpoint, and waits for it.
  ~EmbeddedDaemon();
  EmbeddedDaemon(const EmbeddedDaemon&) = delete;
  EmbeddedDaemon& operator=(const EmbeddedDaemon&) = delete;

  const std::string& socket_path() const { return socket_path_; }
  // kOk while it runs; else kUnavailable with the end of its log.
  Status CheckAlive();

 private:
  EmbeddedDaemon() = default;

  pid_t pid_ = -1;
  std::string folder_;
  bool folder_is_temporary_ = false;
  std::string socket_path_;
  std::string log_path_;
};

}  // namespace oom
