#include "tests/graph/fake_job.h"

#include "runtime/base/check.h"

namespace oom::testing {

FakeJob::FakeJob(const TestJob& job, const PoolMap& pools, uint64_t seed, int64_t first_step,
                 HostOptimizer::Options host, FakeWorker::Options worker)
    : job_(job), first_step_(first_step) {
  auto page = ControlPage::Create(job.layout->control_page());
  OOM_CHECK(page.ok());
  page_ = std::move(page).value();
  // Owners of resident chunks say that their state is there.
  for (const Chunk& chunk : job.layout->chunks()) {
    if (chunk.owner_rank >= 0) {
      page_->version(chunk.index).Publish(static_cast<uint64_t>(first_step));
    }
  }
  host.layout = job.layout.get();
  host.pools = &pools;
  host.page = page_.get();
  host.update_mode = job.plan.update_mode();
  host.accumulation = job.plan.accumulation();
  host.hyper = ReferenceJob::Hyper();
  host.schedule = ReferenceJob::ScheduleOf();
  host.first_step = first_step;
  host.simd = DetectSimdLevel();
  host.threads_by_node.assign(job.plan.optimizer_threads().begin(),
                              job.plan.optimizer_threads().end());
  auto optimizer = HostOptimizer::Start(host);
  OOM_CHECK(optimizer.ok());
  optimizer_ = std::move(optimizer).value();
  worker.job = &job;
  worker.pools = &pools;
  worker.page = page_.get();
  worker.seed = seed;
  worker.simd = DetectSimdLevel();
  for (int rank = 0; rank < job.plan.rank_count(); ++rank) {
    worker.rank = rank;
    workers_.push_back(std::make_unique<FakeWorker>(worker));
  }
  results_.resize(workers_.size());
}

FakeJob::~FakeJob() {
  bool running = false;
  for (const std::thread& thread : threads_) running = running || thread.joinable();
  if (running) Abort();
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
  optimizer_->Stop();
}

void FakeJob::StartWorkers(int64_t last) {
  for (size_t rank = 0; rank < workers_.size(); ++rank) {
    threads_.emplace_back(
        [this, rank, last] { results_[rank] = workers_[rank]->RunSteps(first_step_, last); });
  }
}

Status FakeJob::Join(int rank) {
  std::thread& thread = threads_[static_cast<size_t>(rank)];
  if (thread.joinable()) thread.join();
  return results_[static_cast<size_t>(rank)];
}

void FakeJob::Abort() {
  page_->Abort();
  optimizer_->Stop();
}

std::string FakeJob::Words() const {
  std::string text = "freed " + std::to_string(page_->backlog_freed().Load()) + " of slots " +
                     std::to_string(job_.layout->ring_slot_count()) + ", a step " +
                     std::to_string(job_.layout->ring_chunks_per_step()) + ", clip_known " +
                     std::to_string(page_->clip_known().Load());
  for (int rank = 0; rank < job_.plan.rank_count(); ++rank) {
    text += ", loss_known " + std::to_string(page_->loss_known(rank).Load());
  }
  for (const Chunk& chunk : job_.layout->chunks()) {
    text += "\nchunk " + std::to_string(chunk.index) + " unit " + std::to_string(chunk.unit) +
            " owner " + std::to_string(chunk.owner_rank) + " node " +
            std::to_string(chunk.numa_node) + " ring " +
            std::to_string(job_.layout->ring_sequence(chunk.index, 0)) + " version " +
            std::to_string(page_->version(chunk.index).Load()) + " norm_known " +
            std::to_string(page_->norm_known(chunk.index).Load()) + " landed";
    for (int rank = 0; rank < job_.plan.rank_count(); ++rank) {
      text += " " + std::to_string(page_->landed(rank, chunk.index).Load());
    }
  }
  return text;
}

}  // namespace oom::testing
