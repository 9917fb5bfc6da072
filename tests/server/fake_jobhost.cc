// A job host without workers, for tests of the daemon. It speaks the frames, numbers its
// transitions, repeats those that are not acknowledged to every daemon that connects, and writes
// log files. Labels of the job say what it does: "steps" to make (0: until it is stopped),
// "die_at_step" (SIGKILL to itself, once an attempt of at most "die_attempts"),
// "step_milliseconds", "log_lines" a step.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>

#include "oom/internal/v1/control.pb.h"
#include "runtime/base/check.h"
#include "runtime/base/file.h"
#include "runtime/base/unique_fd.h"
#include "runtime/ipc/frame.h"
#include "server/jobhost/host_pid_file.h"

namespace oom {
namespace {

using SteadyClock = std::chrono::steady_clock;

class FakeHost {
 public:
  explicit FakeHost(internal::v1::JobStart start)
      : start_(std::move(start)), number_(start_.next_transition()) {
    // A clean exit code is no proof of the pools: look at them.
    for (int i = 0; i < start_.pools_size(); ++i) {
      struct stat info = {};
      OOM_CHECK(fstat(start_.first_pool_fd() + i, &info) == 0 &&
                info.st_size >= start_.pools(i).bytes());
      OOM_CHECK((fcntl(start_.first_pool_fd() + i, F_GET_SEALS) & F_SEAL_SHRINK) != 0);
    }
    OOM_CHECK(fcntl(start_.first_pool_fd() + start_.pools_size(), F_GETFD) < 0);
    logs_ = start_.spec().output() + "/logs/attempt-" + std::to_string(start_.first_attempt());
    OOM_CHECK(MakeDirectories(logs_).ok());
    OOM_CHECK(WriteHostPid(start_.job_directory(), {.pid = getpid(),
                                                    .start_ticks = ProcessStartTicks(getpid()),
                                                    .is_running = true})
                  .ok());
    // Steps that an earlier attempt made durable.
    const Result<std::string> saved = ReadFile(start_.spec().output() + "/durable");
    if (saved.ok()) durable_ = step_ = std::atoll(saved->c_str());
    Listen();
  }

  int Run() {
    Append(v1::JOB_STATE_STARTING, "");
    Append(v1::JOB_STATE_RUNNING, "");
    const auto step_time = std::chrono::milliseconds(Label("step_milliseconds", 5));
    auto next_step = SteadyClock::now() + step_time;
    while (true) {
      if (ended_ && pending_.empty()) return 0;
      Poll(next_step);
      if (ended_ || SteadyClock::now() < next_step) continue;
      next_step = SteadyClock::now() + step_time;
      Step();
    }
  }

