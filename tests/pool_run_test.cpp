// Runs that sample from real `leeway serve` processes on loopback: the same bits as in process, and
// servers that are killed, stopped and started again.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <map>
#include <random>

#include "base/files.h"
#include "cli_helpers.h"
#include "live_program.h"
#include "model/policy_snapshot.h"
#include "pool/fake_server.h"
#include "server_process.h"
#include "tiny_model.h"

namespace leeway {
namespace {

namespace fs = std::filesystem;

constexpr const char* kRun = LEEWAY_TINY_MODEL R"(
[trainer]
max_steps = 6
learning_rate = 3e-3
warmup_steps = 0
[orchestrator]
prompts_per_batch = 4
group_size = 4
[rollout]
max_new_tokens = 8
stop = "\n"
[eval]
prompts = 8
[[environment]]
name = "jsonl"
id = "letters"
data = "letters.jsonl"
verifier = "regex"
)";

std::string letters_file() {
  std::string lines;
  for (char c = 'a'; c <= 'z'; ++c) {
    lines += std::string("{\"prompt\": \"") + c + "=\", \"answer\": \"[a-z0-9]\"}\n";
  }
  return lines;
}

const std::vector<const char*> kTimed = {
    "time/", "perf/", "pool/", "account/", "progress/rollouts", "progress/sampled_tokens"};

class PoolRunTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_.write("letters.jsonl", letters_file());
    folder_.write("run.toml", "output_dir = \"run\"\n" + std::string(kRun));
  }
  std::string path(const std::string& name) const { return (folder_.path() / name).string(); }
  RunResult train(const std::string& output, std::vector<std::string> more = {}) const {
    std::vector<std::string> args = {"train", "run.toml", "--json", "--set",
                                     "output_dir=" + output};
    args.insert(args.end(), more.begin(), more.end());
    return run_program(args, {.directory = folder_.path().string()});
  }
  // A model folder that servers start with: other weights than the run's.
  std::string server_model() {
    const std::string model = path("other/weights/step_1");
    if (fs::exists(model)) return model;
    const RunResult made = train("other", {"--set", "trainer.max_steps=1", "--set", "seed=99"});
    EXPECT_EQ(made.code, 0) << made;
    return model;
  }
  void start_servers(size_t count) {
    const std::string model = server_model();
    while (servers_.size() < count) {
      servers_.push_back(std::make_unique<ServerProcess>(
          model, folder_.path().string(), path("server_" + std::to_string(servers_.size()))));
      ASSERT_FALSE(servers_.back()->url().empty());
    }
  }
  std::vector<std::string> pool_of(size_t count, const std::string& more = "") const {
    std::string urls;
    for (size_t i = 0; i < count; ++i) urls += (i == 0 ? "\"" : ", \"") + servers_[i]->url() + "\"";
    return {"--set", "inference.pool=static", "--set", "inference.base_url=[" + urls + more + "]"};
  }
  // metrics.jsonl without what depends on time and on servers: how far sampling is when a step ends
  // is no part of the step.
  std::string metrics(const std::string& run) const {
    std::string out;
    for (const std::string& line : lines_of(read_file(path(run + "/metrics.jsonl")))) {
      const Document row = json_of(line);
      for (const auto& member : row.GetObject()) {
        const std::string name = member.name.GetString();
        const bool timed = std::any_of(kTimed.begin(), kTimed.end(), [&](const char* prefix) {
          return name.starts_with(prefix);
        });
        if (!timed) out += name + " = " + text_of(member.value) + "\n";
      }
    }
    return out;
  }
  void expect_same_run(const std::string& a, const std::string& b) const {
    EXPECT_EQ(metrics(a), metrics(b)) << b;
    EXPECT_EQ(read_file(path(a + "/weights/step_6/model.safetensors")),
              read_file(path(b + "/weights/step_6/model.safetensors")))
        << b;
  }
  Document end_of(const std::string& run) const {
    return json_of(read_file(path(run + "/end.json")));
  }
  void expect_accounted(const std::string& run) const {
    const Document end = end_of(run);
    const Json& rollouts = end["rollouts"];
    const auto count = [&](const char* name) { return rollouts[name].GetDouble(); };
    EXPECT_GE(count("admitted"), count("completed") + count("failed") + count("cancelled"));
    for (const std::string& line : lines_of(read_file(path(run + "/metrics.jsonl")))) {
      const Document row = json_of(line);
      const auto of = [&](const char* name) { return row[name].GetDouble(); };
      EXPECT_EQ(of("account/admitted"), of("account/completed") + of("account/failed") +
                                            of("account/cancelled") + of("account/running"));
      EXPECT_TRUE(row["loss"].IsNumber() && std::isfinite(of("loss"))) << line;
      EXPECT_TRUE(row["grad_norm"].IsNumber() && std::isfinite(of("grad_norm"))) << line;
    }
  }

  TempFolder folder_;
  std::vector<std::unique_ptr<ServerProcess>> servers_;
};

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
  EXPECT_FALSE(contains(read_file(path("spawned/config.toml")), "[inference]"));
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

