#include "worker/worker_main.h"

#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "oom/internal/v1/control.pb.h"
#include "runtime/base/build_id.h"
#include "runtime/base/mutex.h"
#include "runtime/ipc/channel.h"
#include "worker/worker.h"

namespace oom {
namespace {

// 0 if the flag is missing or not a number.
int FlagValue(int argc, char** argv, const char* flag, int otherwise) {
  for (int i = 1; i + 1 < argc; ++i) {
    if (std::strcmp(argv[i], flag) == 0) return std::atoi(argv[i + 1]);
  }
  return otherwise;
}

class ControlLink {
 public:
  explicit ControlLink(int fd) : channel_(UniqueFd(fd)) {}

  Channel& channel() { return channel_; }

  // The job host sees the end of the stream if this fails; there is nobody else to tell.
  void Send(const internal::v1::WorkerFrame& frame) {
    MutexLock lock(mutex_);
    static_cast<void>(channel_.Send(frame));
  }

  // At most one failure is reported: the first is the cause of the others.
  void SendFailure(const Status& status) {
    if (status.code() == Code::kAborted) return;
    internal::v1::WorkerFrame frame;
    auto* failed = frame.mutable_failed();
    failed->set_code(static_cast<int>(status.code()));
    failed->set_message(status.message());
    failed->set_reason(status.reason());
    failed->set_field(status.field());
    {
      MutexLock lock(mutex_);
      if (failure_sent_) return;
      failure_sent_ = true;
    }
    std::fprintf(stderr, "rank failed: %s\n", status.ToString().c_str());
    Send(frame);
  }

 private:
  Channel channel_;
  Mutex mutex_;
  bool failure_sent_ OOM_GUARDED_BY(mutex_) = false;
};

int RunWorker(ControlLink* link, const MakeDevice& make_device) {
  internal::v1::HostToWorkerFrame first;
  std::vector<UniqueFd> descriptors;
  Status status = link->channel().Receive(&first, &descriptors);
  if (!status.ok() || !first.has_start() || descriptors.empty()) {
    std::fprintf(stderr, "no start from the job host: %s\n", status.ToString().c_str());
    return 2;
  }
  UniqueFd page = std::move(descriptors.front());
  descriptors.erase(descriptors.begin());
  auto device = make_device(first.start());
  if (!device.ok()) {
    link->SendFailure(device.status());
    return 1;
  }
  auto worker = Worker::Create(first.start(), std::move(device).value(), std::move(page),
                               std::move(descriptors));
  if (!worker.ok()) {
    link->SendFailure(worker.status());
    return 1;
  }
  internal::v1::WorkerFrame ready;
  ready.mutable_ready()->set_build_id(std::string(BuildId()));
  ready.mutable_ready()->set_graph_hash((*worker)->graph_hash());
  ready.mutable_ready()->set_device_bytes_planned((*worker)->device_bytes_planned());
  link->Send(ready);
  status = (*worker)->Run([link](const Status& failure) { link->SendFailure(failure); });
  if (!status.ok()) {
    link->SendFailure(status);
    return 1;
  }
  internal::v1::WorkerFrame done;
  *done.mutable_done() = (*worker)->Summary();
  link->Send(done);
  return 0;
}

}  // namespace

int WorkerMain(int argc, char** argv, const MakeDevice& make_device) {
  ::signal(SIGPIPE, SIG_IGN);
  const int fd = FlagValue(argc, argv, "--control-fd", -1);
  if (fd < 0) {
    std::fprintf(stderr, "%s is started by oom-jobhost: --rank R --control-fd N\n", argv[0]);
    return 2;
  }
  ControlLink link(fd);
  return RunWorker(&link, make_device);
}

}  // namespace oom
