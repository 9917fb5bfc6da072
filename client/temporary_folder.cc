#include "client/temporary_folder.h"

#include <cerrno>
#include <cstdlib>

namespace oom {

Result<std::string> MakeTemporaryFolder() {
  const char* temporary = std::getenv("TMPDIR");
  std::string pattern =
      std::string(temporary == nullptr || *temporary == '\0' ? "/tmp" : temporary) + "/oom-XXXXXX";
  if (::mkdtemp(pattern.data()) == nullptr) return ErrnoStatus(errno, "cannot create " + pattern);
  return pattern;
}

}  // namespace oom
