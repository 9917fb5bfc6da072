#include "runtime/model/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <tuple>
#include <utility>

#include "runtime/base/check.h"
#include "runtime/model/strict_json.h"

namespace oom {
namespace {

using nlohmann::json;

Status Malformed(const std::string& path, const std::string& what) {
  return Status(Code::kInvalidArgument, path + ": " + what).WithField(path);
}

Status MalformedTensor(const std::string& path, const std::string& name, const std::string& what) {
  return Malformed(path, "tensor \"" + name + "\": " + what);
}

// A whole number from 0 to the largest int64_t.
bool ReadCount(const json& value, int64_t* out) {
  if (!value.is_number_unsigned()) return false;
  const uint64_t count = value.get<uint64_t>();
  if (count > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return false;
  *out = static_cast<int64_t>(count);
  return true;
}

Status ParseShape(const json& value, const std::string& path, SafetensorInfo* info) {
  if (!value.is_array()) return MalformedTensor(path, info->name, "\"shape\" is not a list");
  int64_t bytes = TensorTypeBytes(info->type);
  bool overflow = false;
  bool empty = false;
  for (const json& entry : value) {
    int64_t dimension = 0;
    if (!ReadCount(entry, &dimension)) {
      return MalformedTensor(path, info->name, "\"shape\" has an entry that is not a count");
    }
    info->shape.push_back(dimension);
    empty = empty || dimension == 0;
    overflow = __builtin_mul_overflow(bytes, dimension, &bytes) || overflow;
  }
  if (overflow && !empty) {
    return MalformedTensor(path, info->name,
                           "shape " + FormatShape(info->shape) + " has too many bytes");
  }
  info->bytes = empty ? 0 : bytes;
  return Status::Ok();
}

Status ParseOffsets(const json& value, int64_t data_bytes, const std::string& path,
                    SafetensorInfo* info) {
  int64_t begin = 0;
  int64_t end = 0;
  if (!value.is_array() || value.size() != 2 || !ReadCount(value[0], &begin) ||
      !ReadCount(value[1], &end) || begin > end) {
    return MalformedTensor(path, info->name, "\"data_offsets\" is not a pair of rising offsets");
  }
  if (end > data_bytes) {
    return MalformedTensor(path, info->name,
                           "data offsets [" + std::to_string(begin) + ", " + std::to_string(end) +
                               ") end beyond the file's " + std::to_string(data_bytes) +
                               " bytes of data (truncated file?)");
  }
  if (end - begin != info->bytes) {
    return MalformedTensor(path, info->name,
                           std::string(TensorTypeName(info->type)) + " of shape " +
                               FormatShape(info->shape) + " takes " + std::to_string(info->bytes) +
                               " bytes, its data offsets span " + std::to_string(end - begin));
  }
  info->offset_bytes = begin;
  return Status::Ok();
}

Result<SafetensorInfo> ParseTensor(const std::string& name, const json& value, int64_t data_bytes,
                                   const std::string& path) {
  SafetensorInfo info;
  info.name = name;
  if (!value.is_object()) return MalformedTensor(path, name, "its entry is not an object");
  for (const char* key : {"dtype", "shape", "data_offsets"}) {
    if (!value.contains(key)) {
      return MalformedTensor(path, name, "\"" + std::string(key) + "\" is missing");
    }
  }
  if (value.size() != 3) return MalformedTensor(path, name, "its entry has an unknown key");
  const json& type_name = value["dtype"];
  if (!type_name.is_string()) return MalformedTensor(path, name, "\"dtype\" is not a string");
  const std::optional<TensorType> type =
      TensorTypeFromName(type_name.get_ref<const std::string&>());
  if (!type) {
    return MalformedTensor(path, name,
                           "unknown dtype \"" + type_name.get_ref<const std::string&>() + "\"");
  }
  info.type = *type;
  OOM_RETURN_IF_ERROR(ParseShape(value["shape"], path, &info));
  OOM_RETURN_IF_ERROR(ParseOffsets(value["data_offsets"], data_bytes, path, &info));
  return info;
}

Status ParseMetadata(const json& value, const std::string& path, SafetensorsHeader* header) {
  if (!value.is_object()) return Malformed(path, "\"__metadata__\" is not an object");
  for (const auto& [key, text] : value.items()) {
    if (!text.is_string()) {
      return Malformed(path, "\"__metadata__\" entry \"" + key + "\" is not a string");
    }
    header->metadata[key] = text.get<std::string>();
  }
  return Status::Ok();
}

// Every byte of the data section belongs to exactly one tensor.
Status CheckLayout(const SafetensorsHeader& header, const std::string& path) {
  int64_t end = 0;
  for (const SafetensorInfo& info : header.tensors) {
    if (info.offset_bytes < end) {
      return MalformedTensor(path, info.name,
                             "starts at byte " + std::to_string(info.offset_bytes) +
                                 ", which overlaps the tensor before it (ends at " +
                                 std::to_string(end) + ")");
    }
    if (info.offset_bytes > end) {
      return MalformedTensor(path, info.name,
                             "starts at byte " + std::to_string(info.offset_bytes) +
                                 " and leaves a hole after byte " + std::to_string(end));
    }
    end += info.bytes;
  }
  if (end != header.data_bytes) {
    return Malformed(path, "its tensors end at byte " + std::to_string(end) +
                               " of the data section, which has " +
                               std::to_string(header.data_bytes) + " bytes");
  }
  return Status::Ok();
}

Status ReadExactly(int fd, int64_t offset_bytes, std::span<std::byte> out,
                   const std::string& path) {
  size_t done = 0;
  while (done < out.size()) {
    const ssize_t got = ::pread(fd, out.data() + done, out.size() - done,
                                static_cast<off_t>(offset_bytes + static_cast<int64_t>(done)));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      return Status(Code::kDataLoss, path + ": cannot read: " + std::strerror(errno))
          .WithField(path);
    }
    if (got == 0) {
      return Status(Code::kDataLoss, path + ": ends at byte " +
                                         std::to_string(offset_bytes + static_cast<int64_t>(done)) +
                                         ", though it was longer when it was opened")
          .WithField(path);
    }
    done += static_cast<size_t>(got);
  }
  return Status::Ok();
}

}  // namespace

std::string FormatShape(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(shape[i]);
  }
  return text + "]";
}

