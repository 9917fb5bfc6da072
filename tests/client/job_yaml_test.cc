#include "client/job_yaml.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "client/init.h"

namespace oom {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::util::MessageDifferencer;

constexpr char kExample[] = R"(name: tiny
model: {path: models/tiny}            # Hugging Face directory
data: {train: data/train, evaluation: data/held-out, shuffle: true}
sequence_length: 512
global_batch: 16
steps: 200
optimizer: {learning_rate: 3e-4, betas: [0.9, 0.95], epsilon: 1e-8, weight_decay: 0.1, max_gradient_norm: 1.0}
schedule: {kind: cosine, warmup_steps: 20, minimum_ratio: 0.1}
router: {auxiliary_loss: 0.0}
seed: 1
precision: bfloat16
devices: {kind: cpu, count: 2}
budgets: {gpu_memory: 24GiB, host_memory: 100GiB}
plan: auto
checkpoint: {every_steps: 100, keep: 3}
resume: auto
evaluation: {every_steps: 50, sequences: 64}
output: runs/tiny
)";

constexpr char kShortest[] =
    "model: {path: m}\ndata: {train: d}\nsequence_length: 8\nglobal_batch: 2\nsteps: 3\noutput: "
    "o\n";

Result<v1::JobSpec> Parse(const std::string& text) {
  return ParseJobYaml(text, "job.yaml", "/srv");
}

std::string ErrorOf(const std::string& text) {
  const Result<v1::JobSpec> spec = Parse(text);
  if (spec.ok()) return "no error";
  EXPECT_EQ(spec.status().code(), Code::kInvalidArgument) << text;
  return spec.status().message();
}

TEST(JobYamlTest, TheDocumentedExampleBecomesTheSpecThatItSays) {
  const Result<v1::JobSpec> spec = Parse(kExample);
  ASSERT_TRUE(spec.ok()) << spec.status().ToString();
  EXPECT_EQ(spec->name(), "tiny");
  EXPECT_EQ(spec->model().path(), "/srv/models/tiny");
  EXPECT_EQ(spec->model().config(), "");
  EXPECT_EQ(spec->data().train(), "/srv/data/train");
  EXPECT_EQ(spec->data().evaluation(), "/srv/data/held-out");
  EXPECT_TRUE(spec->data().shuffle());
  EXPECT_EQ(spec->sequence_length(), 512);
  EXPECT_EQ(spec->optimizer().learning_rate(), 3e-4);
  ASSERT_EQ(spec->optimizer().betas_size(), 2);
  EXPECT_EQ(spec->optimizer().betas(1), 0.95);
  EXPECT_EQ(spec->optimizer().epsilon(), 1e-8);
  EXPECT_EQ(spec->schedule().kind(), v1::SCHEDULE_KIND_COSINE);
  EXPECT_EQ(spec->precision(), v1::PRECISION_BFLOAT16);
  EXPECT_EQ(spec->devices().kind(), v1::DEVICE_KIND_CPU);
  EXPECT_EQ(spec->budgets().gpu_memory_bytes(), int64_t{24} << 30);
  ASSERT_EQ(spec->budgets().host_memory_bytes_size(), 1);
  EXPECT_EQ(spec->budgets().host_memory_bytes(0), int64_t{100} << 30);
  EXPECT_EQ(spec->plan(), "auto");
  EXPECT_EQ(spec->resume(), "auto");
  EXPECT_EQ(spec->output(), "/srv/runs/tiny");
}

TEST(JobYamlTest, RopeScalingIsNamedAsInConfigJson) {
  const std::string yaml =
      "model: {path: m, rope_scaling: {kind: yarn, factor: 2, original_max_position_embeddings: "
      "64}}\n"
      "data: {train: d}\nsequence_length: 8\nglobal_batch: 2\nsteps: 3\noutput: o\n";
  const Result<v1::JobSpec> spec = Parse(yaml);
  ASSERT_TRUE(spec.ok()) << spec.status().ToString();
  EXPECT_EQ(spec->model().rope_scaling().kind(), v1::ROPE_SCALING_KIND_YARN);
  EXPECT_EQ(spec->model().rope_scaling().factor(), 2.0);
  EXPECT_EQ(spec->model().rope_scaling().original_max_position_embeddings(), 64);
  EXPECT_FALSE(Parse(kShortest)->model().has_rope_scaling());
}

