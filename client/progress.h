// ProgressPrinter shows a followed job: one bar that redraws itself on a terminal, elsewhere one
// line for each change of state, for the first step, then one each `interval_seconds`. Writes
// messages only. Not thread-safe; the output must outlive it.

#pragma once

#include <functional>
#include <string>

#include "client/output.h"
#include "oom/v1/job.pb.h"

namespace oom {

class ProgressPrinter {
 public:
  struct Options {
    double interval_seconds = 10.0;
    // Monotonic seconds; passed in so that tests need not wait.
    std::function<double()> clock;
  };

  ProgressPrinter(Options options, Output* output);

  void Update(const v1::Job& job);
  // A message between the progress lines.
  void Message(const std::string& text);
  // Leaves the bar's line; prints the last progress that was not printed yet.
  void Finish();

 private:
  void PrintLine();
  void DrawBar();
  void EraseBar();

  const Options options_;
  Output* const output_;
  v1::Job job_;
  std::string state_text_;
  bool bar_is_drawn_ = false;
  int64_t printed_step_ = -1;
  double printed_at_seconds_ = 0.0;
};

// "step 12/200  loss 3.2140  1234 tokens/s  left 3m 20s  durable 0".
std::string ProgressText(const v1::Job& job);

// The line on a terminal of `columns` columns: a bar, the percentage and what fits of ProgressText.
std::string ProgressBar(const v1::Job& job, int columns);

}  // namespace oom
