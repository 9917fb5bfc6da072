#include "client/interrupt.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <utility>

#include "client/exit_code.h"

namespace oom {
namespace {

// SIGUSR2 wakes the thread to end it: nothing else in this program uses it.
constexpr int kStopSignal = SIGUSR2;

sigset_t WatchedSignals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGINT);
  sigaddset(&set, kStopSignal);
  return set;
}

}  // namespace

Interrupt::Interrupt() {
  const sigset_t set = WatchedSignals();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  thread_ = std::thread([this] { Loop(); });
}

Interrupt::~Interrupt() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  pthread_kill(thread_.native_handle(), kStopSignal);
  thread_.join();
  const sigset_t set = WatchedSignals();
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
}

void Interrupt::OnInterrupt(std::function<void()> callback) {
  MutexLock lock(mutex_);
  callback_ = std::move(callback);
  count_ = 0;
}

int Interrupt::count() const {
  MutexLock lock(mutex_);
  return count_;
}

bool Interrupt::WaitForMoreThan(int count, double seconds) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  MutexLock lock(mutex_);
  while (count_ <= count && std::chrono::steady_clock::now() < until) {
    changed_.WaitFor(mutex_, until - std::chrono::steady_clock::now());
  }
  return count_ > count;
}

void Interrupt::Loop() {
  const sigset_t set = WatchedSignals();
  while (true) {
    int signal = 0;
    if (sigwait(&set, &signal) != 0) continue;
    MutexLock lock(mutex_);
    if (stopping_) return;
    if (signal != SIGINT) continue;
    // Nothing is being followed: what Ctrl-C does to any program.
    if (!callback_) _exit(kExitDetached);
    ++count_;
    callback_();
    changed_.NotifyAll();
  }
}

}  // namespace oom
