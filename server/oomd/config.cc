#include "server/oomd/config.h"

#include <dirent.h>
#include <unistd.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <functional>
#include <sstream>

#include "runtime/base/file.h"
#include "runtime/base/units.h"

namespace oom {
namespace {

using Setter = std::function<Status(const std::vector<std::string>&, Config*)>;

Status Bad(const std::string& expected) {
  return Status(Code::kInvalidArgument, "expected " + expected);
}

Setter Text(std::string Config::*member) {
  return [member](const std::vector<std::string>& values, Config* config) -> Status {
    if (values.size() != 1) return Bad("one value");
    config->*member = values[0];
    return Status::Ok();
  };
}

Setter OneOf(std::string Config::*member, std::vector<std::string> allowed) {
  return [member, allowed](const std::vector<std::string>& values, Config* config) -> Status {
    if (values.size() == 1 &&
        std::find(allowed.begin(), allowed.end(), values[0]) != allowed.end()) {
      config->*member = values[0];
      return Status::Ok();
    }
    std::string list;
    for (const std::string& each : allowed) list += (list.empty() ? "" : ", ") + each;
    return Bad("one of " + list);
  };
}

Setter Number(int Config::*member, int least, int most) {
  return [=](const std::vector<std::string>& values, Config* config) -> Status {
    const std::string what =
        "a number from " + std::to_string(least) + " to " + std::to_string(most);
    if (values.size() != 1 || values[0].empty() || values[0].size() > 9) return Bad(what);
    char* end = nullptr;
    const long value = std::strtol(values[0].c_str(), &end, 10);
    if (*end != '\0' || value < least || value > most) return Bad(what);
    config->*member = static_cast<int>(value);
    return Status::Ok();
  };
}

Setter Switch(bool Config::*member) {
  return [member](const std::vector<std::string>& values, Config* config) -> Status {
    if (values.size() != 1 || (values[0] != "true" && values[0] != "false"))
      return Bad("true or false");
    config->*member = values[0] == "true";
    return Status::Ok();
  };
}

Setter Duration(double Config::*member) {
  return [member](const std::vector<std::string>& values, Config* config) -> Status {
    if (values.size() != 1) return Bad("one duration such as 30s");
    OOM_ASSIGN_OR_RETURN(config->*member, ParseSeconds(values[0]));
    return Status::Ok();
  };
}

Setter ByteList(std::vector<int64_t> Config::*member) {
  return [member](const std::vector<std::string>& values, Config* config) -> Status {
    std::vector<int64_t> bytes;
    for (const std::string& value : values) {
      OOM_ASSIGN_OR_RETURN(const int64_t each, ParseBytes(value));
      bytes.push_back(each);
    }
    config->*member = bytes;
    return Status::Ok();
  };
}

const std::map<std::string, Setter>& Setters() {
  static const std::map<std::string, Setter> setters = {
      {"socket", Text(&Config::socket)},
      {"state_dir", Text(&Config::state_dir)},
      {"ephemeral", Switch(&Config::ephemeral)},
      {"metrics_port", Number(&Config::metrics_port, -1, 65535)},
      {"log_format", OneOf(&Config::log_format, {"text", "json"})},
      {"log_level", OneOf(&Config::log_level, {"debug", "info", "warning", "error"})},
      {"jobhost_path", Text(&Config::jobhost_path)},
      {"worker_path", Text(&Config::worker_path)},
      {"backoff_initial", Duration(&Config::backoff_initial_seconds)},
      {"backoff_max", Duration(&Config::backoff_max_seconds)},
      {"stop_slack", Duration(&Config::stop_slack_seconds)},
      {"pool_capacity", ByteList(&Config::pool_capacity_bytes)},
      {"cpu_devices", Number(&Config::cpu_devices, 0, 4096)},
      {"max_queued_jobs", Number(&Config::max_queued_jobs, 1, 1000000)},
      {"hugepages", Switch(&Config::hugepages)},
  };
  return setters;
}

Status Set(const std::string& key, const std::vector<std::string>& values,
           const std::string& origin, Config* config) {
  const auto it = Setters().find(key);
  if (it == Setters().end()) {
    const std::string near = ClosestName(key, ConfigKeys());
    return Status(Code::kInvalidArgument,
                  origin + ": unknown key \"" + key + "\"" +
                      (near.empty() ? "" : "; did you mean \"" + near + "\"?"))
        .WithReason("UNKNOWN_KEY")
        .WithField(key);
  }
  const Status status = it->second(values, config);
  if (status.ok()) return status;
  std::string given;
  for (const std::string& value : values) given += (given.empty() ? "" : ", ") + value;
  return Status(Code::kInvalidArgument,
                origin + ": " + key + ": " + status.message() + ", not \"" + given + "\"")
      .WithReason("INVALID_VALUE")
      .WithField(key);
}

}  // namespace

std::vector<std::string> ConfigKeys() {
  std::vector<std::string> keys = {"version"};
  for (const auto& [key, setter] : Setters()) keys.push_back(key);
  std::sort(keys.begin(), keys.end());
  return keys;
}

Status ApplyYaml(const std::string& text, const std::string& origin, Config* config) {
  YAML::Node root;
  try {
    root = YAML::Load(text);
  } catch (const YAML::Exception& error) {
    return Status(Code::kInvalidArgument,
                  origin + ":" + std::to_string(error.mark.line + 1) + ": " + error.msg)
        .WithReason("INVALID_YAML");
  }
  if (root.IsNull()) return Status::Ok();
  if (!root.IsMap())
    return Status(Code::kInvalidArgument, origin + ":1: expected \"key: value\" lines")
        .WithReason("INVALID_YAML");
  Config changed = *config;
  for (const auto& entry : root) {
    const std::string where = origin + ":" + std::to_string(entry.first.Mark().line + 1);
    if (!entry.first.IsScalar())
      return Status(Code::kInvalidArgument, where + ": a key must be a word")
          .WithReason("INVALID_YAML");
    const std::string key = entry.first.Scalar();
    std::vector<std::string> values;
    if (entry.second.IsScalar()) {
      values.push_back(entry.second.Scalar());
    } else if (entry.second.IsSequence()) {
      for (const auto& item : entry.second) {
        if (!item.IsScalar())
          return Status(Code::kInvalidArgument, where + ": " + key + ": expected plain values")
              .WithField(key);
        values.push_back(item.Scalar());
      }
    }
    if (key == "version") {
      if (values == std::vector<std::string>{"1"}) continue;
      return Status(Code::kInvalidArgument, where + ": version: this oomd reads version 1")
          .WithField(key);
    }
    OOM_RETURN_IF_ERROR(Set(key, values, where, &changed));
  }
  *config = changed;
  return Status::Ok();
}

Status ApplySetting(const std::string& key, const std::string& value, const std::string& origin,
                    Config* config) {
  std::vector<std::string> values;
  std::istringstream parts(value);
  for (std::string part; std::getline(parts, part, ',');) values.push_back(part);
  if (values.empty()) values.push_back("");
  // Only a list is split; a path may have a comma.
  if (key != "pool_capacity") values = {value};
  return Set(key, values, origin, config);
}

Status ApplyFile(const std::string& path, Config* config) {
  OOM_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, 1_MiB));
  OOM_RETURN_IF_ERROR(ApplyYaml(text, path, config));
  std::vector<std::string> drop_ins;
  if (DIR* stream = opendir((path + ".d").c_str())) {
    while (const dirent* entry = readdir(stream)) {
      const std::string name = entry->d_name;
      if (name.size() > 5 && name.front() != '.' && name.substr(name.size() - 5) == ".yaml") {
        drop_ins.push_back(path + ".d/" + name);
      }
    }
    closedir(stream);
  }
  std::sort(drop_ins.begin(), drop_ins.end());
  for (const std::string& drop_in : drop_ins) {
    OOM_ASSIGN_OR_RETURN(const std::string more, ReadFile(drop_in, 1_MiB));
    OOM_RETURN_IF_ERROR(ApplyYaml(more, drop_in, config));
  }
  return Status::Ok();
}

