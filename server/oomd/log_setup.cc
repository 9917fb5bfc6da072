#include "server/oomd/log_setup.h"

#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>

namespace oom {
namespace {

// Everything that a job or a user named may be in a message: the line stays one object whatever it
// is.
class JsonFormatter final : public spdlog::formatter {
 public:
  void format(const spdlog::details::log_msg& message, spdlog::memory_buf_t& out) override {
    const double unix_seconds =
        std::chrono::duration<double>(message.time.time_since_epoch()).count();
    const std::string text(message.payload.data(), message.payload.size());
    const auto level = spdlog::level::to_string_view(message.level);
    const std::string line = "{\"time\": " + std::to_string(unix_seconds) + ", \"level\": \"" +
                             std::string(level.data(), level.size()) + "\", \"message\": \"" +
                             EscapeJson(text) + "\"}\n";
    out.append(line.data(), line.data() + line.size());
  }
  std::unique_ptr<spdlog::formatter> clone() const override {
    return std::make_unique<JsonFormatter>();
  }
};

// Text lines are one line, too.
class TextFormatter final : public spdlog::formatter {
 public:
  void format(const spdlog::details::log_msg& message, spdlog::memory_buf_t& out) override {
    std::string text = EscapeJson(std::string(message.payload.data(), message.payload.size()));
    // Quotes need no escape here.
    for (size_t at = 0; (at = text.find("\\\"", at)) != std::string::npos; ++at) text.erase(at, 1);
    spdlog::details::log_msg clean = message;
    clean.payload = spdlog::string_view_t(text.data(), text.size());
    pattern_.format(clean, out);
  }
  std::unique_ptr<spdlog::formatter> clone() const override {
    return std::make_unique<TextFormatter>();
  }

 private:
  spdlog::pattern_formatter pattern_{"%Y-%m-%dT%H:%M:%S.%e%z %l %v"};
};

}  // namespace

std::string EscapeJson(const std::string& text) {
  const std::string quoted =
      nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  return quoted.substr(1, quoted.size() - 2);
}

void SetUpLog(const std::string& format, const std::string& level) {
  auto logger =
      std::make_shared<spdlog::logger>("oomd", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  if (format == "json") {
    logger->set_formatter(std::make_unique<JsonFormatter>());
  } else {
    logger->set_formatter(std::make_unique<TextFormatter>());
  }
  logger->set_level(spdlog::level::from_str(level));
  logger->flush_on(spdlog::level::info);
  spdlog::set_default_logger(logger);
}

}  // namespace oom
