#include "runtime/trace/tensorboard.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <span>

#include "runtime/base/file.h"
#include "runtime/checkpoint/crc32c.h"

namespace oom {
namespace {

// Field numbers of tensorflow.Event, Summary, Summary.Value and SessionLog.
constexpr uint32_t kEventWallTime = 1, kEventStep = 2, kEventFileVersion = 3, kEventSummary = 5,
                   kEventSessionLog = 7;
constexpr uint32_t kSummaryValue = 1;
constexpr uint32_t kValueTag = 1, kValueSimple = 2;
constexpr uint32_t kSessionStatus = 1;
constexpr uint64_t kSessionStart = 1;
// Wire types of protobuf.
constexpr uint32_t kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5;

void AppendVarint(std::string* out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out->push_back(static_cast<char>(value | 0x80));
  out->push_back(static_cast<char>(value));
}

void AppendKey(std::string* out, uint32_t field, uint32_t wire_type) {
  AppendVarint(out, (field << 3) | wire_type);
}

template <class T>
void AppendRaw(std::string* out, T value) {
  char bytes[sizeof(T)];
  std::memcpy(bytes, &value, sizeof(T));  // Little-endian, as the machine is.
  out->append(bytes, sizeof(T));
}

void AppendBytes(std::string* out, uint32_t field, std::string_view bytes) {
  AppendKey(out, field, kBytes);
  AppendVarint(out, bytes.size());
  out->append(bytes);
}

std::string EventAt(double unix_seconds, int64_t step) {
  std::string event;
  AppendKey(&event, kEventWallTime, kFixed64);
  AppendRaw(&event, unix_seconds);
  AppendKey(&event, kEventStep, kVarint);
  AppendVarint(&event, static_cast<uint64_t>(step));
  return event;
}

// CRCs are stored rotated and offset, since CRCs of data that holds CRCs are weak.
uint32_t MaskedCrc(std::string_view bytes) {
  const uint32_t crc = Crc32c(std::as_bytes(std::span(bytes.data(), bytes.size())));
  return ((crc >> 15) | (crc << 17)) + 0xA282EAD8u;
}

}  // namespace

std::string FrameRecord(std::string_view payload) {
  std::string record;
  AppendRaw(&record, static_cast<uint64_t>(payload.size()));
  const uint32_t length_crc = MaskedCrc(record);
  AppendRaw(&record, length_crc);
  record.append(payload);
  AppendRaw(&record, MaskedCrc(payload));
  return record;
}

Result<std::unique_ptr<TensorboardWriter>> TensorboardWriter::Create(const Options& options) {
  OOM_RETURN_IF_ERROR(MakeDirectories(options.directory));
  std::unique_ptr<TensorboardWriter> writer(new TensorboardWriter());
  char host[HOST_NAME_MAX + 1] = "localhost";
  if (::gethostname(host, HOST_NAME_MAX) != 0) std::strcpy(host, "localhost");
  // TensorBoard reads files in the order of their names, so later attempts must sort later.
  const std::string stem = options.directory + "/events.out.tfevents." +
                           std::to_string(static_cast<int64_t>(options.unix_seconds)) + ".";
  const std::string tail = std::string(".") + host + "." + std::to_string(::getpid());
  for (int number = 0; number < 10000 && !writer->fd_.valid(); ++number) {
    const std::string digits = std::to_string(10000 + number).substr(1);
    writer->path_ = stem + digits + tail;
    writer->fd_ = UniqueFd(
        ::open(writer->path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0644));
    if (!writer->fd_.valid() && errno != EEXIST) break;
  }
  if (!writer->fd_.valid()) return ErrnoStatus(errno, "cannot create " + writer->path_);
  std::string version = EventAt(options.unix_seconds, 0);
  AppendBytes(&version, kEventFileVersion, "brain.Event:2");
  OOM_RETURN_IF_ERROR(writer->WriteRecord(version));
  std::string session;
  AppendKey(&session, kSessionStatus, kVarint);
  AppendVarint(&session, kSessionStart);
  std::string start = EventAt(options.unix_seconds, options.completed_steps + 1);
  AppendBytes(&start, kEventSessionLog, session);
  OOM_RETURN_IF_ERROR(writer->WriteRecord(start));
  return writer;
}

Status TensorboardWriter::AddScalars(int64_t step, double unix_seconds,
                                     const std::vector<std::pair<std::string, double>>& values) {
  std::string summary;
  for (const auto& [tag, number] : values) {
    std::string value;
    AppendBytes(&value, kValueTag, tag);
    AppendKey(&value, kValueSimple, kFixed32);
    AppendRaw(&value, static_cast<float>(number));
    AppendBytes(&summary, kSummaryValue, value);
  }
  std::string event = EventAt(unix_seconds, step);
  AppendBytes(&event, kEventSummary, summary);
  return WriteRecord(event);
}

Status TensorboardWriter::WriteRecord(std::string_view event) {
  const std::string record = FrameRecord(event);
  size_t done = 0;
  while (done < record.size()) {
    const ssize_t written = ::write(fd_.get(), record.data() + done, record.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return ErrnoStatus(written < 0 ? errno : EIO, "cannot write " + path_);
    done += static_cast<size_t>(written);
  }
  return Status::Ok();
}

}  // namespace oom
