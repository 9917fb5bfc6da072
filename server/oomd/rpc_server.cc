#include "server/oomd/rpc_server.h"

#include <fcntl.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <grpcpp/server_posix.h>
#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "runtime/base/units.h"
#include "server/oomd/services.h"

namespace oom {
namespace {

// Connections get descriptors from a range of their own, taken in turn: gRPC names a peer by it,
// and a call that is late must not be taken for one of the next client with the same number.
constexpr int kFirstPeerFd = 1000;
constexpr int kLastPeerFd = 60000;

}  // namespace

struct RpcServer::Impl {
  Impl(ServiceContext& services_in, ListeningSocket socket_in)
      : services(services_in), socket(std::move(socket_in)) {}

  void Accept();
  void Take(UniqueFd connection);

  ServiceContext& services;
  ListeningSocket socket;
  UniqueFd stop_event;
  std::unique_ptr<grpc::Service> job_service;
  std::unique_ptr<grpc::Service> node_service;
  std::unique_ptr<grpc::Server> server;
  std::thread acceptor;
  bool stopped = false;
  // Of the acceptor alone.
  int next_fd = kFirstPeerFd;
  int last_fd = kLastPeerFd;
};

RpcServer::RpcServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

RpcServer::~RpcServer() { Shutdown(); }

Result<std::unique_ptr<RpcServer>> RpcServer::Start(ServiceContext& services,
                                                    ListeningSocket socket) {
  auto impl = std::make_unique<Impl>(services, std::move(socket));
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    if (limit.rlim_cur != RLIM_INFINITY) {
      impl->last_fd = static_cast<int>(std::min<rlim_t>(kLastPeerFd, limit.rlim_cur - 1));
      impl->next_fd = std::min(kFirstPeerFd, impl->last_fd / 2);
    }
  }
  impl->stop_event = UniqueFd(eventfd(0, EFD_CLOEXEC));
  if (!impl->stop_event.valid()) return ErrnoStatus(errno, "eventfd");

  grpc::EnableDefaultHealthCheckService(true);
  static const bool reflection = [] {
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    return true;
  }();
  static_cast<void>(reflection);
  impl->job_service = MakeJobService(services);
  impl->node_service = MakeNodeService(services);
  grpc::ServerBuilder builder;
  builder.RegisterService(impl->job_service.get());
  builder.RegisterService(impl->node_service.get());
  builder.SetMaxReceiveMessageSize(static_cast<int>(4_MiB));
  builder.SetMaxSendMessageSize(static_cast<int>(16_MiB));
  grpc::ResourceQuota quota("oomd");
  quota.Resize(256_MiB);
  builder.SetResourceQuota(quota);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, 128);
  builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, static_cast<int>(16_KiB));
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 30000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  impl->server = builder.BuildAndStart();
  if (impl->server == nullptr) return Status(Code::kInternal, "gRPC does not start");
  impl->server->GetHealthCheckService()->SetServingStatus("liveness", true);
  impl->acceptor = std::thread([raw = impl.get()] { raw->Accept(); });
  auto server = std::unique_ptr<RpcServer>(new RpcServer(std::move(impl)));
  server->SetReady(false);
  return server;
}

void RpcServer::Impl::Accept() {
  pollfd polled[2] = {{.fd = socket.fd(), .events = POLLIN, .revents = 0},
                      {.fd = stop_event.get(), .events = POLLIN, .revents = 0}};
  while (true) {
    if (poll(polled, 2, -1) < 0 && errno != EINTR) return;
    if (polled[1].revents != 0) return;
    if ((polled[0].revents & POLLIN) == 0) continue;
    UniqueFd connection(accept4(socket.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (connection.valid()) {
      Take(std::move(connection));
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) {
      spdlog::warn("a connection is refused: {}", ErrnoStatus(errno, "accept").message());
      poll(&polled[1], 1, 100);  // Until some are closed, or the stop.
    }
  }
}

void RpcServer::Impl::Take(UniqueFd connection) {
  const Result<uid_t> uid = PeerUid(connection.get());
  if (!uid.ok()) return;
  int fd = fcntl(connection.get(), F_DUPFD_CLOEXEC, next_fd);
  if (fd < 0 || fd > last_fd) {
    if (fd >= 0) close(fd);
    next_fd = std::min(kFirstPeerFd, last_fd / 2);
    fd = fcntl(connection.get(), F_DUPFD_CLOEXEC, next_fd);
  }
  if (fd < 0) {
    spdlog::warn("a connection is refused: {}", ErrnoStatus(errno, "dup").message());
    return;
  }
  next_fd = fd + 1;
  services.peers.Add(fd, uid.value());
  grpc::AddInsecureChannelFromFd(server.get(), fd);
}

void RpcServer::SetReady(bool ready) {
  grpc::HealthCheckServiceInterface* health = impl_->server->GetHealthCheckService();
  for (const char* name : {"", "oom.v1.JobService", "oom.v1.NodeService", "readiness"}) {
    health->SetServingStatus(name, ready);
  }
}

void RpcServer::Shutdown() {
  if (impl_ == nullptr || impl_->stopped) return;
  impl_->stopped = true;
  const uint64_t one = 1;
  static_cast<void>(!write(impl_->stop_event.get(), &one, sizeof(one)));
  impl_->acceptor.join();
  impl_->server->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(2));
  impl_->server->Wait();
}

}  // namespace oom
