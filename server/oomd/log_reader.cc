#include "server/oomd/log_reader.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>

namespace oom {
namespace {

std::vector<std::string> Names(const std::string& directory) {
  std::vector<std::string> names;
  DIR* stream = opendir(directory.c_str());
  if (stream == nullptr) return names;
  while (const dirent* entry = readdir(stream)) names.push_back(entry->d_name);
  closedir(stream);
  return names;
}

// "attempt-12" with prefix "attempt-" -> 12; -1 otherwise.
int NumberIn(const std::string& name, const std::string& prefix, const std::string& suffix) {
  if (name.size() <= prefix.size() + suffix.size() || name.rfind(prefix, 0) != 0) return -1;
  const std::string digits =
      name.substr(prefix.size(), name.size() - prefix.size() - suffix.size());
  if (name.substr(name.size() - suffix.size()) != suffix) return -1;
  if (digits.size() > 6 || digits.find_first_not_of("0123456789") != std::string::npos) return -1;
  return std::atoi(digits.c_str());
}

// Where the last `lines` lines begin.
int64_t TailOffset(int fd, int64_t size, int64_t lines) {
  char block[65536];
  int64_t end = size;
  int64_t newlines = 0;
  while (end > 0) {
    const int64_t begin = std::max<int64_t>(0, end - static_cast<int64_t>(sizeof(block)));
    const ssize_t got = pread(fd, block, static_cast<size_t>(end - begin), begin);
    if (got <= 0) break;
    for (int64_t i = got - 1; i >= 0; --i) {
      if (block[i] != '\n' || begin + i == size - 1) continue;
      if (++newlines == lines) return begin + i + 1;
    }
    end = begin;
  }
  return 0;
}

}  // namespace

Status LogReader::Open(const std::string& path, int attempt, int rank) {
  File file{.rank = rank,
            .attempt = attempt,
            .fd = UniqueFd(open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK))};
  if (!file.fd.valid()) {
    if (errno == ENOENT || errno == ELOOP) return Status::Ok();
    return ErrnoStatus(errno, path);
  }
  struct stat info = {};
  if (fstat(file.fd.get(), &info) != 0 || !S_ISREG(info.st_mode)) return Status::Ok();
  int64_t begin = std::min<int64_t>(options_.since_offset_bytes, info.st_size);
  if (options_.tail_lines > 0 && first_discovery_) {
    begin = std::max(begin, TailOffset(file.fd.get(), info.st_size, options_.tail_lines));
  }
  file.read_bytes = file.line_end = std::max<int64_t>(0, begin);
  files_.emplace(std::pair(attempt, rank), std::move(file));
  return Status::Ok();
}

Status LogReader::Discover() {
  for (const std::string& folder : Names(options_.directory)) {
    const int attempt = NumberIn(folder, "attempt-", "");
    if (attempt < 0) continue;
    const std::string path = options_.directory + "/" + folder;
    for (const std::string& name : Names(path)) {
      const int rank = name == "jobhost.log" ? -1 : NumberIn(name, "rank-", ".log");
      if (rank == -1 && name != "jobhost.log") continue;
      if (!options_.ranks.empty() && !options_.ranks.contains(rank)) continue;
      if (files_.contains({attempt, rank})) continue;
      OOM_RETURN_IF_ERROR(Open(path + "/" + name, attempt, rank));
    }
  }
  first_discovery_ = false;
  return Status::Ok();
}

std::optional<LogLine> LogReader::Take(File& file, bool flush) {
  while (true) {
    const size_t newline = file.buffer.find('\n', file.searched);
    size_t length = newline;
    size_t consumed = newline + 1;
    if (newline == std::string::npos) {
      file.searched = file.buffer.size();
      if (file.buffer.size() > static_cast<size_t>(kMaxLineBytes)) {
        // What is over the limit is dropped, not kept in memory.
        length = consumed = kMaxLineBytes;
      } else if (flush && !file.buffer.empty()) {
        length = consumed = file.buffer.size();
      } else {
        return std::nullopt;
      }
    }
    const bool rest = file.cutting;
    file.cutting = newline == std::string::npos && length == static_cast<size_t>(kMaxLineBytes);
    LogLine line{.rank = file.rank,
                 .attempt = file.attempt,
                 .line = file.buffer.substr(0, std::min<size_t>(length, kMaxLineBytes))};
    file.buffer.erase(0, consumed);
    file.searched = 0;
    file.line_end += static_cast<int64_t>(consumed);
    line.offset_bytes = file.line_end;
    if (!rest) return line;
  }
}

Status LogReader::Fill(File& file, bool* grew) {
  char block[65536];
  const ssize_t got = pread(file.fd.get(), block, sizeof(block), file.read_bytes);
  if (got < 0) return ErrnoStatus(errno, "reading a log file");
  if (got > 0) {
    file.buffer.append(block, static_cast<size_t>(got));
    file.read_bytes += got;
    *grew = true;
  }
  return Status::Ok();
}

Result<std::optional<LogLine>> LogReader::Next(bool flush) {
  for (int pass = 0; pass < 2; ++pass) {
    for (auto& [key, file] : files_) {
      while (true) {
        if (std::optional<LogLine> line = Take(file, false)) return line;
        bool grew = false;
        OOM_RETURN_IF_ERROR(Fill(file, &grew));
        if (!grew) break;
      }
      if (flush) {
        if (std::optional<LogLine> line = Take(file, true)) return line;
      }
    }
    // Nothing is left of what is known: look for files that are new, once.
    if (pass == 0) OOM_RETURN_IF_ERROR(Discover());
  }
  return std::optional<LogLine>();
}

}  // namespace oom
