#include "server/jobhost/control_server.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <boost/asio.hpp>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <deque>
#include <thread>

#include "runtime/base/mutex.h"
#include "runtime/ipc/frame.h"

namespace oom {

namespace asio = boost::asio;
using asio::local::stream_protocol;
using boost::system::error_code;
using internal::v1::DaemonFrame;
using internal::v1::HostFrame;

namespace {

// Frames that wait for a daemon which does not read; then it is cut off and connects again.
constexpr size_t kQueueLimit = 1024;

bool IsOurUserOrRoot(int fd) {
  struct ucred peer {};
  socklen_t size = sizeof(peer);
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return false;
  return peer.uid == ::geteuid() || peer.uid == 0;
}

// A bound and listening socket that only this user can reach from its first moment on.
Result<int> Listen(const std::string& path) {
  struct sockaddr_un address {};
  if (path.size() >= sizeof(address.sun_path)) {
    return Status(Code::kInvalidArgument, path + ": longer than a socket path may be (" +
                                              std::to_string(sizeof(address.sun_path) - 1) + ")");
  }
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return ErrnoStatus(errno, "cannot create the control socket");
  ::unlink(path.c_str());
  ::fchmod(fd, 0600);  // Before bind the mode of the socket is the mode of its future file.
  if (::bind(fd, reinterpret_cast<struct sockaddr*>(&address), sizeof(address)) != 0 ||
      ::chmod(path.c_str(), 0600) != 0 || ::listen(fd, 16) != 0) {
    const int error_number = errno;
    ::close(fd);
    return ErrnoStatus(error_number, "cannot listen at " + path);
  }
  return fd;
}

}  // namespace

// One daemon's connection; used on the server's thread alone.
struct DaemonConnection {
  explicit DaemonConnection(stream_protocol::socket connected) : socket(std::move(connected)) {}
  stream_protocol::socket socket;
  FrameDecoder decoder;
  std::array<char, 16384> buffer;
  std::deque<std::string> outgoing;
  int64_t sent_number = -1;  // Transitions up to this one were sent on this connection.
};

class ControlServer::Impl {
 public:
  explicit Impl(Options options)
      : options_(std::move(options)),
        acceptor_(io_),
        repeat_timer_(io_),
        progress_timer_(io_),
        absence_timer_(io_),
        signals_(io_) {}

  Status Start() {
    OOM_ASSIGN_OR_RETURN(const int listener, Listen(options_.socket_path));
    error_code error;
    acceptor_.assign(stream_protocol(), listener, error);
    if (error) return Status(Code::kInternal, "control socket: " + error.message());
    if (options_.on_terminate) {
      signals_.add(SIGTERM, error);
      if (error) return Status(Code::kInternal, "SIGTERM: " + error.message());
      WaitForSignal();
    }
    Accept();
    ArmRepeat();
    thread_ = std::thread([this] { io_.run(); });
    return Status::Ok();
  }

  ~Impl() {
    io_.stop();
    if (thread_.joinable()) thread_.join();
    if (acceptor_.is_open()) ::unlink(options_.socket_path.c_str());
  }

  template <class Work>
  void Post(Work work) {
    asio::post(io_, std::move(work));
  }

  void SendTransitions(bool again) {
    if (!connection_) return;
    // The daemon counts by progress frames: the last one before an end must not be left behind.
    if (progress_waits_) QueueProgress();
    for (internal::v1::Transition& transition : options_.journal->pending()) {
      if (!again && transition.number() <= connection_->sent_number) continue;
      connection_->sent_number = std::max(connection_->sent_number, transition.number());
      HostFrame frame;
      *frame.mutable_transition() = std::move(transition);
      Send(frame);
    }
  }

  void SetAttempt(int attempt) { options_.hello.set_attempt(attempt); }

  void SetProgress(const internal::v1::Progress& progress) {
    *options_.hello.mutable_progress() = progress;
    if (progress_armed_) {
      progress_waits_ = true;
    } else {
      SendProgress();
    }
  }

  void SendDone(const internal::v1::CheckpointDone& done) {
    HostFrame frame;
    *frame.mutable_checkpoint_done() = done;
    Send(frame);
  }

  bool WaitAcknowledged(std::chrono::milliseconds timeout) const {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    MutexLock lock(mutex_);
    while (!options_.journal->pending().empty()) {
      const auto left = deadline - std::chrono::steady_clock::now();
      if (left <= std::chrono::steady_clock::duration::zero()) return false;
      acknowledged_.WaitFor(mutex_, left);
    }
    return true;
  }

 private:
  void Accept() {
    acceptor_.async_accept([this](error_code error, stream_protocol::socket socket) {
      if (error == asio::error::operation_aborted) return;
      if (!error && IsOurUserOrRoot(socket.native_handle())) {
        Drop(connection_);
        connection_ = std::make_shared<DaemonConnection>(std::move(socket));
        absence_timer_.cancel();
        HostFrame frame;
        *frame.mutable_hello() = options_.hello;
        Send(frame);
        SendTransitions(true);
        Read(connection_);
      }
      Accept();
    });
  }

