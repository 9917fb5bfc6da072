#include "server/jobhost/host_log.h"

#include <spdlog/details/file_helper.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <mutex>
#include <vector>

namespace oom {

class HostLog::Sink : public spdlog::sinks::base_sink<std::mutex> {
 public:
  void WriteTo(const std::string& path) {
    std::lock_guard<std::mutex> lock(mutex_);
    file_.reset();
    try {
      auto file = std::make_unique<spdlog::details::file_helper>();
      file->open(path);
      file_ = std::move(file);
    } catch (const spdlog::spdlog_ex& error) {  // spdlog has no other way to say it.
      std::fprintf(stderr, "oom-jobhost: no log file: %s\n", error.what());
    }
  }

 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    if (!file_) return;
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    file_->write(line);
  }
  void flush_() override {
    if (file_) file_->flush();
  }

 private:
  std::unique_ptr<spdlog::details::file_helper> file_;
};

HostLog::HostLog() : sink_(std::make_shared<Sink>()) {
  std::vector<spdlog::sink_ptr> sinks = {std::make_shared<spdlog::sinks::stderr_sink_mt>(), sink_};
  auto logger = std::make_shared<spdlog::logger>("oom-jobhost", sinks.begin(), sinks.end());
  logger->set_pattern("%Y-%m-%dT%H:%M:%S.%e%z %l %v");
  logger->flush_on(spdlog::level::info);
  spdlog::set_default_logger(std::move(logger));
}

HostLog::~HostLog() { spdlog::default_logger()->flush(); }

void HostLog::WriteTo(const std::string& path) { sink_->WriteTo(path); }

}  // namespace oom
