#include "server/oomd/process_launcher.h"

#include <signal.h>
#include <spdlog/spdlog.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <boost/asio/buffer.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/write.hpp>
#include <chrono>
#include <deque>
#include <map>

#include "runtime/base/file.h"
#include "runtime/ipc/frame.h"
#include "runtime/memory/pool.h"
#include "server/jobhost/host_pid_file.h"
#include "server/jobhost/transition_journal.h"
#include "server/oomd/host_process.h"
#include "server/oomd/unix_socket.h"

namespace oom {
namespace {

using boost::system::error_code;
constexpr std::chrono::milliseconds kConnectInterval(50);

}  // namespace

// One job host: its process, and the connection to it. Handlers hold a shared_ptr, so it lives
// until the last of them has run.
class HostLink : public std::enable_shared_from_this<HostLink> {
 public:
  HostLink(ProcessLauncher::Impl& owner, boost::asio::io_context& context, std::string uid,
           std::string socket_path, HostProcess process)
      : owner_(owner),
        uid_(std::move(uid)),
        socket_path_(std::move(socket_path)),
        pid_(process.pid),
        pidfd_(context, process.pidfd.Release()),
        socket_(context),
        timer_(context) {}

  void Begin() {
    pidfd_.async_wait(boost::asio::posix::stream_descriptor::wait_read,
                      [self = shared_from_this()](const error_code& error) {
                        if (!error) self->OnProcessEnd();
                      });
    TryConnect();
  }
  void Send(const internal::v1::DaemonFrame& frame);
  void Kill() {
    // The pidfd first: while it names a live process, so does the number, and the host leads its
    // group.
    if (syscall(SYS_pidfd_send_signal, pidfd_.native_handle(), SIGKILL, nullptr, 0) == 0)
      kill(-pid_, SIGKILL);
  }
  void Close() {
    closed_ = true;
    error_code ignored;
    socket_.close(ignored);
    pidfd_.close(ignored);
    timer_.cancel(ignored);
  }

 private:
  void TryConnect();
  void Read();
  void Write();
  void Disconnected();
  void OnProcessEnd();
  // false: the bytes were no frames.
  bool Take(std::string_view bytes);
  void Dispatch(const internal::v1::HostFrame& frame);

  ProcessLauncher::Impl& owner_;
  const std::string uid_;
  const std::string socket_path_;
  const pid_t pid_;
  boost::asio::posix::stream_descriptor pidfd_;
  boost::asio::local::stream_protocol::socket socket_;
  boost::asio::steady_timer timer_;
  bool connected_ = false;
  bool closed_ = false;
  FrameDecoder decoder_;
  std::array<char, 65536> read_buffer_;
  std::deque<std::string> to_write_;
};

struct ProcessLauncher::Impl {
  Impl(const Options& options_in, boost::asio::io_context& context_in, NumaTopology& topology_in)
      : options(options_in), context(context_in), topology(topology_in) {}

  const Options options;
  boost::asio::io_context& context;
  NumaTopology& topology;
  HostEvents* events = nullptr;
  std::function<void()> after;
  std::map<std::string, std::vector<UniqueFd>> pools;
  std::map<std::string, std::shared_ptr<HostLink>> links;