 private:
  long long Label(const std::string& key, long long otherwise) const {
    const auto it = start_.spec().labels().find(key);
    return it == start_.spec().labels().end() ? otherwise : std::atoll(it->second.c_str());
  }
  void Listen() {
    const std::string path = start_.job_directory() + "/host.sock";
    unlink(path.c_str());
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    OOM_CHECK(path.size() < sizeof(address.sun_path));
    std::memcpy(address.sun_path, path.data(), path.size());
    listener_ = UniqueFd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    OOM_CHECK(bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
    OOM_CHECK(listen(listener_.get(), 8) == 0);
  }
  void Append(v1::JobState state, const std::string& reason) {
    internal::v1::HostFrame frame;
    internal::v1::Transition& transition = *frame.mutable_transition();
    transition.set_number(number_++);
    transition.set_state(state);
    transition.set_reason(reason);
    transition.set_attempt(start_.first_attempt());
    transition.set_step(step_);
    transition.set_durable_step(durable_);
    pending_.push_back(frame);
    Send(frame);
  }
  void Send(const internal::v1::HostFrame& frame) {
    const std::string bytes = EncodeFrame(frame.SerializeAsString());
    if (daemon_.valid() && send(daemon_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) !=
                               static_cast<ssize_t>(bytes.size())) {
      daemon_.Reset();
    }
  }
  internal::v1::Progress Progress() const {
    internal::v1::Progress progress;
    progress.set_step(step_);
    progress.set_durable_step(durable_);
    progress.set_loss(1.0 / static_cast<double>(step_ + 1));
    progress.set_tokens(step_ * 100);
    progress.set_step_seconds(0.005);
    return progress;
  }
  void Save() {
    durable_ = step_;
    OOM_CHECK(
        WriteFileAtomically(start_.spec().output() + "/durable", std::to_string(durable_)).ok());
  }
  void Finish(v1::JobState state, const std::string& reason) {
    Append(v1::JOB_STATE_STOPPING, reason);
    Append(state, reason);
    ended_ = true;
  }
  void Step() {
    ++step_;
    if (FILE* log = std::fopen((logs_ + "/rank-0.log").c_str(), "a")) {
      for (long long i = 0; i < Label("log_lines", 1); ++i)
        std::fprintf(log, "step %lld line %lld\n", static_cast<long long>(step_), i);
      std::fclose(log);
    }
    if (step_ == Label("die_at_step", -1) && start_.first_attempt() <= Label("die_attempts", 1))
      raise(SIGKILL);
    internal::v1::HostFrame frame;
    *frame.mutable_progress() = Progress();
    Send(frame);
    const long long steps = Label("steps", 10);
    if (steps > 0 && step_ >= steps) {
      Save();
      Finish(v1::JOB_STATE_SUCCEEDED, "");
    }
  }
  void Poll(SteadyClock::time_point until) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(until - SteadyClock::now()).count();
    pollfd polled[2] = {{.fd = listener_.get(), .events = POLLIN, .revents = 0},
                        {.fd = daemon_.get(), .events = POLLIN, .revents = 0}};
    poll(polled, daemon_.valid() ? 2 : 1,
         static_cast<int>(std::max<long long>(0, ended_ ? 1000 : left)));
    if (polled[1].revents != 0 && daemon_.valid()) Receive();
    if (polled[0].revents != 0) {
      daemon_ = UniqueFd(accept(listener_.get(), nullptr, nullptr));
      decoder_ = FrameDecoder();
      internal::v1::HostFrame hello;
      hello.mutable_hello()->set_uid(start_.uid());
      hello.mutable_hello()->set_pid(getpid());
      *hello.mutable_hello()->mutable_progress() = Progress();
      Send(hello);
      for (const auto& frame : pending_) Send(frame);
    }
  }
  void Receive() {
    char bytes[4096];
    const ssize_t got = read(daemon_.get(), bytes, sizeof(bytes));
    if (got <= 0) return daemon_.Reset();
    OOM_CHECK(decoder_.Append({bytes, static_cast<size_t>(got)}).ok());
    while (const auto payload = decoder_.Next()) {
      internal::v1::DaemonFrame frame;
      OOM_CHECK(frame.ParseFromString(*payload));
      if (frame.has_ack()) {
        while (!pending_.empty() && pending_.front().transition().number() <= frame.ack().number())
          pending_.pop_front();
      } else if (frame.has_stop() && !ended_) {
        if (frame.stop().checkpoint()) Save();
        Finish(frame.stop().final_state(), frame.stop().reason());
      } else if (frame.has_checkpoint()) {
        Save();
        internal::v1::HostFrame done;
        done.mutable_checkpoint_done()->set_request(frame.checkpoint().request());
        done.mutable_checkpoint_done()->set_step(durable_);
        done.mutable_checkpoint_done()->set_path(start_.spec().output() + "/durable");
        Send(done);
      }
    }
  }

  const internal::v1::JobStart start_;
  int64_t number_ = 0;
  int64_t step_ = 0;
  int64_t durable_ = 0;
  bool ended_ = false;
  std::string logs_;
  std::deque<internal::v1::HostFrame> pending_;
  UniqueFd listener_;
  UniqueFd daemon_;
  FrameDecoder decoder_;
};

}  // namespace
}  // namespace oom

int main(int argc, char** argv) {
  OOM_CHECK(argc == 3 && std::strcmp(argv[1], "--start") == 0);
  const oom::Result<std::string> bytes = oom::ReadFile(argv[2]);
  oom::internal::v1::JobStart start;
  OOM_CHECK(bytes.ok() && start.ParseFromString(*bytes));
  return oom::FakeHost(std::move(start)).Run();
}
