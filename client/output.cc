#include "client/output.h"

#include <google/protobuf/util/json_util.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "client/utf8.h"
#include "runtime/base/check.h"

namespace oom {
namespace {

bool IsControl(uint32_t value) {
  // C0, DEL, C1, and the marks that reverse the direction of the text around them.
  return value < 0x20 || (value >= 0x7f && value < 0xa0) || (value >= 0x202a && value <= 0x202e) ||
         (value >= 0x2066 && value <= 0x2069);
}

// Columns that `text` takes: one for each character. Wide characters are rare in names and numbers.
size_t Width(std::string_view text) {
  size_t width = 0;
  for (const char c : text) width += (static_cast<unsigned char>(c) & 0xc0) != 0x80;
  return width;
}

const char* ColourCode(Colour colour) {
  switch (colour) {
    case Colour::kRed:
      return "\x1b[31m";
    case Colour::kGreen:
      return "\x1b[32m";
    case Colour::kYellow:
      return "\x1b[33m";
    case Colour::kGrey:
      return "\x1b[90m";
  }
  return "";
}

}  // namespace

std::string Printable(std::string_view text, bool keep_newlines) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    uint32_t value = 0;
    const size_t length = Utf8CharacterBytes(text, &value);
    const bool keep =
        length > 0 && (value == '\t' || (keep_newlines && value == '\n') || !IsControl(value));
    if (keep) {
      out.append(text.substr(0, length));
    } else {
      for (size_t i = 0; i < std::max<size_t>(length, 1); ++i) {
        char buffer[8];
        std::snprintf(buffer, sizeof(buffer), "\\x%02x", static_cast<unsigned char>(text[i]));
        out += buffer;
      }
    }
    text.remove_prefix(std::max<size_t>(length, 1));
  }
  return out;
}

Output::Options Output::Detect(OutputForm form, bool quiet) {
  Options options;
  options.form = form;
  options.quiet = quiet;
  options.data_is_terminal = ::isatty(STDOUT_FILENO) == 1;
  options.messages_are_terminal = ::isatty(STDERR_FILENO) == 1;
  const char* no_colour = std::getenv("NO_COLOR");
  const char* terminal = std::getenv("TERM");
  options.no_colour = (no_colour != nullptr && *no_colour != '\0') ||
                      (terminal != nullptr && std::string_view(terminal) == "dumb");
  winsize size{};
  if (::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
    options.terminal_columns = size.ws_col;
  }
  return options;
}

void Output::Line(std::string_view text) { *data_ << text << '\n' << std::flush; }

void Output::Message(std::string_view text) {
  if (!options_.quiet) *messages_ << Printable(text, true) << '\n' << std::flush;
}

void Output::RawMessage(std::string_view text) {
  if (!options_.quiet) *messages_ << text << std::flush;
}

void Output::Error(const Status& status) {
  std::string text = "oom: " + status.message();
  // A field or reason that the message does not name already.
  if (!status.field().empty() && status.message().find(status.field()) == std::string::npos) {
    text += " [" + status.field() + "]";
  }
  if (!status.reason().empty() && status.message().find(status.reason()) == std::string::npos) {
    text += " (" + status.reason() + ")";
  }
  ErrorText(text);
}

void Output::ErrorText(std::string_view text) {
  *messages_ << Printable(text, true) << '\n' << std::flush;
}

std::string Output::Paint(std::string_view text, Colour colour) const {
  if (!options_.data_is_terminal || options_.no_colour) return std::string(text);
  return ColourCode(colour) + std::string(text) + "\x1b[0m";
}

void Table::AddRow(std::vector<std::string> cells) {
  OOM_CHECK(cells.size() == header_.size());
  for (std::string& cell : cells) cell = Printable(cell);
  rows_.push_back({std::move(cells)});
}

void Table::PaintLastRow(size_t column, Colour colour) {
  OOM_CHECK(!rows_.empty());
  rows_.back().painted_column = static_cast<int>(column);
  rows_.back().colour = colour;
}

void Table::Write(Output* output) const {
  std::vector<size_t> widths;
  for (size_t column = 0; column < header_.size(); ++column) {
    size_t width = Width(header_[column]);
    for (const Row& row : rows_) width = std::max(width, Width(row.cells[column]));
    widths.push_back(width);
  }
  const auto write = [&](const std::vector<std::string>& cells, int painted, Colour colour) {
    std::string line;
    for (size_t column = 0; column < cells.size(); ++column) {
      const std::string& cell = cells[column];
      line += static_cast<int>(column) == painted ? output->Paint(cell, colour) : cell;
      if (column + 1 < cells.size()) line.append(widths[column] - Width(cell) + 2, ' ');
    }
    while (line.ends_with(' ')) line.pop_back();
    output->Line(line);
  };
  write(header_, -1, Colour::kGrey);
  for (const Row& row : rows_) write(row.cells, row.painted_column, row.colour);
}

std::string MessageToJson(const google::protobuf::Message& message, bool pretty) {
  google::protobuf::util::JsonPrintOptions options;
  options.always_print_primitive_fields = true;
  options.add_whitespace = pretty;
  std::string text;
  const auto status = google::protobuf::util::MessageToJsonString(message, &text, options);
  OOM_CHECK_MSG(status.ok(), "a message of the API has a JSON form");
  while (text.ends_with('\n')) text.pop_back();
  return text;
}

std::string FormatNumber(double value, int digits) {
  char buffer[64];
  std::snprintf(buffer, sizeof(buffer), "%.*f", digits, value);
  return buffer;
}

}  // namespace oom
