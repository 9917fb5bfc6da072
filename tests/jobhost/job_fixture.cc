#include "tests/jobhost/job_fixture.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "runtime/base/file.h"
#include "runtime/checkpoint/checkpoint_directory.h"
#include "runtime/memory/numa.h"
#include "runtime/memory/pool.h"
#include "runtime/model/hf_config.h"

namespace oom {
namespace {

constexpr const char* kConfig = R"({
  "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
  "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 300,
  "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
  "intermediate_size": 64, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
  "max_position_embeddings": 64, "norm_topk_prob": true
})";
constexpr int kFirstPoolFd = 10;

}  // namespace

v1::JobSpec TinySpec(const std::string& folder) {
  v1::JobSpec spec;
  spec.set_name("tiny");
  spec.mutable_model()->set_config(folder + "/config.json");
  spec.mutable_model()->set_initialize(v1::INITIALIZATION_RANDOM);
  spec.mutable_data()->set_train(folder + "/data");
  spec.mutable_data()->set_evaluation(folder + "/held-out");
  spec.set_sequence_length(16);
  spec.set_global_batch(4);
  spec.set_accumulation(1);
  spec.set_steps(12);
  v1::OptimizerSpec& optimizer = *spec.mutable_optimizer();
  optimizer.set_learning_rate(1e-3);
  optimizer.add_betas(0.9);
  optimizer.add_betas(0.95);
  optimizer.set_epsilon(1e-8);
  optimizer.set_weight_decay(0.1);
  spec.mutable_schedule()->set_kind(v1::SCHEDULE_KIND_CONSTANT);
  spec.set_seed(1);
  spec.set_precision(v1::PRECISION_FLOAT32);
  spec.mutable_devices()->set_kind(v1::DEVICE_KIND_CPU);
  spec.mutable_devices()->set_count(2);
  spec.mutable_checkpoint()->set_every_steps(4);
  spec.mutable_checkpoint()->set_keep(3);
  spec.mutable_evaluation()->set_every_steps(6);
  spec.set_resume("auto");
  spec.set_output(folder + "/out");
  spec.mutable_retry()->set_max_failures(3);
  spec.mutable_trace()->set_first_step(3);
  spec.mutable_trace()->set_step_count(2);
  return spec;
}

v1::Plan TinyPlan() {
  v1::Plan plan;
  plan.set_version(1);
  plan.set_path(v1::EXECUTION_PATH_LOCAL);
  plan.set_rank_count(2);
  plan.set_precision(v1::PRECISION_FLOAT32);
  // The embedding resident and sharded, as default plans have it; the rest streamed.
  for (const char* name : {"embedding", "layers.0", "layers.0.experts", "head"}) {
    v1::UnitPlan& unit = *plan.add_units();
    unit.set_unit(name);
    unit.set_home(std::string(name) == "embedding" ? v1::STATE_HOME_RESIDENT
                                                   : v1::STATE_HOME_STREAMED);
    unit.set_delivery(v1::PARAMETER_DELIVERY_FULL);
  }
  v1::LayerPlan& layer = *plan.add_layers();
  layer.set_boundary(v1::BOUNDARY_HOME_HOST);
  layer.set_attention_result(v1::ATTENTION_RESULT_HOME_REPLAYED);
  plan.mutable_partitions()->set_attention_head_group_count(1);
  plan.set_chunk_bytes(2 * 4096 * 4);
  plan.set_backlog_bytes(4 * 2 * 4096 * 4);
  plan.set_window_count(2);
  plan.set_gradient_buffer_count(2);
  plan.set_boundary_buffer_count(2);
  plan.set_update_mode(v1::UPDATE_MODE_OVERLAPPED);
  plan.set_reduction(v1::GRADIENT_REDUCTION_HOST);
  plan.set_accumulation(1);
  plan.set_micro_batch_tokens(32);
  plan.add_optimizer_threads(2);
  plan.set_worker_threads(1);
  plan.add_rank_numa_node(0);
  plan.add_rank_numa_node(0);
  plan.set_deterministic(true);
  plan.set_snapshot_staging_bytes(4 * 2 * 4096 * 12);
  return plan;
}

std::vector<std::string> StepLines(const std::string& output) {
  std::vector<std::string> lines;
  std::ifstream file(output + "/steps.jsonl");
  std::string line;
  while (std::getline(file, line)) {
    const auto json = nlohmann::json::parse(line);
    lines.push_back(json.at("step").dump() + " " + json.at("loss").dump() + " " +
                    json.at("gradient_norm").dump() + " " +
                    (json.contains("evaluation_loss") ? json.at("evaluation_loss").dump() : "-"));
  }
  return lines;
}

bool HasCheckpoint(const std::string& output, int64_t step) {
  return ReadCheckpointManifest(CheckpointsDirectory(output) + "/" + CheckpointName(step)).ok();
}

JobFixture::JobFixture() {
  char pattern[] = "/tmp/oom-jobhost-XXXXXX";
  folder_ = ::mkdtemp(pattern);
  std::filesystem::create_directories(folder_ + "/job");
  std::ofstream(folder_ + "/config.json") << kConfig;
  start_.set_uid("0190-test-uid");
  start_.set_job_id("tiny");
  *start_.mutable_spec() = TinySpec(folder_);
  *start_.mutable_plan() = TinyPlan();
  start_.set_first_pool_fd(kFirstPoolFd);
  start_.set_job_directory(folder_ + "/job");
  start_.set_first_attempt(1);
  start_.set_backoff_initial_seconds(0.01);
  start_.set_backoff_max_seconds(0.05);
  start_.set_last_failure_durable_step(-1);
  start_.set_worker_path(OOM_FAKE_WORKER_PROGRAM);
  start_.set_next_transition(1);
  daemon_ = std::make_unique<FakeDaemon>(socket_path());
}