Result<SafetensorsHeader> ParseSafetensorsHeader(std::string_view text, int64_t data_bytes,
                                                 const std::string& path) {
  if (text.empty() || text.front() != '{') {
    return Malformed(path, "the header does not start with '{'; not a safetensors file");
  }
  OOM_ASSIGN_OR_RETURN(const json root, ParseStrictJson(text, path + ": header"));
  SafetensorsHeader header;
  header.data_bytes = data_bytes;
  for (const auto& [name, value] : root.items()) {
    if (name == "__metadata__") {
      OOM_RETURN_IF_ERROR(ParseMetadata(value, path, &header));
      continue;
    }
    OOM_ASSIGN_OR_RETURN(SafetensorInfo info, ParseTensor(name, value, data_bytes, path));
    header.tensors.push_back(std::move(info));
  }
  std::sort(header.tensors.begin(), header.tensors.end(),
            [](const SafetensorInfo& a, const SafetensorInfo& b) {
              return std::tie(a.offset_bytes, a.bytes, a.name) <
                     std::tie(b.offset_bytes, b.bytes, b.name);
            });
  OOM_RETURN_IF_ERROR(CheckLayout(header, path));
  return header;
}

Result<std::unique_ptr<SafetensorsFile>> SafetensorsFile::Open(const std::string& path) {
  std::unique_ptr<SafetensorsFile> file(new SafetensorsFile());
  file->path_ = path;
  file->fd_ = UniqueFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file->fd_.valid()) return ErrnoStatus(errno, "cannot open " + path).WithField(path);
  struct stat info {};
  if (::fstat(file->fd_.get(), &info) != 0) return ErrnoStatus(errno, "cannot stat " + path);
  if (!S_ISREG(info.st_mode)) return Malformed(path, "is not a regular file");
  const int64_t file_bytes = info.st_size;
  uint64_t header_bytes = 0;
  if (file_bytes < 8) {
    return Malformed(path, "has " + std::to_string(file_bytes) +
                               " bytes, too few for a safetensors header (truncated?)");
  }
  OOM_RETURN_IF_ERROR(
      ReadExactly(file->fd_.get(), 0, std::as_writable_bytes(std::span(&header_bytes, 1)), path));
  if (header_bytes > static_cast<uint64_t>(kSafetensorsHeaderLimitBytes)) {
    return Malformed(path, "header length " + std::to_string(header_bytes) + " is above " +
                               std::to_string(kSafetensorsHeaderLimitBytes));
  }
  file->data_offset_bytes_ = 8 + static_cast<int64_t>(header_bytes);
  if (file->data_offset_bytes_ > file_bytes) {
    return Malformed(path, "header of " + std::to_string(header_bytes) +
                               " bytes ends beyond the file's " + std::to_string(file_bytes) +
                               " bytes (truncated?)");
  }
  // The header is parsed from a copy, so that a file that shrinks meanwhile gives an error, not a
  // signal.
  std::string text(header_bytes, '\0');
  OOM_RETURN_IF_ERROR(ReadExactly(
      file->fd_.get(), 8, std::as_writable_bytes(std::span(text.data(), text.size())), path));
  OOM_ASSIGN_OR_RETURN(file->header_,
                       ParseSafetensorsHeader(text, file_bytes - file->data_offset_bytes_, path));
  void* map =
      ::mmap(nullptr, static_cast<size_t>(file_bytes), PROT_READ, MAP_SHARED, file->fd_.get(), 0);
  if (map == MAP_FAILED) return ErrnoStatus(errno, "cannot map " + path);
  file->map_ = static_cast<const std::byte*>(map);
  file->map_bytes_ = file_bytes;
  const std::vector<SafetensorInfo>& tensors = file->header_.tensors;
  for (size_t i = 0; i < tensors.size(); ++i) file->by_name_[tensors[i].name] = i;
  return file;
}

