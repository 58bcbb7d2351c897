// What the tests of runs with servers share: a tiny run in a folder, `leeway serve` processes, and
// what two such runs must have in common.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/files.h"
#include "cli_helpers.h"
#include "server_process.h"
#include "tiny_model.h"

namespace leeway {

inline constexpr const char* kPoolRun = LEEWAY_TINY_MODEL R"(
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
samples = 2
every = 2
[[environment]]
name = "jsonl"
id = "letters"
data = "letters.jsonl"
verifier = "regex"
)";

inline std::string letters_file() {
  std::string lines;
  for (char c = 'a'; c <= 'z'; ++c) {
    lines += std::string("{\"prompt\": \"") + c + "=\", \"answer\": \"[a-z0-9]\"}\n";
  }
  return lines;
}

inline const std::vector<const char*> kTimed = {"time/",
                                                "perf/",
                                                "pool/",
                                                "ranks/",
                                                "account/",
                                                "progress/rollouts",
                                                "progress/sampled_tokens"};

class PoolRunTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_.write("letters.jsonl", letters_file());
    folder_.write("run.toml", "output_dir = \"run\"\n" + std::string(kPoolRun));
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
    if (std::filesystem::exists(model)) return model;
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
  std::string metrics(const std::string& run, const std::string& file = "metrics.jsonl") const {
    std::string out;
    for (const std::string& line : lines_of(read_file(path(run + "/" + file)))) {
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
  void expect_same_run(const std::string& a, const std::string& b, int steps = 6) const {
    EXPECT_EQ(metrics(a), metrics(b)) << b;
    EXPECT_EQ(metrics(a, "eval.jsonl"), metrics(b, "eval.jsonl")) << b;
    EXPECT_TRUE(contains(metrics(b, "eval.jsonl"), "eval/all/greedy/mean"));
    const std::string weights = "/weights/step_" + std::to_string(steps) + "/model.safetensors";
    EXPECT_EQ(read_file(path(a + weights)), read_file(path(b + weights))) << b;
  }
  // The sum of a metric over all steps.
  double sum(const std::string& run, const char* name) const {
    double total = 0.0;
    for (const std::string& line : lines_of(read_file(path(run + "/metrics.jsonl")))) {
      total += json_of(line)[name].GetDouble();
    }
    return total;
  }
  size_t steps_made(const std::string& run) const {
    const std::string file = path(run + "/metrics.jsonl");
    return std::filesystem::exists(file) ? lines_of(read_file(file)).size() : 0;
  }
  // `leeway train` in the background, with absolute paths.
  std::vector<std::string> live(const std::string& file, const std::string& output) const {
    return {"train", path(file), "--set", "output_dir=" + path(output)};
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

inline std::vector<std::string> patient() {
  return {"--set", "inference.sync_interval=0.2",
          "--set", "inference.connect_timeout=0.5",
          "--set", "inference.request_timeout=20",
          "--set", "inference.ready_timeout=20",
          "--set", "orchestrator.max_error_reschedule_attempts=20",
          "--set", "orchestrator.zero_progress_batches=50"};
}

// Stopped first, so that it has requests when it is killed.
inline void kill_with_requests(ServerProcess& server) {
  server.send(SIGSTOP);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  server.kill(SIGKILL);
}

}  // namespace leeway
