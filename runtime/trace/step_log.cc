#include "runtime/trace/step_log.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "runtime/base/file.h"

namespace oom {
namespace {

// A log of many millions of steps.
constexpr int64_t kLogLimitBytes = int64_t{16} << 30;

struct RealKey {
  const char* name;
  double StepRecord::*member;
};
struct CountKey {
  const char* name;
  int64_t StepRecord::*member;
};
constexpr RealKey kReals[] = {
    {"loss", &StepRecord::loss},
    {"auxiliary_loss", &StepRecord::auxiliary_loss},
    {"gradient_norm", &StepRecord::gradient_norm},
    {"learning_rate", &StepRecord::learning_rate},
    {"step_seconds", &StepRecord::step_seconds},
    {"tokens_per_second", &StepRecord::tokens_per_second},
    {"exposed_wait_seconds", &StepRecord::exposed_wait_seconds},
};
constexpr CountKey kCounts[] = {
    {"step", &StepRecord::step},
    {"tokens", &StepRecord::tokens},
    {"gpu_bytes_peak", &StepRecord::gpu_bytes_peak},
    {"host_bytes_peak", &StepRecord::host_bytes_peak},
};

void AppendReal(std::string* line, std::string_view key, double value) {
  *line += ", \"" + std::string(key) + "\": ";
  if (!std::isfinite(value)) {
    *line += "null";
    return;
  }
  char text[40];  // The shortest text that reads back as the same double.
  const auto end = std::to_chars(text, text + sizeof(text), value).ptr;
  const std::string_view digits(text, static_cast<size_t>(end - text));
  *line += digits;
  // Without a mark it would be read as an integer, and -0 would lose its sign.
  if (digits.find_first_of(".e") == std::string_view::npos) *line += ".0";
}

void AppendCount(std::string* line, std::string_view key, int64_t value) {
  *line += ", \"" + std::string(key) + "\": " + std::to_string(value);
}

// What of `content` stays: whole lines of steps up to `completed_steps`, each later than the one
// before.
std::string KeptLines(std::string_view content, int64_t completed_steps, int64_t* line_count) {
  std::string kept;
  int64_t last_step = 0;
  *line_count = 0;
  while (!content.empty()) {
    const size_t newline = content.find('\n');
    if (newline == std::string_view::npos) break;  // Torn.
    const std::string_view line = content.substr(0, newline + 1);
    content.remove_prefix(newline + 1);
    const auto record = ParseStepRecord(line.substr(0, newline));
    if (!record.ok() || record->step <= last_step || record->step > completed_steps) continue;
    last_step = record->step;
    kept += line;
    ++*line_count;
  }
  return kept;
}

}  // namespace

std::string FormatStepRecord(const StepRecord& record) {
  std::string line = "{\"step\": " + std::to_string(record.step);
  AppendReal(&line, "loss", record.loss);
  AppendReal(&line, "auxiliary_loss", record.auxiliary_loss);
  AppendCount(&line, "tokens", record.tokens);
  AppendReal(&line, "gradient_norm", record.gradient_norm);
  AppendReal(&line, "learning_rate", record.learning_rate);
  AppendReal(&line, "step_seconds", record.step_seconds);
  AppendReal(&line, "tokens_per_second", record.tokens_per_second);
  AppendReal(&line, "exposed_wait_seconds", record.exposed_wait_seconds);
  AppendCount(&line, "gpu_bytes_peak", record.gpu_bytes_peak);
  AppendCount(&line, "host_bytes_peak", record.host_bytes_peak);
  if (record.evaluation_loss) AppendReal(&line, "evaluation_loss", *record.evaluation_loss);
  return line + "}\n";
}

Result<StepRecord> ParseStepRecord(std::string_view line) {
  const auto refuse = [](const std::string& what) {
    return Status(Code::kInvalidArgument, "step log: " + what);
  };
  const auto json =
      nlohmann::json::parse(line.begin(), line.end(), nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return refuse("not an object");
  StepRecord record;
  size_t key_count = std::size(kReals) + std::size(kCounts);
  const auto real = [&](const nlohmann::json& value) {
    return value.is_null() ? std::nan("") : value.get<double>();
  };
  for (const RealKey& key : kReals) {
    const auto found = json.find(key.name);
    if (found == json.end() || !(found->is_number() || found->is_null())) {
      return refuse(std::string("no number \"") + key.name + "\"");
    }
    record.*key.member = real(*found);
  }
  for (const CountKey& key : kCounts) {
    const auto found = json.find(key.name);
    if (found == json.end() || !found->is_number_integer()) {
      return refuse(std::string("no integer \"") + key.name + "\"");
    }
    record.*key.member = found->get<int64_t>();
  }
  const auto evaluation = json.find("evaluation_loss");
  if (evaluation != json.end()) {
    if (!(evaluation->is_number() || evaluation->is_null()))
      return refuse("no number \"evaluation_loss\"");
    record.evaluation_loss = real(*evaluation);
    ++key_count;
  }
  if (json.size() != key_count) return refuse("an unknown key");
  return record;
}

Result<std::unique_ptr<StepLog>> StepLog::Open(const std::string& path, int64_t completed_steps) {
  std::unique_ptr<StepLog> log(new StepLog());
  log->path_ = path;
  log->last_step_ = completed_steps;
  auto content = ReadFile(path, kLogLimitBytes);
  if (!content.ok() && content.status().code() != Code::kNotFound) return content.status();
  const std::string before = content.ok() ? *std::move(content) : "";
  int64_t line_count = 0;
  const std::string kept = KeptLines(before, completed_steps, &line_count);
  log->missing_count_ = completed_steps - line_count;
  const bool is_prefix = std::string_view(before).starts_with(kept);
  if (!is_prefix) OOM_RETURN_IF_ERROR(WriteFileAtomically(path, kept));
  log->fd_ = UniqueFd(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  if (!log->fd_.valid()) return ErrnoStatus(errno, "cannot open " + path);
  log->size_bytes_ = static_cast<int64_t>(kept.size());
  if (is_prefix && ::ftruncate(log->fd_.get(), log->size_bytes_) != 0) {
    return ErrnoStatus(errno, "cannot truncate " + path);
  }
  OOM_RETURN_IF_ERROR(log->Sync());
  const std::string parent = std::filesystem::path(path).parent_path().string();
  OOM_RETURN_IF_ERROR(SyncDirectory(parent.empty() ? "." : parent));
  return log;
}

Status StepLog::Append(const StepRecord& record) {
  if (record.step != last_step_ + 1) {
    return Status(Code::kInvalidArgument, path_ + ": step " + std::to_string(record.step) +
                                              " after step " + std::to_string(last_step_));
  }
  const std::string line = FormatStepRecord(record);
  ssize_t written = 0;
  do {
    written = ::write(fd_.get(), line.data(), line.size());
  } while (written < 0 && errno == EINTR);
  if (written != static_cast<ssize_t>(line.size())) {
    const int error = written < 0 ? errno : ENOSPC;  // A short write to a file is a full disk.
    if (written > 0) static_cast<void>(::ftruncate(fd_.get(), size_bytes_) == 0);
    return ErrnoStatus(error, "cannot write " + path_);
  }
  size_bytes_ += written;
  last_step_ = record.step;
  return Status::Ok();
}

Status StepLog::Sync() {
  if (::fdatasync(fd_.get()) != 0) return ErrnoStatus(errno, "cannot sync " + path_);
  return Status::Ok();
}

}  // namespace oom
