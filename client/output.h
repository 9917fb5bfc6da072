// Where `oom` writes: data to standard output, messages to standard error, colour only on a
// terminal and without NO_COLOR. Text that came from outside is made printable before it reaches a
// terminal. Not thread-safe; the streams must outlive it.

#pragma once

#include <google/protobuf/message.h>

#include <cstdint>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/base/status.h"

namespace oom {

enum class OutputForm { kTable, kWide, kJson, kJsonl, kYaml, kName };
enum class Colour { kRed, kGreen, kYellow, kGrey };

class Output {
 public:
  struct Options {
    OutputForm form = OutputForm::kTable;
    bool quiet = false;
    // Whether data and messages go to a terminal.
    bool data_is_terminal = false;
    bool messages_are_terminal = false;
    bool no_colour = false;
    int terminal_columns = 80;
  };

  Output(const Options& options, std::ostream* data, std::ostream* messages)
      : options_(options), data_(data), messages_(messages) {}

  // Terminal or not, NO_COLOR and the terminal's width as this process finds them.
  static Options Detect(OutputForm form, bool quiet);

  const Options& options() const { return options_; }
  OutputForm form() const { return options_.form; }
  bool is_table() const { return form() == OutputForm::kTable || form() == OutputForm::kWide; }
  std::ostream& data() { return *data_; }

  // A line of data.
  void Line(std::string_view text);
  // A line for a human, not with --quiet. Control characters are escaped.
  void Message(std::string_view text);
  // Writes as it is to the messages' stream (cursor movement of the progress bar); not with
  // --quiet.
  void RawMessage(std::string_view text);
  // "oom: ..." with field and reason where the message does not name them; also with --quiet.
  void Error(const Status& status);
  // As Message, but also with --quiet.
  void ErrorText(std::string_view text);

  // `text` in `colour` where data goes to a terminal that wants colour.
  std::string Paint(std::string_view text, Colour colour) const;

 private:
  const Options options_;
  std::ostream* const data_;
  std::ostream* const messages_;
};

// C0, DEL, C1 and broken UTF-8 as \x1b; tabs stay, newlines stay when `keep_newlines`.
std::string Printable(std::string_view text, bool keep_newlines = false);

// Columns padded to their widest cell; control characters escaped, then `painted` cells coloured.
class Table {
 public:
  explicit Table(std::vector<std::string> header) : header_(std::move(header)) {}
  void AddRow(std::vector<std::string> cells);
  // REQUIRES: at least one row.
  void PaintLastRow(size_t column, Colour colour);
  void Write(Output* output) const;

 private:
  struct Row {
    std::vector<std::string> cells;
    int painted_column = -1;
    Colour colour = Colour::kGrey;
  };
  std::vector<std::string> header_;
  std::vector<Row> rows_;
};

// JSON with the field names of the API; every field is present. `pretty` over several lines.
std::string MessageToJson(const google::protobuf::Message& message, bool pretty);

// The number with `digits` decimals.
std::string FormatNumber(double value, int digits);

}  // namespace oom
