#include "tests/server/controller_fixture.h"

#include <utility>

#include "server/oomd/job_state.h"

namespace oom {

using internal::v1::Transition;

void ControllerTest::Restart() {
  controller_.reset();
  events_ = std::make_unique<EventLog>();
  view_ = std::make_unique<JobView>();
  Controller::Options options = options_;
  options.seed = ++seed_;
  controller_ = std::make_unique<Controller>(
      options,
      Controller::Parts{&clock_, &store_, &launcher_, &observer_, events_.get(), view_.get()});
  const Status status = controller_->Recover();
  ASSERT_TRUE(status.ok()) << status.ToString();
}

Controller::NewJob ControllerTest::NewJob(const std::string& id, int64_t bytes, int priority) {
  Controller::NewJob job;
  job.job_id = id;
  job.owner = 7;
  job.job.mutable_spec()->set_name(id.empty() ? "some name" : id);
  job.job.mutable_spec()->set_steps(100);
  job.job.mutable_spec()->set_priority(priority);
  job.job.mutable_spec()->mutable_devices()->set_count(1);
  internal::v1::Pool pool;
  pool.set_name("state");
  pool.set_bytes(bytes);
  job.pools.push_back(pool);
  return job;
}

Result<v1::Job> ControllerTest::Create(Controller::NewJob job) {
  Result<v1::Job> answer = Status(Code::kInternal, "no answer");
  controller_->CreateJob(std::move(job), [&](Result<v1::Job> reply) { answer = std::move(reply); });
  controller_->Flush();
  return answer;
}

Result<v1::Job> ControllerTest::Cancel(const std::string& id, v1::CancelMode mode) {
  v1::CancelJobRequest request;
  request.set_name("jobs/" + id);
  request.set_mode(mode);
  Result<v1::Job> answer = Status(Code::kInternal, "no answer");
  controller_->CancelJob(request, [&](Result<v1::Job> reply) { answer = std::move(reply); });
  controller_->Flush();
  return answer;
}

Result<v1::Job> ControllerTest::Call(void (Controller::*method)(const std::string&,
                                                                Controller::Reply),
                                     const std::string& id) {
  Result<v1::Job> answer = Status(Code::kInternal, "no answer");
  ((*controller_).*method)("jobs/" + id, [&](Result<v1::Job> reply) { answer = std::move(reply); });
  controller_->Flush();
  return answer;
}

v1::Job ControllerTest::Get(const std::string& id) {
  const JobView::JobPointer job = view_->Get("jobs/" + id);
  return job == nullptr ? v1::Job() : *job;
}

std::string ControllerTest::State(const std::string& id) { return StateName(Get(id).state()); }

void ControllerTest::Hello(const std::string& id) {
  internal::v1::HostHello hello;
  hello.set_uid(Get(id).uid());
  controller_->OnHello(hello.uid(), hello);
  controller_->Flush();
}

void ControllerTest::Report(const std::string& id, int64_t number, v1::JobState state,
                            int64_t durable_step) {
  Transition transition;
  transition.set_number(number);
  transition.set_state(state);
  transition.set_durable_step(durable_step);
  transition.set_step(durable_step);
  controller_->OnTransition(Get(id).uid(), transition);
  controller_->Flush();
}

void ControllerTest::Exit(const std::string& id) {
  const std::string uid = Get(id).uid();
  launcher_.alive.erase(uid);
  controller_->OnExit(uid);
  controller_->Flush();
}

void ControllerTest::Advance(double seconds) {
  clock_.now += seconds;
  controller_->OnTimer();
}

int ControllerTest::Acks(const std::string& id, int64_t number) {
  int count = 0;
  for (const FakeLauncher::Sent& sent : launcher_.sent) {
    count +=
        sent.uid == Get(id).uid() && sent.frame.has_ack() && sent.frame.ack().number() == number
            ? 1
            : 0;
  }
  return count;
}

const internal::v1::Stop* ControllerTest::LastStop() {
  for (auto it = launcher_.sent.rbegin(); it != launcher_.sent.rend(); ++it) {
    if (it->frame.has_stop()) return &it->frame.stop();
  }
  return nullptr;
}

}  // namespace oom