std::vector<std::string> patient() {
  return {"--set", "inference.sync_interval=0.2",
          "--set", "inference.connect_timeout=0.5",
          "--set", "inference.request_timeout=20",
          "--set", "inference.ready_timeout=20",
          "--set", "orchestrator.max_error_reschedule_attempts=20",
          "--set", "orchestrator.zero_progress_batches=50"};
}

TEST_F(PoolRunTest, WhenAllServersDieTheRunGivesUpWithTheirReason) {
  start_servers(2);
  std::vector<std::string> args = {"train", path("run.toml"),
                                   "--set", "output_dir=" + path("dying"),
                                   "--set", "environment.data=" + path("letters.jsonl"),
                                   "--set", "trainer.max_steps=100000"};
  for (const std::string& word : pool_of(2)) args.push_back(word);
  args.insert(args.end(),
              {"--set", "inference.ready_timeout=1", "--set", "inference.connect_timeout=0.5",
               "--set", "inference.sync_interval=0.2"});
  LiveProgram run(args, LiveProgram::Streams::pipes);
  ASSERT_TRUE(run.wait_for("mismatch_kl")) << run.printed();
  for (auto& server : servers_) server->kill(SIGKILL);
  EXPECT_EQ(run.wait(), 3) << run.printed();
  EXPECT_TRUE(contains(run.printed(), "no server is ready")) << run.printed();
  EXPECT_TRUE(contains(run.printed(), "GET /health")) << run.printed();
  expect_accounted("dying");
}

// A server that takes weights as it should, and whose every answer must not be trained.
void make_bad(testing::HttpFakeServer& server) {
  server.with([](testing::FakeModel& model) {
    model.vocab_size = 128;
    model.max_length = 48;
    model.load = [](const std::string& folder, PolicyVersion version) {
      return PolicySnapshot(load_parameters(folder), version).checksum();
    };
    model.spoil = [count = 0](const std::string& path, testing::FakeAnswer& answer) mutable {
      if (path != "/inference/v1/generate") return;
      const auto replace = [&](const std::string& what, const std::string& with) {
        const size_t at = answer.body.find(what);
        if (at != std::string::npos) answer.body.replace(at, what.size(), with);
      };
      switch (count++ % 9) {
        case 0: answer = {500, R"({"error":{"message":"out of luck"}})"}; break;
        case 1: answer.body.resize(answer.body.size() / 2); break;
        case 2: replace("\"token_ids\":[", "\"token_ids\":[4096,"); break;
        case 3: replace("\"logprob\":-0.25", "\"logprob\":NaN"); break;
        case 4: replace("\"versions\":[", "\"versions\":[-1,"); break;
        case 5: answer.reset = true; break;
        case 6: answer.truncated = true; break;
        case 7: answer.silent = true; break;
        case 8: answer = {429, R"({"error":{"message":"too many"}})"}; break;
      }
    };
  });
}

// Some hundred groups while servers are killed, stopped and started again, by a seed.
TEST_F(PoolRunTest, ChaosLosesNoRollout) {
  start_servers(3);
  testing::HttpFakeServer bad;
  make_bad(bad);
  std::vector<std::string> args = {"--set", "trainer.max_steps=400",
                                   "--set", "orchestrator.schedule=free",
                                   "--set", "rollout.max_new_tokens=24"};
  for (const std::string& word : pool_of(3, ", \"" + bad.url() + "\"")) args.push_back(word);
  for (const std::string& word : patient()) args.push_back(word);
  args.insert(args.end(), {"--set", "inference.request_timeout=2"});
  std::atomic<bool> over = false;
  std::thread chaos([&] {
    std::mt19937 rng(7);
    while (!over) {
      ServerProcess& server = *servers_[rng() % 3];
      const auto some = [&] { return std::chrono::milliseconds(20 + rng() % 300); };
      if (rng() % 2 == 0) {
        server.kill(SIGKILL);
        std::this_thread::sleep_for(some());
        server.start();
      } else {
        server.send(SIGSTOP);
        std::this_thread::sleep_for(some() * 4);
        server.send(SIGCONT);
      }
      std::this_thread::sleep_for(some());
    }
  });
  const RunResult result = train("chaos", args);
  over = true;
  chaos.join();
  ASSERT_EQ(result.code, 0) << result;
  expect_accounted("chaos");
  const Document end = end_of("chaos");
  EXPECT_GE(end["rollouts"]["batched"].GetDouble(), 400 * 16);
  double left = 0.0, bad_answers = 0.0;
  for (const std::string& line : lines_of(read_file(path("chaos/metrics.jsonl")))) {
    left += json_of(line)["pool/left"].GetDouble();
    bad_answers += json_of(line)["pool/bad_answers"].GetDouble();
  }
  EXPECT_GT(left, 0.0);
  EXPECT_GT(bad_answers, 0.0);
  EXPECT_GT(end["rollouts"]["failed"].GetDouble(), 0.0);
  std::cout << "chaos: " << text_of(end["rollouts"]) << ", a server left " << left << " times, "
            << bad_answers << " bad answers\n";
}

}  // namespace
}  // namespace leeway
