// Configuration, sockets, log files, limits, NUMA and pools.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "runtime/base/file.h"
#include "runtime/base/units.h"
#include "runtime/memory/host_memory.h"
#include "runtime/memory/numa.h"
#include "runtime/memory/pool.h"
#include "server/oomd/config.h"
#include "server/oomd/log_reader.h"
#include "server/oomd/log_setup.h"
#include "server/oomd/unix_socket.h"
#include "tests/server/folder_test.h"

namespace oom {
namespace {

using ConfigTest = testing::FolderTest;
using SocketTest = testing::FolderTest;
using LogReaderTest = testing::FolderTest;
using HostMemoryTest = testing::FolderTest;

TEST_F(ConfigTest, EveryKeyIsReadAndLaterSourcesWin) {
  Write("oomd.yaml",
        "version: 1\nstate_dir: /s\nmetrics_port: 9000\nbackoff_initial: 2s\npool_capacity: [1GiB, "
        "2GiB]\nephemeral: true\n");
  Write("oomd.yaml.d/20.yaml", "metrics_port: 9002\n");
  Write("oomd.yaml.d/10.yaml", "metrics_port: 9001\nlog_format: json\n");
  Write("oomd.yaml.d/ignored.txt", "nonsense: 1\n");
  Config config;
  ASSERT_TRUE(ApplyFile(folder_ + "/oomd.yaml", &config).ok());
  EXPECT_EQ(config.metrics_port, 9002);
  EXPECT_EQ(config.log_format, "json");
  EXPECT_EQ(config.pool_capacity_bytes, (std::vector<int64_t>{1_GiB, 2_GiB}));
  EXPECT_EQ(config.backoff_initial_seconds, 2);
  EXPECT_TRUE(config.ephemeral);
  ASSERT_TRUE(ApplyEnvironment({{"OOMD_METRICS_PORT", "9003"}, {"PATH", "x"}}, &config).ok());
  EXPECT_EQ(config.metrics_port, 9003);
  ASSERT_TRUE(ApplySetting("pool_capacity", "3GiB,4GiB", "command line", &config).ok());
  EXPECT_EQ(config.pool_capacity_bytes[1], 4_GiB);
  FillDefaults({{"XDG_RUNTIME_DIR", "/run/user/7"}}, "/opt/oom/bin/oomd", &config);
  EXPECT_EQ(config.socket, "/run/user/7/oomd.sock");
  EXPECT_EQ(config.jobhost_path, "/opt/oom/bin/oom-jobhost");
  EXPECT_EQ(ApplyFile(folder_ + "/none.yaml", &config).code(), Code::kNotFound);
}

TEST_F(ConfigTest, ErrorsNameFileLineAndTheNearestKey) {
  Config config;
  const auto error = [&](const std::string& text) {
    const Config before = config;
    const Status status = ApplyYaml(text, "oomd.yaml", &config);
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << text;
    EXPECT_EQ(config.metrics_port, before.metrics_port) << "a bad file changed something";
    return status.message();
  };
  EXPECT_EQ(error("metrics_port: 7\nmetric_port: 1\n"),
            "oomd.yaml:2: unknown key \"metric_port\"; did you mean \"metrics_port\"?");
  EXPECT_EQ(error("zzzzzzzzzzzz: 1\n"), "oomd.yaml:1: unknown key \"zzzzzzzzzzzz\"");
  EXPECT_EQ(error("# c\nmetrics_port: 70000\n"),
            "oomd.yaml:2: metrics_port: expected a number from -1 to 65535, not \"70000\"");
  EXPECT_NE(error("pool_capacity: [1GiB, lots]\n").find("lots"), std::string::npos);
  EXPECT_NE(error("backoff_max: soon\n").find("backoff_max"), std::string::npos);
  EXPECT_NE(error("log_format: xml\n").find("one of text, json"), std::string::npos);
  EXPECT_NE(error("version: 2\n").find("version 1"), std::string::npos);
  EXPECT_NE(error("a: [1\n").find("oomd.yaml:"), std::string::npos);
  EXPECT_NE(error("- 1\n").find("oomd.yaml:1"), std::string::npos);
  EXPECT_NE(error("socket: {a: 1}\n").find("socket"), std::string::npos);
  EXPECT_NE(
      ApplyEnvironment({{"OOMD_SOKET", "x"}}, &config).message().find("did you mean \"socket\""),
      std::string::npos);
}

TEST_F(SocketTest, TheSocketIsOursAloneAndGoesWithItsOwner) {
  const std::string path = folder_ + "/oomd.sock";
  {
    const auto socket = ListeningSocket::Listen(path);
    ASSERT_TRUE(socket.ok()) << socket.status().ToString();
    struct stat info = {};
    ASSERT_EQ(stat(path.c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0600U);
    const auto second = ListeningSocket::Listen(path);
    ASSERT_FALSE(second.ok());
    EXPECT_EQ(second.status().reason(), "ALREADY_RUNNING");
    EXPECT_TRUE(ConnectUnix(path).ok()) << "the refused daemon broke the live one";
  }
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST_F(SocketTest, AStaleSocketOfOursIsReplacedAndNothingElse) {
  const std::string path = folder_ + "/oomd.sock";
  const auto leave_stale = [&](const std::string& at) {
    const UniqueFd fd(socket(AF_UNIX, SOCK_STREAM, 0));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::copy(at.begin(), at.end(), address.sun_path);
    ASSERT_EQ(bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  };
  leave_stale(path);
  EXPECT_TRUE(ListeningSocket::Listen(path).ok());
  leave_stale(path);
  const Status foreign = CheckStaleSocket(path, geteuid() + 1);
  EXPECT_EQ(foreign.code(), Code::kPermissionDenied);
  EXPECT_NE(foreign.message().find("belongs to uid " + std::to_string(geteuid())),
            std::string::npos);
  Write("file", "precious");
  EXPECT_EQ(ListeningSocket::Listen(folder_ + "/file").status().reason(), "NOT_A_SOCKET");
  EXPECT_EQ(ReadFile(folder_ + "/file").value(), "precious");
  if (geteuid() == 0) {
    ASSERT_EQ(lchown(path.c_str(), 65534, 65534), 0);
    EXPECT_EQ(ListeningSocket::Listen(path).status().reason(), "SOCKET_NOT_OURS");
    EXPECT_TRUE(std::filesystem::exists(path));
  }
  ASSERT_EQ(chmod(folder_.c_str(), 0777), 0);
  EXPECT_EQ(ListeningSocket::Listen(folder_ + "/new").status().reason(), "SOCKET_FOLDER_WRITABLE");
  EXPECT_EQ(ListeningSocket::Listen("/tmp/" + std::string(120, 'x')).status().code(),
            Code::kInvalidArgument);
}

TEST_F(LogReaderTest, GivesEachLineOnceInOrderWithOffsetsThatResume) {
  Write("attempt-1/rank-0.log", "one\ntwo\nthr");
  Write("attempt-1/jobhost.log", "host\n");
  Write("attempt-1/rank-x.log", "not a log\n");
  Write("attempt-1/other.txt", "neither\n");
  LogReader reader({.directory = folder_});
  const auto next = [&](LogReader& from, bool flush = false) -> std::string {
    const auto line = from.Next(flush);
    EXPECT_TRUE(line.ok());
    if (!line.ok() || !line->has_value()) return "-";
    return std::to_string((*line)->attempt) + "/" + std::to_string((*line)->rank) + "@" +
           std::to_string((*line)->offset_bytes) + ":" + (*line)->line;
  };
  EXPECT_EQ(next(reader), "1/-1@5:host");
  EXPECT_EQ(next(reader), "1/0@4:one");
  EXPECT_EQ(next(reader), "1/0@8:two");
  EXPECT_EQ(next(reader), "-") << "a line without its end is not a line yet";
  Append("attempt-1/rank-0.log", "ee\nfour");
  Write("attempt-2/rank-0.log", "again\n");
  EXPECT_EQ(next(reader), "1/0@14:three");
  EXPECT_EQ(next(reader), "2/0@6:again");
  EXPECT_EQ(next(reader, true), "1/0@18:four");
  EXPECT_EQ(next(reader, true), "-");
  LogReader since({.directory = folder_, .ranks = {0}, .since_offset_bytes = 8});
  EXPECT_EQ(next(since), "1/0@14:three");
  LogReader tail({.directory = folder_, .ranks = {0}, .tail_lines = 2});
  EXPECT_EQ(next(tail), "1/0@14:three");
}

TEST_F(LogReaderTest, LongLinesAreCutAndLinksAreNotFollowed) {
  Write("secret", "secret\n");
  Write("attempt-1/rank-0.log", std::string(3 << 20, 'x') + "\nshort\n");
  std::filesystem::create_symlink(folder_ + "/secret", folder_ + "/attempt-1/rank-1.log");
  LogReader reader({.directory = folder_});
  const auto first = reader.Next(false);
  ASSERT_TRUE(first.ok() && first->has_value());
  EXPECT_EQ((*first)->line.size(), 16384U);
  const auto second = reader.Next(false);
  ASSERT_TRUE(second.ok() && second->has_value());
  EXPECT_EQ((*second)->line, "short");
  EXPECT_EQ((*second)->offset_bytes, (3 << 20) + 7);
  EXPECT_FALSE(reader.Next(false)->has_value());
}

TEST_F(HostMemoryTest, TheSmallestLimitUpTheTreeCounts) {
  Write("proc/meminfo", "MemTotal:       1048576 kB\nMemFree: 5 kB\n");
  EXPECT_EQ(ReadHostMemoryLimit(folder_)->bytes, 1_GiB);
  EXPECT_EQ(ReadHostMemoryLimit(folder_)->source, "machine");
  Write("proc/self/cgroup", "0::/a/b\n");
  Write("sys/fs/cgroup/a/b/memory.max", "max\n");
  EXPECT_EQ(ReadHostMemoryLimit(folder_)->source, "machine");
  Write("sys/fs/cgroup/a/memory.max", "536870912\n");
  EXPECT_EQ(ReadHostMemoryLimit(folder_)->bytes, 512_MiB);
  EXPECT_EQ(ReadHostMemoryLimit(folder_)->source, "cgroup memory.max");
  Write("proc/self/cgroup", "5:cpu,memory:/x/y\n0::/\n");
  Write("sys/fs/cgroup/memory/x/y/memory.limit_in_bytes", "9223372036854771712\n");
  Write("sys/fs/cgroup/memory/x/memory.limit_in_bytes", "268435456\n");
  EXPECT_EQ(ReadHostMemoryLimit(folder_)->bytes, 256_MiB);
  // In a container the path may be the host's; the root of the mount is then our own group.
  Write("proc/self/cgroup", "5:memory:/not/here\n");
  Write("sys/fs/cgroup/memory/memory.limit_in_bytes", "134217728\n");
  EXPECT_EQ(ReadHostMemoryLimit(folder_)->source, "cgroup memory.limit_in_bytes");
  EXPECT_EQ(ReadHostMemoryLimit(folder_)->bytes, 128_MiB);
}

TEST_F(HostMemoryTest, CapacityIsSharedOutByNodeAndConfigurationOnlyLowersIt) {
  const FakeNumaTopology nodes(
      {{.total_bytes = 3_GiB, .cpus = {0}}, {.total_bytes = 1_GiB, .cpus = {1}}});
  const HostMemoryLimit limit{.bytes = 4_GiB, .source = "machine"};
  const auto all = ComputePoolCapacity(nodes, limit, {});
  EXPECT_NEAR(static_cast<double>(all->bytes_by_node[0]), 0.9 * 3_GiB, 1_MiB);
  EXPECT_NEAR(static_cast<double>(all->bytes_by_node[1]), 0.9 * 1_GiB, 1_MiB);
  EXPECT_EQ(all->source, "machine");
  const auto less = ComputePoolCapacity(nodes, limit, {1_GiB, 64_GiB});
  EXPECT_EQ(less->bytes_by_node[0], 1_GiB);
  EXPECT_EQ(less->bytes_by_node[1], all->bytes_by_node[1]);
  EXPECT_EQ(less->source, "configuration");
  EXPECT_EQ(ComputePoolCapacity(nodes, limit, {1, 2, 3}).status().field(), "pool_capacity");
}

// Goal: a pool is bound to its node, and a bound thread is what touches it.
// Method: two nodes of the fake; two pools; a thread bound to each touches its own.
TEST(PoolTest, PoolsArePlacedOnTheirNodeAndTheFakeKnowsWhoTouchedThem) {
  FakeNumaTopology nodes = FakeNumaTopology::TwoNodes(1_GiB);
  std::vector<PoolMapping> mappings;
  for (int node = 0; node < 2; ++node) {
    Result<CreatedPool> pool = CreatePool(
        nodes, {.name = "test", .numa_node = node, .bytes = 3_MiB, .allow_hugetlb = false});
    ASSERT_TRUE(pool.ok()) << pool.status().ToString();
    EXPECT_TRUE(pool->bound);
    Result<PoolMapping> mapping = PoolMapping::Map(pool->fd.get(), 3_MiB);
    ASSERT_TRUE(mapping.ok());
    ASSERT_TRUE(nodes.BindMemory(mapping->data(), mapping->size_bytes(), node).ok());
    mappings.push_back(std::move(mapping.value()));
  }
  for (int node = 0; node < 2; ++node) {
    std::thread([&, node] {
      ASSERT_TRUE(nodes.BindThread(node).ok());
      nodes.NoteAccess(mappings[node].data(), 4096, MemoryAccess::kFirstTouch);
      mappings[node].data()[0] = std::byte{1};
    }).join();
  }
  nodes.NoteAccess(mappings[1].data() + 1_MiB, 64, MemoryAccess::kUpdate);
  const auto accesses = nodes.accesses();
  ASSERT_EQ(accesses.size(), 3U);
  for (int node = 0; node < 2; ++node) {
    EXPECT_EQ(accesses[node].thread_node, node);
    EXPECT_EQ(accesses[node].memory_node, node);
  }
  EXPECT_EQ(accesses[2].thread_node, -1) << "an unbound thread is seen as one";
  EXPECT_EQ(accesses[2].memory_node, 1);
  EXPECT_EQ(accesses[2].access, MemoryAccess::kUpdate);
}

TEST(PoolTest, ALaterBindingOverridesTheOverlapOnly) {
  FakeNumaTopology nodes = FakeNumaTopology::TwoNodes(1_GiB);
  static std::byte memory[4096];
  ASSERT_TRUE(nodes.BindMemory(memory, 4096, 0).ok());
  ASSERT_TRUE(nodes.BindMemory(memory + 1024, 1024, 1).ok());
  EXPECT_EQ(nodes.NodeOf(memory), 0);
  EXPECT_EQ(nodes.NodeOf(memory + 1023), 0);
  EXPECT_EQ(nodes.NodeOf(memory + 1024), 1);
  EXPECT_EQ(nodes.NodeOf(memory + 2047), 1);
  EXPECT_EQ(nodes.NodeOf(memory + 2048), 0);
  EXPECT_EQ(nodes.NodeOf(memory + 4096), -1);
}

TEST(PoolTest, APoolCannotShrinkUnderItsMappers) {
  const auto topology = MakeSystemTopology();
  Result<CreatedPool> pool = CreatePool(*topology, {.name = "test", .bytes = 1_MiB + 1});
  ASSERT_TRUE(pool.ok()) << pool.status().ToString();
  EXPECT_NE(ftruncate(pool->fd.get(), 4096), 0);
  EXPECT_NE(ftruncate(pool->fd.get(), 64_MiB), 0);
  EXPECT_TRUE(PoolMapping::Map(pool->fd.get(), 1_MiB + 1).ok());
  EXPECT_EQ(PoolMapping::Map(pool->fd.get(), 64_MiB).status().code(), Code::kInvalidArgument);
  const UniqueFd loose(memfd_create("loose", MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(loose.get(), 4096), 0);
  EXPECT_EQ(PoolMapping::Map(loose.get(), 4096).status().code(), Code::kInvalidArgument);
}

TEST(NumaTest, TheSystemHasANodeWithMemoryAndCpus) {
  const auto topology = MakeSystemTopology();
  ASSERT_GE(topology->node_count(), 1);
  EXPECT_GT(topology->Describe(0).total_bytes, 0);
  EXPECT_FALSE(topology->Describe(0).cpus.empty());
  std::thread([&] { EXPECT_TRUE(topology->BindThread(0).ok()); }).join();
}

TEST(LogTest, AMessageStaysOneJsonStringWhateverIsInIt) {
  const std::string hostile = "\x1b]0;x\a\r\n{\"level\": \"error\"}\xff\\";
  const std::string escaped = EscapeJson(hostile);
  EXPECT_EQ(escaped.find('\n'), std::string::npos);
  EXPECT_EQ(escaped.find('\x1b'), std::string::npos);
  const auto parsed = nlohmann::json::parse("{\"m\": \"" + escaped + "\"}");
  EXPECT_EQ(parsed.size(), 1U);
}

}  // namespace
}  // namespace oom
