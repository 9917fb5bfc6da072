#include "runtime/data/npy.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "runtime/base/check.h"
#include "runtime/base/unique_fd.h"

namespace oom {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr size_t kHeaderLimitBytes = 1 << 16;

Status Malformed(const std::string& path, const std::string& what) {
  return Status(Code::kInvalidArgument, path + ": " + what).WithField(path);
}

// The header is a Python dictionary with three known keys; this reads exactly that.
class Cursor {
 public:
  explicit Cursor(std::string_view text) : text_(text) {}

  void SkipSpace() {
    while (!text_.empty() && (text_.front() == ' ' || text_.front() == '\n')) {
      text_.remove_prefix(1);
    }
  }
  bool Take(std::string_view token) {
    SkipSpace();
    if (!text_.starts_with(token)) return false;
    text_.remove_prefix(token.size());
    return true;
  }
  bool TakeString(std::string* out) {
    SkipSpace();
    if (text_.empty() || (text_.front() != '\'' && text_.front() != '"')) return false;
    const size_t end = text_.find(text_.front(), 1);
    if (end == std::string_view::npos) return false;
    *out = std::string(text_.substr(1, end - 1));
    text_.remove_prefix(end + 1);
    return true;
  }
  bool TakeCount(int64_t* out) {
    SkipSpace();
    int64_t value = 0;
    size_t digits = 0;
    for (; digits < text_.size() && text_[digits] >= '0' && text_[digits] <= '9'; ++digits) {
      if (__builtin_mul_overflow(value, int64_t{10}, &value) ||
          __builtin_add_overflow(value, int64_t{text_[digits] - '0'}, &value)) {
        return false;
      }
    }
    text_.remove_prefix(digits);
    *out = value;
    return digits > 0;
  }
  bool TakeShape(std::vector<int64_t>* shape) {
    if (!Take("(")) return false;
    while (!Take(")")) {
      int64_t dimension = 0;
      if (!TakeCount(&dimension) || shape->size() == 32) return false;
      shape->push_back(dimension);
      if (Take(",")) continue;
      // Python needs the comma in a tuple of one.
      return shape->size() > 1 && Take(")");
    }
    return true;
  }
  bool AtEnd() {
    SkipSpace();
    return text_.empty();
  }

 private:
  std::string_view text_;
};

// "<u4": byte order, kind, bytes of an element. 0 if it is anything else.
int64_t ElementBytes(const std::string& descr) {
  if (descr.size() != 3 || descr[2] < '1' || descr[2] > '8') return 0;
  const int64_t bytes = descr[2] - '0';
  if (std::string_view("biuf").find(descr[1]) == std::string_view::npos) return 0;
  const bool one_byte = bytes == 1 && descr[0] == '|';
  const bool little = (bytes == 2 || bytes == 4 || bytes == 8) && descr[0] == '<';
  return one_byte || little ? bytes : 0;
}

Result<NpyHeader> ParseDictionary(std::string_view text, const std::string& path) {
  NpyHeader header;
  Cursor cursor(text);
  bool has_descr = false;
  bool has_order = false;
  bool has_shape = false;
  bool good = cursor.Take("{");
  while (good && !cursor.Take("}")) {
    std::string key;
    good = cursor.TakeString(&key) && cursor.Take(":");
    if (!good) break;
    if (key == "descr" && !has_descr) {
      has_descr = good = cursor.TakeString(&header.descr);
    } else if (key == "fortran_order" && !has_order) {
      if (cursor.Take("True")) return Malformed(path, "is in Fortran order; C order is read");
      has_order = good = cursor.Take("False");
    } else if (key == "shape" && !has_shape) {
      has_shape = good = cursor.TakeShape(&header.shape);
    } else {
      return Malformed(path, "its npy header has an unknown or repeated key");
    }
    if (good && !cursor.Take(",")) {
      good = cursor.Take("}");
      break;
    }
  }
  if (!good || !cursor.AtEnd() || !has_descr || !has_order || !has_shape) {
    return Malformed(path, "malformed npy header");
  }
  return header;
}

}  // namespace