TEST(JobYamlTest, HostMemoryMayBeAListByNode) {
  const Result<v1::JobSpec> spec =
      Parse(std::string(kShortest) + "budgets: {host_memory: [1.5GiB, 512MiB, 4096]}\n");
  ASSERT_TRUE(spec.ok()) << spec.status().ToString();
  ASSERT_EQ(spec->budgets().host_memory_bytes_size(), 3);
  EXPECT_EQ(spec->budgets().host_memory_bytes(0), int64_t{3} << 29);
  EXPECT_EQ(spec->budgets().host_memory_bytes(2), 4096);
}

TEST(JobYamlTest, FieldsByTheirFullNameTakePlainNumbersOnly) {
  const Result<v1::JobSpec> spec =
      Parse(std::string(kShortest) + "budgets: {gpu_memory_bytes: 1000}\n");
  ASSERT_TRUE(spec.ok()) << spec.status().ToString();
  EXPECT_EQ(spec->budgets().gpu_memory_bytes(), 1000);
  EXPECT_NE(ErrorOf(std::string(kShortest) + "budgets: {gpu_memory_bytes: 1GiB}\n")
                .find("'budgets.gpu_memory_bytes' must be a whole number, not '1GiB'"),
            std::string::npos);
}

TEST(JobYamlTest, AnAbsentOptionalFieldIsNotAZeroOne) {
  const Result<v1::JobSpec> absent = Parse(kShortest);
  const Result<v1::JobSpec> zero =
      Parse(std::string(kShortest) + "optimizer: {weight_decay: 0}\nretry: {max_failures: 0}\n");
  ASSERT_TRUE(absent.ok() && zero.ok());
  EXPECT_FALSE(absent->optimizer().has_weight_decay());
  EXPECT_FALSE(absent->retry().has_max_failures());
  EXPECT_TRUE(zero->optimizer().has_weight_decay());
  EXPECT_TRUE(zero->retry().has_max_failures());
}

TEST(JobYamlTest, PathsAreRelativeToTheFileButWordsAreNot) {
  const Result<v1::JobSpec> spec = Parse(
      "model: {config: ../c.json, initialize: random}\ndata: {train: /abs/d}\nsequence_length: 8\n"
      "global_batch: 2\nsteps: 3\noutput: ./runs/../o/\nplan: p.json\nresume: never\n");
  ASSERT_TRUE(spec.ok()) << spec.status().ToString();
  EXPECT_EQ(spec->model().config(), "/c.json");
  EXPECT_EQ(spec->model().initialize(), v1::INITIALIZATION_RANDOM);
  EXPECT_EQ(spec->data().train(), "/abs/d");
  EXPECT_EQ(spec->data().evaluation(), "");
  EXPECT_EQ(spec->output(), "/srv/o");
  EXPECT_EQ(spec->plan(), "/srv/p.json");
  EXPECT_EQ(spec->resume(), "never");
  const Result<v1::JobSpec> from = Parse(std::string(kShortest) + "resume: c/step-00000100\n");
  ASSERT_TRUE(from.ok());
  EXPECT_EQ(from->resume(), "/srv/c/step-00000100");
}

struct BadCase {
  const char* addition;
  const char* message;
};

