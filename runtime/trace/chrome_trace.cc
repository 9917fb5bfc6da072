#include "runtime/trace/chrome_trace.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "runtime/base/file.h"

namespace oom {
namespace {

using Json = nlohmann::ordered_json;

std::string Dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Json Metadata(const char* kind, int64_t pid, int64_t tid, const char* argument, Json value) {
  Json args;
  args[argument] = std::move(value);
  return {{"ph", "M"}, {"name", kind}, {"pid", pid}, {"tid", tid}, {"args", std::move(args)}};
}

// Lanes of one row: within a lane, events follow each other or nest. Fills lane_of[i] for each
// event.
std::vector<size_t> AssignLanes(const std::vector<const TraceEvent*>& row, size_t* lane_count) {
  std::vector<size_t> lane_of(row.size());
  std::vector<std::vector<double>>
      open_ends;  // By lane, the ends of the events that enclose this moment.
  for (size_t i = 0; i < row.size(); ++i) {
    const double start = row[i]->start_microseconds;
    const double end = start + row[i]->duration_microseconds;
    size_t lane = 0;
    for (;; ++lane) {
      if (lane == open_ends.size()) open_ends.emplace_back();
      std::vector<double>& ends = open_ends[lane];
      while (!ends.empty() && ends.back() <= start) ends.pop_back();
      if (ends.empty() || end <= ends.back()) break;
    }
    open_ends[lane].push_back(end);
    lane_of[i] = lane;
  }
  *lane_count = std::max<size_t>(open_ends.size(), 1);
  return lane_of;
}

}  // namespace

ChromeTrace::Process& ChromeTrace::FindProcess(const std::string& name) {
  for (Process& process : processes_) {
    if (process.name == name) return process;
  }
  return processes_.emplace_back(Process{.name = name, .rows = {}});
}

void ChromeTrace::AddProcess(const std::string& process) { FindProcess(process); }

void ChromeTrace::AddRow(const std::string& process, const std::string& row) {
  std::vector<std::string>& rows = FindProcess(process).rows;
  if (std::find(rows.begin(), rows.end(), row) == rows.end()) rows.push_back(row);
}

void ChromeTrace::Add(TraceEvent event) {
  AddRow(event.process, event.row);
  events_.push_back(std::move(event));
}

void ChromeTrace::AddCounter(TraceCounter counter) {
  AddProcess(counter.process);
  counters_.push_back(std::move(counter));
}

void ChromeTrace::Merge(const ChromeTrace& part) {
  for (const Process& process : part.processes_) {
    AddProcess(process.name);
    for (const std::string& row : process.rows) AddRow(process.name, row);
  }
  events_.insert(events_.end(), part.events_.begin(), part.events_.end());
  counters_.insert(counters_.end(), part.counters_.begin(), part.counters_.end());
}

std::string ChromeTrace::ToJson() const {
  std::map<std::pair<std::string, std::string>, std::vector<const TraceEvent*>> by_row;
  for (const TraceEvent& event : events_) by_row[{event.process, event.row}].push_back(&event);
  std::string text = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[";
  const char* separator = "\n";
  const auto append = [&](const Json& json) {
    text += separator;
    text += Dump(json);
    separator = ",\n";
  };
  int64_t pid = 0;
  for (const Process& process : processes_) {
    ++pid;
    append(Metadata("process_name", pid, 0, "name", process.name));
    append(Metadata("process_sort_index", pid, 0, "sort_index", pid));
    int64_t tid = 0;
    for (const std::string& row : process.rows) {
      std::vector<const TraceEvent*>& events = by_row[{process.name, row}];
      std::stable_sort(events.begin(), events.end(), [](const TraceEvent* a, const TraceEvent* b) {
        if (a->start_microseconds != b->start_microseconds) {
          return a->start_microseconds < b->start_microseconds;
        }
        return a->duration_microseconds > b->duration_microseconds;  // The enclosing one first.
      });
      size_t lane_count = 0;
      const std::vector<size_t> lane_of = AssignLanes(events, &lane_count);
      for (size_t lane = 0; lane < lane_count; ++lane) {
        const int64_t lane_tid = tid + static_cast<int64_t>(lane) + 1;
        const std::string name = lane == 0 ? row : row + " (" + std::to_string(lane + 1) + ")";
        append(Metadata("thread_name", pid, lane_tid, "name", name));
        append(Metadata("thread_sort_index", pid, lane_tid, "sort_index", lane_tid));
      }
      for (size_t i = 0; i < events.size(); ++i) {
        const TraceEvent& event = *events[i];
        Json json = {{"ph", "X"},
                     {"name", event.name},
                     {"pid", pid},
                     {"tid", tid + static_cast<int64_t>(lane_of[i]) + 1},
                     {"ts", event.start_microseconds},
                     {"dur", event.duration_microseconds}};
        if (event.bytes >= 0) json["args"] = {{"bytes", event.bytes}};
        append(json);
      }
      tid += static_cast<int64_t>(lane_count);
    }
    for (const TraceCounter& counter : counters_) {
      if (counter.process != process.name) continue;
      append({{"ph", "C"},
              {"name", counter.name},
              {"pid", pid},
              {"tid", 0},
              {"ts", counter.time_microseconds},
              {"args", {{"bytes", counter.bytes}}}});
    }
  }
  return text + "\n]}\n";
}

Result<ChromeTrace> ChromeTrace::FromJson(const std::string& text, const std::string& where) {
  const auto refuse = [&](const std::string& what) {
    return Status(Code::kInvalidArgument, where + ": " + what);
  };
  const Json root = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!root.is_object() || !root.contains("traceEvents") || !root["traceEvents"].is_array()) {
    return refuse("not a trace with an array \"traceEvents\"");
  }
  using Row = std::pair<int64_t, int64_t>;
  std::map<int64_t, std::string> process_names;
  std::map<Row, std::string> row_names;
  ChromeTrace trace;
  for (const Json& entry : root["traceEvents"]) {
    const bool plain = entry.is_object() && entry.contains("ph") && entry["ph"].is_string() &&
                       entry.contains("name") && entry["name"].is_string() &&
                       entry.contains("pid") && entry["pid"].is_number_integer() &&
                       entry.contains("tid") && entry["tid"].is_number_integer();
    if (!plain) return refuse("an event without ph, name, pid or tid");
    const std::string name = entry["name"];
    const Row row(entry["pid"].get<int64_t>(), entry["tid"].get<int64_t>());
    const Json* args =
        entry.contains("args") && entry["args"].is_object() ? &entry["args"] : nullptr;
    if (entry["ph"] == "M") {
      if (name != "process_name" && name != "thread_name") continue;
      if (args == nullptr || !args->contains("name") || !(*args)["name"].is_string()) {
        return refuse(name + " without a name");
      }
      const std::string value = (*args)["name"];
      if (name == "process_name") {
        trace.AddProcess(process_names[row.first] = value);
      } else {
        row_names[row] = value;
        trace.AddRow(process_names[row.first], value);
      }
    } else if (entry["ph"] == "X") {
      if (!entry.contains("ts") || !entry["ts"].is_number() || !entry.contains("dur") ||
          !entry["dur"].is_number()) {
        return refuse("event \"" + name + "\" without ts or dur");
      }
      if (!row_names.contains(row)) return refuse("event \"" + name + "\" on a row without a name");
      TraceEvent event{.name = name,
                       .process = process_names[row.first],
                       .row = row_names[row],
                       .start_microseconds = entry["ts"].get<double>(),
                       .duration_microseconds = entry["dur"].get<double>()};
      if (args != nullptr && args->contains("bytes") && (*args)["bytes"].is_number_integer()) {
        event.bytes = (*args)["bytes"].get<int64_t>();
      }
      trace.Add(std::move(event));
    } else if (entry["ph"] == "C") {
      if (!entry.contains("ts") || !entry["ts"].is_number() || args == nullptr || !args->contains("bytes") ||
          !(*args)["bytes"].is_number_integer()) {
        return refuse("curve \"" + name + "\" without ts or bytes");
      }
      if (!process_names.contains(row.first)) return refuse("curve \"" + name + "\" of a process without a name");
      trace.AddCounter({.name = name,
                        .process = process_names[row.first],
                        .time_microseconds = entry["ts"].get<double>(),
                        .bytes = (*args)["bytes"].get<int64_t>()});
    }
  }
  return trace;
}

Status ChromeTrace::Write(const std::string& path) const {
  return WriteFileAtomically(path, ToJson());
}

Result<ChromeTrace> ChromeTrace::Read(const std::string& path) {
  OOM_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  return FromJson(text, path);
}

}  // namespace oom
