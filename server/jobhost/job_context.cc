#include "server/jobhost/job_context.h"

#include <utility>

#include "planner/job_settings.h"
#include "runtime/graph/graph_builder.h"

namespace oom {
namespace {

Status AsInvalidInput(const Status& status) {
  if (!status.reason().empty()) return status;
  Status copy = status;
  return std::move(copy).WithReason("INVALID_INPUT");
}

}  // namespace

Result<std::unique_ptr<JobContext>> JobContext::Create(const internal::v1::JobStart& start,
                                                       std::vector<UniqueFd> pool_fds,
                                                       std::unique_ptr<NumaTopology> topology) {
  std::unique_ptr<JobContext> context(new JobContext(start));
  context->pool_fds_ = std::move(pool_fds);
  context->topology_ = std::move(topology);
  auto model = ReadJobModel(start.spec());
  if (!model.ok()) return AsInvalidInput(model.status());
  context->model_ = std::move(model).value();
  const v1::Plan& plan = start.plan();
  if (const Status status = ValidatePlan(context->model_, plan); !status.ok()) {
    return AsInvalidInput(status);
  }
  const int64_t sequence_length = start.spec().sequence_length();
  if (sequence_length <= 0 || plan.micro_batch_tokens() <= 0 ||
      plan.micro_batch_tokens() % sequence_length != 0) {
    return Status(Code::kInvalidArgument, "micro_batch_tokens is not a number of whole sequences")
        .WithReason("INVALID_INPUT")
        .WithField("plan.micro_batch_tokens");
  }
  const BatchShape batch = BatchShapeOf(start.spec(), plan);
  context->layout_ =
      std::make_unique<SharedLayout>(SharedLayout::Build(context->model_, plan, batch));
  context->graph_hash_ = BuildTrainingGraph({.model = &context->model_,
                                             .plan = &plan,
                                             .layout = context->layout_.get(),
                                             .batch = batch})
                             .Hash();
  OOM_RETURN_IF_ERROR(context->MapPools());
  return context;
}

Status JobContext::MapPools() {
  int given = 0;
  for (const PoolSpec& wanted : layout_->pools()) {
    if (wanted.on_gpu) {
      pool_map_.bases.push_back(nullptr);
      continue;
    }
    if (given == start_.pools_size()) {
      return Status(Code::kInternal, "the job lacks the plan's pool " + wanted.name);
    }
    const internal::v1::Pool& pool = start_.pools(given);
    if (pool.name() != wanted.name || pool.bytes() < wanted.bytes) {
      return Status(Code::kInternal, "pool " + pool.name() + " of " + std::to_string(pool.bytes()) +
                                         " bytes is not the plan's " + wanted.name + " of " +
                                         std::to_string(wanted.bytes));
    }
    OOM_ASSIGN_OR_RETURN(
        PoolMapping mapping,
        PoolMapping::Map(pool_fds_[static_cast<size_t>(given)].get(), pool.bytes()));
    pool_map_.bases.push_back(mapping.data());
    mappings_.push_back(std::move(mapping));
    ++given;
  }
  if (given == start_.pools_size()) return Status::Ok();
  return Status(Code::kInternal, "the job has " + std::to_string(start_.pools_size()) +
                                     " pools, its plan needs " + std::to_string(given));
}

std::vector<int> JobContext::pool_descriptors() const {
  std::vector<int> descriptors;
  for (const UniqueFd& fd : pool_fds_) descriptors.push_back(fd.get());
  return descriptors;
}

Result<std::unique_ptr<StateSource>> JobContext::OpenModel() const {
  return OpenInitialState(spec(), model_, layout_->units());
}

}  // namespace oom
