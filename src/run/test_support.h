// What the tests of runs in this process share: a tiny configuration, a Progress that records, and
// an environment whose held-out answers wait at a gate.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "base/files.h"
#include "config/config.h"
#include "leeway/error.h"
#include "orchestrator/environment.h"
#include "run/policy_evaluation.h"
#include "run/progress.h"
#include "run/run_setup.h"

namespace leeway {

inline constexpr const char* kTinyRun = R"(
[model]
tokenizer = "byte"
vocab_size = 128
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
max_position_embeddings = 48
[trainer]
max_steps = 6
learning_rate = 3e-3
warmup_steps = 0
threads = 1
[trainer.loss]
preset = "grpo"
[orchestrator]
prompts_per_batch = 2
group_size = 4
max_off_policy_steps = 1
filter_zero_advantages = false
[rollout]
max_new_tokens = 4
stop = "\n"
threads = 1
[eval]
prompts = 4
every = 2
[checkpoint]
every = 0
[[environment]]
name = "sort"
min_length = 1
max_length = 2
)";

// A folder of the test's own, which goes with it.
class TestFolder {
 public:
  TestFolder() {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    path_ = std::filesystem::path(::testing::TempDir()) /
            (std::string("leeway_") + test->test_suite_name() + "_" + test->name());
    std::filesystem::remove_all(path_);
    std::filesystem::create_directories(path_);
  }
  ~TestFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;

  std::string operator/(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

inline Config tiny_config(const Catalog& catalog, const std::string& output_dir,
                          std::vector<std::string> sets = {}) {
  sets.push_back("output_dir=" + output_dir);
  return parse_config(catalog, "tiny.toml", kTinyRun, sets, ConfigScope::whole);
}

// Steps and evaluations in the order they were told: "step 1", "eval 0", "stopped eval 2".
class RecordingProgress : public Progress {
 public:
  std::vector<std::string> events;
  std::vector<std::string> notes;
  std::atomic<int64_t> last_step = 0, last_evaluated = -1;

  void note(const std::string& line) override { notes.push_back(line); }
  void begin_steps(int64_t) override {}
  void step(int64_t step, int64_t, const std::string&) override {
    events.push_back("step " + std::to_string(step));
    last_step = step;
  }
  void count(const std::string&, const std::string&, size_t, size_t) override {}
  void evaluated(int64_t step, const EvaluationResult& result) override {
    events.push_back((result.stopped ? "stopped eval " : "eval ") + std::to_string(step));
    if (!result.stopped) last_evaluated = step;
  }
  void status(const std::string&) override {}
};

// After the first step a folder lies where a file is to be written, which then fails.
class FolderInTheWay final : public RecordingProgress {
 public:
  explicit FolderInTheWay(std::string file) : file_(std::move(file)) {}
  void step(int64_t step, int64_t of, const std::string& line) override {
    if (step == 1) std::filesystem::create_directories(file_ + "/is a folder");
    RecordingProgress::step(step, of, line);
  }

 private:
  const std::string file_;
};

// Answers of held-out prompts wait until `gate` lets them through; those to train on do not.
class GatedEnvironment final : public Environment {
 public:
  using Gate = std::function<bool()>;
  // `broken`: its held-out examples cannot be had.
  explicit GatedEnvironment(Gate gate, bool broken = false)
      : gate_(std::move(gate)), broken_(broken) {}

  std::optional<uint64_t> size(Split split) const override {
    return split == Split::train ? 16 : 4;
  }
  Example example(Split split, uint64_t index) const override {
    if (broken_ && split == Split::held_out) throw Error("the held-out examples are gone");
    Example example;
    example.index = index;
    Message message;
    message.role = Role::user;
    message.content = std::string(1, static_cast<char>('a' + index)) + "=";
    example.messages = {message};
    example.answer = split == Split::held_out ? "held out" : "";
    return example;
  }
  std::unique_ptr<Episode> start(const Example& example, const EpisodePlace&) const override {
    return std::make_unique<Gated>(example.answer.empty() ? Gate([] { return true; }) : gate_);
  }
  bool needs_renderer() const override { return false; }

 private:
  class Gated final : public Episode {
   public:
    explicit Gated(Gate gate) : gate_(std::move(gate)) {}
    Turn respond(const Reply& reply) override {
      const double value = reply.text.empty() ? 0.0 : static_cast<double>(reply.text[0] % 2);
      turn_.kind = Turn::Kind::reward;
      turn_.rewards = {{.name = "odd", .weight = 1.0, .value = value}};
      return poll();
    }
    Turn poll() override {
      Turn pending;
      pending.kind = Turn::Kind::pending;
      return gate_() ? turn_ : pending;
    }

   private:
    Gate gate_;
    Turn turn_;
  };

  Gate gate_;
  bool broken_;
};

// A run's set-up with that environment in place of the configured one.
inline RunSetup gated_setup(Config config, GatedEnvironment::Gate gate, bool broken = false) {
  RunSetup setup(std::move(config));
  std::vector<EnvironmentMix::Member> members;
  members.push_back({.id = setup.environment_ids.at(0),
                     .weight = 1.0,
                     .environment = std::make_unique<GatedEnvironment>(std::move(gate), broken)});
  setup.environments = std::make_unique<EnvironmentMix>(std::move(members), 1);
  return setup;
}

// The steps of a file of JSON lines, in its order.
inline std::vector<int64_t> steps_in(const std::string& file) {
  std::vector<int64_t> steps;
  if (!is_present(file)) return steps;
  std::istringstream lines(read_file(file));
  for (std::string line; std::getline(lines, line);) {
    const size_t at = line.find_first_of("0123456789");
    if (line.starts_with("{\"step\"") && at != std::string::npos) {
      steps.push_back(std::stoll(line.substr(at)));
    }
  }
  return steps;
}

}  // namespace leeway
