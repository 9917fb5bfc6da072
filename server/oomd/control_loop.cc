#include "server/oomd/control_loop.h"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <chrono>

#include "server/oomd/clock.h"

namespace oom {

ControlLoop::ControlLoop() : context_(1), guard_(context_.get_executor()), timer_(context_) {}

ControlLoop::~ControlLoop() { Stop(); }

void ControlLoop::Start(std::function<void()> after_flush) {
  after_flush_ = std::move(after_flush);
  thread_ = std::thread([this] {
    ArmTimer();
    context_.run();
  });
}

void ControlLoop::Stop() {
  if (!thread_.joinable()) return;
  boost::asio::post(context_, [this] {
    guard_.reset();
    context_.stop();
  });
  thread_.join();
}

void ControlLoop::Post(std::function<void(Controller&)> work) {
  boost::asio::post(context_, [this, work = std::move(work)] {
    work(*controller_);
    ScheduleFlush();
  });
}

void ControlLoop::ScheduleFlush() {
  if (flush_scheduled_) return;
  flush_scheduled_ = true;
  // Behind everything that is queued by now: one commit serves it all.
  boost::asio::post(context_, [this] {
    flush_scheduled_ = false;
    controller_->Flush();
    if (after_flush_) after_flush_();
    ArmTimer();
  });
}

void ControlLoop::ArmTimer() {
  const std::optional<double> deadline = controller_->NextDeadline();
  if (!deadline) return;
  const double wait = std::max(0.0, *deadline - SystemClock().MonotonicSeconds());
  timer_.expires_after(std::chrono::microseconds(static_cast<int64_t>(wait * 1e6) + 1));
  timer_.async_wait([this](const boost::system::error_code& error) {
    if (error) return;
    controller_->OnTimer();
    ScheduleFlush();
  });
}

}  // namespace oom
