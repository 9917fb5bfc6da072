// A folder of the client's own for as long as a command runs.

#pragma once

#include <string>

#include "runtime/base/status.h"

namespace oom {

// A new one, for this user alone, in TMPDIR or /tmp. The caller removes it. Codes of ErrnoStatus.
Result<std::string> MakeTemporaryFolder();

}  // namespace oom
