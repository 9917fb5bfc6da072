# cmake -DROOT=folder -DOUTPUT=file -P WriteBuildId.cmake: a source file that defines oom::BuildId(), a hash of
# everything that decides what a job's shared memory means. An unchanged hash leaves the file as it is.
set(text "")
foreach(folder proto runtime planner worker server/jobhost)
  file(GLOB_RECURSE sources RELATIVE ${ROOT} ${ROOT}/${folder}/*.h ${ROOT}/${folder}/*.cc ${ROOT}/${folder}/*.cu
       ${ROOT}/${folder}/*.proto)
  list(SORT sources)
  foreach(source ${sources})
    file(SHA256 ${ROOT}/${source} hash)
    string(APPEND text "${source} ${hash}\n")
  endforeach()
endforeach()
string(SHA256 id "${text}")
file(CONFIGURE OUTPUT ${OUTPUT} @ONLY CONTENT [[
#include "runtime/base/build_id.h"

namespace oom {

std::string_view BuildId() { return "@id@"; }

}  // namespace oom
]])
