// Shared by the tests of `leeway train --resume`: runs in their own folder that can be disturbed,
// and their outcome.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/files.h"
#include "cli_helpers.h"
#include "tiny_model.h"

namespace leeway {

namespace fs = std::filesystem;

inline constexpr const char* kResumeConfig = R"(
output_dir = "run"
)" LEEWAY_TINY_MODEL R"([sft]
max_steps = 4
batch_size = 8
[trainer]
max_steps = 12
learning_rate = 3e-3
warmup_steps = 0
[trainer.loss]
preset = "grpo"
ref_kl = 0.05
[orchestrator]
prompts_per_batch = 4
group_size = 4
max_off_policy_steps = 2
[rollout]
max_new_tokens = 6
stop = "\n"
[eval]
prompts = 8
samples = 2
every = 5
[output]
rollouts_every = 1
rollouts_groups = 0
[checkpoint]
every = 2
[[environment]]
name = "jsonl"
id = "letters"
data = "letters.jsonl"
verifier = "regex"
weight = 2
[[environment]]
name = "sort"
min_length = 1
max_length = 2
[[environment]]
name = "arithmetic"
max_operand = 5
)";

// Enough steps that a signal arrives before the last one.
inline const std::vector<std::string> kLong = {"trainer.max_steps=400", "checkpoint.every=50",
                                               "output.rollouts_every=20", "eval.every=60"};

// Prompts that random weights sometimes answer, so that there is something to learn.
inline std::string letters_file() {
  std::string lines;
  for (char c = 'a'; c <= 'z'; ++c) {
    lines += std::string("{\"prompt\": \"") + c +
             "=\", \"answer\": \"[a-z0-9]\", \"completion\": \"x\\n\"}\n";
  }
  return lines;
}

// A program that runs in the background of the test. Its output goes to files.
class Started {
 public:
  Started(std::vector<std::string> args, const std::string& directory) {
    args.insert(args.begin(), leeway_program());
    child_ = ::fork();
    if (child_ < 0) throw std::runtime_error("fork failed");
    if (child_ > 0) return;
    const RunOptions options{.directory = directory,
                             .stdout_file = directory + "/out.txt",
                             .stderr_file = directory + "/err.txt"};
    run_detail::exec_child(args, options, ::open("/dev/null", O_RDONLY), -1, -1);
  }
  ~Started() {
    if (child_ > 0) send(SIGKILL), wait();
  }
  Started(const Started&) = delete;
  Started& operator=(const Started&) = delete;

  void send(int signal) const { ::kill(child_, signal); }
  // The exit code, or minus the signal that ended it.
  int wait() {
    int status = 0;
    while (::waitpid(child_, &status, 0) < 0 && errno == EINTR) {
    }
    child_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

 private:
  pid_t child_;
};

// The contents of a folder: bytes by path.
inline std::map<std::string, std::string> content_of(const fs::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    const std::string name = fs::relative(entry.path(), folder);
    if (entry.is_regular_file()) files[name] = read_file(entry.path());
  }
  return files;
}