Status ApplyEnvironment(const std::map<std::string, std::string>& environment, Config* config) {
  for (const auto& [name, value] : environment) {
    if (name.rfind("OOMD_", 0) != 0) continue;
    std::string key = name.substr(5);
    std::transform(key.begin(), key.end(), key.begin(),
                   [](unsigned char c) { return std::tolower(c); });
    OOM_RETURN_IF_ERROR(ApplySetting(key, value, "environment " + name, config));
  }
  return Status::Ok();
}

void FillDefaults(const std::map<std::string, std::string>& environment, const std::string& program,
                  Config* config) {
  const auto variable = [&](const char* name) {
    const auto it = environment.find(name);
    return it == environment.end() ? std::string() : it->second;
  };
  if (config->state_dir.empty()) {
    const std::string state = variable("XDG_STATE_HOME");
    const std::string home = variable("HOME");
    config->state_dir =
        !state.empty() ? state + "/oom" : (home.empty() ? "/root" : home) + "/.local/state/oom";
  }
  if (config->socket.empty()) {
    const std::string runtime = variable("XDG_RUNTIME_DIR");
    config->socket = (runtime.empty() ? config->state_dir : runtime) + "/oomd.sock";
  }
  const size_t slash = program.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : program.substr(0, slash);
  if (config->jobhost_path.empty()) config->jobhost_path = folder + "/oom-jobhost";
  if (config->worker_path.empty()) config->worker_path = folder + "/oom-worker";
}

}  // namespace oom
