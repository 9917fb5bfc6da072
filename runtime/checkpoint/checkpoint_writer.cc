#include "runtime/checkpoint/checkpoint_writer.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/base/file.h"
#include "runtime/checkpoint/checkpoint_directory.h"

namespace oom {

CheckpointWriter::CheckpointWriter(Options options)
    : options_(std::move(options)), parent_(CheckpointsDirectory(options_.output_directory)) {}

CheckpointWriter::~CheckpointWriter() {
  if (temporary_.empty()) return;
  files_.clear();
  std::error_code ignored;  // What cannot be removed now is removed by the next writer.
  std::filesystem::remove_all(temporary_, ignored);
}

void CheckpointWriter::Stage(std::string_view stage) {
  if (options_.on_stage) options_.on_stage(stage);
}

Result<std::unique_ptr<CheckpointWriter>> CheckpointWriter::Create(Options options) {
  std::unique_ptr<CheckpointWriter> writer(new CheckpointWriter(std::move(options)));
  OOM_RETURN_IF_ERROR(MakeDirectories(writer->parent_));
  OOM_RETURN_IF_ERROR(RemoveStaleTemporaries(writer->options_.output_directory));
  OOM_RETURN_IF_ERROR(writer->Reserve());
  writer->Stage("reserved");
  return writer;
}

Status CheckpointWriter::Reserve() {
  const std::string temporary =
      parent_ + "/" + CheckpointName(options_.manifest.step) + ".tmp." + RandomSuffix();
  if (::mkdir(temporary.c_str(), 0755) != 0)
    return ErrnoStatus(errno, "cannot create " + temporary);
  temporary_ = temporary;
  lock_fd_ = UniqueFd(::open(temporary.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!lock_fd_.valid()) return ErrnoStatus(errno, "cannot open " + temporary);
  // Where directories cannot be locked, another writer on this output could remove ours; the rename
  // then fails.
  static_cast<void>(::flock(lock_fd_.get(), LOCK_EX | LOCK_NB));
  for (const ParameterUnit& unit : options_.units) {
    UnitFileLayout layout = LayOutUnitFile(unit);
    OOM_ASSIGN_OR_RETURN(auto file,
                         StateFileWriter::Create(temporary + "/" + layout.name, layout.bytes));
    OOM_RETURN_IF_ERROR(file->Write(0, std::as_bytes(std::span(layout.header))));
    files_.push_back(std::move(file));
    layouts_.push_back(std::move(layout));
  }
  return Status::Ok();
}

Status CheckpointWriter::WriteBlocks(int64_t unit, int64_t first_element,
                                     std::span<const float> masters, std::span<const float> moment1,
                                     std::span<const float> moment2) {
  OOM_CHECK(unit >= 0 && unit < static_cast<int64_t>(options_.units.size()));
  const ParameterUnit& spec = options_.units[static_cast<size_t>(unit)];
  const auto count = static_cast<int64_t>(masters.size());
  OOM_CHECK(masters.size() == moment1.size() && masters.size() == moment2.size());
  OOM_CHECK(first_element >= 0 && count <= spec.elements - first_element);
  for (size_t tensor = 0; tensor < spec.tensors.size(); ++tensor) {
    const TensorSpec& part = spec.tensors[tensor];
    const int64_t begin = std::max(first_element, part.offset_elements);
    const int64_t end = std::min(first_element + count, part.offset_elements + part.elements);
    if (begin >= end) continue;
    OOM_RETURN_IF_ERROR(
        WriteTensorPart(unit, tensor, first_element, begin, end, masters, StateArray::kMaster));
    OOM_RETURN_IF_ERROR(
        WriteTensorPart(unit, tensor, first_element, begin, end, moment1, StateArray::kMoment1));
    OOM_RETURN_IF_ERROR(
        WriteTensorPart(unit, tensor, first_element, begin, end, moment2, StateArray::kMoment2));
  }
  return Status::Ok();
}

// `begin` and `end` are in unit coordinates; values[0] is element `first_in_unit`.
Status CheckpointWriter::WriteTensorPart(int64_t unit, size_t tensor, int64_t first_in_unit,
                                         int64_t begin, int64_t end, std::span<const float> values,
                                         StateArray array) {
  const TensorSpec& spec = options_.units[static_cast<size_t>(unit)].tensors[tensor];
  const int64_t base =
      layouts_[static_cast<size_t>(unit)].offset_bytes[tensor][static_cast<size_t>(array)];
  const int64_t offset_bytes =
      base + (begin - spec.offset_elements) * static_cast<int64_t>(sizeof(float));
  const auto part =
      values.subspan(static_cast<size_t>(begin - first_in_unit), static_cast<size_t>(end - begin));
  return files_[static_cast<size_t>(unit)]->Write(offset_bytes, std::as_bytes(part));
}

Status CheckpointWriter::WriteManifest() {
  const std::string path = temporary_ + "/" + std::string(kManifestName);
  // By way of a temporary name here too, so that its presence alone says that it is whole.
  return WriteFileAtomically(path, FormatManifest(options_.manifest));
}

Status CheckpointWriter::Rename(const std::string& path) {
  if (::rename(temporary_.c_str(), path.c_str()) == 0) {
    temporary_.clear();
    return Status::Ok();
  }
  if (errno != ENOTEMPTY && errno != EEXIST) return ErrnoStatus(errno, "cannot rename to " + path);
  // One of this step is there: not whole, or of an abandoned run, else training had gone on from
  // it.
  if (::renameat2(AT_FDCWD, temporary_.c_str(), AT_FDCWD, path.c_str(), RENAME_EXCHANGE) == 0) {
    std::error_code ignored;  // Under the temporary name; the next writer removes what stays.
    std::filesystem::remove_all(std::exchange(temporary_, ""), ignored);
    return Status::Ok();
  }
  if (errno != EINVAL && errno != ENOSYS) return ErrnoStatus(errno, "cannot replace " + path);
  OOM_RETURN_IF_ERROR(RemoveCheckpoint(path));
  if (::rename(temporary_.c_str(), path.c_str()) != 0)
    return ErrnoStatus(errno, "cannot rename to " + path);
  temporary_.clear();
  return Status::Ok();
}

Result<CheckpointReport> CheckpointWriter::Commit() {
  OOM_CHECK(!temporary_.empty());
  Stage("written");
  CheckpointReport report;
  report.step = options_.manifest.step;
  for (size_t unit = 0; unit < files_.size(); ++unit) {
    OOM_ASSIGN_OR_RETURN(auto crcs, files_[unit]->Finish());
    report.bytes += files_[unit]->bytes();
    options_.manifest.files.push_back({.name = layouts_[unit].name,
                                       .bytes = files_[unit]->bytes(),
                                       .piece_crcs = std::move(crcs)});
  }
  OOM_RETURN_IF_ERROR(SyncDirectory(temporary_));
  Stage("synced");
  OOM_RETURN_IF_ERROR(WriteManifest());
  Stage("manifest");
  report.path = parent_ + "/" + CheckpointName(report.step);
  OOM_RETURN_IF_ERROR(Rename(report.path));
  OOM_RETURN_IF_ERROR(SyncDirectory(parent_));
  // The directory `checkpoints` itself may be new.
  OOM_RETURN_IF_ERROR(SyncDirectory(options_.output_directory));
  Stage("renamed");
  auto removed = ApplyRetention(options_.output_directory, report.step, options_.keep);
  if (removed.ok()) {
    report.removed = *std::move(removed);
  } else if (removed.status().code() == Code::kDataLoss) {
    // The disk gave back other bytes than were written. The older ones stand.
    static_cast<void>(RemoveCheckpoint(report.path));
    return removed.status();
  } else {
    report.retention = removed.status();
  }
  Stage("retained");
  return report;
}

}  // namespace oom