// Goal: each kind of mistake is named with its line. Method: one line appended to a good file of 6
// lines.
TEST(JobYamlTest, EveryMistakeNamesItsLineAndKey) {
  const BadCase kCases[] = {
      {"step: 5\n", "job.yaml:7: unknown key 'step'; did you mean 'steps'?"},
      {"zzzzzzzzzzzz: 5\n", "job.yaml:7: unknown key 'zzzzzzzzzzzz'; keys here are accumulation"},
      {"optimizer:\n  learning_rat: 1\n",
       "job.yaml:8: unknown key 'optimizer.learning_rat'; did you mean 'learning_rate'?"},
      {"budgets: {gpu_memry: 1GiB}\n", "did you mean 'gpu_memory'?"},
      {"seed: many\n", "job.yaml:7: 'seed' must be a whole number from 0, not 'many'"},
      {"seed: -1\n", "'seed' must be a whole number from 0, not '-1'"},
      {"seed: 18446744073709551616\n", "'seed' must be"},
      {"seed: '7'\n", "'seed' must be"},
      {"accumulation: 1.5\n", "'accumulation' must be a whole number, not '1.5'"},
      {"accumulation: 3000000000\n", "'accumulation' must be a whole number"},
      {"accumulation: [1]\n", "'accumulation' must be a whole number, not a list"},
      {"accumulation:\n", "'accumulation' has no value"},
      {"name: [a]\n", "'name' must be a text, not a list"},
      {"optimizer: 3\n", "'optimizer' must be a map of keys, not a single value"},
      {"optimizer: {learning_rate: fast}\n",
       "'optimizer.learning_rate' must be a number, not 'fast'"},
      {"optimizer: {learning_rate: nan}\n", "'optimizer.learning_rate' must be a number"},
      {"optimizer: {betas: [0.9, x]}\n", "'optimizer.betas' must be a number, not 'x'"},
      {"optimizer: {betas: [[0.9]]}\n", "'optimizer.betas' must be a number, not a list"},
      {"data: {train: x}\n", "'data' is there twice"},
      {"schedule: {kind: cosin}\n",
       "job.yaml:7: 'schedule.kind' cannot be 'cosin'; did you mean 'cosine'?"},
      {"schedule: {kind: COSINE}\n", "did you mean 'cosine'?"},
      {"schedule: {kind: unspecified}\n",
       "it is one of constant linear cosine warmup_stable_decay"},
      {"precision: fp8xyzzyplugh\n", "it is one of bfloat16 float32"},
      {"devices: {kind: gpu, count: 1}\n", "'devices.kind' cannot be 'gpu'"},
      {"budgets: {gpu_memory: 24 parsecs}\n",
       "'budgets.gpu_memory' must be a number of bytes (such as 24GiB), not '24 parsecs'"},
      {"budgets: {gpu_memory: -1GiB}\n", "'budgets.gpu_memory' must be a number of bytes"},
      {"budgets: {gpu_memory: 1, gpu_memory_bytes: 2}\n", "are one field"},
      {"labels: [a, b]\n", "'labels' must be a map of keys, not a list"},
      {"labels: {a: {b: c}}\n", "'labels.a' must be a text, not a map"},
      {"labels: {? [a] : b}\n", "a key must be a text"},
      {"name: &a x\n", "anchors are not supported"},
      {"name: *a\n", "job.yaml:7"},
      {"name: !!binary x\n", "tags are not supported"},
      {"name: \xff\xfe\n", "job.yaml:7: not UTF-8"},
      {"---\nname: x\n", "more than one YAML document"},
      {"name: \"open\n", "job.yaml:"},
      {"\tname: x\n", "job.yaml:"},
      {"- a\n", "job.yaml:"},
  };
  for (const BadCase& bad : kCases) {
    EXPECT_NE(ErrorOf(std::string(kShortest) + bad.addition).find(bad.message), std::string::npos)
        << bad.addition << "gave: " << ErrorOf(std::string(kShortest) + bad.addition);
  }
}

TEST(JobYamlTest, AFileThatIsNoMapIsSaidSo) {
  EXPECT_NE(ErrorOf("- a\n- b\n").find("the file must be a map of keys, not a list"),
            std::string::npos);
  EXPECT_NE(ErrorOf("hello").find("the file must be a map of keys, not a single value"),
            std::string::npos);
}

TEST(JobYamlTest, AllMissingFieldsAreNamedAtOnce) {
  EXPECT_EQ(ErrorOf(""),
            "job.yaml: missing: model, data.train, sequence_length, global_batch, steps, output");
  EXPECT_EQ(
      ErrorOf("model: {path: m}\nsteps: 1\ndata: {evaluation: d}\noutput: o\nglobal_batch: 1\n"),
      "job.yaml: missing: data.train, sequence_length");
}

