#include "runtime/memory/control_page.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "runtime/base/check.h"
#include "runtime/base/units.h"

namespace oom {
namespace {

// First cache line of the page; the communicator's identity follows.
struct PageHeader {
  uint64_t magic;
  int64_t rank_count;
  int64_t chunk_count;
  int64_t block_count;
  int64_t expert_count;
};
constexpr uint64_t kMagic = 0x33306567616d6f6fULL;  // "oomage03", little-endian.
constexpr int64_t kCommunicatorIdOffset = 64;
constexpr int64_t kHeaderBytes = kCommunicatorIdOffset + ControlPage::kCommunicatorIdBytes;
static_assert(sizeof(PageHeader) <= kCommunicatorIdOffset && kHeaderBytes % 64 == 0);

int64_t RankRecordsOffset(int64_t word_count) { return kHeaderBytes + word_count * 64; }

// Of a rank's and the job host's records, all steps of the ring.
int64_t RecordBytes(const ControlPage::Layout& layout) {
  return RoundUp(layout.rank_count * kStepRing * static_cast<int64_t>(sizeof(RankRecord)) +
                     kStepRing * static_cast<int64_t>(sizeof(ClipRecord)),
                 64);
}

// Of one rank and step.
int64_t RouterCountBytes(const ControlPage::Layout& layout) {
  if (layout.expert_count == 0) return 0;
  return RoundUp((1 + layout.expert_count) * static_cast<int64_t>(sizeof(int64_t)), 64);
}

int64_t NormSquaresOffset(const ControlPage::Layout& layout, int64_t word_count) {
  return RankRecordsOffset(word_count) + RecordBytes(layout) +
         layout.rank_count * kStepRing * RouterCountBytes(layout);
}

}  // namespace

int64_t ControlPage::WordCount(const Layout& layout) {
  return kFixedWords + (3 + layout.rank_count) * layout.chunk_count +
         kWordsOfARank * layout.rank_count;
}

int64_t ControlPage::TotalBytes(const Layout& layout) {
  return RoundUp(NormSquaresOffset(layout, WordCount(layout)) +
                     layout.block_count * static_cast<int64_t>(sizeof(double)),
                 4096);
}

Result<std::unique_ptr<ControlPage>> ControlPage::MapPage(UniqueFd fd, const Layout& layout) {
  const int64_t bytes = TotalBytes(layout);
  void* base = ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED,
                      fd.get(), 0);
  if (base == MAP_FAILED) return ErrnoStatus(errno, "cannot map the control page");
  return std::unique_ptr<ControlPage>(
      new ControlPage(std::move(fd), layout, static_cast<std::byte*>(base), bytes));
}

Result<std::unique_ptr<ControlPage>> ControlPage::Create(const Layout& layout) {
  OOM_CHECK(layout.rank_count > 0 && layout.chunk_count > 0);
  UniqueFd fd(::memfd_create("oom-control", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return ErrnoStatus(errno, "cannot create the control page");
  if (::ftruncate(fd.get(), TotalBytes(layout)) != 0) {
    return ErrnoStatus(errno, "cannot size the control page");
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    return ErrnoStatus(errno, "cannot seal the control page");
  }
  OOM_ASSIGN_OR_RETURN(auto page, MapPage(std::move(fd), layout));
  *reinterpret_cast<PageHeader*>(page->base_) = {
      .magic = kMagic,
      .rank_count = layout.rank_count,
      .chunk_count = layout.chunk_count,
      .block_count = layout.block_count,
      .expert_count = layout.expert_count,
  };
  return page;
}

Result<std::unique_ptr<ControlPage>> ControlPage::Map(UniqueFd fd, const Layout& layout) {
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return ErrnoStatus(errno, "cannot stat the control page");
  if (info.st_size != TotalBytes(layout)) {
    return Status(Code::kInvalidArgument, "the control page has " + std::to_string(info.st_size) +
                                              " bytes, this graph needs " +
                                              std::to_string(TotalBytes(layout)));
  }
  OOM_ASSIGN_OR_RETURN(auto page, MapPage(std::move(fd), layout));
  const PageHeader header = *reinterpret_cast<const PageHeader*>(page->base_);
  if (header.magic != kMagic || header.rank_count != layout.rank_count ||
      header.chunk_count != layout.chunk_count || header.block_count != layout.block_count ||
      header.expert_count != layout.expert_count) {
    return Status(Code::kInvalidArgument, "the control page belongs to another graph");
  }
  return page;
}

ControlPage::~ControlPage() { ::munmap(base_, static_cast<size_t>(bytes_)); }

SharedWord& ControlPage::word(int64_t index) const {
  OOM_CHECK(index >= 0 && index < WordCount(layout_));
  return reinterpret_cast<SharedWord*>(base_ + kHeaderBytes)[index];
}

std::span<std::byte> ControlPage::communicator_id() const {
  return {base_ + kCommunicatorIdOffset, static_cast<size_t>(kCommunicatorIdBytes)};
}

RankRecord& ControlPage::rank_record(int rank, int64_t step) const {
  OOM_CHECK(rank >= 0 && rank < layout_.rank_count && step >= 0);
  auto* records =
      reinterpret_cast<RankRecord*>(base_ + RankRecordsOffset(WordCount(layout_)));
  return records[rank * kStepRing + step % kStepRing];
}

ClipRecord& ControlPage::clip_record(int64_t step) const {
  auto* after_ranks = base_ + RankRecordsOffset(WordCount(layout_)) +
                      layout_.rank_count * kStepRing * static_cast<int64_t>(sizeof(RankRecord));
  return reinterpret_cast<ClipRecord*>(after_ranks)[step % kStepRing];
}

RouterCounts ControlPage::router_counts(int rank, int64_t step) const {
  OOM_CHECK(rank >= 0 && rank < layout_.rank_count && step >= 0 && layout_.expert_count > 0);
  auto* entry = reinterpret_cast<int64_t*>(
      base_ + RankRecordsOffset(WordCount(layout_)) + RecordBytes(layout_) +
      (rank * kStepRing + step % kStepRing) * RouterCountBytes(layout_));
  return {.tokens = entry[0], .choices_E = {entry + 1, static_cast<size_t>(layout_.expert_count)}};
}

std::span<double> ControlPage::norm_squares() const {
  auto* squares = reinterpret_cast<double*>(base_ + NormSquaresOffset(layout_, WordCount(layout_)));
  return {squares, static_cast<size_t>(layout_.block_count)};
}

void ControlPage::Abort() {
  aborted().Publish(1);
  for (int64_t index = 0; index < WordCount(layout_); ++index) word(index).WakeAll();
}

}  // namespace oom
