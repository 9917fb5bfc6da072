// CallCounts counts calls by function and by the name of the calling thread, and writes the counts
// to a file, again and again, so that they outlive a process that is killed. Thread-safe.

#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace oom::testing {

class CallCounts {
 public:
  explicit CallCounts(std::string path) : path_(std::move(path)) {}

  void Add(const char* function);
  // Replaces the file if a call came since the last time: lines "FUNCTION COUNT THREAD", by
  // function. A reader never sees half of it. false: the file cannot be written.
  bool Write();

 private:
  const std::string path_;
  std::mutex writing_;
  std::mutex mutex_;
  std::map<std::pair<std::string, std::string>, int64_t> counts_;  // By function and thread.
  bool changed_ = true;
};

}  // namespace oom::testing
