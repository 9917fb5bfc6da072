#include "runtime/memory/hugepages.h"

#include <algorithm>
#include <charconv>

#include "runtime/base/file.h"
#include "runtime/base/units.h"
#include "runtime/memory/pool.h"

namespace oom {
namespace {

constexpr const char* kSharedMemoryFile = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

// 0 if the kernel has no such pages.
int64_t HugetlbBytes(const std::string& root, const std::string& count) {
  const Result<std::string> text =
      ReadFile(root + "/sys/kernel/mm/hugepages/hugepages-2048kB/" + count, 4096);
  int64_t pages = 0;
  if (text.ok()) std::from_chars(text->data(), text->data() + text->size(), pages);
  return pages * 2_MiB;
}

}  // namespace

bool SharedMemoryUsesTransparentHugePages(const std::string& root) {
  const Result<std::string> text = ReadFile(root + kSharedMemoryFile, 4096);
  return text.ok() && text->find("[never]") == std::string::npos &&
         text->find("[deny]") == std::string::npos;
}

int64_t FreeHugetlbBytes(const std::string& root) { return HugetlbBytes(root, "free_hugepages"); }

HugepageState ExamineHugepages(int64_t pool_bytes, bool allow_hugetlb, const std::string& root) {
  HugepageState state;
  const bool transparent = SharedMemoryUsesTransparentHugePages(root);
  if (allow_hugetlb && FreeHugetlbBytes(root) > 0) {
    state.kind = kHugetlbPages;
  } else {
    state.kind = transparent ? kTransparentHugePages : kSmallPages;
  }
  if (!transparent) {
    state.hint = std::string("echo advise | sudo tee ") + kSharedMemoryFile;
  }
  // Those that pools have taken count: a running job is no reason to ask for more.
  if (allow_hugetlb && HugetlbBytes(root, "nr_hugepages") < pool_bytes / 2) {
    const std::string reserve = "sudo sysctl -w vm.nr_hugepages=" +
                                std::to_string(std::max<int64_t>(1, pool_bytes / 2 / 2_MiB));
    state.hint += (state.hint.empty() ? "" : "   # or: ") + reserve;
  } else if (allow_hugetlb) {
    state.hint.clear();
  }
  return state;
}

}  // namespace oom
