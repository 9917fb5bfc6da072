#include "server/oomd/job_record.h"

#include <cstdio>

namespace oom {

bool IsValidJobId(const std::string& id) {
  if (id.empty() || id.size() > 63) return false;
  const auto lower = [](char c) { return c >= 'a' && c <= 'z'; };
  const auto digit = [](char c) { return c >= '0' && c <= '9'; };
  if (!lower(id.front())) return false;
  for (char c : id) {
    if (!lower(c) && !digit(c) && c != '-') return false;
  }
  return id.back() != '-';
}

std::string MakeJobId(const std::string& name) {
  std::string id;
  for (char c : name) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    const bool plain = (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9');
    if (plain) {
      id += c;
    } else if (!id.empty() && id.back() != '-') {
      id += '-';
    }
  }
  // Room for a "-123" that makes it unique.
  if (id.size() > 56) id.resize(56);
  while (!id.empty() && id.back() == '-') id.pop_back();
  if (id.empty()) return "job";
  if (id.front() < 'a' || id.front() > 'z') id = "job-" + id;
  return id;
}

std::string MakeUuid7(double unix_seconds, uint64_t random_high, uint64_t random_low) {
  const auto milliseconds = static_cast<uint64_t>(unix_seconds * 1e3) & 0xFFFFFFFFFFFF;
  const auto version = static_cast<unsigned>(0x7000 | (random_high & 0x0FFF));
  const auto variant = static_cast<unsigned>(0x8000 | ((random_high >> 12) & 0x3FFF));
  char text[40];
  std::snprintf(text, sizeof(text), "%08x-%04x-%04x-%04x-%012llx",
                static_cast<unsigned>(milliseconds >> 16),
                static_cast<unsigned>(milliseconds & 0xFFFF), version, variant,
                static_cast<unsigned long long>(random_low & 0xFFFFFFFFFFFF));
  return text;
}

uint64_t HashBytes(const std::string& data) {
  uint64_t hash = 0xcbf29ce484222325;
  for (unsigned char c : data) hash = (hash ^ c) * 0x100000001b3;
  return hash;
}

v1::Job Brief(const v1::Job& job) {
  v1::Job brief = job;
  brief.clear_plan();
  brief.clear_model();
  return brief;
}

}  // namespace oom
