#include "pool/child_servers.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>

#include <chrono>
#include <functional>
#include <thread>

#include "base/files.h"
#include "base/test_folder.h"

namespace leeway {
namespace {

using testing::TestFolder;

ChildServersOptions options_of(const TestFolder& folder, const std::string& script) {
  const std::string program = folder.write("server.sh", script);
  chmod(program.c_str(), 0700);
  return {.count = 2,
          .model = "model",
          .weights_root = "root",
          .log_folder = folder.at("servers"),
          .options = {"--threads", "1"},
          .program = program};
}

// Looks, on a clock of its own that makes waits between restarts short, until it holds.
bool until(ChildServers& children, double& now, const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (std::chrono::steady_clock::now() < end) {
    children.servers(now += 0.01);
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

constexpr const char* kServer =
    "#!/bin/sh\n"
    "echo \"$@\" > \"$0.arguments\"\n"
    "[ ${#LEEWAY_API_KEY} -ge 32 ] || exit 7\n"
    "echo 'some words' >&2\n"
    "echo \"listening on http://127.0.0.1:$$\" >&2\n"
    "exec sleep 600\n";

TEST(ChildServers, ListenWithAKeyAndAreStartedAgain) {
  const TestFolder folder;
  pid_t last = 0;
  {
    ChildServers children(options_of(folder, kServer));
    double now = 1.0;
    ASSERT_TRUE(until(children, now, [&] { return children.servers(now).size() == 2; }));
    const std::string first = children.servers(now)[0].url;
    EXPECT_EQ(first, "http://127.0.0.1:" + std::to_string(children.processes()[0]));
    EXPECT_EQ(read_file(folder.at("server.sh.arguments")),
              "serve model --port 0 --weights-root root --threads 1\n");
    kill(children.processes()[0], SIGKILL);
    ASSERT_TRUE(until(children, now, [&] { return children.servers(now).size() == 1; }));
    ASSERT_TRUE(until(children, now, [&] { return children.servers(now).size() == 2; }));
    EXPECT_NE(children.servers(now)[0].url, first);
    EXPECT_TRUE(children.why_gone(first).starts_with("its process was killed by signal 9"))
        << children.why_gone(first);
    std::string log;
    for (const std::string& line : children.take_log()) log += line + "\n";
    EXPECT_NE(log.find("was killed by signal 9; it is started again"), std::string::npos) << log;
    EXPECT_EQ(log.find(children.key()), std::string::npos);
    EXPECT_EQ(children.given_up(), "");
    last = children.processes()[1];
  }
  EXPECT_NE(kill(last, 0), 0) << "a process is left";
}

TEST(ChildServers, AreGivenUpAfterABoundedNumberOfStarts) {
  const TestFolder folder;
  ChildServers children(
      options_of(folder, "#!/bin/sh\necho x >> \"$0.starts\"\necho no such model >&2\nexit 2\n"));
  double now = 1.0;
  ASSERT_TRUE(until(children, now, [&] { return !children.given_up().empty(); }));
  EXPECT_NE(children.given_up().find("ended with exit code 2: no such model"), std::string::npos)
      << children.given_up();
  EXPECT_EQ(read_file(folder.at("server.sh.starts")).size(), 2u * 2u * 4u);
  EXPECT_TRUE(children.processes().empty());
}

}  // namespace
}  // namespace leeway
