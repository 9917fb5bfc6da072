// Dependencies point one way (architecture, "Folders"): reads every source file's includes and
// fails by name on an arrow that points the wrong way, and on the few other things that are banned
// everywhere.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace oom {
namespace {

namespace fs = std::filesystem;

// Path from the root of the sources, and content.
using Tree = std::map<std::string, std::string>;

// Each folder may include itself and these. Generated headers of proto/ are included as oom/...
const std::map<std::string, std::set<std::string>> kMayInclude = {
    {"proto", {}},
    {"runtime", {"proto"}},
    {"planner", {"proto", "runtime"}},
    {"server", {"proto", "runtime", "planner"}},
    {"worker", {"proto", "runtime", "planner"}},
    {"client", {"proto", "runtime/base"}},
};
// Nothing but tests and benchmarks includes these.
const std::set<std::string> kLeaves = {"tests", "bench", "tools"};

const std::regex kLibTorchFiles(
    "(runtime/(device|ops|comm)|worker)/.*|runtime/graph/executor\\.cc");
const std::regex kGrpcFiles("(server|client)/.*");
// Where a test may let time pass: injected delays, and naps between two looks at a condition with a
// deadline.
const std::set<std::string> kMaySleep = {
    "tests/gpu/api_calls/injection.cc",
    "tests/graph/delay.cc",
    "tests/jobhost/fake_daemon.cc",
    "tests/jobhost/job_fixture.cc",
    "tests/jobhost/worker_process_test.cc",
};

std::string FirstFolder(const std::string& path) { return path.substr(0, path.find('/')); }

bool IsTestOrBench(const std::string& path) { return kLeaves.contains(FirstFolder(path)); }

bool IsCpp(const std::string& path) {
  const std::string extension = fs::path(path).extension().string();
  return extension == ".cc" || extension == ".h" || extension == ".cu" || extension == ".cuh";
}

// Without comments and the contents of string literals (raw ones too), so that what a file says
// about a thing is not taken for the thing. Include lines keep their quoted path.
std::string CodeOf(const std::string& text) {
  std::string code;
  size_t i = 0;
  const auto starts = [&](std::string_view what) {
    return text.compare(i, what.size(), what) == 0;
  };
  bool include_line = false;
  while (i < text.size()) {
    if (text[i] == '\n') include_line = false;
    if (text[i] == '#') include_line = true;
    if (starts("//")) {
      while (i < text.size() && text[i] != '\n') ++i;
    } else if (starts("/*")) {
      const size_t end = text.find("*/", i + 2);
      i = end == std::string::npos ? text.size() : end + 2;
    } else if (starts("R\"")) {
      const size_t open = text.find('(', i);
      const std::string close = ")" + text.substr(i + 2, open - i - 2) + "\"";
      const size_t end = text.find(close, open);
      i = end == std::string::npos ? text.size() : end + close.size();
      code += "\"\"";
    } else if (text[i] == '\'' &&
               (i == 0 || std::isalnum(static_cast<unsigned char>(text[i - 1])) == 0)) {
      i += text[i + 1] == '\\' ? 3 : 2;
      while (i < text.size() && text[i] != '\'') ++i;
      ++i;
    } else if (text[i] == '"' && !include_line) {
      for (++i; i < text.size() && text[i] != '"'; ++i) {
        if (text[i] == '\\') ++i;
      }
      ++i;
      code += "\"\"";
    } else {
      code += text[i++];
    }
  }
  return code;
}

struct Include {
  std::string target;
  bool quoted;
};

std::vector<Include> IncludesOf(const std::string& code) {
  static const std::regex kInclude("(?:^|\n)\\s*#\\s*include\\s*([<\"])([^>\"]+)[>\"]");
  std::vector<Include> includes;
  for (std::sregex_iterator it(code.begin(), code.end(), kInclude), end; it != end; ++it) {
    includes.push_back({(*it)[2], (*it)[1] == "\""});
  }
  return includes;
}

bool IsLibTorch(const std::string& target) {
  const std::string first = FirstFolder(target);
  return first == "torch" || first == "ATen" || first == "c10" || target == "runtime/ops/aten.h";
}

bool IsGrpc(const std::string& target) {
  return target.rfind("grpc", 0) == 0 || target.ends_with(".grpc.pb.h");
}

bool Allowed(const std::set<std::string>& allowed, const std::string& target) {
  return std::any_of(allowed.begin(), allowed.end(),
                     [&](const std::string& prefix) { return target.rfind(prefix + "/", 0) == 0; });
}

void CheckIncludes(const std::string& path, const std::string& code,
                   std::vector<std::string>* found) {
  const std::string folder = FirstFolder(path);
  const bool leaf = IsTestOrBench(path);
  for (const Include& include : IncludesOf(code)) {
    std::string target = include.target;
    if (IsLibTorch(target) && !leaf && !std::regex_match(path, kLibTorchFiles)) {
      found->push_back(path + " includes LibTorch (" + target + ")");
    }
    if (IsGrpc(target) && !leaf && !std::regex_match(path, kGrpcFiles)) {
      found->push_back(path + " includes gRPC (" + target + ")");
    }
    if (target.rfind("oom/", 0) == 0) target = "proto/" + target;
    const std::string first = FirstFolder(target);
    if (leaf || !include.quoted || first == folder) continue;
    const auto rule = kMayInclude.find(folder);
    const bool ours = kMayInclude.contains(first) || kLeaves.contains(first);
    if (ours && (rule == kMayInclude.end() || !Allowed(rule->second, target))) {
      found->push_back(path + " includes " + target);
    }
  }
}

void CheckBans(const std::string& path, const std::string& code, std::vector<std::string>* found) {
  static const std::regex kUsing("using\\s+namespace\\s+std\\s*;");
  static const std::regex kSleep(
      "\\b(sleep_for|sleep_until|usleep|nanosleep)\\s*\\(|(^|[^\\w.>])(::)?sleep\\s*\\(");
  if (std::regex_search(code, kUsing)) found->push_back(path + " has `using namespace std`");
  if (FirstFolder(path) == "tests" && !kMaySleep.contains(path) &&
      std::regex_search(code, kSleep)) {
    found->push_back(path + " sleeps; wait for a condition with a deadline instead");
  }
}

// Every source is built: named in the CMakeLists.txt of its folder or of one above.
void CheckListed(const Tree& tree, const std::string& path, std::vector<std::string>* found) {
  const fs::path file(path);
  for (fs::path folder = file.parent_path();; folder = folder.parent_path()) {
    const auto list = tree.find((folder / "CMakeLists.txt").string());
    if (list != tree.end()) {
      const std::string name = folder.empty() ? path : file.lexically_relative(folder).string();
      std::istringstream words(std::regex_replace(list->second, std::regex("[()\"]"), " "));
      for (std::string word; words >> word;) {
        if (word == name) return;
      }
    }
    if (folder.empty()) break;
  }
  found->push_back(path + " is in no CMakeLists.txt");
}

// Folders of runtime/ are libraries: they may not include each other in a circle.
void CheckRuntimeFolders(const Tree& tree, std::vector<std::string>* found) {
  std::map<std::string, std::set<std::string>> uses;
  const auto runtime_folder = [](const std::string& path) -> std::string {
    if (path.rfind("runtime/", 0) != 0) return "";
    const size_t end = path.find('/', 8);
    return end == std::string::npos ? "" : path.substr(8, end - 8);
  };
  for (const auto& [path, text] : tree) {
    const std::string from = runtime_folder(path);
    if (from.empty() || !IsCpp(path)) continue;
    for (const Include& include : IncludesOf(CodeOf(text))) {
      const std::string to = runtime_folder(include.target);
      if (!to.empty() && to != from) uses[from].insert(to);
    }
  }
  std::set<std::string> done, open;
  std::function<void(const std::string&)> visit = [&](const std::string& folder) {
    if (done.contains(folder)) return;
    if (!open.insert(folder).second) {
      found->push_back("runtime/" + folder + " includes itself by a circle of folders");
      return;
    }
    for (const std::string& next : uses[folder]) visit(next);
    open.erase(folder);
    done.insert(folder);
  };
  for (const auto& [folder, targets] : std::map(uses)) visit(folder);
}

std::vector<std::string> Violations(const Tree& tree) {
  std::vector<std::string> found;
  for (const auto& [path, text] : tree) {
    if (!IsCpp(path)) continue;
    const std::string code = CodeOf(text);
    CheckIncludes(path, code, &found);
    CheckBans(path, code, &found);
    if (path.ends_with(".cc") || path.ends_with(".cu")) CheckListed(tree, path, &found);
  }
  CheckRuntimeFolders(tree, &found);
  return found;
}

Tree ReadSources() {
  Tree tree;
  const fs::path root(OOM_SOURCE_DIR);
  std::vector<std::string> folders(kLeaves.begin(), kLeaves.end());
  for (const auto& [folder, allowed] : kMayInclude) folders.push_back(folder);
  for (const std::string& folder : folders) {
    if (!fs::exists(root / folder)) continue;
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(root / folder)) {
      const std::string path = entry.path().lexically_relative(root).string();
      if (!entry.is_regular_file() || !(IsCpp(path) || entry.path().filename() == "CMakeLists.txt"))
        continue;
      std::ifstream file(entry.path(), std::ios::binary);
      tree[path] = std::string(std::istreambuf_iterator<char>(file), {});
    }
  }
  return tree;
}