JobFixture::~JobFixture() {
  if (host_ > 0) KillHost();
  EXPECT_TRUE(Leftovers().empty()) << "processes were left behind";
  if (HasFailure()) {
    std::fprintf(stderr, "%s\n", HostOutput().c_str());
  }
  std::filesystem::remove_all(folder_);
}

void JobFixture::MakePools() {
  const auto model = ReadHfConfig(folder_ + "/config.json");
  ASSERT_TRUE(model.ok()) << model.status().ToString();
  const SharedLayout layout =
      SharedLayout::Build(*model, start_.plan(),
                          {.micro_batch_sequences = 2, .sequence_length = 16, .accumulation = 1});
  const auto topology = MakeSystemTopology();
  start_.clear_pools();
  for (const PoolSpec& spec : layout.pools()) {
    auto pool =
        CreatePool(*topology, {.name = spec.name, .bytes = spec.bytes, .allow_hugetlb = false});
    ASSERT_TRUE(pool.ok()) << pool.status().ToString();
    internal::v1::Pool& entry = *start_.add_pools();
    entry.set_name(spec.name);
    entry.set_bytes(pool->bytes);
    entry.set_page_kind(pool->page_kind);
    pools_.push_back(std::move(pool->fd));
  }
}

void JobFixture::StartHost(const std::vector<std::string>& environment,
                           const std::vector<std::string>& arguments) {
  if (pools_.empty()) MakePools();
  const std::string start_path = folder_ + "/job/job.pb";
  ASSERT_TRUE(WriteFileAtomically(start_path, start_.SerializeAsString()).ok());
  std::vector<std::string> words = {OOM_JOBHOST_PROGRAM, "--start", start_path};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  // The folder marks every process of this test.
  std::vector<std::string> variables = {"OOM_TEST_FOLDER=" + folder_, "PATH=/usr/bin:/bin"};
  for (const char* name : {"ASAN_OPTIONS", "UBSAN_OPTIONS", "TSAN_OPTIONS", "LD_LIBRARY_PATH"}) {
    if (const char* value = std::getenv(name)) variables.push_back(std::string(name) + "=" + value);
  }
  variables.insert(variables.end(), environment.begin(), environment.end());
  std::vector<char*> envp;
  for (std::string& variable : variables) envp.push_back(variable.data());
  envp.push_back(nullptr);
  const int log =
      ::open((folder_ + "/host.log").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  // Above the numbers that the host expects, so that moving them down cannot overwrite one.
  std::vector<int> high;
  for (const UniqueFd& pool : pools_) high.push_back(::fcntl(pool.get(), F_DUPFD_CLOEXEC, 100));
  host_ = ::fork();
  if (host_ == 0) {
    ::setsid();
    ::dup2(log, STDOUT_FILENO);
    ::dup2(log, STDERR_FILENO);
    for (size_t i = 0; i < high.size(); ++i) ::dup2(high[i], kFirstPoolFd + static_cast<int>(i));
    ::execve(argv[0], argv.data(), envp.data());
    ::_exit(127);
  }
  ::close(log);
  for (const int fd : high) ::close(fd);
  ASSERT_GT(host_, 0);
}

internal::v1::Transition JobFixture::RunToEnd(const std::vector<std::string>& environment) {
  daemon_ = std::make_unique<FakeDaemon>(socket_path());
  StartHost(environment);
  EXPECT_TRUE(daemon_->Connect());
  const auto end = daemon_->WaitForEnd();
  EXPECT_TRUE(end.has_value());
  EXPECT_EQ(WaitForHost(), 0);
  if (!end.has_value()) return {};
  start_.set_next_transition(end->number() + 1);
  return *end;
}

int JobFixture::WaitForHost() {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  int status = 0;
  while (::waitpid(host_, &status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() > deadline) {
      KillHost();
      return -1;
    }
    ::usleep(2000);
  }
  host_ = -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

void JobFixture::KillHost() {
  ::kill(host_, SIGKILL);
  ::waitpid(host_, nullptr, 0);
  host_ = -1;
}

std::string JobFixture::HostOutput() const {
  const auto text = ReadFile(folder_ + "/host.log");
  return text.ok() ? *text : "";
}

std::vector<pid_t> JobFixture::Leftovers() const {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  std::vector<pid_t> found;
  do {
    found.clear();
    for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
      const std::string name = entry.path().filename();
      if (name.find_first_not_of("0123456789") != std::string::npos) continue;
      std::ifstream environment(entry.path() / "environ");
      const std::string text((std::istreambuf_iterator<char>(environment)), {});
      if (text.find("OOM_TEST_FOLDER=" + folder_) == std::string::npos) continue;
      if (std::atoi(name.c_str()) != host_) found.push_back(std::atoi(name.c_str()));
    }
  } while (!found.empty() && host_ < 0 && std::chrono::steady_clock::now() < deadline);
  return found;
}

}  // namespace oom
