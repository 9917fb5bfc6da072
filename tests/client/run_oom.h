// RunOom starts the built `oom` and looks at what it prints and how it ends, with pipes or with a
// terminal. Not thread-safe. Every wait has a deadline, after which the program is killed.

#pragma once

#include <sys/types.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "runtime/base/unique_fd.h"

namespace oom {

struct OomOptions {
  // By default the built program.
  std::string program;
  std::map<std::string, std::string> environment;
  std::string folder;
  std::string input;
  // Standard output and error are one terminal; its text is `messages` and `data` both.
  bool terminal = false;
  double deadline_seconds = 30.0;
};

struct OomResult {
  // 128 + signal when a signal ended it.
  int exit_code = -1;
  std::string data;
  std::string messages;
};

class OomProcess {
 public:
  OomProcess(const std::vector<std::string>& arguments, const OomOptions& options);
  ~OomProcess();
  OomProcess(const OomProcess&) = delete;
  OomProcess& operator=(const OomProcess&) = delete;

  // Reads until `text` is in messages or data; false when it ends or the deadline comes first.
  bool WaitFor(const std::string& text);
  void Signal(int signal);
  // Reads to the end.
  OomResult Finish();
  const OomResult& seen() const { return result_; }

 private:
  // Reads what is there, waiting at most until the deadline; false at the end of both streams.
  bool ReadSome();

  const OomOptions options_;
  pid_t pid_ = -1;
  UniqueFd data_;
  UniqueFd messages_;
  double deadline_ = 0.0;
  OomResult result_;
};

OomResult RunOom(const std::vector<std::string>& arguments, const OomOptions& options = {});

}  // namespace oom
