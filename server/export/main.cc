// oom-export: writes a checkpoint of a job's output directory as a Hugging Face directory, or its
// FP32 state. Started by `oom export`; needs no daemon. Exit codes are those of `oom` (docs: exit
// codes).

#include <CLI/CLI.hpp>
#include <cstdint>
#include <cstdio>
#include <string>

#include "runtime/base/status.h"
#include "runtime/checkpoint/export.h"

namespace {

constexpr int kUsage = 2;

int ExitCode(oom::Code code) {
  switch (code) {
    case oom::Code::kOk:
      return 0;
    case oom::Code::kNotFound:
      return 4;
    case oom::Code::kPermissionDenied:
      return 5;
    case oom::Code::kInvalidArgument:
      return 6;
    case oom::Code::kResourceExhausted:
      return 6;  // The disk: more than there is, as in a job's plan.
    case oom::Code::kFailedPrecondition:
    case oom::Code::kAlreadyExists:
      return 7;
    default:
      return 1;
  }
}

}  // namespace

int main(int argument_count, char** arguments) {
  oom::ExportOptions options;
  int64_t step = 0;
  CLI::App app("Exports a checkpoint of a job's output directory", "oom-export");
  app.add_option("--output-directory", options.output_directory, "The job's output directory")
      ->required();
  CLI::Option* step_option =
      app.add_option("--step", step, "Completed steps; default: the newest whole checkpoint")
          ->check(CLI::NonNegativeNumber);
  app.add_flag("--state", options.state, "FP32 masters and moments instead of a model directory");
  app.add_option("--destination", options.destination,
                 "Directory to write; default: export, or export-state, in the output directory");
  try {
    app.parse(argument_count, arguments);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    std::fprintf(stderr, "oom-export: %s\n", error.what());
    return kUsage;
  }
  if (!step_option->empty()) options.step = step;
  const oom::Result<oom::ExportReport> report = oom::ExportCheckpoint(options);
  if (!report.ok()) {
    std::fprintf(stderr, "oom-export: %s\n", report.status().message().c_str());
    return ExitCode(report.status().code());
  }
  if (report->skipped_count > 0) {
    std::fprintf(stderr, "oom-export: %d newer checkpoint(s) are not whole and were skipped\n",
                 report->skipped_count);
  }
  std::printf("step %lld: %s\n", static_cast<long long>(report->step), report->destination.c_str());
  return 0;
}