Result<NpyHeader> ParseNpyHeader(std::string_view prefix, const std::string& path) {
  if (!prefix.starts_with(kMagic) || prefix.size() < 10) {
    return Malformed(path, "is not an npy file (or is truncated)");
  }
  const int major = static_cast<unsigned char>(prefix[6]);
  const int minor = static_cast<unsigned char>(prefix[7]);
  if ((major != 1 && major != 2) || minor != 0) {
    return Malformed(path, "npy format " + std::to_string(major) + "." + std::to_string(minor) +
                               " is not read; 1.0 and 2.0 are");
  }
  const size_t length_bytes = major == 1 ? 2 : 4;
  if (prefix.size() < 8 + length_bytes) return Malformed(path, "truncated npy header");
  size_t header_bytes = 0;
  for (size_t i = 0; i < length_bytes; ++i) {
    header_bytes |= static_cast<size_t>(static_cast<unsigned char>(prefix[8 + i])) << (8 * i);
  }
  if (header_bytes > kHeaderLimitBytes || prefix.size() - 8 - length_bytes < header_bytes) {
    return Malformed(
        path, "npy header of " + std::to_string(header_bytes) + " bytes is too long or truncated");
  }
  OOM_ASSIGN_OR_RETURN(NpyHeader header,
                       ParseDictionary(prefix.substr(8 + length_bytes, header_bytes), path));
  header.data_offset_bytes = static_cast<int64_t>(8 + length_bytes + header_bytes);
  header.element_bytes = ElementBytes(header.descr);
  if (header.element_bytes == 0) {
    return Malformed(path,
                     "element type '" + header.descr + "' is not read; little-endian numbers are");
  }
  header.elements = 1;
  int64_t bytes = header.element_bytes;
  for (const int64_t dimension : header.shape) {
    if (__builtin_mul_overflow(header.elements, dimension, &header.elements) ||
        __builtin_mul_overflow(bytes, dimension, &bytes)) {
      return Malformed(path, "its shape has too many elements");
    }
  }
  return header;
}

Result<std::unique_ptr<NpyFile>> NpyFile::Open(const std::string& path,
                                               std::span<const std::string_view> types) {
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return ErrnoStatus(errno, "cannot open " + path).WithField(path);
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return ErrnoStatus(errno, "cannot stat " + path);
  if (!S_ISREG(info.st_mode)) return Malformed(path, "is not a regular file");
  std::string prefix(std::min<size_t>(static_cast<size_t>(info.st_size), kHeaderLimitBytes + 12),
                     '\0');
  size_t done = 0;
  while (done < prefix.size()) {
    const ssize_t got =
        ::pread(fd.get(), prefix.data() + done, prefix.size() - done, static_cast<off_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoStatus(errno, "cannot read " + path);
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  prefix.resize(done);
  std::unique_ptr<NpyFile> file(new NpyFile());
  OOM_ASSIGN_OR_RETURN(file->header_, ParseNpyHeader(prefix, path));
  const NpyHeader& header = file->header_;
  if (std::find(types.begin(), types.end(), header.descr) == types.end()) {
    return Malformed(path, "has elements of type '" + header.descr + "', not '" +
                               std::string(types.front()) + "'");
  }
  if (header.shape.size() != 1) {
    return Malformed(path, "has " + std::to_string(header.shape.size()) + " dimensions, not 1");
  }
  if (header.data_offset_bytes % header.element_bytes != 0) {
    return Malformed(path, "its data is not aligned to its elements");
  }
  const int64_t data_bytes = info.st_size - header.data_offset_bytes;
  if (header.elements * header.element_bytes != data_bytes) {
    return Malformed(path, "its shape (" + std::to_string(header.elements) + ") needs " +
                               std::to_string(header.elements * header.element_bytes) +
                               " bytes of data, the file has " + std::to_string(data_bytes));
  }
  void* map =
      ::mmap(nullptr, static_cast<size_t>(info.st_size), PROT_READ, MAP_SHARED, fd.get(), 0);
  if (map == MAP_FAILED) return ErrnoStatus(errno, "cannot map " + path);
  file->map_ = static_cast<const std::byte*>(map);
  file->map_bytes_ = info.st_size;
  return file;
}

NpyFile::~NpyFile() {
  if (map_ != nullptr) {
    ::munmap(const_cast<std::byte*>(map_), static_cast<size_t>(map_bytes_));
  }
}

void NpyFile::CheckElementBytes(size_t bytes) const {
  OOM_CHECK(static_cast<int64_t>(bytes) == header_.element_bytes);
}

}  // namespace oom
