#include "client/job_view.h"

#include <algorithm>
#include <ctime>
#include <utility>

#include "client/commands.h"
#include "client/exit_code.h"
#include "client/job_yaml.h"
#include "client/message_yaml.h"
#include "runtime/base/file.h"
#include "runtime/base/units.h"

namespace oom {
namespace {

Colour StateColour(v1::JobState state) {
  switch (state) {
    case v1::JOB_STATE_SUCCEEDED:
    case v1::JOB_STATE_RUNNING:
      return Colour::kGreen;
    case v1::JOB_STATE_FAILED:
      return Colour::kRed;
    case v1::JOB_STATE_RECOVERING:
    case v1::JOB_STATE_STOPPING:
    case v1::JOB_STATE_SUSPENDED:
      return Colour::kYellow;
    default:
      return Colour::kGrey;
  }
}

std::string Age(const google::protobuf::Timestamp& time, double now_seconds) {
  if (time.seconds() == 0) return "-";
  return FormatSeconds(std::max(0.0, now_seconds - static_cast<double>(time.seconds())));
}

std::string LocalTime(const google::protobuf::Timestamp& time) {
  if (time.seconds() == 0) return "-";
  const std::time_t seconds = time.seconds();
  std::tm parts{};
  localtime_r(&seconds, &parts);
  char buffer[64];
  std::strftime(buffer, sizeof(buffer), "%Y-%m-%d %H:%M:%S %z", &parts);
  return buffer;
}

std::string Steps(const v1::Job& job) {
  return std::to_string(job.step()) + "/" + std::to_string(job.spec().steps());
}

std::string OrDash(double value, int digits) {
  return value == 0.0 ? "-" : FormatNumber(value, digits);
}

std::string Left(const v1::Job& job) {
  const bool moves = job.state() == v1::JOB_STATE_RUNNING && job.eta_seconds() > 0;
  return moves ? FormatSeconds(job.eta_seconds()) : "-";
}

std::string Devices(const v1::JobSpec& spec) {
  const int count = std::max(1, spec.devices().count());
  const bool cuda = spec.devices().kind() == v1::DEVICE_KIND_CUDA;
  return std::to_string(count) + (cuda ? " cuda" : " cpu");
}

void WriteTable(const std::vector<v1::Job>& jobs, double now_seconds, Output* output) {
  const bool wide = output->form() == OutputForm::kWide;
  std::vector<std::string> header = {"NAME", "STATE", "REASON",   "STEP",
                                     "LOSS", "LEFT",  "TOKENS/S", "AGE"};
  if (wide) {
    const std::vector<std::string> more = {"DURABLE", "ATTEMPT", "PRIORITY",
                                           "DEVICES", "OUTPUT",  "UID"};
    header.insert(header.end(), more.begin(), more.end());
  }
  Table table(header);
  for (const v1::Job& job : jobs) {
    std::vector<std::string> row = {JobId(job.name()),
                                    StateName(job.state()),
                                    job.reason().empty() ? "-" : job.reason(),
                                    Steps(job),
                                    OrDash(job.loss(), 4),
                                    Left(job),
                                    OrDash(job.tokens_per_second(), 0),
                                    Age(job.create_time(), now_seconds)};
    if (wide) {
      row.push_back(std::to_string(job.durable_step()));
      row.push_back(std::to_string(job.attempt()));
      row.push_back(std::to_string(job.spec().priority()));
      row.push_back(Devices(job.spec()));
      row.push_back(job.spec().output());
      row.push_back(job.uid());
    }
    table.AddRow(std::move(row));
    table.PaintLastRow(1, StateColour(job.state()));
  }
  table.Write(output);
}

void WriteYaml(const v1::Job& job, Output* output) {
  output->Line("# " + Printable(job.name()) + ": " + StateName(job.state()) + ", step " +
               Steps(job));
  output->data() << JobSpecToYaml(job.spec()) << std::flush;
}

// A key and its value, aligned; nothing for an empty value.
void Row(const std::string& key, const std::string& value, Output* output) {
  if (value.empty()) return;
  std::string line = key + ":";
  line.append(line.size() < 16 ? 16 - line.size() : 1, ' ');
  output->Line(line + Printable(value));
}

}  // namespace

std::string StateName(v1::JobState state) {
  constexpr std::string_view kPrefix = "JOB_STATE_";
  const std::string& name = v1::JobState_Name(state);
  return name.starts_with(kPrefix) ? name.substr(kPrefix.size()) : "STATE " + std::to_string(state);
}

v1::JobState ParseState(const std::string& name, std::string* closest) {
  std::string lower = name;
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  std::vector<std::string> names;
  const auto* descriptor = v1::JobState_descriptor();
  for (int i = 1; i < descriptor->value_count(); ++i) {
    names.push_back(ShortEnumName(*descriptor->value(i)));
    if (names.back() == lower) return static_cast<v1::JobState>(descriptor->value(i)->number());
  }
  if (closest != nullptr) *closest = ClosestName(lower, names);
  return v1::JOB_STATE_UNSPECIFIED;
}

void WriteJobs(const std::vector<v1::Job>& jobs, double now_seconds, Output* output) {
  switch (output->form()) {
    case OutputForm::kTable:
    case OutputForm::kWide:
      if (jobs.empty()) {
        output->Message("no jobs");
      } else {
        WriteTable(jobs, now_seconds, output);
      }
      return;
    case OutputForm::kJson: {
      v1::ListJobsResponse list;
      for (const v1::Job& job : jobs) *list.add_jobs() = job;
      list.clear_next_page_token();
      output->Line(MessageToJson(list, true));
      return;
    }
    case OutputForm::kJsonl:
      for (const v1::Job& job : jobs) output->Line(MessageToJson(job, false));
      return;
    case OutputForm::kYaml:
      for (size_t i = 0; i < jobs.size(); ++i) {
        if (i > 0) output->Line("---");
        WriteYaml(jobs[i], output);
      }
      return;
    case OutputForm::kName:
      for (const v1::Job& job : jobs) output->Line(JobId(job.name()));
      return;
  }
}

void WriteJob(const v1::Job& job, double now_seconds, Output* output) {
  if (output->form() == OutputForm::kJson) {
    output->Line(MessageToJson(job, true));
  } else {
    WriteJobs({job}, now_seconds, output);
  }
}

std::string WhyItWaits(const v1::Job& job) {
  const std::string resume = "; `oom resume " + JobId(job.name()) + "` queues it again";
  switch (job.state()) {
    case v1::JOB_STATE_SUSPENDED:
      return "suspended at step " + std::to_string(job.step()) + resume;
    case v1::JOB_STATE_RECOVERING:
      return "attempt " + std::to_string(job.attempt()) +
             " failed; the next one starts from step " + std::to_string(job.durable_step());
    case v1::JOB_STATE_QUEUED:
      break;
    default:
      return "";
  }
  std::string why;
  if (job.jobs_ahead() > 0) {
    why = std::to_string(job.jobs_ahead()) + (job.jobs_ahead() == 1 ? " job" : " jobs") + " ahead";
  }
  if (!job.blocked_by().empty()) why += (why.empty() ? "" : "; ") + job.blocked_by();
  if (why.empty() && !job.message().empty()) why = job.message();
  return why.empty() ? "it starts next" : why;
}

void WriteDescription(const v1::Job& job, double now_seconds, Output* output) {
  if (!output->is_table()) return WriteJob(job, now_seconds, output);
  Row("Name", JobId(job.name()), output);
  Row("Uid", job.uid(), output);
  output->Line("State:          " +
               output->Paint(StateName(job.state()), StateColour(job.state())));
  Row("Reason", job.reason(), output);
  Row("Message", job.message(), output);
  Row("Waits for", WhyItWaits(job), output);
  Row("Step", Steps(job) + " (durable: " + std::to_string(job.durable_step()) + ")", output);
  if (job.step() > 0) {
    Row("Loss", FormatNumber(job.loss(), 4), output);
    Row("Speed",
        FormatNumber(job.tokens_per_second(), 0) + " tokens/s, " +
            FormatNumber(job.step_seconds(), 3) + " s a step",
        output);
  }
  Row("Time left", Left(job) == "-" ? "" : Left(job), output);
  Row("Attempt",
      std::to_string(job.attempt()) + ", failures " + std::to_string(job.failure_count()), output);
  Row("Created",
      LocalTime(job.create_time()) + " (" + Age(job.create_time(), now_seconds) + " ago)", output);
  if (job.has_start_time()) Row("Started", LocalTime(job.start_time()), output);
  if (job.has_end_time()) Row("Ended", LocalTime(job.end_time()), output);
  Row("Priority", std::to_string(job.spec().priority()), output);
  Row("Devices", Devices(job.spec()), output);
  if (job.model().parameter_count() > 0) {
    Row("Parameters", std::to_string(job.model().parameter_count()), output);
  }
  if (job.plan().has_estimate()) {
    const v1::PlanEstimate& estimate = job.plan().estimate();
    Row("Memory",
        FormatBytes(estimate.host_bytes_peak()) + " host, " +
            FormatBytes(estimate.device_bytes_peak()) + " a device",
        output);
  }
  for (const auto& [key, value] : job.spec().labels()) Row("Label", key + "=" + value, output);
  Row("Model",
      job.spec().model().path().empty() ? job.spec().model().config() : job.spec().model().path(),
      output);
  Row("Data", job.spec().data().train(), output);
  Row("Output", job.spec().output(), output);
  Row("Failed log", job.failed_log_path(), output);
}

void WriteEvent(const v1::JobEvent& event, Output* output) {
  const v1::Job& job = event.job();
  switch (output->form()) {
    case OutputForm::kJson:
    case OutputForm::kJsonl:
      output->Line(MessageToJson(event, false));
      return;
    case OutputForm::kName:
      output->Line(JobId(job.name()));
      return;
    case OutputForm::kYaml:
      output->data() << "---\n" << MessageToYaml(event) << std::flush;
      return;
    case OutputForm::kTable:
    case OutputForm::kWide:
      break;
  }
  if (event.kind() == v1::JOB_EVENT_KIND_BOOKMARK) return;
  std::string line = LocalTime(event.time()).substr(0, 19) + "  " + Printable(JobId(job.name())) +
                     "  " + output->Paint(StateName(job.state()), StateColour(job.state()));
  if (!job.reason().empty()) line += "  " + Printable(job.reason());
  line += "  step " + Steps(job);
  if (job.step() > 0) line += "  loss " + FormatNumber(job.loss(), 4);
  if (!job.message().empty()) line += "  " + Printable(job.message());
  output->Line(line);
}

void WriteNode(const v1::Node& node, Output* output) {
  switch (output->form()) {
    case OutputForm::kJson:
      output->Line(MessageToJson(node, true));
      return;
    case OutputForm::kJsonl:
      output->Line(MessageToJson(node, false));
      return;
    case OutputForm::kYaml:
      output->data() << MessageToYaml(node) << std::flush;
      return;
    case OutputForm::kName:
      output->Line(Printable(node.name()));
      return;
    case OutputForm::kTable:
    case OutputForm::kWide:
      break;
  }
  Row("Node",
      node.name() + ", oomd " + node.version() + ", up " + FormatSeconds(node.uptime_seconds()),
      output);
  Row("Jobs",
      std::to_string(node.running_jobs()) + " running, " + std::to_string(node.queued_jobs()) +
          " queued",
      output);
  Row("Cpus", std::to_string(node.cpu_count()), output);
  Row("Memory limit", node.memory_limit_source(), output);
  Row("Locked memory",
      node.locked_memory_limit_bytes() < 0 ? "unlimited"
                                           : FormatBytes(node.locked_memory_limit_bytes()),
      output);
  Row("Metrics", node.metrics_address(), output);
  output->Line("");
  Table memory({"NUMA", "POOLS USED", "POOLS LIMIT", "MEMORY FREE", "MEMORY", "PAGES", "CPUS"});
  for (const v1::NumaNode& numa : node.numa_nodes()) {
    memory.AddRow({std::to_string(numa.index()), FormatBytes(numa.pool_used_bytes()),
                   FormatBytes(numa.pool_capacity_bytes()), FormatBytes(numa.memory_free_bytes()),
                   FormatBytes(numa.memory_total_bytes()), numa.page_kind(),
                   std::to_string(numa.cpus_size())});
  }
  memory.Write(output);
  output->Line("");
  Table devices({"DEVICE", "KIND", "NAME", "MEMORY", "NUMA", "JOB"});
  for (const v1::Device& device : node.devices()) {
    devices.AddRow({std::to_string(device.index()), device.kind(), device.name(),
                    FormatBytes(device.memory_bytes()), std::to_string(device.numa_node()),
                    device.job().empty() ? "-" : JobId(device.job())});
  }
  devices.Write(output);
  if (!node.hugepage_hint().empty()) output->Message("hugepages: " + node.hugepage_hint());
  if (!node.gpu_problem().empty()) output->Message("GPUs: " + Printable(node.gpu_problem()));
}

}  // namespace oom
