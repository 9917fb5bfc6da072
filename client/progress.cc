#include "client/progress.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "client/commands.h"
#include "client/exit_code.h"
#include "client/job_view.h"
#include "runtime/base/units.h"

namespace oom {
namespace {

constexpr int kBarColumns = 24;

std::string Speed(double tokens_per_second) {
  if (tokens_per_second >= 1e6) return FormatNumber(tokens_per_second / 1e6, 2) + "M tokens/s";
  if (tokens_per_second >= 1e4) return FormatNumber(tokens_per_second / 1e3, 1) + "k tokens/s";
  return FormatNumber(tokens_per_second, 0) + " tokens/s";
}

std::string StateText(const v1::Job& job) {
  std::string text = JobId(job.name()) + ": " + StateName(job.state());
  if (!job.reason().empty()) text += " (" + job.reason() + ")";
  const std::string waits = WhyItWaits(job);
  if (!waits.empty()) {
    text += ": " + waits;
  } else if (!job.message().empty() && !IsTerminal(job.state())) {
    text += ": " + job.message();
  }
  return text;
}

}  // namespace

std::string ProgressText(const v1::Job& job) {
  std::string text =
      "step " + std::to_string(job.step()) + "/" + std::to_string(job.spec().steps());
  if (job.step() > 0) text += "  loss " + FormatNumber(job.loss(), 4);
  if (job.tokens_per_second() > 0) text += "  " + Speed(job.tokens_per_second());
  if (job.eta_seconds() > 0) text += "  left " + FormatSeconds(job.eta_seconds());
  return text + "  durable " + std::to_string(job.durable_step());
}

std::string ProgressBar(const v1::Job& job, int columns) {
  const double steps = static_cast<double>(std::max<int64_t>(job.spec().steps(), 1));
  const double share = std::clamp(static_cast<double>(job.step()) / steps, 0.0, 1.0);
  const int done = static_cast<int>(std::lround(share * kBarColumns));
  std::string text = "[" + std::string(done, '#') + std::string(kBarColumns - done, '.') + "] ";
  text += FormatNumber(std::floor(share * 100), 0) + "%  " + ProgressText(job);
  // A line that wraps could not be erased again.
  if (static_cast<int>(text.size()) >= columns)
    text.resize(static_cast<size_t>(std::max(columns - 1, 0)));
  return text;
}

ProgressPrinter::ProgressPrinter(Options options, Output* output)
    : options_(std::move(options)), output_(output) {}

void ProgressPrinter::Update(const v1::Job& job) {
  job_ = job;
  std::string text = StateText(job);
  if (text != state_text_) {
    state_text_ = std::move(text);
    Message(state_text_);
  }
  if (job.step() <= 0) return;
  if (output_->options().messages_are_terminal) {
    DrawBar();
    return;
  }
  const bool first = printed_step_ < 0;
  const bool due = options_.clock() - printed_at_seconds_ >= options_.interval_seconds;
  if (first || (due && job.step() != printed_step_)) PrintLine();
}

void ProgressPrinter::Message(const std::string& text) {
  EraseBar();
  output_->Message(text);
}

void ProgressPrinter::Finish() {
  if (job_.step() <= 0) return;
  if (bar_is_drawn_) {
    DrawBar();
    output_->RawMessage("\n");
    bar_is_drawn_ = false;
  } else if (job_.step() != printed_step_) {
    PrintLine();
  }
}

void ProgressPrinter::PrintLine() {
  output_->Message(ProgressText(job_));
  printed_step_ = job_.step();
  printed_at_seconds_ = options_.clock();
}

void ProgressPrinter::DrawBar() {
  output_->RawMessage("\r" + ProgressBar(job_, output_->options().terminal_columns) + "\x1b[K");
  bar_is_drawn_ = true;
  printed_step_ = job_.step();
}

void ProgressPrinter::EraseBar() {
  if (bar_is_drawn_) output_->RawMessage("\r\x1b[K");
  bar_is_drawn_ = false;
}

}  // namespace oom
