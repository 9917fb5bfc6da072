#include "server/oomd/request_check.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "planner/geometry.h"
#include "server/oomd/job_record.h"

namespace oom {
namespace {

constexpr size_t kMaxRequestIdBytes = 128;
constexpr size_t kMaxNameBytes = 256;

Status Bad(const std::string& field, const std::string& message) {
  return Status(Code::kInvalidArgument, field + ": " + message)
      .WithReason("INVALID_INPUT")
      .WithField(field);
}

uint64_t FilterHash(const v1::ListJobsRequest& request, uint32_t caller,
                    const std::string& store_id, int64_t after) {
  std::vector<int> states(request.states().begin(), request.states().end());
  std::sort(states.begin(), states.end());
  std::string text = store_id + "/" + std::to_string(caller) + "/" + std::to_string(after);
  for (int state : states) text += "/" + std::to_string(state);
  return HashBytes(text);
}

}  // namespace

Status CheckCreate(const v1::CreateJobRequest& request) {
  const v1::JobSpec& spec = request.job().spec();
  if (!request.has_job() || !request.job().has_spec()) return Bad("job.spec", "is missing");
  if (static_cast<int64_t>(spec.ByteSizeLong()) > kMaxSpecBytes) {
    return Bad("job.spec", "has " + std::to_string(spec.ByteSizeLong()) + " bytes, more than " +
                               std::to_string(kMaxSpecBytes));
  }
  if (IsGeometry(spec) && !request.validate_only()) {
    return Bad("data.train",
               "is required; without data and output a model is only planned (validate_only)");
  }
  if (request.request_id().size() > kMaxRequestIdBytes) {
    return Bad("request_id", "has at most " + std::to_string(kMaxRequestIdBytes) + " bytes");
  }
  if (spec.name().size() > kMaxNameBytes)
    return Bad("name", "has at most " + std::to_string(kMaxNameBytes) + " bytes");
  for (unsigned char c : spec.name()) {
    if (c < 0x20 || c == 0x7f) return Bad("name", "has no control characters");
  }
  if (spec.labels_size() > 64) return Bad("labels", "has at most 64 entries");
  for (const auto& [key, value] : spec.labels()) {
    if (key.empty() || key.size() > 63 || value.size() > 256) {
      return Bad("labels", "keys have 1 to 63 bytes, values at most 256");
    }
  }
  return Status::Ok();
}

Status CheckJobName(const std::string& name) {
  if (name.rfind("jobs/", 0) == 0 && IsValidJobId(name.substr(5))) return Status::Ok();
  return Bad("name", "must be \"jobs/<job id>\"");
}

uint64_t PayloadHash(const v1::CreateJobRequest& request) {
  v1::CreateJobRequest payload = request;
  payload.clear_request_id();
  std::string bytes;
  {
    google::protobuf::io::StringOutputStream stream(&bytes);
    google::protobuf::io::CodedOutputStream coded(&stream);
    coded.SetSerializationDeterministic(true);  // Maps have no order of their own.
    payload.SerializeToCodedStream(&coded);
  }
  return HashBytes(bytes);
}

Result<Page> ParsePage(const v1::ListJobsRequest& request, uint32_t caller,
                       const std::string& store_id) {
  Page page;
  if (request.page_size() < 0) return Bad("page_size", "is not negative");
  if (request.page_size() > 0) page.size = std::min(request.page_size(), kMaxPageSize);
  for (int state : request.states()) {
    if (!v1::JobState_IsValid(state))
      return Bad("states", "has an unknown state " + std::to_string(state));
  }
  if (request.page_token().empty()) return page;
  long long after = 0;
  unsigned long long hash = 0;
  int end = 0;
  const std::string& token = request.page_token();
  if (token.size() > 64 || std::sscanf(token.c_str(), "%lld-%llx%n", &after, &hash, &end) != 2 ||
      end != static_cast<int>(token.size()) ||
      hash != FilterHash(request, caller, store_id, after)) {
    return Bad("page_token", "is not one that this service gave out for this filter");
  }
  page.after = after;
  return page;
}

std::string MakePageToken(const v1::ListJobsRequest& request, uint32_t caller,
                          const std::string& store_id, int64_t after) {
  char text[64];
  std::snprintf(text, sizeof(text), "%lld-%llx", static_cast<long long>(after),
                static_cast<unsigned long long>(FilterHash(request, caller, store_id, after)));
  return text;
}

}  // namespace oom
