// Writes one of each file of runtime/trace into a directory, for the test that reads them in
// Python.

#include <cstdio>
#include <string>

#include "runtime/trace/chrome_trace.h"
#include "runtime/trace/step_log.h"
#include "runtime/trace/tensorboard.h"

namespace {

oom::Status WriteSamples(const std::string& directory) {
  oom::ChromeTrace worker, host;
  worker.Add({.name = "load \"layers.0\"",
              .process = "rank 0",
              .row = "H2D",
              .start_microseconds = 1000.125,
              .duration_microseconds = 10,
              .bytes = 4096});
  worker.Add({.name = "forward layers.0",
              .process = "rank 0",
              .row = "compute",
              .start_microseconds = 1010.5,
              .duration_microseconds = 20.25});
  host.Add({.name = "update 3",
            .process = "job host",
            .row = "optimizer numa 0",
            .start_microseconds = 1005,
            .duration_microseconds = 1,
            .bytes = 26 * 4096});
  OOM_RETURN_IF_ERROR(worker.Write(directory + "/part.json"));
  OOM_ASSIGN_OR_RETURN(const oom::ChromeTrace part,
                       oom::ChromeTrace::Read(directory + "/part.json"));
  host.Merge(part);
  OOM_RETURN_IF_ERROR(host.Write(directory + "/trace.json"));

  OOM_ASSIGN_OR_RETURN(auto log, oom::StepLog::Open(directory + "/steps.jsonl", 0));
  OOM_ASSIGN_OR_RETURN(
      auto events,
      oom::TensorboardWriter::Create(
          {.directory = directory + "/tensorboard", .completed_steps = 0, .unix_seconds = 1.7e9}));
  for (int64_t step = 1; step <= 300; ++step) {
    oom::StepRecord record{.step = step,
                           .loss = 10.0 / static_cast<double>(step),
                           .tokens = 512,
                           .learning_rate = 3e-4};
    if (step % 100 == 0) record.evaluation_loss = 1.0 / 3.0;
    OOM_RETURN_IF_ERROR(log->Append(record));
    OOM_RETURN_IF_ERROR(events->AddScalars(step, 1.7e9 + static_cast<double>(step),
                                           {{"loss", record.loss}, {"learning_rate", 3e-4}}));
  }
  return oom::Status::Ok();
}

}  // namespace

int main(int argument_count, char** arguments) {
  if (argument_count != 2) return 2;
  const oom::Status status = WriteSamples(arguments[1]);
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return 1;
}
