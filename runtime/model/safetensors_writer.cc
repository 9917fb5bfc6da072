#include "runtime/model/safetensors_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <unordered_set>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/base/file.h"
#include "runtime/base/units.h"

namespace oom {
namespace {

std::string HeaderText(const SafetensorsWriter::Options& options,
                       const std::vector<int64_t>& offsets_bytes) {
  nlohmann::ordered_json root = nlohmann::ordered_json::object();
  if (!options.metadata.empty()) root["__metadata__"] = options.metadata;
  for (size_t i = 0; i < options.tensors.size(); ++i) {
    const SafetensorEntry& entry = options.tensors[i];
    nlohmann::ordered_json value;
    value["dtype"] = TensorTypeName(entry.type);
    value["shape"] = entry.shape;
    value["data_offsets"] = {offsets_bytes[i], offsets_bytes[i + 1]};
    // push_back, since ordered_json looks a key up by scanning all of them.
    root.get_ref<nlohmann::ordered_json::object_t&>().push_back({entry.name, std::move(value)});
  }
  std::string text = root.dump();
  text.resize(static_cast<size_t>(RoundUp(static_cast<int64_t>(text.size()), 8)), ' ');
  return text;
}

}  // namespace

Status WriteErrnoStatus(int error_number, std::string_view what) {
  if (error_number != EFBIG) return ErrnoStatus(error_number, what);
  return Status(Code::kResourceExhausted, std::string(what) + ": " + std::strerror(error_number));
}

Result<std::unique_ptr<SafetensorsWriter>> SafetensorsWriter::Create(const Options& options) {
  std::vector<int64_t> offsets_bytes = {0};
  std::unordered_set<std::string_view> names;
  for (const SafetensorEntry& entry : options.tensors) {
    OOM_CHECK_MSG(names.insert(entry.name).second, entry.name.c_str());
    int64_t bytes = TensorTypeBytes(entry.type);
    for (const int64_t dimension : entry.shape) {
      OOM_CHECK(dimension >= 0 && !__builtin_mul_overflow(bytes, dimension, &bytes));
    }
    offsets_bytes.push_back(offsets_bytes.back() + bytes);
  }
  const std::string header = HeaderText(options, offsets_bytes);
  return Start(options.path, header, std::move(offsets_bytes), options.preallocate);
}

Result<std::unique_ptr<SafetensorsWriter>> SafetensorsWriter::CreateLike(
    const std::string& path, const SafetensorsFile& model) {
  std::vector<int64_t> offsets_bytes = {0};
  for (const SafetensorInfo& info : model.header().tensors) {
    offsets_bytes.push_back(info.offset_bytes + info.bytes);
  }
  return Start(path, model.header_text(), std::move(offsets_bytes), /*preallocate=*/false);
}

Result<std::unique_ptr<SafetensorsWriter>> SafetensorsWriter::Start(
    const std::string& path, std::string_view header, std::vector<int64_t> offsets_bytes,
    bool preallocate) {
  if (static_cast<int64_t>(header.size()) > kSafetensorsHeaderLimitBytes) {
    return Status(Code::kInvalidArgument,
                  path + ": its header would have " + std::to_string(header.size()) +
                      " bytes; the format allows " + std::to_string(kSafetensorsHeaderLimitBytes));
  }
  std::unique_ptr<SafetensorsWriter> writer(new SafetensorsWriter());
  writer->path_ = path;
  writer->offsets_bytes_ = std::move(offsets_bytes);
  writer->data_offset_bytes_ = 8 + static_cast<int64_t>(header.size());
  writer->fd_ = UniqueFd(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  if (!writer->fd_.valid()) return WriteErrnoStatus(errno, "cannot create " + path);
  if (preallocate) {
    const off_t file_bytes = writer->data_offset_bytes_ + writer->data_bytes();
    int failed = 0;
    do {
      failed = ::fallocate(writer->fd_.get(), 0, 0, file_bytes) == 0 ? 0 : errno;
    } while (failed == EINTR);
    if (failed == EOPNOTSUPP || failed == ENOSYS) {
      // A file system without preallocation: the size at least.
      failed = ::ftruncate(writer->fd_.get(), file_bytes) == 0 ? 0 : errno;
    }
    if (failed != 0) {
      return WriteErrnoStatus(failed, "cannot take " + FormatBytes(file_bytes) + " for " + path);
    }
  }
  const uint64_t header_bytes = header.size();
  OOM_RETURN_IF_ERROR(writer->WriteBytes(0, std::as_bytes(std::span(&header_bytes, 1))));
  OOM_RETURN_IF_ERROR(writer->WriteBytes(8, std::as_bytes(std::span(header))));
  return writer;
}

Status SafetensorsWriter::WriteBytes(int64_t file_offset_bytes, std::span<const std::byte> bytes) {
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t written =
        ::pwrite(fd_.get(), bytes.data() + done, bytes.size() - done,
                 static_cast<off_t>(file_offset_bytes + static_cast<int64_t>(done)));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return WriteErrnoStatus(errno, "cannot write " + path_);
    done += static_cast<size_t>(written);
  }
  return Status::Ok();
}

Status SafetensorsWriter::Append(std::span<const std::byte> bytes) {
  const int64_t count = static_cast<int64_t>(bytes.size());
  OOM_CHECK(count <= data_bytes() - appended_bytes_);
  OOM_RETURN_IF_ERROR(WriteBytes(data_offset_bytes_ + appended_bytes_, bytes));
  appended_bytes_ += count;
  written_bytes_ += count;
  return Status::Ok();
}

Status SafetensorsWriter::WriteAt(size_t index, int64_t offset_bytes,
                                  std::span<const std::byte> bytes) {
  const int64_t count = static_cast<int64_t>(bytes.size());
  OOM_CHECK(index + 1 < offsets_bytes_.size());
  OOM_CHECK(offset_bytes >= 0 && offset_bytes <= tensor_bytes(index) - count);
  OOM_RETURN_IF_ERROR(WriteBytes(data_offset_bytes_ + offsets_bytes_[index] + offset_bytes, bytes));
  written_bytes_ += count;
  return Status::Ok();
}

Status SafetensorsWriter::Finish() {
  OOM_CHECK_MSG(written_bytes_ == data_bytes(), path_.c_str());
  if (::fsync(fd_.get()) != 0) return WriteErrnoStatus(errno, "cannot sync " + path_);
  // Some file systems report a failed write only here.
  if (::close(fd_.Release()) != 0) return WriteErrnoStatus(errno, "cannot close " + path_);
  return Status::Ok();
}

Status WriteSafetensorsIndex(const std::string& path,
                             const std::map<std::string, std::string>& file_by_tensor,
                             int64_t total_bytes, int64_t total_parameters) {
  nlohmann::ordered_json root;
  root["metadata"]["total_parameters"] = total_parameters;
  root["metadata"]["total_size"] = total_bytes;
  root["weight_map"] = file_by_tensor;
  return WriteFileAtomically(path, root.dump(2) + "\n");
}

}  // namespace oom