class ResumeFixture : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::access("/dev/shm", W_OK) == 0) {
      ::setenv("TMPDIR", "/dev/shm", 1);
      memory_.emplace();
      ::unsetenv("TMPDIR");
    }
    prepare(directory());
  }

  void prepare(const std::string& directory) const {
    std::ofstream(directory + "/letters.jsonl") << letters_file();
    std::ofstream(directory + "/run.toml") << kResumeConfig;
  }
  std::string path(const std::string& name) const { return directory() + "/" + name; }
  // Where runs are written: in memory if there is such a file system, since syncing is slow.
  std::string directory() const {
    return memory_ ? memory_->path().string() : (folder_.path() / inside_).string();
  }
  void write(const std::string& name, const std::string& text) const {
    std::ofstream(path(name)) << text;
  }
  void work_on_disk() {
    memory_.reset();
    prepare(directory());
  }

  static std::vector<std::string> arguments(std::vector<std::string> args,
                                            const std::vector<std::string>& sets) {
    args.insert(args.begin(), "train");
    for (const std::string& set : sets) args.insert(args.end(), {"--set", set});
    return args;
  }
  RunResult leeway(const std::vector<std::string>& args) const {
    return run_program(args, {.directory = directory()});
  }
  RunResult train(const std::vector<std::string>& sets = {}) const {
    return leeway(arguments({"run.toml", "--json"}, sets));
  }
  RunResult resume(const std::vector<std::string>& sets = {}) const {
    return leeway(arguments({"--resume", "run", "--json"}, sets));
  }

  // The outcome of a run: its last weights, metrics and evaluations without times, and rollouts.
  struct Outcome {
    std::string weights;
    std::vector<std::string> metrics, evaluations;
    std::map<std::string, std::string> rollouts;
  };
  static std::vector<std::string> results_of(const std::string& name) {
    std::vector<std::string> rows;
    for (const std::string& line : lines_of(read_file(name))) {
      Document row = json_of(line);
      for (auto member = row.MemberBegin(); member != row.MemberEnd();) {
        const std::string key = member->name.GetString();
        // How far sampling is ahead of training depends on timing.
        const bool of_time = key.starts_with("time/") || key.starts_with("perf/") ||
                             key.starts_with("progress/") || key.starts_with("account/");
        member = of_time ? row.EraseMember(member) : member + 1;
      }
      rows.push_back(text_of(row));
    }
    return rows;
  }
  Outcome outcome(int64_t steps = 12) const {
    Outcome found;
    found.weights =
        read_file(path("run/weights/step_" + std::to_string(steps) + "/model.safetensors"));
    found.metrics = results_of(path("run/metrics.jsonl"));
    found.evaluations = results_of(path("run/eval.jsonl"));
    found.rollouts = content_of(path("run/rollouts"));
    return found;
  }
  static void expect_same(const Outcome& found, const Outcome& wanted) {
    EXPECT_TRUE(found.weights == wanted.weights);
    EXPECT_EQ(found.metrics, wanted.metrics);
    EXPECT_EQ(found.evaluations, wanted.evaluations);
    EXPECT_TRUE(found.rollouts == wanted.rollouts);
  }
  // An undisturbed run; its folder is removed.
  Outcome undisturbed(const std::vector<std::string>& sets = {}, int64_t steps = 12) const {
    const RunResult result = train(sets);
    EXPECT_EQ(result.code, 0) << result;
    Outcome found = outcome(steps);
    EXPECT_EQ(found.metrics.size(), static_cast<size_t>(steps));
    // Something must be learned, or equality would prove nothing.
    EXPECT_FALSE(found.weights == read_file(path("run/weights/step_0/model.safetensors")));
    fs::remove_all(path("run"));
    return found;
  }

  std::set<std::string> checkpoints() const {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(path("run/checkpoints"))) {
      names.insert(entry.path().filename());
    }
    return names;
  }
  void expect_no_leftovers() const {
    for (const auto& entry : fs::recursive_directory_iterator(path("run"))) {
      const std::string name = entry.path().filename();
      EXPECT_FALSE(name.ends_with(".tmp") || name.starts_with(".writing")) << entry.path();
    }
  }
  // The report of the run can be written, whatever happened to it.
  void expect_readable() const {
    const std::string page = (folder_.path() / "page.html").string();
    const RunResult report = leeway({"report", "run", "--output", page});
    EXPECT_EQ(report.code, 0) << report;
    EXPECT_TRUE(contains(read_file(page), "</html>"));
  }
  // Waits until metrics.jsonl has this many lines.
  void wait_for_steps(size_t steps) const {
    wait_until([&] {
      return fs::exists(path("run/metrics.jsonl")) &&
             lines_of(read_file(path("run/metrics.jsonl"))).size() >= steps;
    });
  }
  void wait_until(const std::function<bool()>& condition) const {
    // Reached by a run that hangs alone: a busy machine needs a fraction of it.
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(300);
    while (!condition()) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline)
          << "the run did not get so far in 300 s; it said:\n"
          << read_file(path("err.txt"));
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  TempFolder folder_;
  std::string inside_;
  std::optional<TempFolder> memory_;
};

}  // namespace leeway
