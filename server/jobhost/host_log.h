// The job host's own log: spdlog's default logger writes to stderr and to a file that changes with
// the attempt, <output>/logs/attempt-<A>/jobhost.log. Thread-safe.

#pragma once

#include <memory>
#include <string>

namespace oom {

class HostLog {
 public:
  // Becomes spdlog's default logger.
  HostLog();
  ~HostLog();

  // Lines go here from now on, too. A file that cannot be opened is said on stderr; nothing else
  // depends on it.
  void WriteTo(const std::string& path);

 private:
  class Sink;
  std::shared_ptr<Sink> sink_;
};

}  // namespace oom