SafetensorsFile::~SafetensorsFile() {
  if (map_ != nullptr) {
    ::munmap(const_cast<std::byte*>(map_), static_cast<size_t>(map_bytes_));
  }
}

std::string_view SafetensorsFile::header_text() const {
  return {reinterpret_cast<const char*>(map_ + 8), static_cast<size_t>(data_offset_bytes_ - 8)};
}

const SafetensorInfo* SafetensorsFile::Find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &header_.tensors[found->second];
}

std::span<const std::byte> SafetensorsFile::bytes(const SafetensorInfo& tensor) const {
  return {map_ + data_offset_bytes_ + tensor.offset_bytes, static_cast<size_t>(tensor.bytes)};
}

Status SafetensorsFile::Read(const SafetensorInfo& tensor, int64_t offset_bytes,
                             std::span<std::byte> out) const {
  OOM_CHECK(offset_bytes >= 0 && offset_bytes <= tensor.bytes - static_cast<int64_t>(out.size()));
  return ReadExactly(fd_.get(), data_offset_bytes_ + tensor.offset_bytes + offset_bytes, out,
                     path_);
}

Status SafetensorsFile::ReadFloats(const SafetensorInfo& tensor, int64_t first_element,
                                   std::span<float> out) const {
  const int64_t element_bytes = TensorTypeBytes(tensor.type);
  if (tensor.type == TensorType::kF32) {
    return Read(tensor, first_element * element_bytes, std::as_writable_bytes(out));
  }
  constexpr size_t kPieceElements = 1 << 16;
  std::vector<std::byte> piece(std::min(out.size(), kPieceElements) *
                               static_cast<size_t>(element_bytes));
  while (!out.empty()) {
    const size_t count = std::min(out.size(), kPieceElements);
    const std::span<std::byte> raw(piece.data(), count * static_cast<size_t>(element_bytes));
    OOM_RETURN_IF_ERROR(Read(tensor, first_element * element_bytes, raw));
    ConvertToFloat(tensor.type, raw, out.first(count));
    out = out.subspan(count);
    first_element += static_cast<int64_t>(count);
  }
  return Status::Ok();
}

}  // namespace oom
