// The daemon's Prometheus metrics and their endpoint, on the loopback address. Names, labels and
// buckets are in docs/METRICS.md; no label has user text but `job`, on families of single jobs,
// which are capped. Thread-safe.

#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "server/oomd/controller.h"

namespace oom {

class Metrics : public Observer {
 public:
  struct Gauges {
    std::map<v1::JobState, int> jobs;
    std::vector<int64_t> pool_capacity_bytes;
    std::vector<int64_t> pool_used_bytes;
    size_t watch_streams = 0;
    int64_t watch_overflows = 0;
  };

  explicit Metrics(const std::string& version);
  ~Metrics() override;

  // Listens on 127.0.0.1:`port` (0: any). Fails with kAlreadyExists if the port is taken.
  Status Serve(int port);
  // "127.0.0.1:9464"; empty while nothing is served.
  std::string address() const;
  void SetGauges(const Gauges& gauges);
  void SetReady(bool ready);
  void SetDraining(bool draining);
  void CountRequest(const std::string& method, const std::string& code, double seconds);
  void CountLogMessage(const std::string& level);

  void JobTransitioned(const v1::Job& job) override;
  void QueueWaited(double seconds) override;
  void Progressed(const v1::Job& job, const internal::v1::Progress& progress) override;
  void StoreCommitted(double seconds) override;
  void StoreFailed(const Status& status) override;
  void Warned(const std::string& message) override;

 private:
  struct Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace oom
