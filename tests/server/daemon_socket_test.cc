// Where a daemon may be and who is answered there: one daemon on a socket and a state directory, a
// path that job sockets fit below, and no other user.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>

#include "server/oomd/unix_socket.h"
#include "tests/server/daemon_fixture.h"
#include "tests/server/fake_planner.h"

namespace oom {
namespace {

TEST_F(DaemonTest, ASecondDaemonIsRefusedOnTheSameSocketAndOnTheSameState) {
  Start();
  Config other = config_;
  other.state_dir = directory_ + "/other";
  Result<std::unique_ptr<Daemon>> second =
      Daemon::Start({.config = other, .plan = FakePlan, .version = "test"});
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().reason(), "ALREADY_RUNNING") << second.status().ToString();
  other = config_;
  other.socket = directory_ + "/s2";
  second = Daemon::Start({.config = other, .plan = FakePlan, .version = "test"});
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().reason(), "ALREADY_RUNNING") << second.status().ToString();
  EXPECT_EQ(MustCreate("still", {{"steps", "1"}}).name(), "jobs/still");
}

TEST_F(DaemonTest, AStateDirectoryTooLongForTheSocketsOfJobsIsRefusedAndTheLongestWorks) {
  std::filesystem::create_directories(directory_ + "/jobs");
  // Of 107 characters "/jobs/", 36 of the job and "/host.sock" take 52.
  config_.state_dir = directory_ + "/" + std::string(55 - directory_.size() - 1, 'x');
  Config longer = config_;
  longer.state_dir += "x";
  const auto refused = Daemon::Start({.config = longer, .plan = FakePlan, .version = "test"});
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), Code::kInvalidArgument) << refused.status().ToString();
  EXPECT_EQ(refused.status().field(), "state_dir");
  EXPECT_FALSE(std::filesystem::exists(longer.state_dir));
  Start();
  MustCreate("a", {{"steps", "2"}});
  EXPECT_TRUE(WaitFor("a", v1::JOB_STATE_SUCCEEDED));
}

TEST_F(DaemonTest, OnlyTheDaemonsUserAndRootAreAnswered) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  Start();
  // Even if somebody opened the socket's mode.
  ASSERT_EQ(chmod(directory_.c_str(), 0711), 0);
  ASSERT_EQ(chmod(config_.socket.c_str(), 0666), 0);
  // The connection is made as another user; SO_PEERCRED remembers that.
  const pid_t child = fork();
  if (child == 0) {
    int code = 255;
    if (setuid(65534) == 0) {
      const Result<UniqueFd> fd = ConnectUnix(config_.socket);
      if (fd.ok()) {
        // The HTTP/2 preface, empty settings, and a GetNode call with literal headers.
        std::string bytes = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
        bytes += std::string("\0\0\0\4\0\0\0\0\0", 9);
        std::string headers;
        const auto literal = [&](const std::string& name, const std::string& value) {
          headers += '\0';
          headers += static_cast<char>(name.size());
          headers += name;
          headers += static_cast<char>(value.size());
          headers += value;
        };
        literal(":method", "POST");
        literal(":scheme", "http");
        literal(":path", "/oom.v1.NodeService/GetNode");
        literal(":authority", "localhost");
        literal("te", "trailers");
        literal("content-type", "application/grpc");
        bytes += std::string("\0\0", 2) + static_cast<char>(headers.size()) +
                 std::string("\1\4\0\0\0\1", 6) + headers;
        bytes += std::string("\0\0\5\0\1\0\0\0\1\0\0\0\0\0", 14);
        std::string reply;
        char block[4096];
        if (write(fd->get(), bytes.data(), bytes.size()) > 0) {
          for (ssize_t got; (got = read(fd->get(), block, sizeof(block))) > 0;) {
            reply.append(block, static_cast<size_t>(got));
            if (reply.find("NOT_ALLOWED") != std::string::npos ||
                reply.find("uid 65534 may not") != std::string::npos) {
              code = 7;
              break;
            }
          }
        }
      }
    }
    _exit(code);
  }
  int status = 0;
  ASSERT_TRUE(Eventually([&] { return waitpid(child, &status, WNOHANG) == child; }));
  EXPECT_EQ(WEXITSTATUS(status), 7) << "another user was not refused";
}

}  // namespace
}  // namespace oom
