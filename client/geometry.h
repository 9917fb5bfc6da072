// Geometries: configurations of published models that come with oom, `geometries/NAME/config.json`
// beside the program. Without weights and data they tell what a model needs and how fast it can be.
// Not thread-safe.

#pragma once

#include <memory>
#include <string>
#include <vector>

#include "client/command_line.h"
#include "oom/v1/job.pb.h"
#include "runtime/base/status.h"

namespace oom {

// Sorted. Fails with kNotFound where the folder is missing.
Result<std::vector<std::string>> GeometryNames();

// The configuration's path. Fails with kNotFound; the message lists the geometries that there are,
// and says which may be meant.
Result<std::string> FindGeometry(const std::string& name);

// Whether a word that may be a job file, too, can only be meant as a geometry: it is no path, not
// named like a job file, and no such file is there.
bool MeansGeometry(const std::string& word);

// What `oom plan GEOMETRY` asks for. A configuration of another number of layers is a file in a
// temporary folder, which goes with this object.
class GeometryPlan {
 public:
  // Fails with kNotFound as FindGeometry, and with codes of reading and writing files.
  static Result<std::unique_ptr<GeometryPlan>> Create(const CommandLine& line);
  ~GeometryPlan();
  GeometryPlan(const GeometryPlan&) = delete;
  GeometryPlan& operator=(const GeometryPlan&) = delete;

  const v1::CreateJobRequest& request() const { return request_; }

 private:
  GeometryPlan() = default;
  Status WriteConfig(const std::string& original, int64_t layers);

  v1::CreateJobRequest request_;
  std::string temporary_folder_;
};

}  // namespace oom