  std::string Directory(const std::string& uid) const {
    return options.job_directory_root + "/" + uid;
  }
  void Track(const std::string& uid, HostProcess process) {
    auto link = std::make_shared<HostLink>(*this, context, uid, Directory(uid) + "/host.sock",
                                           std::move(process));
    links[uid] = link;
    // Never back into the caller from within a call.
    boost::asio::post(context, [link] { link->Begin(); });
  }
};

void HostLink::TryConnect() {
  if (closed_ || connected_) return;
  Result<UniqueFd> fd = ConnectUnix(socket_path_);
  // The socket's file of an earlier host, or one that another process made, is not this host.
  ucred credentials = {};
  socklen_t size = sizeof(credentials);
  if (fd.ok() && (getsockopt(fd->get(), SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0 ||
                  credentials.pid != pid_)) {
    fd = Status(Code::kUnavailable, "another process listens");
  }
  if (!fd.ok()) {
    timer_.expires_after(kConnectInterval);
    timer_.async_wait([self = shared_from_this()](const error_code& error) {
      if (!error) self->TryConnect();
    });
    return;
  }
  error_code error;
  socket_.assign(boost::asio::local::stream_protocol(), fd->Release(), error);
  socket_.non_blocking(true, error);
  connected_ = true;
  decoder_ = FrameDecoder();
  to_write_.clear();
  Read();
}

void HostLink::Read() {
  socket_.async_read_some(boost::asio::buffer(read_buffer_),
                          [self = shared_from_this()](const error_code& error, size_t bytes) {
                            if (self->closed_ || !self->connected_) return;
                            if (error || !self->Take({self->read_buffer_.data(), bytes}))
                              return self->Disconnected();
                            self->Read();
                          });
}

bool HostLink::Take(std::string_view bytes) {
  const Status status = decoder_.Append(bytes);
  while (std::optional<std::string> payload = decoder_.Next()) {
    internal::v1::HostFrame frame;
    if (!frame.ParseFromString(*payload)) return false;
    Dispatch(frame);
  }
  owner_.after();
  return status.ok();
}

void HostLink::Dispatch(const internal::v1::HostFrame& frame) {
  switch (frame.body_case()) {
    case internal::v1::HostFrame::kHello:
      return owner_.events->OnHello(uid_, frame.hello());
    case internal::v1::HostFrame::kTransition:
      return owner_.events->OnTransition(uid_, frame.transition());
    case internal::v1::HostFrame::kProgress:
      return owner_.events->OnProgress(uid_, frame.progress());
    case internal::v1::HostFrame::kCheckpointDone:
      return owner_.events->OnCheckpointDone(uid_, frame.checkpoint_done());
    default:
      return;
  }
}

void HostLink::Disconnected() {
  connected_ = false;
  error_code ignored;
  socket_.close(ignored);
  to_write_.clear();
  owner_.events->OnDisconnect(uid_);
  owner_.after();
  timer_.expires_after(kConnectInterval);
  timer_.async_wait([self = shared_from_this()](const error_code& error) {
    if (!error) self->TryConnect();
  });
}

void HostLink::OnProcessEnd() {
  if (closed_) return;
  // What the host wrote before it died counts: read to the end of the stream.
  while (connected_) {
    error_code error;
    const size_t bytes = socket_.read_some(boost::asio::buffer(read_buffer_), error);
    if (error || !Take({read_buffer_.data(), bytes})) break;
  }
  // Its workers go with it, and if it was a child of this daemon, it is reaped.
  kill(-pid_, SIGKILL);
  waitpid(pid_, nullptr, WNOHANG);
  const auto self = shared_from_this();
  Close();
  owner_.links.erase(uid_);
  RemoveHostPid(owner_.Directory(uid_));
  owner_.events->OnExit(uid_);
  owner_.after();
}

void HostLink::Send(const internal::v1::DaemonFrame& frame) {
  if (!connected_) return;
  to_write_.push_back(EncodeFrame(frame.SerializeAsString()));
  if (to_write_.size() == 1) Write();
}

void HostLink::Write() {
  boost::asio::async_write(socket_, boost::asio::buffer(to_write_.front()),
                           [self = shared_from_this()](const error_code& error, size_t) {
                             // After an error the reading side sees the end, too, and connects
                             // again.
                             if (error || self->closed_ || self->to_write_.empty()) return;
                             self->to_write_.pop_front();
                             if (!self->to_write_.empty()) self->Write();
                           });
}

ProcessLauncher::ProcessLauncher(const Options& options, boost::asio::io_context& context,
                                 NumaTopology& topology)
    : impl_(std::make_unique<Impl>(options, context, topology)) {}

ProcessLauncher::~ProcessLauncher() {
  for (const auto& [uid, link] : impl_->links) link->Close();
}

void ProcessLauncher::SetEvents(HostEvents* events, std::function<void()> after) {
  impl_->events = events;
  impl_->after = std::move(after);
}

Status ProcessLauncher::Start(const internal::v1::JobStart& start) {
  const std::string& uid = start.uid();
  OOM_RETURN_IF_ERROR(MakeDirectories(start.job_directory()));
  internal::v1::JobStart written = start;
  std::vector<UniqueFd>& pools = impl_->pools[uid];
  // A host that is started again gets the pools of the one before.
  if (static_cast<int>(pools.size()) != start.pools_size()) {
    pools.clear();
    for (const internal::v1::Pool& pool : start.pools()) {
      const int node = std::clamp(pool.numa_node(), 0, impl_->topology.node_count() - 1);
      Result<CreatedPool> created =
          CreatePool(impl_->topology, {.name = "oom-" + start.job_id() + "-" + pool.name(),
                                       .numa_node = node,
                                       .bytes = pool.bytes(),
                                       .allow_hugetlb = impl_->options.allow_hugetlb});
      if (!created.ok()) {
        pools.clear();
        return created.status();
      }
      written.mutable_pools(static_cast<int>(pools.size()))->set_page_kind(created->page_kind);
      pools.push_back(std::move(created->fd));
    }
  }
  const std::string start_path = start.job_directory() + "/job.pb";
  OOM_RETURN_IF_ERROR(WriteFileAtomically(start_path, written.SerializeAsString()));
  SpawnOptions spawn{.program = impl_->options.jobhost_path,
                     .arguments = {"--start", start_path},
                     .directory = start.job_directory(),
                     .descriptors = {},
                     .first_fd = start.first_pool_fd()};
  for (const UniqueFd& pool : pools) spawn.descriptors.push_back(pool.get());
  OOM_ASSIGN_OR_RETURN(HostProcess process, SpawnHost(spawn));
  impl_->Track(uid, std::move(process));
  return Status::Ok();
}

Launcher::Found ProcessLauncher::Adopt(const std::string& uid) {
  Result<HostProcess> process = FindHost(impl_->Directory(uid));
  if (!process.ok()) {
    if (process.status().code() == Code::kNotFound) return Found::kNeverStarted;
    RemoveHostPid(impl_->Directory(uid));
    return Found::kDead;
  }
  impl_->Track(uid, std::move(process.value()));
  return Found::kAlive;
}

std::vector<internal::v1::Transition> ProcessLauncher::Leftovers(const std::string& uid) {
  const std::string path = impl_->Directory(uid) + "/transitions.journal";
  if (access(path.c_str(), F_OK) != 0) return {};
  const Result<std::unique_ptr<TransitionJournal>> journal = TransitionJournal::Open(path, 0);
  if (journal.ok()) return (*journal)->pending();
  spdlog::warn("the journal of a dead job host is not readable: {}", journal.status().ToString());
  return {};
}

void ProcessLauncher::Send(const std::string& uid, const internal::v1::DaemonFrame& frame) {
  if (const auto it = impl_->links.find(uid); it != impl_->links.end()) it->second->Send(frame);
}

void ProcessLauncher::Kill(const std::string& uid) {
  if (const auto it = impl_->links.find(uid); it != impl_->links.end()) it->second->Kill();
}

void ProcessLauncher::ReleasePools(const std::string& uid) { impl_->pools.erase(uid); }

}  // namespace oom