  void Drop(const std::shared_ptr<DaemonConnection>& connection) {
    if (!connection || connection != connection_) return;
    error_code ignored;
    connection->socket.close(ignored);
    connection_.reset();
    if (options_.absence_limit.count() == 0) return;
    absence_timer_.expires_after(options_.absence_limit);
    absence_timer_.async_wait([this](error_code error) {
      if (!error && !connection_) options_.on_absence();
    });
  }

  void Read(const std::shared_ptr<DaemonConnection>& connection) {
    connection->socket.async_read_some(
        asio::buffer(connection->buffer), [this, connection](error_code error, size_t count) {
          if (error || connection != connection_) return Drop(connection);
          const Status status = connection->decoder.Append({connection->buffer.data(), count});
          while (auto payload = connection->decoder.Next()) {
            DaemonFrame frame;
            if (!frame.ParseFromString(*payload)) return Drop(connection);
            Take(frame);
          }
          if (!status.ok()) return Drop(connection);
          Read(connection);
        });
  }

  void Take(const DaemonFrame& frame) {
    switch (frame.body_case()) {
      case DaemonFrame::kAck: {
        const Status status = options_.journal->Acknowledge(frame.ack().number());
        if (!status.ok() && options_.on_trouble) options_.on_trouble(status);
        MutexLock lock(mutex_);
        acknowledged_.NotifyAll();
        break;
      }
      case DaemonFrame::kStop:
        if (options_.on_stop) options_.on_stop(frame.stop());
        break;
      case DaemonFrame::kCheckpoint:
        if (options_.on_checkpoint) options_.on_checkpoint(frame.checkpoint());
        break;
      case DaemonFrame::BODY_NOT_SET:
        break;  // A newer daemon's frame: nothing that this host could do about it.
    }
  }

  void Send(const HostFrame& frame) {
    if (!connection_) return;
    if (connection_->outgoing.size() >= kQueueLimit) return Drop(connection_);
    connection_->outgoing.push_back(EncodeFrame(frame.SerializeAsString()));
    if (connection_->outgoing.size() == 1) Write(connection_);
  }

  void Write(const std::shared_ptr<DaemonConnection>& connection) {
    asio::async_write(connection->socket, asio::buffer(connection->outgoing.front()),
                      [this, connection](error_code error, size_t) {
                        if (error || connection != connection_) return Drop(connection);
                        connection->outgoing.pop_front();
                        if (!connection->outgoing.empty()) Write(connection);
                      });
  }

  void WaitForSignal() {
    signals_.async_wait([this](error_code error, int) {
      if (error) return;
      options_.on_terminate();
      WaitForSignal();
    });
  }

  void ArmRepeat() {
    repeat_timer_.expires_after(options_.repeat_interval);
    repeat_timer_.async_wait([this](error_code error) {
      if (error) return;
      // Only to a daemon that reads: what waits is not queued twice.
      if (connection_ && connection_->outgoing.empty()) SendTransitions(true);
      ArmRepeat();
    });
  }

  void QueueProgress() {
    progress_waits_ = false;
    HostFrame frame;
    *frame.mutable_progress() = options_.hello.progress();
    Send(frame);
  }

  void SendProgress() {
    // To a daemon that reads; for another one the newest progress waits.
    progress_waits_ = true;
    if (connection_ && connection_->outgoing.empty()) QueueProgress();
    progress_armed_ = true;
    progress_timer_.expires_after(options_.progress_interval);
    progress_timer_.async_wait([this](error_code error) {
      if (error) return;
      progress_armed_ = false;
      if (progress_waits_) SendProgress();
    });
  }

  Options options_;  // `hello` changes on the server's thread alone.
  asio::io_context io_;
  stream_protocol::acceptor acceptor_;
  asio::steady_timer repeat_timer_;
  asio::steady_timer progress_timer_;
  asio::steady_timer absence_timer_;
  asio::signal_set signals_;
  std::shared_ptr<DaemonConnection> connection_;
  bool progress_armed_ = false;
  bool progress_waits_ = false;

  mutable Mutex mutex_;
  mutable CondVar acknowledged_;

  std::thread thread_;
};

ControlServer::ControlServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ControlServer::~ControlServer() = default;

Result<std::unique_ptr<ControlServer>> ControlServer::Start(Options options) {
  auto impl = std::make_unique<Impl>(std::move(options));
  OOM_RETURN_IF_ERROR(impl->Start());
  return std::unique_ptr<ControlServer>(new ControlServer(std::move(impl)));
}

void ControlServer::TransitionsChanged() {
  impl_->Post([impl = impl_.get()] { impl->SendTransitions(false); });
}
void ControlServer::SetAttempt(int attempt) {
  impl_->Post([impl = impl_.get(), attempt] { impl->SetAttempt(attempt); });
}
void ControlServer::SetProgress(const internal::v1::Progress& progress) {
  impl_->Post([impl = impl_.get(), progress] { impl->SetProgress(progress); });
}
void ControlServer::CheckpointDone(const internal::v1::CheckpointDone& done) {
  impl_->Post([impl = impl_.get(), done] { impl->SendDone(done); });
}
bool ControlServer::WaitAcknowledged(std::chrono::milliseconds timeout) const {
  return impl_->WaitAcknowledged(timeout);
}

}  // namespace oom
