#include "planner/plan_job.h"

#include <google/protobuf/util/json_util.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <utility>

#include "planner/default_plan.h"
#include "planner/geometry.h"
#include "planner/job_settings.h"
#include "planner/memory_account.h"
#include "planner/model_proto.h"
#include "planner/resource_bounds.h"
#include "planner/resume_check.h"
#include "runtime/base/file.h"
#include "runtime/base/units.h"
#include "runtime/data/dataset.h"
#include "runtime/graph/graph_builder.h"
#include "runtime/memory/shm_layout.h"

namespace oom {
namespace {

constexpr int64_t kPlanFileLimitBytes = 64_MiB;
// Of each NUMA node, for a geometry: beyond any, and sums of it stay within 64 bits.
constexpr int64_t kAmpleBytes = int64_t{1} << 50;

// An error of the files that a field names.
Status AtField(Status status, const std::string& field) {
  Status about = status.Annotate(field);
  return std::move(about).WithReason("INVALID_INPUT").WithField(field);
}

Result<v1::Plan> ReadPlan(const std::string& path) {
  auto text = ReadFile(path, kPlanFileLimitBytes);
  if (!text.ok()) return AtField(text.status(), "plan");
  v1::Plan plan;
  const auto parsed = google::protobuf::util::JsonStringToMessage(*text, &plan);
  if (!parsed.ok()) {
    return AtField(Status(Code::kInvalidArgument, path + ": " + parsed.ToString()), "plan");
  }
  plan.clear_estimate();
  return plan;
}

// A plan that somebody wrote has to be about this job.
Status CheckPlanAgainstJob(const v1::JobSpec& spec, const v1::Plan& plan) {
  const auto differs = [](const std::string& field, const std::string& what) {
    return Status(Code::kInvalidArgument, "plan." + field + ": " + what)
        .WithReason("INVALID_INPUT")
        .WithField("plan." + field);
  };
  if (plan.rank_count() != spec.devices().count()) {
    return differs("rank_count", "the plan is for " + std::to_string(plan.rank_count()) +
                                     " devices, the job has " +
                                     std::to_string(spec.devices().count()));
  }
  if (plan.cuda_devices() != (spec.devices().kind() == v1::DEVICE_KIND_CUDA)) {
    return differs("cuda_devices", "the plan is for devices of another kind than the job's");
  }
  if (plan.precision() != spec.precision()) {
    return differs("precision", "the plan has another precision than the job");
  }
  if (plan.accumulation() != spec.accumulation()) {
    return differs("accumulation", "the plan has " + std::to_string(plan.accumulation()) +
                                       ", the job " + std::to_string(spec.accumulation()));
  }
  const int64_t tokens = spec.global_batch() / spec.devices().count() / spec.accumulation() *
                         spec.sequence_length();
  if (plan.micro_batch_tokens() != tokens) {
    return differs("micro_batch_tokens", "the plan has " +
                                             std::to_string(plan.micro_batch_tokens()) +
                                             ", the job " + std::to_string(tokens));
  }
  if (plan.partitions().attention_sub_batch_tokens() % spec.sequence_length() != 0) {
    return differs("partitions.attention_sub_batch_tokens",
                   "a sub-batch has whole sequences: a multiple of " +
                       std::to_string(spec.sequence_length()) + " tokens");
  }
  if (spec.optimizer().max_gradient_norm() > 0.0 &&
      plan.update_mode() != v1::UPDATE_MODE_DEFERRED) {
    return differs("update_mode", "clipping (optimizer.max_gradient_norm) needs deferred updates");
  }
  return Status::Ok();
}

Status CheckDatasets(const v1::JobSpec& spec, const ModelDescription& model) {
  const auto check = [&](const std::string& directory, const std::string& field) {
    auto dataset = Dataset::Open({.directory = directory,
                                  .sequence_length = spec.sequence_length(),
                                  .vocabulary_size = model.vocabulary_size});
    return dataset.ok() ? Status::Ok() : AtField(dataset.status(), field);
  };
  OOM_RETURN_IF_ERROR(check(spec.data().train(), "data.train"));
  if (spec.data().evaluation().empty()) return Status::Ok();
  return check(spec.data().evaluation(), "data.evaluation");
}

// The nearest folder of `path` that exists.
std::filesystem::path ExistingParent(std::filesystem::path path) {
  std::error_code error;
  while (!path.empty() && path != path.root_path() && !std::filesystem::exists(path, error)) {
    path = path.parent_path();
  }
  return path;
}

Status CheckOutput(const v1::JobSpec& spec, int64_t disk_bytes) {
  const std::filesystem::path folder = ExistingParent(spec.output());
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error)) {
    return AtField(Status(Code::kInvalidArgument, folder.string() + " is not a directory"), "output");
  }
  if (::access(folder.c_str(), W_OK | X_OK) != 0) {
    return AtField(ErrnoStatus(errno, "cannot write to " + folder.string()), "output");
  }
  struct statvfs info {};
  if (::statvfs(folder.c_str(), &info) != 0) {
    return AtField(ErrnoStatus(errno, "cannot look at " + folder.string()), "output");
  }
  const auto free_bytes = static_cast<int64_t>(info.f_bavail) * static_cast<int64_t>(info.f_frsize);
  if (free_bytes >= disk_bytes) return Status::Ok();
  return Status(Code::kResourceExhausted,
                "output: " + std::to_string(spec.checkpoint().keep() + 1) + " checkpoints need " +
                    FormatBytes(disk_bytes) + " of disk, " + FormatBytes(free_bytes) +
                    " are free in " + folder.string())
      .WithReason("STORAGE_FULL")
      .WithField("output");
}