TEST(JobYamlTest, AHostileFileIsRefusedQuickly) {
  EXPECT_NE(ErrorOf(std::string((1 << 20) + 1, '#')).find("at most 1 MiB"), std::string::npos);
  EXPECT_NE(ErrorOf(std::string(100000, '[')), "no error");
  EXPECT_NE(ErrorOf(std::string(100000, '{')), "no error");
}

// Sets every field of `message`, each scalar to a value of its own.
void FillEveryField(Message* message, int* counter) {
  const auto* descriptor = message->GetDescriptor();
  const auto* reflection = message->GetReflection();
  for (int i = 0; i < descriptor->field_count(); ++i) {
    const FieldDescriptor* field = descriptor->field(i);
    const int value = ++*counter;
    const bool repeated = field->is_repeated();
    for (int copy = 0; copy < (repeated ? 2 : 1); ++copy) {
      switch (field->cpp_type()) {
        case FieldDescriptor::CPPTYPE_INT32:
          repeated ? reflection->AddInt32(message, field, value)
                   : reflection->SetInt32(message, field, value);
          break;
        case FieldDescriptor::CPPTYPE_INT64:
          repeated ? reflection->AddInt64(message, field, (int64_t{1} << 40) + copy)
                   : reflection->SetInt64(message, field, (int64_t{1} << 53) + value);
          break;
        case FieldDescriptor::CPPTYPE_UINT64:
          reflection->SetUInt64(message, field, ~uint64_t{0} - static_cast<uint64_t>(value));
          break;
        case FieldDescriptor::CPPTYPE_UINT32:
          reflection->SetUInt32(message, field, ~uint32_t{0});
          break;
        case FieldDescriptor::CPPTYPE_DOUBLE:
          repeated ? reflection->AddDouble(message, field, 0.1 * value + copy)
                   : reflection->SetDouble(message, field, 1e-9 / 3 * value);
          break;
        case FieldDescriptor::CPPTYPE_BOOL:
          reflection->SetBool(message, field, false);
          break;
        case FieldDescriptor::CPPTYPE_ENUM:
          reflection->SetEnumValue(message, field, field->enum_type()->value_count() - 1);
          break;
        case FieldDescriptor::CPPTYPE_STRING:
          reflection->SetString(message, field, "/text/" + std::to_string(value));
          break;
        case FieldDescriptor::CPPTYPE_MESSAGE:
          if (field->is_map()) {
            Message* entry = reflection->AddMessage(message, field);
            // Texts that look like something else must stay texts.
            const auto* key = field->message_type()->field(0);
            const auto* item = field->message_type()->field(1);
            entry->GetReflection()->SetString(entry, key, copy == 0 ? "yes" : "a: b #c\n\"");
            entry->GetReflection()->SetString(entry, item, copy == 0 ? "12" : "\tnull\x01 ~");
          } else {
            FillEveryField(repeated ? reflection->AddMessage(message, field)
                                    : reflection->MutableMessage(message, field),
                           counter);
          }
          break;
        default:
          FAIL() << "a type that job files do not have: " << field->full_name();
      }
    }
  }
}

TEST(JobYamlTest, WritingAndReadingGivesBackEveryField) {
  v1::JobSpec spec;
  int counter = 0;
  FillEveryField(&spec, &counter);
  ASSERT_FALSE(HasFatalFailure());
  const std::string yaml = JobSpecToYaml(spec);
  const Result<v1::JobSpec> again = Parse(yaml);
  ASSERT_TRUE(again.ok()) << again.status().ToString() << "\n" << yaml;
  std::string difference;
  MessageDifferencer differencer;
  differencer.ReportDifferencesToString(&difference);
  EXPECT_TRUE(differencer.Compare(spec, *again)) << difference << "\n" << yaml;
}

