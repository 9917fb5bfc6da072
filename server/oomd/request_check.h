// What of a request is refused before anything is done with it: sizes, names, page tokens. The
// rules of a job itself are the planner's. Pure functions; all fail with kInvalidArgument and the
// field's name.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "oom/v1/job.pb.h"
#include "runtime/base/status.h"

namespace oom {

inline constexpr int64_t kMaxSpecBytes = int64_t{1} << 20;
inline constexpr int kMaxPageSize = 1000;
inline constexpr int kDefaultPageSize = 100;

// What has to hold before the specification's own fields are looked at, which is the planner's work.
Status CheckCreate(const v1::CreateJobRequest& request);
Status CheckJobName(const std::string& name);

// Of the payload without its request_id; equal for equal requests.
uint64_t PayloadHash(const v1::CreateJobRequest& request);

struct Page {
  int64_t after = 0;  // Submit order of the last job of the page before.
  int size = kDefaultPageSize;
};
// A token is bound to the caller, to the filter and to the store.
Result<Page> ParsePage(const v1::ListJobsRequest& request, uint32_t caller,
                       const std::string& store_id);
std::string MakePageToken(const v1::ListJobsRequest& request, uint32_t caller,
                          const std::string& store_id, int64_t after);

}  // namespace oom