NodeLimits LimitsOfGeometry(const v1::JobSpec& spec, NodeLimits limits) {
  if (limits.pool_capacity_bytes.empty()) limits.pool_capacity_bytes.resize(1);
  std::fill(limits.pool_capacity_bytes.begin(), limits.pool_capacity_bytes.end(), kAmpleBytes);
  if (spec.budgets().gpu_memory_bytes() > 0) limits.gpu_memory_bytes = 0;
  return limits;
}

std::string Itemised(const MemoryAccount& account, const std::string& space) {
  std::string text;
  for (const v1::MemoryEstimate& item : account.items) {
    if (item.space() != space) continue;
    text += (text.empty() ? "" : ", ") + item.item() + " " + FormatBytes(item.bytes());
  }
  return text;
}

Status CheckHostMemory(const v1::JobSpec& spec, const NodeLimits& limits,
                       const MemoryAccount& account) {
  const auto& budget = spec.budgets().host_memory_bytes();
  const auto refuse = [&](const std::string& what, int64_t needed, int64_t allowed,
                          const std::string& space) {
    return Status(Code::kResourceExhausted, "budgets.host_memory: " + what + " needs " +
                                                FormatBytes(needed) + ", " + FormatBytes(allowed) +
                                                " are allowed (" + Itemised(account, space) + ")")
        .WithReason("OUT_OF_HOST_MEMORY")
        .WithField("budgets.host_memory");
  };
  if (budget.size() > 1 && budget.size() != static_cast<int>(account.host_bytes_by_node.size())) {
    return Status(Code::kInvalidArgument,
                  "budgets.host_memory: " + std::to_string(budget.size()) + " values for " +
                      std::to_string(account.host_bytes_by_node.size()) + " NUMA nodes")
        .WithReason("INVALID_INPUT")
        .WithField("budgets.host_memory");
  }
  if (budget.size() == 1 && budget[0] > 0 && account.host_bytes > budget[0]) {
    return refuse("host memory", account.host_bytes, budget[0], "numa 0");
  }
  for (size_t node = 0; node < account.host_bytes_by_node.size(); ++node) {
    int64_t allowed = limits.pool_capacity_bytes.empty() ? 0 : limits.pool_capacity_bytes[node];
    if (budget.size() > 1 && budget[static_cast<int>(node)] > 0) {
      allowed = std::min(allowed, budget[static_cast<int>(node)]);
    }
    if (account.host_bytes_by_node[node] <= allowed) continue;
    const std::string space = "numa " + std::to_string(node);
    return refuse("host memory of " + space, account.host_bytes_by_node[node], allowed, space);
  }
  return Status::Ok();
}

Status CheckDeviceMemory(const v1::JobSpec& spec, const NodeLimits& limits,
                         const MemoryAccount& account) {
  const int64_t budget = DeviceBudgetBytes(spec, limits);
  if (budget == 0 || account.device_bytes <= budget) return Status::Ok();
  // A plan that the planner made has as little in device memory as it can.
  std::string text = "budgets.gpu_memory: device memory needs ";
  text += (spec.plan() == "auto" ? "at least " : "") + FormatBytes(account.device_bytes) + " (" +
          Itemised(account, "device 0") + "), " + FormatBytes(budget);
  if (budget == spec.budgets().gpu_memory_bytes()) {
    text += " are allowed; raise it, or lower sequence_length or global_batch";
  } else if (!limits.gpu_memory_note.empty()) {
    text += " are free; " + limits.gpu_memory_note;
  } else {
    text += " is what the GPU has; lower sequence_length or global_batch";
  }
  return Status(Code::kResourceExhausted, text)
      .WithReason("OUT_OF_GPU_MEMORY")
      .WithField("budgets.gpu_memory");
}

}  // namespace

