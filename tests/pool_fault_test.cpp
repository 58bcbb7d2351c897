// Runs whose servers fail: real processes that are killed, stopped and started again, a proxy that
// spoils what they say, and a link that is cut.
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <random>

#include "linked_namespaces.h"
#include "live_program.h"
#include "model/policy_snapshot.h"
#include "pool/fake_server.h"
#include "pool_run_support.h"

namespace leeway {
namespace {

using PoolFaultTest = PoolRunTest;

TEST_F(PoolFaultTest, WhenAllServersDieTheRunGivesUpWithTheirReason) {
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

TEST_F(PoolFaultTest, AServerThatIsKilledChangesNoBitOfALockstepRun) {
  const std::vector<std::string> steps = {"--set", "trainer.max_steps=1000"};
  ASSERT_EQ(train("here", steps).code, 0);
  start_servers(2);
  std::vector<std::string> args = live("run.toml", "killed");
  args.insert(args.end(), {"--set", "environment.data=" + path("letters.jsonl")});
  for (const auto& more : {steps, pool_of(2), patient()}) {
    args.insert(args.end(), more.begin(), more.end());
  }
  LiveProgram run(args, LiveProgram::Streams::pipes);
  // One that has just loaded weights has no request yet, so that several may have to be killed: the
  // run is long enough for that.
  for (size_t i = 0; i < 2 || (i < 50 && sum("killed", "pool/retried_requests") == 0.0); ++i) {
    ASSERT_TRUE(run.wait_until([&](const std::string&) {
      return steps_made("killed") >= 4 + 4 * i;
    })) << run.printed();
    ServerProcess& server = *servers_[i % 2];
    kill_with_requests(server);
    server.start();
  }
  EXPECT_EQ(run.wait(), 0) << run.printed();
  expect_same_run("here", "killed", 1000);
  EXPECT_GT(sum("killed", "pool/failed_requests"), 0.0);
  EXPECT_EQ(end_of("killed")["rollouts"]["failed"].GetDouble(), 0.0);
}

TEST_F(PoolFaultTest, AServerThatIsKilledChangesNoBitOfAnEvaluation) {
  folder_.write("sort.toml", LEEWAY_TINY_MODEL R"(
[trainer]
max_steps = 1
[orchestrator]
prompts_per_batch = 2
group_size = 2
[rollout]
max_new_tokens = 24
stop = "\n"
[eval]
prompts = 400
samples = 2
[[environment]]
name = "sort"
)");
  ASSERT_EQ(run_program(live("sort.toml", "here")).code, 0);
  start_servers(2);
  std::vector<std::string> args = live("sort.toml", "killed");
  for (const auto& more : {pool_of(2), patient()})
    args.insert(args.end(), more.begin(), more.end());
  LiveProgram run(args, LiveProgram::Streams::pipes);
  // The evaluation of step 0 begins as soon as one server is ready, and that one gets its requests.
  ASSERT_TRUE(run.wait_for(": ready: ")) << run.printed();
  const std::string before = run.printed().substr(0, run.printed().find(": ready: "));
  const std::string url = before.substr(before.rfind("http://"));
  ServerProcess& server = *servers_[url == servers_[0]->url() ? 0 : 1];
  ASSERT_EQ(server.url(), url);
  kill_with_requests(server);
  EXPECT_EQ(run.wait(), 0) << run.printed();
  EXPECT_EQ(metrics("here", "eval.jsonl"), metrics("killed", "eval.jsonl"));
  const std::string log = read_file(path("killed/log.txt"));
  EXPECT_LT(log.find(url + ": discovering: "), log.find("eval at step 0")) << log;
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
TEST_F(PoolFaultTest, ChaosLosesNoRollout) {
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
  const double left = sum("chaos", "pool/left"), bad_answers = sum("chaos", "pool/bad_answers");
  const double failed = sum("chaos", "pool/failed_requests");
  EXPECT_GT(left, 0.0);
  EXPECT_GT(bad_answers, 0.0);
  EXPECT_GT(failed, bad_answers);
  std::cout << "chaos: " << text_of(end["rollouts"]) << ", a server left " << left << " times, "
            << failed << " calls failed, " << bad_answers << " of them by a bad answer\n";
}

// `leeway serve` behind a proxy that spoils `share` of the samples and `admin_share` of the rest.
class SpoiledServer {
 public:
  SpoiledServer(const ServerProcess& server, int seed, double share, double admin_share,
                const std::string& log)
      : proxy_({LEEWAY_FAULT_PROXY, ServerProcess::kPort,
                server.url().substr(server.url().rfind(':') + 1), std::to_string(seed),
                std::to_string(share), std::to_string(admin_share)},
               log) {}
  const std::string& url() const { return proxy_.url(); }
  void kill() { proxy_.kill(SIGKILL); }

 private:
  ServerProcess proxy_;
};

std::vector<std::string> static_pool(const std::vector<std::string>& urls) {
  std::string list;
  for (const std::string& url : urls) list += (list.empty() ? "\"" : ", \"") + url + "\"";
  return {"--set", "inference.pool=static", "--set", "inference.base_url=[" + list + "]"};
}

// Every process that the test has started is waited for: none is left as a zombie.
void expect_no_children() {
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
}

// Some hundred groups through proxies that inject every fault, also into weights and health.
TEST_F(PoolFaultTest, AProxyFullOfFaultsLosesNoRolloutAndTrainsNothingWrong) {
  start_servers(2);
  SpoiledServer worse(*servers_[0], 11, 0.3, 0.1, path("proxy_0"));
  SpoiledServer bad(*servers_[1], 12, 0.1, 0.05, path("proxy_1"));
  std::vector<std::string> args = {"--set", "trainer.max_steps=100", "--set",
                                   "orchestrator.schedule=free"};
  for (const auto& more : {static_pool({worse.url(), bad.url()}), patient()}) {
    args.insert(args.end(), more.begin(), more.end());
  }
  args.insert(args.end(), {"--set", "inference.request_timeout=1", "--set",
                           "inference.stall_timeout=0.5", "--set", "inference.update_timeout=2"});
  const RunResult result = train("spoiled", args);
  ASSERT_EQ(result.code, 0) << result;
  expect_accounted("spoiled");
  EXPECT_GE(end_of("spoiled")["rollouts"]["batched"].GetDouble(), 100 * 16);
  const double failed = sum("spoiled", "pool/failed_requests");
  const double bad_answers = sum("spoiled", "pool/bad_answers");
  EXPECT_GT(bad_answers, 0.0);
  EXPECT_GT(failed, bad_answers);
  std::cout << "faults: " << text_of(end_of("spoiled")["rollouts"]) << ", "
            << sum("spoiled", "pool/requests") << " calls, " << failed << " failed, " << bad_answers
            << " of them by a bad answer\n";
  worse.kill();
  bad.kill();
  servers_.clear();
  expect_no_children();
}

// Lockstep: what a proxy spoils is made again with the same seed.
TEST_F(PoolFaultTest, FaultsChangeNoBitOfALockstepRun) {
  ASSERT_EQ(train("here").code, 0);
  start_servers(2);
  const SpoiledServer bad(*servers_[0], 5, 0.3, 0.0, path("proxy_0"));
  const SpoiledServer worse(*servers_[1], 6, 0.4, 0.0, path("proxy_1"));
  std::vector<std::string> args = static_pool({bad.url(), worse.url()});
  for (const std::string& word : patient()) args.push_back(word);
  args.insert(args.end(),
              {"--set", "inference.request_timeout=1", "--set", "inference.request_attempts=100"});
  const RunResult result = train("spoiled", args);
  ASSERT_EQ(result.code, 0) << result;
  expect_same_run("here", "spoiled");
  EXPECT_GT(sum("spoiled", "pool/failed_requests"), 0.0);
}

// With every bound but one out of reach, the one that is named ends the run.
TEST_F(PoolFaultTest, WhenEverythingFailsTheRunEndsInTimeWithTheRealError) {
  start_servers(1);
  SpoiledServer worst(*servers_[0], 3, 1.0, 0.0, path("proxy"));
  std::vector<std::string> args = static_pool({worst.url()});
  args.insert(args.end(),
              {"--set", "orchestrator.max_error_reschedule_attempts=unlimited", "--set",
               "orchestrator.zero_progress_batches=100000", "--set", "inference.sync_interval=0.2",
               "--set", "inference.request_timeout=0.5", "--set", "inference.outage_timeout=3"});
  const RunResult result = train("worst", args);
  EXPECT_EQ(result.code, 3) << result;
  EXPECT_TRUE(contains(result.err, "inference.outage_timeout = 3")) << result;
  EXPECT_TRUE(contains(result.err, worst.url())) << result;
  EXPECT_EQ(end_of("worst")["rollouts"]["batched"].GetDouble(), 0.0);
}

// A machine that goes away without a word, and comes back.
TEST_F(PoolFaultTest, ALinkThatIsCutChangesNoBitOfALockstepRun) {
  const LinkedNamespaces network;
  if (!network.made()) GTEST_SKIP() << "needs the right to make network namespaces";
  const std::vector<std::string> steps = {"--set", "trainer.max_steps=300"};
  ASSERT_EQ(train("here", steps).code, 0);
  const auto server_in = [&](std::vector<std::string> words, const char* host, const char* log) {
    words.insert(words.end(), {leeway_program(), "serve", server_model(), "--host", host, "--port",
                               ServerProcess::kPort, "--weights-root", folder_.path().string(),
                               "--threads", "1"});
    return std::make_unique<ServerProcess>(std::move(words), path(log));
  };
  const auto near = server_in(network.in_near(), "127.0.0.1", "near");
  const auto far = server_in(network.in_far(), LinkedNamespaces::kFar, "far");
  std::vector<std::string> args = live("run.toml", "cut");
  args.insert(args.end(), {"--set", "environment.data=" + path("letters.jsonl")});
  for (const auto& more : {steps, static_pool({near->url(), far->url()}), patient()}) {
    args.insert(args.end(), more.begin(), more.end());
  }
  // While both servers are away calls are repeated, since a rollout that fails gets another seed.
  args.insert(args.end(),
              {"--set", "inference.stall_timeout=0.5", "--set", "inference.update_timeout=1",
               "--set", "inference.update_attempts=1", "--set", "inference.request_attempts=100"});
  LiveProgram run(args, LiveProgram::Streams::pipes, network.in_near());
  const auto times_ready = [&](const std::string& all) {
    int times = 0;
    const std::string words = far->url() + ": ready: ";
    for (size_t at = 0; (at = all.find(words, at)) != std::string::npos; ++at) ++times;
    return times;
  };
  ASSERT_TRUE(run.wait_until([&](const std::string& all) {
    return times_ready(all) == 1 && steps_made("cut") >= 4;
  })) << run.printed();
  network.link(false);
  near->send(SIGSTOP);  // else the run may end before the far one is back
  ASSERT_TRUE(run.wait_for(far->url() + ": unhealthy: ")) << run.printed();
  network.link(true);
  ASSERT_TRUE(run.wait_until([&](const std::string& all) { return times_ready(all) == 2; }))
      << run.printed();
  near->send(SIGCONT);
  EXPECT_EQ(run.wait(), 0) << run.printed();
  expect_same_run("here", "cut", 300);
}

TEST_F(PoolFaultTest, ServersThatAreGoneForGoodEndARunWithoutOtherBounds) {
  start_servers(2);
  std::vector<std::string> args = live("run.toml", "gone");
  args.insert(args.end(), {"--set", "environment.data=" + path("letters.jsonl"), "--set",
                           "trainer.max_steps=100000"});
  for (const auto& more : {pool_of(2), patient()})
    args.insert(args.end(), more.begin(), more.end());
  args.insert(args.end(),
              {"--set", "orchestrator.max_error_reschedule_attempts=unlimited", "--set",
               "orchestrator.zero_progress_batches=100000", "--set", "inference.outage_timeout=2"});
  LiveProgram run(args, LiveProgram::Streams::pipes);
  ASSERT_TRUE(run.wait_for("mismatch_kl")) << run.printed();
  for (auto& server : servers_) server->kill(SIGKILL);
  EXPECT_EQ(run.wait(), 3) << run.printed();
  EXPECT_TRUE(contains(run.printed(), "inference.outage_timeout = 2")) << run.printed();
  EXPECT_TRUE(contains(run.printed(), "GET /health")) << run.printed();
  expect_accounted("gone");
}

}  // namespace
}  // namespace leeway
