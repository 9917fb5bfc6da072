#include "server/jobhost/transition_journal.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <string_view>

#include "runtime/base/file.h"
#include "runtime/checkpoint/crc32c.h"

namespace oom {
namespace {

constexpr std::string_view kFirstLine = "oom-transitions 1\n";
constexpr size_t kRecordHeaderBytes = 8;
constexpr int64_t kJournalLimitBytes = int64_t{64} << 20;
constexpr char kAcknowledged = 'A';
constexpr char kTransition = 'T';

void PutLittleEndian(uint64_t value, int bytes, std::string* out) {
  for (int index = 0; index < bytes; ++index) {
    out->push_back(static_cast<char>((value >> (8 * index)) & 0xFF));
  }
}

uint64_t GetLittleEndian(std::string_view bytes) {
  uint64_t value = 0;
  for (size_t index = 0; index < bytes.size(); ++index) {
    value |= static_cast<uint64_t>(static_cast<unsigned char>(bytes[index])) << (8 * index);
  }
  return value;
}

std::string Record(char kind, std::string_view payload) {
  const std::string body = kind + std::string(payload);
  std::string record;
  PutLittleEndian(body.size(), 4, &record);
  PutLittleEndian(Crc32c(std::as_bytes(std::span(body))), 4, &record);
  return record + body;
}

std::string AcknowledgedRecord(int64_t number) {
  std::string payload;
  PutLittleEndian(static_cast<uint64_t>(number), 8, &payload);
  return Record(kAcknowledged, payload);
}

Status WriteAll(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::write(fd, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return ErrnoStatus(errno, "cannot write the transition journal");
    bytes.remove_prefix(static_cast<size_t>(count));
  }
  return Status::Ok();
}

}  // namespace

Result<std::unique_ptr<TransitionJournal>> TransitionJournal::Open(const std::string& path,
                                                                   int64_t first_number) {
  std::unique_ptr<TransitionJournal> journal(new TransitionJournal(path));
  MutexLock lock(journal->mutex_);
  OOM_RETURN_IF_ERROR(journal->Load());
  if (journal->next_number_ < first_number) journal->next_number_ = first_number;
  if (journal->pending_.empty()) journal->acknowledged_ = journal->next_number_ - 1;
  // Without the cut record, so that the next one follows whole ones.
  OOM_RETURN_IF_ERROR(journal->Rewrite());
  return journal;
}

Status TransitionJournal::Load() {
  const Result<std::string> content = ReadFile(path_, kJournalLimitBytes);
  if (!content.ok()) {
    return content.status().code() == Code::kNotFound ? Status::Ok() : content.status();
  }
  std::string_view rest = content.value();
  // Only whole files are renamed into place, so the first line is never cut.
  if (!rest.starts_with(kFirstLine)) {
    return Status(Code::kDataLoss, path_ + ": this is no transition journal");
  }
  rest.remove_prefix(kFirstLine.size());
  while (rest.size() >= kRecordHeaderBytes) {
    const uint64_t body_bytes = GetLittleEndian(rest.substr(0, 4));
    if (body_bytes > rest.size() - kRecordHeaderBytes) break;  // Cut by a crash.
    const std::string_view body = rest.substr(kRecordHeaderBytes, body_bytes);
    const bool is_last = kRecordHeaderBytes + body_bytes == rest.size();
    if (Crc32c(std::as_bytes(std::span(body))) != GetLittleEndian(rest.substr(4, 4))) {
      if (is_last) break;  // Its length arrived before its bytes.
      return Status(Code::kDataLoss, path_ + ": a record's checksum does not fit");
    }
    if (body.empty()) return Status(Code::kDataLoss, path_ + ": an empty record");
    OOM_RETURN_IF_ERROR(ParseRecord(body.front(), body.substr(1)));
    rest.remove_prefix(kRecordHeaderBytes + body_bytes);
  }
  return Status::Ok();
}

Status TransitionJournal::ParseRecord(char kind, std::string_view payload) {
  if (kind == kAcknowledged && payload.size() == 8 && pending_.empty()) {
    acknowledged_ = static_cast<int64_t>(GetLittleEndian(payload));
    next_number_ = acknowledged_ + 1;
    return Status::Ok();
  }
  internal::v1::Transition transition;
  if (kind != kTransition ||
      !transition.ParseFromArray(payload.data(), static_cast<int>(payload.size()))) {
    return Status(Code::kDataLoss, path_ + ": a record is malformed");
  }
  const bool follows = transition.number() == next_number_ ||
                       (pending_.empty() && transition.number() > acknowledged_);
  if (!follows) {
    return Status(Code::kDataLoss, path_ + ": transition " + std::to_string(transition.number()) +
                                       " is out of order");
  }
  next_number_ = transition.number() + 1;
  pending_.push_back(std::move(transition));
  return Status::Ok();
}

Status TransitionJournal::Rewrite() {
  std::string content(kFirstLine);
  content += AcknowledgedRecord(acknowledged_);
  for (const internal::v1::Transition& transition : pending_) {
    content += Record(kTransition, transition.SerializeAsString());
  }
  OOM_RETURN_IF_ERROR(WriteFileAtomically(path_, content));
  UniqueFd file(::open(path_.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC));
  if (!file.valid()) return ErrnoStatus(errno, "cannot open " + path_);
  file_ = std::move(file);
  return Status::Ok();
}

Result<internal::v1::Transition> TransitionJournal::Append(internal::v1::Transition transition) {
  MutexLock lock(mutex_);
  if (broken_) return Status(Code::kInternal, path_ + ": an earlier write failed");
  transition.set_number(next_number_);
  Status status = WriteAll(file_.get(), Record(kTransition, transition.SerializeAsString()));
  // After a failed sync nobody knows what is on disk: the call is never repeated.
  if (status.ok() && ::fdatasync(file_.get()) != 0)
    status = ErrnoStatus(errno, "cannot sync " + path_);
  if (!status.ok()) {
    broken_ = true;
    return status;
  }
  ++next_number_;
  pending_.push_back(transition);
  return transition;
}

Status TransitionJournal::Acknowledge(int64_t number) {
  MutexLock lock(mutex_);
  if (number <= acknowledged_ || number >= next_number_ || broken_) return Status::Ok();
  std::erase_if(pending_, [&](const auto& transition) { return transition.number() <= number; });
  acknowledged_ = number;
  const Status status = Rewrite();
  if (!status.ok()) broken_ = true;
  return status;
}

std::vector<internal::v1::Transition> TransitionJournal::pending() const {
  MutexLock lock(mutex_);
  return pending_;
}

int64_t TransitionJournal::next_number() const {
  MutexLock lock(mutex_);
  return next_number_;
}

}  // namespace oom
