// Runs that sample from real `leeway serve` processes on loopback: the same bits as in process, for
// any number of servers.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "live_program.h"
#include "pool_run_support.h"

namespace leeway {
namespace {

namespace fs = std::filesystem;

TEST_F(PoolRunTest, AnyNumberOfServersGivesTheBitsOfTheRunInProcess) {
  for (const char* lag : {"0", "1"}) {
    const std::string here = std::string("here_") + lag;
    const std::vector<std::string> set = {"--set",
                                          std::string("orchestrator.max_off_policy_steps=") + lag};
    ASSERT_EQ(train(here, set).code, 0);
    start_servers(3);
    for (size_t count : {1, 2, 3}) {
      const std::string there = "there_" + std::to_string(count) + "_" + lag;
      std::vector<std::string> args = pool_of(count);
      args.insert(args.end(), set.begin(), set.end());
      const RunResult result = train(there, args);
      ASSERT_EQ(result.code, 0) << result;
      expect_same_run(here, there);
      EXPECT_FALSE(fs::exists(path(there + "/broadcast"))) << "weights for servers are left";
    }
    if (*lag != '0') continue;
    for (const std::string& line : lines_of(read_file(path("there_3_0/metrics.jsonl")))) {
      EXPECT_EQ(json_of(line)["mismatch_kl/all/mean"].GetDouble(), 0.0);
    }
  }
}

TEST_F(PoolRunTest, SpawnedServersGiveTheSameBitsAndEndWithTheRun) {
  ASSERT_EQ(train("here").code, 0);
  const RunResult result = train("spawned", {"--spawn-servers", "2"});
  ASSERT_EQ(result.code, 0) << result;
  expect_same_run("here", "spawned");
  EXPECT_TRUE(contains(result.err, "server process 2 listens on http://127.0.0.1:")) << result;
  // The servers are not the configuration's: it can be used without them.
  const std::string config = read_file(path("spawned/config.toml"));
  EXPECT_TRUE(contains(config, "pool = \"in_process\"")) << config;
  EXPECT_FALSE(contains(config, "base_url")) << config;
  EXPECT_TRUE(contains(read_file(path("spawned/servers.jsonl")), "\"state\": \"ready\""));
  const RunResult both = train("both", {"--spawn-servers", "2", "--set", "inference.pool=static",
                                        "--set", "inference.base_url=http://127.0.0.1:1"});
  expect_mistake(both, {"--spawn-servers 2", "inference.pool"});
}

TEST_F(PoolRunTest, ARunGoesOnWithAnotherNumberOfServers) {
  const auto in_parts = [&](const std::string& run, const std::vector<std::string>& first,
                            const std::vector<std::string>& then) {
    std::vector<std::string> args = {"--set", "trainer.max_steps=3"};
    args.insert(args.end(), first.begin(), first.end());
    ASSERT_EQ(train(run, args).code, 0);
    args = {"train", "--resume", run, "--set", "trainer.max_steps=6"};
    args.insert(args.end(), then.begin(), then.end());
    const RunResult result = run_program(args, {.directory = folder_.path().string()});
    ASSERT_EQ(result.code, 0) << result;
  };
  in_parts("here", {}, {});
  in_parts("there", {"--spawn-servers", "1"}, {"--spawn-servers", "2"});
  expect_same_run("here", "there");
}

bool listens(const std::string& url) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(std::stoi(url.substr(url.rfind(':') + 1))));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  const bool there = ::connect(socket, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
  ::close(socket);
  return there;
}

std::vector<std::string> urls_in(const std::string& text) {
  std::vector<std::string> urls;
  const std::string words = "listens on ";
  for (size_t at = 0; (at = text.find(words, at)) != std::string::npos;) {
    at += words.size();
    urls.push_back(text.substr(at, text.find_first_of("\r\n", at) - at));
  }
  return urls;
}

TEST_F(PoolRunTest, SpawnedServersDieWithARunThatIsKilled) {
  LiveProgram run(
      {"train", path("run.toml"), "--spawn-servers", "2", "--set", "output_dir=" + path("killed"),
       "--set", "trainer.max_steps=100000", "--set", "environment.data=" + path("letters.jsonl")},
      LiveProgram::Streams::pipes);
  ASSERT_TRUE(run.wait_until([](const std::string& all) { return urls_in(all).size() == 2; }))
      << run.printed();
  const std::vector<std::string> urls = urls_in(run.printed());
  for (const std::string& url : urls) EXPECT_TRUE(listens(url));
  run.send(SIGKILL);
  run.wait();
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  const auto any = [&] { return listens(urls[0]) || listens(urls[1]); };
  while (any() && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_FALSE(any());
}

TEST_F(PoolRunTest, WithoutServersARunDoesNotStartAndSaysWhy) {
  const RunResult result = train(
      "none", {"--set", "inference.pool=static", "--set", "inference.base_url=http://127.0.0.1:1",
               "--set", "inference.ready_timeout=0.3"});
  expect_mistake(result, {"http://127.0.0.1:1", "inference.ready_timeout"});
  EXPECT_FALSE(fs::exists(path("none")));
  const RunResult key = train(
      "none", {"--set", "inference.pool=static", "--set", "inference.base_url=http://127.0.0.1:1",
               "--set", "inference.api_key_var=LEEWAY_NO_SUCH_KEY"});
  expect_mistake(key, {"inference.api_key_var", "LEEWAY_NO_SUCH_KEY", "not set"});
}

}  // namespace
}  // namespace leeway
