// Any text as a job file: refused with a Status that names the file, or a spec that has what is
// required and that its own YAML form gives back.

#include <google/protobuf/util/message_differencer.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "client/job_yaml.h"
#include "runtime/base/check.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  const auto spec = oom::ParseJobYaml(text, "job.yaml", "/folder");
  if (!spec.ok()) {
    OOM_CHECK(spec.status().code() == oom::Code::kInvalidArgument);
    OOM_CHECK(spec.status().message().find("job.yaml") != std::string::npos);
    return 0;
  }
  OOM_CHECK(!spec->output().empty() && spec->output().front() == '/');
  const auto again = oom::ParseJobYaml(oom::JobSpecToYaml(*spec), "job.yaml", "/folder");
  OOM_CHECK(again.ok());
  OOM_CHECK(google::protobuf::util::MessageDifferencer::Equals(*spec, *again));
  return 0;
}