TEST(Layering, EveryArrowPointsTheRightWay) {
  const Tree tree = ReadSources();
  ASSERT_GT(tree.size(), 100u);
  for (const std::string& violation : Violations(tree)) ADD_FAILURE() << violation;
}

// Goal: the test above can fail.
// Method: one planted violation of each kind in a small tree, found by name; and their harmless
// neighbours, not found.
TEST(Layering, PlantedViolationsAreFound) {
  const Tree good = {
      {"runtime/base/CMakeLists.txt", "oom_library(oom_base SOURCES units.cc)"},
      {"runtime/base/units.cc", "#include \"runtime/base/units.h\"\n#include <string>\n"},
      {"runtime/ops/aten.h", "#include <ATen/ATen.h>\n"},
      {"client/CMakeLists.txt", "oom_library(c SOURCES main.cc)"},
      {"client/main.cc", "#include \"oom/v1/job.grpc.pb.h\"\n#include \"runtime/base/units.h\"\n"},
      {"planner/plan.h",
       "#include \"runtime/memory/pool.h\"\n// #include \"server/oomd/queue.h\"\n"},
      {"tests/base/CMakeLists.txt", "oom_test(t SOURCES t.cc)"},
      {"tests/base/t.cc",
       "// sleep_for(1)\nconst char* kText = \"using namespace std; usleep(3)\";\n"
       "#include \"server/oomd/queue.h\"\nchar quote = '\"'; int sleepers(int);\n"},
  };
  EXPECT_EQ(Violations(good), std::vector<std::string>{});
  const std::vector<std::pair<std::string, std::pair<std::string, std::string>>> plants = {
      {"runtime/base/units.h includes planner/plan.h",
       {"runtime/base/units.h", "#include \"planner/plan.h\"\n"}},
      {"planner/plan.h includes server/oomd/queue.h",
       {"planner/plan.h", "  #  include \"server/oomd/queue.h\"\n"}},
      {"server/a.h includes worker/worker.h", {"server/a.h", "#include \"worker/worker.h\"\n"}},
      {"worker/a.h includes server/a.h", {"worker/a.h", "#include \"server/a.h\"\n"}},
      {"client/a.h includes runtime/memory/pool.h",
       {"client/a.h", "#include \"runtime/memory/pool.h\"\n"}},
      {"client/a.h includes planner/plan.h", {"client/a.h", "#include \"planner/plan.h\"\n"}},
      {"proto/a.h includes runtime/base/units.h",
       {"proto/a.h", "#include \"runtime/base/units.h\"\n"}},
      {"runtime/base/a.h includes tests/base/t.h",
       {"runtime/base/a.h", "#include \"tests/base/t.h\"\n"}},
      {"planner/a.h includes LibTorch (ATen/ATen.h)", {"planner/a.h", "#include <ATen/ATen.h>\n"}},
      {"runtime/memory/a.h includes LibTorch (c10/core/Device.h)",
       {"runtime/memory/a.h", "#include <c10/core/Device.h>\n"}},
      {"runtime/graph/executor.h includes LibTorch (torch/torch.h)",
       {"runtime/graph/executor.h", "#include <torch/torch.h>\n"}},
      {"server/a.h includes LibTorch (runtime/ops/aten.h)",
       {"server/a.h", "#include \"runtime/ops/aten.h\"\n"}},
      {"runtime/ipc/a.h includes gRPC (grpcpp/grpcpp.h)",
       {"runtime/ipc/a.h", "#include <grpcpp/grpcpp.h>\n"}},
      {"worker/a.h includes gRPC (oom/v1/job.grpc.pb.h)",
       {"worker/a.h", "#include \"oom/v1/job.grpc.pb.h\"\n"}},
      {"runtime/base/lost.cc is in no CMakeLists.txt", {"runtime/base/lost.cc", "int x;\n"}},
      {"tests/base/b.h sleeps; wait for a condition with a deadline instead",
       {"tests/base/b.h", "void F() { std::this_thread::sleep_for(x); }\n"}},
      {"tests/base/b.h sleeps; wait for a condition with a deadline instead",
       {"tests/base/b.h", "void F() { ::sleep(1); }\n"}},
      {"worker/a.h has `using namespace std`", {"worker/a.h", "using  namespace std;\n"}},
  };
  for (const auto& [message, plant] : plants) {
    Tree tree = good;
    tree[plant.first] = plant.second;
    EXPECT_EQ(Violations(tree), std::vector<std::string>{message});
  }
  Tree circle = good;
  circle["runtime/a/a.h"] = "#include \"runtime/b/b.h\"\n";
  circle["runtime/b/b.h"] = "#include \"runtime/a/c.h\"\n";
  EXPECT_EQ(Violations(circle).size(), 1u);
}

// Scripts branch on reasons: each one that the sources name is in the document that users read.
TEST(Reasons, EachIsExplainedInTheDocument) {
  std::ifstream file(fs::path(OOM_SOURCE_DIR) / "docs/ERRORS.md");
  const std::string document(std::istreambuf_iterator<char>(file), {});
  const std::regex pattern("WithReason\\(\"([A-Z_]+)\"\\)");
  std::set<std::string> reasons;
  for (const auto& [path, text] : ReadSources()) {
    if (IsTestOrBench(path)) continue;
    for (std::sregex_iterator it(text.begin(), text.end(), pattern), end; it != end; ++it) {
      reasons.insert((*it)[1]);
    }
  }
  EXPECT_GT(reasons.size(), 30u);
  for (const std::string& reason : reasons) {
    EXPECT_NE(document.find("`" + reason + "`"), std::string::npos) << reason;
  }
}

}  // namespace
}  // namespace oom
