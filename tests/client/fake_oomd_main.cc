// A program in oomd's place for `oom train --embedded`: takes the flags that oom passes, trains
// every submitted job in an instant, ends on SIGTERM. Writes "stopped" beside its socket then.

#include <csignal>
#include <fstream>
#include <iostream>
#include <string>

#include "tests/client/fake_oomd.h"

int main(int argc, char** argv) {
  std::string socket_path;
  std::string state_dir;
  bool foreground = false;
  bool ephemeral = false;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word.starts_with("--socket=")) socket_path = word.substr(9);
    if (word.starts_with("--state-dir=")) state_dir = word.substr(12);
    if (word == "--foreground") foreground = true;
    if (word == "--ephemeral") ephemeral = true;
  }
  if (socket_path.empty() || state_dir.empty() || !foreground || !ephemeral) {
    std::cerr << "wrong flags\n";
    return 2;
  }
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigprocmask(SIG_BLOCK, &set, nullptr);
  {
    oom::FakeOomd fake(socket_path);
    fake.OnCreate([&fake](const oom::v1::Job& job) {
      oom::v1::Job done = job;
      // A job that is to last is one that the test interrupts.
      done.set_state(job.spec().name() == "long" ? oom::v1::JOB_STATE_RUNNING
                                                 : oom::v1::JOB_STATE_SUCCEEDED);
      done.set_step(job.spec().steps());
      fake.Publish(done);
    });
    int signal = 0;
    sigwait(&set, &signal);
  }
  std::ofstream(state_dir + "/stopped") << "stopped\n";
  return 0;
}
