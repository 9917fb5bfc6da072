// A job file: the YAML form of oom.v1.JobSpec (docs/CLI.md). Pure functions but for ReadJobFile.

#pragma once

#include <cstdint>
#include <string>

#include "oom/v1/job.pb.h"
#include "runtime/base/status.h"

namespace oom {

inline constexpr int64_t kJobFileLimitBytes = int64_t{1} << 20;

// Parses `text`; `file` appears in errors. Relative paths (model.path, model.config, data.train,
// data.evaluation, output, plan unless "auto", resume unless "auto" or "never") are taken from
// `folder`, which must be absolute. Fails with kInvalidArgument, field() set: a syntax error, an
// unknown key or a value of the wrong type with its line, or all missing required fields in one
// message.
Result<v1::JobSpec> ParseJobYaml(const std::string& text, const std::string& file,
                                 const std::string& folder);

// Reads and parses a job file; "-" is standard input, with paths relative to the current folder.
// A file that is missing, unreadable or above kJobFileLimitBytes is kInvalidArgument too.
Result<v1::JobSpec> ReadJobFile(const std::string& path);

// The job file of a spec; ParseJobYaml gives back an equal spec.
std::string JobSpecToYaml(const v1::JobSpec& spec);

}  // namespace oom