TEST(JobYamlTest, WholeUnitsComeOutAsTheyWereWritten) {
  const Result<v1::JobSpec> spec = Parse(kExample);
  ASSERT_TRUE(spec.ok());
  const std::string yaml = JobSpecToYaml(*spec);
  EXPECT_NE(yaml.find("gpu_memory: 24GiB"), std::string::npos) << yaml;
  EXPECT_NE(yaml.find("learning_rate: 0.0003"), std::string::npos) << yaml;
  EXPECT_NE(yaml.find("kind: cosine"), std::string::npos) << yaml;
}

TEST(JobYamlTest, AMissingFileIsAnInvalidSpecAndNamesTheFile) {
  const Result<v1::JobSpec> spec = ReadJobFile("/nonexistent/job.yaml");
  ASSERT_FALSE(spec.ok());
  EXPECT_EQ(spec.status().code(), Code::kInvalidArgument);
  EXPECT_EQ(spec.status().field(), "/nonexistent/job.yaml");
}

// Goal: what `oom init` writes is a job file, with every commented default a valid line too.
// Method: parse it as it is, and again with the `# key: value` comments taken as keys.
TEST(InitTest, TheFileItWritesParsesAndSoDoItsComments) {
  char folder[] = "/tmp/oom-init-XXXXXX";
  ASSERT_NE(::mkdtemp(folder), nullptr);
  const std::string config = std::string(folder) + "/config.json";
  std::ofstream(config) << R"({"model_type": "qwen3_moe", "max_position_embeddings": 512})";
  const Result<std::string> random = JobFileForModel(folder);
  ASSERT_TRUE(random.ok()) << random.status().ToString();
  std::ofstream(std::string(folder) + "/model.safetensors") << "";
  const Result<std::string> trained = JobFileForModel(folder);
  std::filesystem::remove_all(folder);
  ASSERT_TRUE(trained.ok());
  const Result<v1::JobSpec> from_nothing = Parse(*random);
  const Result<v1::JobSpec> from_weights = Parse(*trained);
  ASSERT_TRUE(from_nothing.ok()) << from_nothing.status().ToString();
  ASSERT_TRUE(from_weights.ok()) << from_weights.status().ToString();
  EXPECT_EQ(from_nothing->model().config(), config);
  EXPECT_EQ(from_nothing->model().initialize(), v1::INITIALIZATION_RANDOM);
  EXPECT_EQ(from_weights->model().path(), folder);
  EXPECT_EQ(from_nothing->sequence_length(), 512);
  std::string uncommented;
  std::istringstream lines(*random);
  for (std::string line; std::getline(lines, line);) {
    const size_t hash = line.find("# ");
    const std::string key =
        hash == std::string::npos ? "" : line.substr(hash + 2, line.find(':') - hash - 2);
    const bool is_key = !key.empty() &&
                        key.find_first_not_of("abcdefghijklmnopqrstuvwxyz_") == std::string::npos &&
                        line.find(": ") != std::string::npos && key != "auto";
    uncommented += (is_key ? line.substr(0, hash) + line.substr(hash + 2) : line) + "\n";
  }
  const Result<v1::JobSpec> full = Parse(uncommented);
  ASSERT_TRUE(full.ok()) << full.status().ToString() << "\n" << uncommented;
  EXPECT_EQ(full->budgets().gpu_memory_bytes(), int64_t{24} << 30);
  EXPECT_TRUE(full->data().has_shuffle());
  EXPECT_EQ(full->labels().at("project"), "example");
}

TEST(InitTest, AnUnknownFamilyIsRefusedByName) {
  char folder[] = "/tmp/oom-init-XXXXXX";
  ASSERT_NE(::mkdtemp(folder), nullptr);
  const std::string config = std::string(folder) + "/config.json";
  std::ofstream(config) << R"({"model_type": "llama"})";
  const Result<std::string> llama = JobFileForModel(config);
  std::ofstream(config) << "not json";
  const Result<std::string> broken = JobFileForModel(config);
  std::filesystem::remove_all(folder);
  ASSERT_FALSE(llama.ok());
  EXPECT_NE(llama.status().message().find("'llama' is not one of mixtral, qwen3_moe"),
            std::string::npos);
  ASSERT_FALSE(broken.ok());
  EXPECT_EQ(JobFileForModel(config).status().code(), Code::kNotFound);
}

}  // namespace
}  // namespace oom
