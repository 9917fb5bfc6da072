#include "client/init.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <vector>

#include "client/geometry.h"
#include "client/message_yaml.h"
#include "oom/v1/job.pb.h"
#include "runtime/base/file.h"

namespace oom {
namespace {

constexpr int64_t kConfigLimitBytes = int64_t{16} << 20;
// Longer sequences than this are a choice, not a default.
constexpr int64_t kLongestDefaultSequence = 4096;

struct ModelFacts {
  std::string family;
  int64_t sequence_length = 0;
  bool has_weights = false;
};

// "qwen3_moe", "mixtral": as config.json spells the families of the API.
std::vector<std::string> KnownFamilies() {
  std::vector<std::string> names;
  const auto* descriptor = v1::ModelFamily_descriptor();
  for (int i = 1; i < descriptor->value_count(); ++i) {
    names.push_back(ShortEnumName(*descriptor->value(i)));
  }
  return names;
}

bool HasWeights(const std::filesystem::path& folder) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    if (entry.path().extension() == ".safetensors") return true;
  }
  return false;
}

Result<ModelFacts> ReadFacts(const std::filesystem::path& config, bool is_folder) {
  OOM_ASSIGN_OR_RETURN(const std::string text, ReadFile(config.string(), kConfigLimitBytes));
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, false);
  const auto wrong = [&](const std::string& message) {
    return Status(Code::kInvalidArgument, config.string() + ": " + message)
        .WithField(config.string());
  };
  if (!json.is_object()) return wrong("not a JSON object");
  ModelFacts facts;
  const auto family = json.find("model_type");
  if (family == json.end() || !family->is_string()) return wrong("no model_type");
  facts.family = family->get<std::string>();
  const std::vector<std::string> known = KnownFamilies();
  if (std::find(known.begin(), known.end(), facts.family) == known.end()) {
    std::string names;
    for (const std::string& name : known) names += (names.empty() ? "" : ", ") + name;
    return wrong("model_type '" + facts.family + "' is not one of " + names);
  }
  facts.sequence_length = kLongestDefaultSequence;
  const auto positions = json.find("max_position_embeddings");
  if (positions != json.end() && positions->is_number_integer() && positions->get<int64_t>() > 0) {
    facts.sequence_length = std::min(facts.sequence_length, positions->get<int64_t>());
  }
  facts.has_weights = is_folder && HasWeights(config.parent_path());
  return facts;
}

// As a double-quoted YAML text.
std::string Quoted(const std::string& text) { return nlohmann::json(text).dump(); }

}  // namespace

Result<std::string> JobFileForModel(const std::string& model) {
  std::filesystem::path path(model);
  std::error_code error;
  if (MeansGeometry(model) && !std::filesystem::exists(path, error)) {
    OOM_ASSIGN_OR_RETURN(const std::string geometry, FindGeometry(model));
    path = std::filesystem::path(geometry).parent_path();
  }
  const bool is_folder = std::filesystem::is_directory(path, error);
  const std::filesystem::path config = is_folder ? path / "config.json" : path;
  OOM_ASSIGN_OR_RETURN(const ModelFacts facts, ReadFacts(config, is_folder));
  const std::filesystem::path absolute =
      std::filesystem::absolute(facts.has_weights ? path : config).lexically_normal();
  std::string name = (is_folder ? path / "" : path).parent_path().filename().string();
  std::erase_if(name, [](unsigned char c) { return std::isalnum(c) == 0 && c != '-'; });
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (name.empty() || std::isalpha(static_cast<unsigned char>(name.front())) == 0) name = "job";
  while (name.ends_with('-')) name.pop_back();
  name.resize(std::min<size_t>(name.size(), 40));

  std::ostringstream out;
  out << "# A training job of OOM. Relative paths are relative to this file.\n"
         "# Check it with `oom plan FILE`, start it with `oom train FILE`. A `#` key shows a "
         "default.\n"
      << "name: " << name << "\n\n";
  if (facts.has_weights) {
    out << "# " << facts.family
        << ", from the weights in this folder.\nmodel: {path: " << Quoted(absolute.string())
        << "}\n";
  } else {
    out << "# " << facts.family
        << ", from random weights.\nmodel: {config: " << Quoted(absolute.string())
        << ", initialize: random}\n";
  }
  if (facts.family.starts_with("qwen")) {
    out << "# For contexts longer than the model was made for, inside of `model`:\n"
           "#   rope_scaling: {kind: yarn, factor: 2}\n";
  }
  out << "\n# Folders that tools/pack made. `evaluation` is held-out data.\n"
         "data:\n"
         "  train: data/train\n"
         "  # evaluation: data/held-out\n"
         "  # shuffle: true\n"
         "\n# Tokens of a sequence; sequences of a step over all devices; steps.\n"
      << "sequence_length: " << facts.sequence_length << "\n"
      << "global_batch: 16\n"
         "steps: 1000\n"
         "# Micro-batches a step: a step's memory for activations shrinks, updates wait for the "
         "last one.\n"
         "# accumulation: 1\n"
         "\noptimizer:\n"
         "  learning_rate: 3e-4\n"
         "  # betas: [0.9, 0.95]\n"
         "  # epsilon: 1e-8\n"
         "  # weight_decay: 0.1\n"
         "  # Clipping; without it updates overlap the backward pass (`oom plan` says what it "
         "costs).\n"
         "  max_gradient_norm: 1.0\n"
         "\n# constant, linear, cosine or warmup_stable_decay.\n"
         "schedule: {kind: cosine, warmup_steps: 100, minimum_ratio: 0.1}\n"
         "\n# Coefficient of the load-balancing loss of the experts' router; not with "
         "accumulation.\n"
         "# router: {auxiliary_loss: 0.0}\n"
         "\n# bfloat16 keeps exact FP32 masters; float32 computes in FP32 too.\n"
         "precision: bfloat16\n"
         "# seed: 1\n"
         "\n# cpu or cuda.\n"
         "devices: {kind: cpu, count: 1}\n"
         "# Without budgets a job may use what the node has free. host_memory may be a list by "
         "NUMA node.\n"
         "# budgets: {gpu_memory: 24GiB, host_memory: 100GiB}\n"
         "# auto, or the path of a plan that `oom plan -o json` wrote.\n"
         "# plan: auto\n"
         "\ncheckpoint: {every_steps: 100, keep: 3}\n"
         "# auto: the newest complete checkpoint in output; never; or the path of a checkpoint.\n"
         "# resume: auto\n"
         "# evaluation: {every_steps: 100, sequences: 64}\n"
         "\n# Holds steps.jsonl, tensorboard/, checkpoints/, export/, logs/, plan.json and "
         "trace/.\n"
      << "output: runs/" << name << "\n"
      << "\n# -1000 to 1000; jobs of higher priority start first.\n"
         "# priority: 0\n"
         "# retry: {max_failures: 3}\n"
         "# labels: {project: example}\n"
         "# A trace of these steps, for https://ui.perfetto.dev.\n"
         "# trace: {first_step: 3, step_count: 2}\n";
  return out.str();
}

}  // namespace oom
