// Launcher starts job hosts, finds them again, and talks to them; HostEvents is what comes back.
// The process implementation is in process_launcher.h; tests have one without processes. All calls,
// both ways, are on the control thread. A Launcher never calls back from within a call.

#pragma once

#include <string>
#include <vector>

#include "oom/internal/v1/control.pb.h"
#include "runtime/base/status.h"

namespace oom {

class HostEvents {
 public:
  virtual ~HostEvents() = default;
  virtual void OnHello(const std::string& uid, const internal::v1::HostHello& hello) = 0;
  virtual void OnTransition(const std::string& uid, const internal::v1::Transition& transition) = 0;
  virtual void OnProgress(const std::string& uid, const internal::v1::Progress& progress) = 0;
  virtual void OnCheckpointDone(const std::string& uid,
                                const internal::v1::CheckpointDone& done) = 0;
  // The connection is gone, the process is not known to be; the launcher connects again by itself.
  virtual void OnDisconnect(const std::string& uid) = 0;
  // The process is gone; every frame that it sent was delivered before.
  virtual void OnExit(const std::string& uid) = 0;
};

class Launcher {
 public:
  enum class Found { kAlive, kDead, kNeverStarted };

  virtual ~Launcher() = default;
  // Creates the job's pools unless they are still there, and starts a host. Fails with
  // kResourceExhausted if the memory is not there, else with codes of ErrnoStatus.
  virtual Status Start(const internal::v1::JobStart& start) = 0;
  // After a restart of the daemon: takes over the host of `uid` if it is alive.
  virtual Found Adopt(const std::string& uid) = 0;
  // Transitions that a dead host has journalled and nobody has recorded yet, in order.
  virtual std::vector<internal::v1::Transition> Leftovers(const std::string& uid) = 0;
  // Dropped if the host is not connected: the controller sends what matters again after OnHello.
  virtual void Send(const std::string& uid, const internal::v1::DaemonFrame& frame) = 0;
  // SIGKILL to the host's process group.
  virtual void Kill(const std::string& uid) = 0;
  // The job holds no memory any more: closes its pools.
  virtual void ReleasePools(const std::string& uid) = 0;
};

}  // namespace oom
