// ProcessLauncher is the Launcher with real processes: pools as memfds, `oom-jobhost` in its own
// session, a pidfd for its end (also of a host that an earlier daemon started), and a socket of
// frames to it. Belongs to the control thread, whose io_context runs everything.

#pragma once

#include <boost/asio/io_context.hpp>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "runtime/memory/numa.h"
#include "server/oomd/launcher.h"

namespace oom {

class ProcessLauncher : public Launcher {
 public:
  struct Options {
    std::string job_directory_root;  // "<state>/jobs", which exists.
    std::string jobhost_path;
    bool allow_hugetlb = true;
  };

  // `context` and `topology` outlive the launcher.
  ProcessLauncher(const Options& options, boost::asio::io_context& context, NumaTopology& topology);
  ~ProcessLauncher() override;
  // Where events go; `after` runs after each of them (the commit). Call once, before anything else.
  void SetEvents(HostEvents* events, std::function<void()> after);

  Status Start(const internal::v1::JobStart& start) override;
  Found Adopt(const std::string& uid) override;
  std::vector<internal::v1::Transition> Leftovers(const std::string& uid) override;
  void Send(const std::string& uid, const internal::v1::DaemonFrame& frame) override;
  void Kill(const std::string& uid) override;
  void ReleasePools(const std::string& uid) override;

  struct Impl;

 private:
  const std::unique_ptr<Impl> impl_;
};

}  // namespace oom
