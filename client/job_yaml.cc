#include "client/job_yaml.h"

#include <filesystem>
#include <iostream>
#include <iterator>
#include <vector>

#include "client/message_yaml.h"
#include "client/yaml_tree.h"
#include "runtime/base/file.h"

namespace oom {
namespace {

std::string Resolve(const std::string& folder, const std::string& path) {
  if (path.empty()) return path;
  std::string resolved = ResolvePath(folder, path);
  // "data/" and "data" are one folder.
  while (resolved.size() > 1 && resolved.back() == '/') resolved.pop_back();
  return resolved;
}

void ResolvePaths(const std::string& folder, v1::JobSpec* spec) {
  if (spec->has_model()) {
    v1::ModelSource* model = spec->mutable_model();
    model->set_path(Resolve(folder, model->path()));
    model->set_config(Resolve(folder, model->config()));
  }
  if (spec->has_data()) {
    v1::DataSource* data = spec->mutable_data();
    data->set_train(Resolve(folder, data->train()));
    data->set_evaluation(Resolve(folder, data->evaluation()));
  }
  spec->set_output(Resolve(folder, spec->output()));
  if (spec->plan() != "auto") spec->set_plan(Resolve(folder, spec->plan()));
  if (spec->resume() != "auto" && spec->resume() != "never") {
    spec->set_resume(Resolve(folder, spec->resume()));
  }
}

Status CheckRequired(const v1::JobSpec& spec, const std::string& file) {
  std::vector<std::string> missing;
  if (spec.model().path().empty() && spec.model().config().empty()) missing.push_back("model");
  if (spec.data().train().empty()) missing.push_back("data.train");
  if (spec.sequence_length() == 0) missing.push_back("sequence_length");
  if (spec.global_batch() == 0) missing.push_back("global_batch");
  if (spec.steps() == 0) missing.push_back("steps");
  if (spec.output().empty()) missing.push_back("output");
  if (missing.empty()) return Status::Ok();
  std::string names;
  for (const std::string& name : missing) names += (names.empty() ? "" : ", ") + name;
  return Status(Code::kInvalidArgument, file + ": missing: " + names).WithField(missing.front());
}

}  // namespace

Result<v1::JobSpec> ParseJobYaml(const std::string& text, const std::string& file,
                                 const std::string& folder) {
  if (static_cast<int64_t>(text.size()) > kJobFileLimitBytes) {
    return Status(Code::kInvalidArgument, file + " has " + std::to_string(text.size()) +
                                              " bytes; a job file has at most 1 MiB")
        .WithField(file);
  }
  OOM_ASSIGN_OR_RETURN(const YamlTree tree, ParseYaml(text, file));
  v1::JobSpec spec;
  OOM_RETURN_IF_ERROR(MessageFromYaml(tree, file, &spec));
  OOM_RETURN_IF_ERROR(CheckRequired(spec, file));
  ResolvePaths(folder, &spec);
  return spec;
}

Result<v1::JobSpec> ReadJobFile(const std::string& path) {
  std::error_code error;
  const std::filesystem::path current = std::filesystem::current_path(error);
  if (error) return ErrnoStatus(error.value(), "cannot find the current folder");
  if (path == "-") {
    std::string text;
    char buffer[65536];
    // One byte above the limit is enough to know that it is too large.
    while (static_cast<int64_t>(text.size()) <= kJobFileLimitBytes &&
           (std::cin.read(buffer, sizeof(buffer)), std::cin.gcount() > 0)) {
      text.append(buffer, static_cast<size_t>(std::cin.gcount()));
    }
    return ParseJobYaml(text, "standard input", current.string());
  }
  const Result<std::string> text = ReadFile(path, kJobFileLimitBytes);
  if (!text.ok()) {
    return Status(Code::kInvalidArgument, text.status().message()).WithField(path);
  }
  const std::filesystem::path folder = (current / path).lexically_normal().parent_path();
  return ParseJobYaml(*text, path, folder.string());
}

std::string JobSpecToYaml(const v1::JobSpec& spec) { return MessageToYaml(spec); }

}  // namespace oom
