#include "tests/gpu/api_calls/call_counts.h"

#include <pthread.h>

#include <cstdio>
#include <fstream>

namespace oom::testing {

void CallCounts::Add(const char* function) {
  char thread[16] = {};
  static_cast<void>(::pthread_getname_np(::pthread_self(), thread, sizeof(thread)));
  std::lock_guard<std::mutex> lock(mutex_);
  ++counts_[{function, thread}];
  changed_ = true;
}

bool CallCounts::Write() {
  std::lock_guard<std::mutex> one_writer(writing_);
  std::map<std::pair<std::string, std::string>, int64_t> counts;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!changed_) return true;
    changed_ = false;
    counts = counts_;
  }
  const std::string next = path_ + ".next";
  std::ofstream file(next, std::ios::trunc);
  for (const auto& [key, count] : counts) {
    file << key.first << ' ' << count << ' ' << key.second << '\n';
  }
  file.close();
  return file.good() && std::rename(next.c_str(), path_.c_str()) == 0;
}

}  // namespace oom::testing
