#include <numeric>

#include "oom/v1/node.grpc.pb.h"
#include "runtime/base/units.h"
#include "runtime/memory/host_memory.h"
#include "runtime/memory/hugepages.h"
#include "server/oomd/service_context.h"
#include "server/oomd/services.h"

namespace oom {
namespace {

class NodeServiceImpl final : public v1::NodeService::CallbackService {
 public:
  explicit NodeServiceImpl(ServiceContext& services) : services_(services) {}

  grpc::ServerUnaryReactor* GetNode(grpc::CallbackServerContext* context, const v1::GetNodeRequest*,
                                    v1::Node* response) override {
    const UnaryCall call(services_, *context, "GetNode");
    if (!call.ok()) return call.reactor();
    services_.loop->Post([=, this](Controller& controller) {
      Describe(controller.resources(), response);
      call.Finish(Status::Ok());
    });
    return call.reactor();
  }

 private:
  void AddDevices(const NodeResources& resources, v1::DeviceKind kind, const char* name,
                  v1::Node* node) const {
    const std::vector<std::string>& holders = resources.devices(kind);
    for (size_t i = 0; i < holders.size(); ++i) {
      v1::Device& device = *node->add_devices();
      device.set_index(static_cast<int32_t>(i));
      device.set_kind(name);
      device.set_name(std::string(name) + " " + std::to_string(i));
      if (kind == v1::DEVICE_KIND_CUDA && i < services_.gpus.size()) {
        device.set_name(services_.gpus[i].name);
        device.set_memory_bytes(services_.gpus[i].memory_bytes);
        device.set_numa_node(services_.gpus[i].numa_node);
      }
      if (holders[i].empty()) continue;
      for (const auto& [order, job] : services_.view->List(0, SIZE_MAX, {})) {
        if (job->uid() == holders[i]) device.set_job(job->name());
      }
    }
  }

  void Describe(const NodeResources& resources, v1::Node* node) const {
    node->set_name(services_.node_name);
    node->set_version(services_.version);
    node->set_cpu_count(services_.limits.cpu_count);
    node->set_memory_limit_source(services_.memory_limit_source);
    node->set_locked_memory_limit_bytes(LockedMemoryLimitBytes());
    node->set_metrics_address(services_.metrics->address());
    node->set_uptime_seconds(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - services_.start_time)
            .count());
    const std::vector<int64_t>& capacity = resources.capacity_bytes();
    const HugepageState pages = ExamineHugepages(
        std::accumulate(capacity.begin(), capacity.end(), int64_t{0}), services_.allow_hugetlb);
    for (int i = 0; i < static_cast<int>(capacity.size()); ++i) {
      v1::NumaNode& numa = *node->add_numa_nodes();
      numa.set_index(i);
      numa.set_pool_capacity_bytes(capacity[i]);
      numa.set_pool_used_bytes(resources.used_bytes()[i]);
      if (i >= services_.topology->node_count()) continue;
      const NumaNodeInfo info = services_.topology->Describe(i);
      numa.set_memory_total_bytes(info.total_bytes);
      numa.set_memory_free_bytes(info.free_bytes);
      numa.mutable_cpus()->Assign(info.cpus.begin(), info.cpus.end());
      numa.set_page_kind(pages.kind);
    }
    AddDevices(resources, v1::DEVICE_KIND_CPU, "cpu", node);
    AddDevices(resources, v1::DEVICE_KIND_CUDA, "cuda", node);
    for (const auto& [state, count] : services_.view->CountByState()) {
      if (state == v1::JOB_STATE_QUEUED) node->set_queued_jobs(count);
      if (state == v1::JOB_STATE_STARTING || state == v1::JOB_STATE_RUNNING ||
          state == v1::JOB_STATE_STOPPING || state == v1::JOB_STATE_RECOVERING) {
        node->set_running_jobs(node->running_jobs() + count);
      }
    }
    node->set_hugepage_hint(pages.hint);
    node->set_gpu_problem(services_.gpu_problem);
  }

  ServiceContext& services_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeNodeService(ServiceContext& services) {
  return std::make_unique<NodeServiceImpl>(services);
}

}  // namespace oom
