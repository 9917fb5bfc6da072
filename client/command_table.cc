#include "client/command_table.h"

#include "client/commands.h"

namespace oom {
namespace {

constexpr OptionRow kGlobalOptions[] = {
    {"output-form", "-o", OptionKind::kChoice, "FORM", "form of the data",
     "table|wide|json|jsonl|yaml|name"},
    {"quiet", "-q,--quiet", OptionKind::kFlag, "", "no messages, errors only"},
    {"timeout", "--timeout", OptionKind::kDuration, "TIME", "give up after this time (exit 124)"},
    {"host", "--host", OptionKind::kPath, "SOCKET", "oomd's Unix socket (default: OOM_HOST)"},
};

constexpr OptionRow kName = {"name", "--name", OptionKind::kText, "NAME",
                             "name of the job (default: the job file's)"};
constexpr OptionRow kRequestId = {"request-id", "--request-id", OptionKind::kText, "ID",
                                  "repeats an earlier submission safely (default: random)"};
constexpr OptionRow kInterval = {"progress-interval", "--progress-interval", OptionKind::kDuration,
                                 "TIME", "between progress lines off a terminal (default: 10s)"};
constexpr OptionRow kStep = {"step", "--step", OptionKind::kCount, "N", "completed steps"};

constexpr OptionRow kTrainOptions[] = {
    kName,
    kRequestId,
    kInterval,
    {"embedded", "--embedded", OptionKind::kFlag, "", "with a private oomd that ends with the job"},
    {"state-dir", "--state-dir", OptionKind::kPath, "DIR",
     "with --embedded: where the private oomd keeps its state (default: a temporary folder)"},
};
constexpr OptionRow kSubmitOptions[] = {kName, kRequestId};
constexpr OptionRow kPlanOptions[] = {
    kName,
    {"layers", "--layers", OptionKind::kCount, "N", "of a geometry (default: all of the model's)"},
    {"sequence-length", "--sequence-length", OptionKind::kCount, "N",
     "of a geometry: tokens of a sequence (default: 4096)"},
    {"global-batch", "--global-batch", OptionKind::kCount, "N",
     "of a geometry: sequences of a step (default: 16)"},
    {"devices", "--devices", OptionKind::kChoice, "KIND", "of a geometry (default: cpu)",
     "cpu|cuda"},
    {"device-count", "--device-count", OptionKind::kCount, "N", "of a geometry (default: 1)"},
    {"gpu-memory", "--gpu-memory", OptionKind::kBytes, "BYTES",
     "of a geometry: budget of each device, such as 80GiB"},
    {"host-memory", "--host-memory", OptionKind::kBytes, "BYTES",
     "of a geometry: budget of the node (default: as much as it needs)"},
    {"precision", "--precision", OptionKind::kChoice, "PRECISION",
     "of a geometry (default: bfloat16)", "bfloat16|float32"},
};
constexpr OptionRow kInitOptions[] = {
    {"file", "--file", OptionKind::kPath, "FILE",
     "to write; - is standard output (default: job.yaml)"},
    {"force", "--force", OptionKind::kFlag, "", "replace the file"},
};
constexpr OptionRow kListOptions[] = {
    {"state", "--state", OptionKind::kText, "STATE", "only jobs in this state, such as running"},
};
constexpr OptionRow kWatchOptions[] = {
    kInterval,
    {"resume-token", "--resume-token", OptionKind::kText, "TOKEN",
     "go on after the event that had this token"},
};
constexpr OptionRow kLogsOptions[] = {
    {"follow", "-f,--follow", OptionKind::kFlag, "", "wait for more until the job ends"},
    {"rank", "--rank", OptionKind::kText, "RANK",
     "only this worker, or `host` for the job host; may be repeated"},
    {"tail", "--tail", OptionKind::kCount, "N", "only the last N lines of each log"},
    {"raw", "--raw", OptionKind::kFlag, "", "control characters as they are"},
};
constexpr OptionRow kCancelOptions[] = {
    {"now", "--now", OptionKind::kFlag, "", "without a checkpoint"},
    {"grace", "--grace", OptionKind::kDuration, "TIME",
     "for the checkpoint before the job is killed (default: 60s)"},
};
constexpr OptionRow kExportOptions[] = {
    kStep,
    {"state", "--state", OptionKind::kFlag, "", "FP32 masters and moments instead of a model"},
    {"output", "--output", OptionKind::kPath, "DIR", "to write (default: export/ of the job)"},
};
constexpr OptionRow kHealthOptions[] = {
    {"ready", "--ready", OptionKind::kFlag, "", "whether new work is accepted, not only alive"},
};

constexpr CommandRow kCommands[] = {
    {"train", "run", ArgumentKind::kJobFile, "submit a job and follow it to its end", kTrainOptions,
     RunTrain},
    {"submit", "", ArgumentKind::kJobFile, "submit a job; prints its name", kSubmitOptions,
     RunSubmit},
    {"plan", "", ArgumentKind::kJobFileOrGeometry,
     "what a job, or a model's size, would need and take; submits nothing", kPlanOptions, RunPlan},
    {"init", "", ArgumentKind::kModel, "write a commented job.yaml for a model", kInitOptions,
     RunInit},
    {"doctor",
     "",
     ArgumentKind::kNone,
     "check this machine; prints what fixes each finding",
     {},
     RunDoctor},
    {"ls", "", ArgumentKind::kNone, "list jobs", kListOptions, RunList},
    {"get", "", ArgumentKind::kJobs, "show jobs", {}, RunGet},
    {"describe", "", ArgumentKind::kJobs, "all about a job, and why it waits", {}, RunDescribe},
    {"watch", "", ArgumentKind::kOptionalJob, "follow a job, or every job's events", kWatchOptions,
     RunWatch},
    {"logs", "", ArgumentKind::kJob, "print the logs of a job's workers", kLogsOptions, RunLogs},
    {"wait",
     "",
     ArgumentKind::kJob,
     "wait for a job's end; its result is the exit code",
     {},
     RunWait},
    {"cancel", "", ArgumentKind::kJobs, "stop jobs for good, after a checkpoint", kCancelOptions,
     RunCancel},
    {"suspend",
     "",
     ArgumentKind::kJobs,
     "stop jobs after a checkpoint, until resumed",
     {},
     RunSuspend},
    {"resume", "", ArgumentKind::kJobs, "queue suspended jobs again", {}, RunResume},
    {"checkpoint",
     "",
     ArgumentKind::kJobs,
     "write a checkpoint now; returns when it is durable",
     {},
     RunCheckpoint},
    {"export", "", ArgumentKind::kJob, "write a checkpoint as a Hugging Face model", kExportOptions,
     RunExport},
    {"node", "", ArgumentKind::kNone, "memory and devices of the node", {}, RunNode},
    {"health", "", ArgumentKind::kNone, "whether oomd serves", kHealthOptions, RunHealth},
    {"version", "", ArgumentKind::kNone, "versions of oom and of oomd", {}, RunVersion},
    {"completion", "", ArgumentKind::kShell, "print a completion script", {}, RunCompletion},
};

}  // namespace

std::span<const OptionRow> GlobalOptions() { return kGlobalOptions; }
std::span<const CommandRow> Commands() { return kCommands; }

std::string_view ArgumentSynopsis(ArgumentKind kind) {
  switch (kind) {
    case ArgumentKind::kNone:
      return "";
    case ArgumentKind::kJob:
      return "JOB";
    case ArgumentKind::kOptionalJob:
      return "[JOB]";
    case ArgumentKind::kJobs:
      return "JOB...";
    case ArgumentKind::kJobFile:
      return "JOB.YAML";
    case ArgumentKind::kJobFileOrGeometry:
      return "JOB.YAML|GEOMETRY";
    case ArgumentKind::kModel:
      return "MODEL";
    case ArgumentKind::kShell:
      return "bash|zsh|fish";
  }
  return "";
}

}  // namespace oom