Result<PlannedJob> PlanJob(const v1::JobSpec& given, const NodeLimits& node) {
  PlannedJob planned;
  planned.spec = given;
  v1::JobSpec& spec = planned.spec;
  OOM_RETURN_IF_ERROR(NormalizeJobSpec(&spec));
  const bool geometry = IsGeometry(spec);
  const NodeLimits limits = geometry ? LimitsOfGeometry(spec, node) : node;
  auto model = ReadJobModel(spec);
  const std::string model_field = spec.model().path().empty() ? "model.config" : "model.path";
  if (!model.ok()) {
    // A setting that is not for this model names itself.
    const bool named = model.status().field().starts_with("model.");
    return named ? model.status() : AtField(model.status(), model_field);
  }

  if (spec.plan() == "auto") {
    planned.plan = MakeDefaultPlan(spec, *model, limits);
  } else {
    OOM_ASSIGN_OR_RETURN(planned.plan, ReadPlan(spec.plan()));
    OOM_RETURN_IF_ERROR(CheckPlanAgainstJob(spec, planned.plan));
  }
  if (const Status status = ValidatePlan(*model, planned.plan); !status.ok()) {
    return AtField(status, status.field());
  }
  const int numa_nodes = std::max<int>(1, static_cast<int>(limits.pool_capacity_bytes.size()));
  if (planned.plan.optimizer_threads_size() > numa_nodes) {
    return Status(Code::kInvalidArgument,
                  "plan.optimizer_threads: the plan uses " +
                      std::to_string(planned.plan.optimizer_threads_size()) +
                      " NUMA nodes, this machine has " + std::to_string(numa_nodes))
        .WithReason("INVALID_INPUT")
        .WithField("plan.optimizer_threads");
  }
  const BatchShape batch = BatchShapeOf(spec, planned.plan);
  const SharedLayout layout = SharedLayout::Build(*model, planned.plan, batch);
  planned.model = ToProto(*model, ParameterCount(layout.units()));
  auto source = OpenInitialState(spec, *model, layout.units());
  if (!source.ok()) return AtField(source.status(), model_field);
  if (!geometry) OOM_RETURN_IF_ERROR(CheckDatasets(spec, *model));

  const StepGraph graph = BuildTrainingGraph(
      {.model = &*model, .plan = &planned.plan, .layout = &layout, .batch = batch});
  const MemoryAccount account =
      AccountMemory(*model, planned.plan, layout, graph, batch, numa_nodes);
  OOM_RETURN_IF_ERROR(CheckDeviceMemory(spec, limits, account));
  OOM_RETURN_IF_ERROR(CheckHostMemory(spec, limits, account));
  const int64_t disk_bytes = account.checkpoint_bytes * (spec.checkpoint().keep() + 1);
  if (!geometry) {
    OOM_RETURN_IF_ERROR(CheckOutput(spec, disk_bytes));
    OOM_RETURN_IF_ERROR(CheckResumable(spec, *model, PrecisionOf(planned.plan)));
  }

  for (const PoolSpec& pool : layout.pools()) {
    if (pool.on_gpu) continue;
    internal::v1::Pool out;
    out.set_name(pool.name);
    out.set_numa_node(pool.numa_node);
    out.set_bytes(pool.bytes);
    planned.pools.push_back(std::move(out));
  }
  v1::PlanEstimate* estimate = planned.plan.mutable_estimate();
  for (const v1::MemoryEstimate& item : account.items) *estimate->add_memory() = item;
  for (const v1::ResourceEstimate& bound :
       BoundResources(*model, planned.plan, layout, graph, batch,
                      planned.plan.cuda_devices()
                          ? CudaRates(limits.cpu_count, layout.float32())
                          : CpuRates(limits.cpu_count, planned.plan.worker_threads()))) {
    *estimate->add_resources() = bound;
    estimate->set_step_seconds_lower_bound(
        std::max(estimate->step_seconds_lower_bound(), bound.seconds()));
  }
  estimate->set_deferred_extra_bytes(account.deferred_extra_bytes);
  estimate->set_host_bytes_peak(account.host_bytes);
  estimate->set_device_bytes_peak(account.device_bytes);
  estimate->set_checkpoint_disk_bytes(disk_bytes);
  return planned;
}

}  // namespace oom
