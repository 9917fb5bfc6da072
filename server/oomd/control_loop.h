// ControlLoop is the one thread that owns the daemon's core. Work from other threads is posted to
// it; all that has come in is then committed together (a group commit), and timers run on it.

#pragma once

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <functional>
#include <thread>

#include "server/oomd/controller.h"

namespace oom {

class ControlLoop {
 public:
  ControlLoop();
  ~ControlLoop();

  boost::asio::io_context& context() { return context_; }
  // The controller is made with context() and set before Start().
  void SetController(Controller* controller) { controller_ = controller; }
  // `after_flush` runs after every commit, on the thread.
  void Start(std::function<void()> after_flush);
  // Runs what is posted already, then ends the thread. Nothing may be posted from then on.
  void Stop();

  // Thread-safe. Work posted from one thread runs in that order.
  void Post(std::function<void(Controller&)> work);
  // On the thread: commits after everything that is waiting now.
  void ScheduleFlush();

 private:
  void ArmTimer();

  boost::asio::io_context context_;
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> guard_;
  boost::asio::steady_timer timer_;
  Controller* controller_ = nullptr;
  std::function<void()> after_flush_;
  bool flush_scheduled_ = false;
  std::thread thread_;
};

}  // namespace oom
