// `leeway train --resume`: runs that are killed, stopped, damaged or out of room go on as if
// nothing had happened.

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>

#include <chrono>
#include <functional>
#include <map>
#include <set>
#include <thread>

#include "base/files.h"
#include "base/rng.h"
#include "cli_helpers.h"
#include "tiny_model.h"

namespace leeway {
namespace {

namespace fs = std::filesystem;
using Seconds = std::chrono::duration<double>;
using SteadyTime = std::chrono::steady_clock;

constexpr const char* kConfig = R"(
output_dir = "run"
)" LEEWAY_TINY_MODEL R"([sft]
max_steps = 4
batch_size = 8
[trainer]
max_steps = 12
learning_rate = 3e-3
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

// So many steps that a signal comes before the last one.
const std::vector<std::string> kLong = {"trainer.max_steps=400", "checkpoint.every=50",
                                        "output.rollouts_every=20", "eval.every=60"};

// Prompts that even random weights answer now and then: there is something to learn.
std::string letters_file() {
  std::string lines;
  for (char c = 'a'; c <= 'z'; ++c) {
    lines += std::string("{\"prompt\": \"") + c +
             "=\", \"answer\": \"[a-z0-9]\", \"completion\": \"x\\n\"}\n";
  }
  return lines;
}

// A program that goes on beside the test. Its output goes to files.
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

// Everything of a folder: bytes by path.
std::map<std::string, std::string> content_of(const fs::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    const std::string name = fs::relative(entry.path(), folder);
    if (entry.is_regular_file()) files[name] = read_file(entry.path());
  }
  return files;
}

class ResumeTest : public ::testing::Test {
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
    std::ofstream(directory + "/run.toml") << kConfig;
  }
  std::string path(const std::string& name) const { return directory() + "/" + name; }
  // Where runs are made: in memory where there is such a file system, as syncing takes its time.
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

  // What a run gave: its last weights, its metrics and evaluations without times, its rollouts.
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
        // Sampling is ahead of training by as much as time allows.
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
  // A run that nothing disturbs; its folder is removed.
  Outcome undisturbed(const std::vector<std::string>& sets = {}, int64_t steps = 12) const {
    const RunResult result = train(sets);
    EXPECT_EQ(result.code, 0) << result;
    Outcome found = outcome(steps);
    EXPECT_EQ(found.metrics.size(), static_cast<size_t>(steps));
    // Something is learned, or sameness would say nothing.
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
  // The page of the run, whatever became of it, can be made.
  void expect_readable() const {
    const std::string page = (folder_.path() / "page.html").string();
    const RunResult report = leeway({"report", "run", "--output", page});
    EXPECT_EQ(report.code, 0) << report;
    EXPECT_TRUE(contains(read_file(page), "</html>"));
  }
  // Until metrics.jsonl has this many lines.
  void wait_for_steps(size_t steps) const {
    wait_until([&] {
      return fs::exists(path("run/metrics.jsonl")) &&
             lines_of(read_file(path("run/metrics.jsonl"))).size() >= steps;
    });
  }
  void wait_until(const std::function<bool()>& condition) const {
    const auto deadline = SteadyTime::now() + std::chrono::seconds(30);
    while (!condition()) {
      ASSERT_LT(SteadyTime::now(), deadline) << read_file(path("err.txt"));
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  // Makes runs, each killed at random moments and resumed until it ends, with `kills` kills in all;
  // looks at each run with `check`.
  void survive(int kills, uint64_t seed, const std::vector<std::string>& sets,
               const std::function<void()>& check) const {
    Rng rng(seed);
    int runs = 0, from_checkpoint = 0;
    double longest = 0.05;  // seconds until a kill
    for (int killed = 0; killed < kills; ++runs) {
      fs::remove_all(path("run"));
      const auto begin = SteadyTime::now();
      for (int code = -1; code != 0;) {
        // The first run is timed.
        const bool spare = runs == 0 || killed >= kills;
        const bool begun = fs::exists(path("run/config.toml"));
        Started run(begun ? arguments({"--resume", "run"}, {}) : arguments({"run.toml"}, sets),
                    directory());
        if (!spare) {
          std::this_thread::sleep_for(Seconds(rng.uniform() * 0.8 * longest));
          run.send(SIGKILL);
        }
        code = run.wait();
        ASSERT_TRUE(code == 0 || code == -SIGKILL) << code << read_file(path("err.txt"));
        killed += code == -SIGKILL ? 1 : 0;
        longest *= code == -SIGKILL ? 1.05 : 0.85;  // about three kills for each end
        from_checkpoint += contains(read_file(path("err.txt")), "resumed from step") ? 1 : 0;
      }
      if (runs == 0) longest = Seconds(SteadyTime::now() - begin).count();
      check();
      if (HasFatalFailure() || HasNonfatalFailure()) return;
    }
    RecordProperty("kills", kills);
    std::printf("%d kills in %d runs, %d lives began at a checkpoint\n", kills, runs,
                from_checkpoint);
    EXPECT_GT(from_checkpoint, kills / 4);
  }

  TempFolder folder_;
  std::string inside_;
  std::optional<TempFolder> memory_;
};

TEST_F(ResumeTest, AHundredKillsChangeNothing) {
  const std::vector<std::string> sets = {"output.rollouts_every=4"};
  const Outcome wanted = undisturbed(sets);
  const auto check = [&] {
    expect_same(outcome(), wanted);
    expect_no_leftovers();
  };
  // On a disk most moments are those of a file being synced, in memory those of training.
  survive(80, 1, sets, check);
  work_on_disk();
  survive(20, 3, sets, check);
}

TEST_F(ResumeTest, KilledFreeRunsTrainEveryStepOnceAndNoGroupTwice) {
  survive(40, 2, {"orchestrator.schedule=free"}, [&] {
    const auto rows = lines_of(read_file(path("run/metrics.jsonl")));
    ASSERT_EQ(rows.size(), 12u);
    std::set<std::pair<int, int>> rollouts;
    for (int step = 1; step <= 12; ++step) {
      EXPECT_EQ(json_of(rows[static_cast<size_t>(step - 1)])["step"].GetInt(), step);
      std::set<int> groups;
      for (const std::string& line :
           lines_of(read_file(path("run/rollouts/step_" + std::to_string(step) + ".jsonl")))) {
        const Document row = json_of(line);
        groups.insert(row["group"].GetInt());
        EXPECT_TRUE(rollouts.emplace(row["group"].GetInt(), row["rollout"].GetInt()).second)
            << "group " << row["group"].GetInt() << " was trained twice";
      }
      EXPECT_EQ(groups.size(), 4u);
    }
    expect_no_leftovers();
  });
}

// A finished run with its checkpoints of steps 8, 10 and 12.
class DamageTest : public ResumeTest {
 protected:
  void SetUp() override {
    ResumeTest::SetUp();
    ASSERT_EQ(train({"checkpoint.keep_last=3"}).code, 0);
    wanted_ = outcome();
    fs::copy(path("run"), path("whole"), fs::copy_options::recursive);
  }
  void put_back() const {
    fs::remove_all(path("run"));
    fs::copy(path("whole"), path("run"), fs::copy_options::recursive);
  }
  static void flip_a_byte(const std::string& name) {
    std::string bytes = read_file(name);
    bytes[bytes.size() / 2] ^= 4;
    write_file_atomically(name, bytes);
  }
  Outcome wanted_;
};

TEST_F(DamageTest, ADamagedCheckpointIsNamedAndTheOneBeforeIsUsed) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(path("whole/checkpoints/step_12"))) {
    names.push_back(entry.path().filename());
  }
  ASSERT_EQ(names.size(), 7u);
  const std::map<std::string, std::function<void(const std::string&)>> damages = {
      {"cut", [](const auto& name) { fs::resize_file(name, fs::file_size(name) / 2); }},
      {"empty", [](const auto& name) { fs::resize_file(name, 0); }},
      {"flipped", flip_a_byte},
      {"deleted", [](const auto& name) { fs::remove(name); }},
  };
  for (const std::string& name : names) {
    for (const auto& [kind, damage] : damages) {
      SCOPED_TRACE(name + " " + kind);
      put_back();
      damage(path("run/checkpoints/step_12/" + name));
      const RunResult result = resume();
      ASSERT_EQ(result.code, 0) << result;
      EXPECT_TRUE(contains(result.err, "checkpoint of step 12 is passed over")) << result.err;
      // A manifest may be readable and say something wrong of another file.
      EXPECT_TRUE(contains(result.err,
                           "checkpoints/step_12/" + (name == "manifest.json" ? "" : name + ": ")))
          << result.err;
      EXPECT_TRUE(contains(result.err, "resumed from step 10")) << result.err;
      expect_same(outcome(), wanted_);
      EXPECT_EQ(resume().code, 0);
    }
  }
}

TEST_F(ResumeTest, WithoutACheckpointTheRunBeginsAnewAndKeepsItsNewOnes) {
  ASSERT_EQ(train(kLong).code, 0);
  const Outcome wanted = outcome(400);
  for (const std::string& step : checkpoints()) {
    fs::resize_file(path("run/checkpoints/" + step + "/optimizer.safetensors"), 100);
  }
  {
    Started run(arguments({"--resume", "run"}, {"checkpoint.keep_last=1", "checkpoint.every=2"}),
                directory());
    wait_until([&] {
      return fs::exists(path("err.txt")) &&
             contains(read_file(path("err.txt")), "the run begins anew");
    });
    wait_for_steps(10);
    run.send(SIGKILL);
    ASSERT_EQ(run.wait(), -SIGKILL);
  }
  // The damaged ones of later steps do not count among those to be kept.
  const RunResult result = resume();
  ASSERT_EQ(result.code, 0) << result;
  EXPECT_TRUE(contains(result.err, "resumed from step")) << result.err;
  expect_same(outcome(400), wanted);
}

TEST_F(DamageTest, HalfWrittenCheckpointsAreNotLookedAtAndGo) {
  fs::rename(path("run/checkpoints/step_12"), path("run/checkpoints/.writing_1"));
  fs::create_directories(path("run/checkpoints/.writing_99999999"));
  write("run/report.html.4711.tmp", "half");
  write("run/mine.tmp", "of the user");
  const RunResult result = resume();
  ASSERT_EQ(result.code, 0) << result;
  EXPECT_TRUE(contains(result.err, "resumed from step 10")) << result.err;
  expect_same(outcome(), wanted_);
  EXPECT_TRUE(fs::remove(path("run/mine.tmp")));
  expect_no_leftovers();
}

TEST_F(DamageTest, LinesCutOffOrDamagedAfterTheCheckpointAreWrittenAgain) {
  fs::remove_all(path("run/checkpoints/step_12"));
  std::ofstream(path("run/metrics.jsonl"), std::ios::app) << "\0\0\0\n{\"step\": 13, \"lo";
  std::ofstream(path("run/eval.jsonl"), std::ios::app) << "{\"st";
  ASSERT_EQ(resume().code, 0);
  expect_same(outcome(), wanted_);
}

TEST_F(DamageTest, AnotherReferenceThanThatOfStepZeroIsRefused) {
  fs::remove_all(path("run/checkpoints/step_12"));
  const std::string name = path("run/weights/step_0/model.safetensors");
  std::string bytes = read_file(name);
  bytes[bytes.size() - 4] ^= 1;  // the last bit of a number
  write_file_atomically(name, bytes);
  const RunResult result = resume();
  EXPECT_EQ(result.code, 3) << result;
  EXPECT_TRUE(contains(result.err, "weights/step_0: is not the policy of step 0")) << result.err;
  expect_readable();
}

TEST_F(DamageTest, AFinishedRunIsLeftAsItIs) {
  const auto before = content_of(path("run"));
  for (const std::vector<std::string>& sets :
       {std::vector<std::string>{}, {"eval.samples=3", "checkpoint.every=1"}}) {
    const RunResult result = resume(sets);
    EXPECT_EQ(result.code, 0) << result;
    EXPECT_TRUE(contains(result.err, "the run has finished, all of its 12 steps")) << result.err;
    const Document summary = json_of(result.out);
    EXPECT_STREQ(summary["end"].GetString(), "finished");
    EXPECT_EQ(summary["steps"].GetInt(), 12);
    EXPECT_STREQ(summary["weights"].GetString(), "run/weights/step_12");
    EXPECT_EQ(summary["before"].MemberCount(), summary["after"].MemberCount());
  }
  const RunResult text = leeway({"train", "--resume", "run"});
  EXPECT_TRUE(contains(text.out, "run/weights/step_12")) << text;
  EXPECT_TRUE(content_of(path("run")) == before);
}

TEST_F(DamageTest, WhatCameAfterTheLastCheckpointIsMadeGood) {
  for (const char* missing : {"run/report.html", "run/weights/step_12", "run/eval.jsonl"}) {
    SCOPED_TRACE(missing);
    put_back();
    fs::remove_all(path(missing));
    if (std::string(missing) == "run/eval.jsonl") {
      std::string kept;
      for (const std::string& line : lines_of(read_file(path("whole/eval.jsonl")))) {
        if (json_of(line)["step"].GetInt() < 12) kept += line + "\n";
      }
      write("run/eval.jsonl", kept);
    }
    ASSERT_EQ(resume().code, 0);
    expect_same(outcome(), wanted_);
    EXPECT_TRUE(fs::exists(path("run/report.html")));
  }
}

TEST_F(DamageTest, AnotherConfigurationIsRefusedWithBothValues) {
  fs::remove_all(path("run/checkpoints/step_12"));
  const auto before = content_of(path("run"));
  expect_mistake(resume({"trainer.learning_rate=1e-3", "trainer.loss.ref_kl=0.5"}),
                 {"trainer.learning_rate: 0.003 in the run, 0.001 now",
                  "trainer.loss.ref_kl: 0.05 in the run, 0.5 now"});
  expect_mistake(resume({"trainer.max_steps=20"}), {"trainer.max_steps: 12 in the run, 20 now"});
  std::string other = kConfig;
  other.replace(other.find("max_operand = 5"), 15, "max_operand = 7");
  write("other.toml", other + "[[environment]]\nname = \"sort\"\nid = \"more\"\n");
  expect_mistake(leeway({"train", "other.toml", "--resume", "run"}),
                 {"max_operand: 5 in the run, 7 now", "absent in the run", "\"more\""});
  expect_mistake(leeway({"train", "--resume", "nowhere"}), {"nowhere/config.toml"});
  EXPECT_TRUE(content_of(path("run")) == before);
}

TEST_F(DamageTest, WhatDoesNotChangeTheTrainingMayBeAnother) {
  fs::remove_all(path("run/checkpoints/step_12"));
  const std::string config = read_file(path("run/config.toml"));
  const RunResult result =
      resume({"trainer.threads=1", "rollout.threads=1", "output.tensorboard=true",
              "output.rollouts_every=100", "eval.samples=3", "eval.every=11", "checkpoint.every=1",
              "checkpoint.keep_last=1"});
  ASSERT_EQ(result.code, 0) << result;
  const Outcome found = outcome();
  EXPECT_TRUE(found.weights == wanted_.weights);
  EXPECT_EQ(found.metrics, wanted_.metrics);
  EXPECT_TRUE(fs::exists(path("run/tensorboard")));
  EXPECT_EQ(checkpoints(), std::set<std::string>{"step_12"});
  EXPECT_TRUE(contains(read_file(path("run/config.toml")), "samples = 3"));

  // With nothing changed the file keeps the origins of its values.
  put_back();
  fs::remove_all(path("run/checkpoints/step_12"));
  ASSERT_EQ(leeway({"train", "run.toml", "--resume", "run"}).code, 0);
  expect_same(outcome(), wanted_);
  put_back();
  fs::remove_all(path("run/checkpoints/step_12"));
  ASSERT_EQ(resume().code, 0);
  EXPECT_EQ(read_file(path("run/config.toml")), config);
}

TEST_F(ResumeTest, TheLastCheckpointsAndEveryFewAreKept) {
  ASSERT_EQ(train({"checkpoint.keep_last=2", "checkpoint.keep_every=4"}).code, 0);
  EXPECT_EQ(checkpoints(),
            (std::set<std::string>{"step_0", "step_4", "step_8", "step_10", "step_12"}));
  fs::remove_all(path("run"));
  ASSERT_EQ(train({"checkpoint.keep_last=3"}).code, 0);
  EXPECT_EQ(checkpoints(), (std::set<std::string>{"step_8", "step_10", "step_12"}));
  fs::remove_all(path("run"));
  ASSERT_EQ(train({"checkpoint.keep_last=1", "checkpoint.every=0"}).code, 0);
  EXPECT_EQ(checkpoints(), std::set<std::string>{"step_12"});
}

TEST_F(ResumeTest, ASignalSavesAndTheResumedRunEndsTheSame) {
  const Outcome wanted = undisturbed(kLong, 400);
  for (const int signal : {SIGTERM, SIGINT}) {
    fs::remove_all(path("run"));
    Started run(arguments({"run.toml", "--json"}, kLong), directory());
    wait_for_steps(10);
    run.send(signal);
    EXPECT_EQ(run.wait(), 0) << read_file(path("err.txt"));
    const Document summary = json_of(read_file(path("out.txt")));
    EXPECT_STREQ(summary["end"].GetString(), "stopped");
    expect_readable();
    const RunResult result = resume();
    ASSERT_EQ(result.code, 0) << result;
    expect_same(outcome(400), wanted);
  }
  // Twice: at once. Where the second comes too late, the run has ended well before it.
  int code = 0;
  for (int attempt = 0; attempt < 20 && code == 0; ++attempt) {
    fs::remove_all(path("run"));
    Started run(arguments({"run.toml"}, kLong), directory());
    wait_for_steps(10);
    run.send(SIGTERM);
    run.send(SIGINT);
    code = run.wait();
  }
  EXPECT_TRUE(code == 130 || code == 143) << code;
  expect_readable();
  const RunResult result = resume();
  ASSERT_EQ(result.code, 0) << result;
  expect_same(outcome(400), wanted);
  expect_no_leftovers();
}

TEST_F(ResumeTest, ARunThatGoesOnIsNotResumedBesideItself) {
  Started run(arguments({"run.toml"}, kLong), directory());
  wait_for_steps(10);
  run.send(SIGSTOP);
  expect_mistake(resume(), {"run: another process is at work on this run"});
  run.send(SIGCONT);
  EXPECT_EQ(run.wait(), 0);
  EXPECT_EQ(lines_of(read_file(path("run/metrics.jsonl"))).size(), 400u);
}

// Runs on a file system of its own, whose size can be set.
class FullDiskTest : public ResumeTest {
 protected:
  void SetUp() override {
    ResumeTest::SetUp();
    memory_.reset();
    inside_ = "disk";
    fs::create_directory(directory());
    // Mounts of this process alone, so that nothing stays mounted.
    if (::unshare(CLONE_NEWNS) != 0 ||
        ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("none", directory().c_str(), "tmpfs", 0, "size=16m") != 0) {
      GTEST_SKIP() << "this user cannot mount a file system";
    }
    mounted_ = true;
    prepare(directory());
  }
  void TearDown() override {
    if (mounted_) ::umount2(directory().c_str(), MNT_DETACH);
  }
  void set_size(const std::string& size) const {
    ASSERT_EQ(::mount("none", directory().c_str(), "tmpfs", MS_REMOUNT, ("size=" + size).c_str()),
              0);
  }
  bool mounted_ = false;
};

TEST_F(FullDiskTest, CheckpointsThatDoNotFitCostNothingButThemselves) {
  const std::vector<std::string> sets = {"output.rollouts_every=100", "checkpoint.every=1",
                                         "checkpoint.keep_last=1"};
  const Outcome wanted = undisturbed(sets);
  // Room for the reference, one checkpoint, the lines and the last weights; not for two.
  set_size("560k");
  const RunResult result = train(sets);
  EXPECT_TRUE(contains(result.err, "warning: no checkpoint of step")) << result.err;
  EXPECT_TRUE(contains(result.err, "No space left on device")) << result.err;
  EXPECT_TRUE(contains(result.err, "step 12/12")) << result.err;
  EXPECT_EQ(checkpoints(), std::set<std::string>{"step_0"});
  expect_readable();
  set_size("16m");
  const RunResult resumed = resume();
  ASSERT_EQ(resumed.code, 0) << resumed;
  EXPECT_TRUE(contains(resumed.err, "resumed from step 0")) << resumed.err;
  expect_same(outcome(), wanted);
  expect_no_leftovers();
}

TEST_F(FullDiskTest, AFullDiskEndsTheRunWhichGoesOnWhenThereIsRoom) {
  const std::vector<std::string> sets = {"trainer.max_steps=300", "output.rollouts_every=100",
                                         "checkpoint.every=10"};
  const Outcome wanted = undisturbed(sets, 300);
  set_size("1100k");
  const RunResult result = train(sets);
  EXPECT_EQ(result.code, 3) << result;
  const std::string reason = json_of(result.out)["reason"].GetString();
  EXPECT_TRUE(reason.starts_with("run/") &&
              reason.ends_with(": cannot write: No space left on device"))
      << reason;
  EXPECT_TRUE(contains(result.err, "leeway: the run gave up: " + reason)) << result.err;
  EXPECT_STREQ(json_of(result.out)["end"].GetString(), "gave_up");
  expect_readable();
  const RunResult still_full = resume();
  EXPECT_TRUE(still_full.code == 2 || still_full.code == 3) << still_full;
  EXPECT_TRUE(contains(still_full.err, "No space left on device")) << still_full.err;
  expect_readable();
  set_size("16m");
  const RunResult resumed = resume();
  ASSERT_EQ(resumed.code, 0) << resumed;
  EXPECT_TRUE(contains(resumed.err, "resumed from step")) << resumed.err;
  expect_same(outcome(300), wanted);
  expect_no_leftovers();
}

TEST_F(ResumeTest, ARunThatGaveUpCanBeReadAndResumed) {
  std::string config = kConfig;
  config.erase(config.find("[sft]"), config.find("[trainer]") - config.find("[sft]"));
  config.erase(config.find("[[environment]]"));
  // A judge that likes what it is evaluated with and nothing that is trained on.
  write("judge.sh",
        "while read -r line; do\n"
        "  id=${line#*'\"id\": '} id=${id%%,*}\n"
        "  case $line in\n"
        "    *'\"hello\"'*) echo '{\"type\": \"hello\", \"protocol\": 1}' ;;\n"
        "    *'\"good\": 1'*) echo \"{\\\"id\\\": $id, \\\"reward\\\": 1}\" ;;\n"
        "    *) echo \"{\\\"id\\\": $id, \\\"error\\\": \\\"the backend is gone\\\"}\" ;;\n"
        "  esac\n"
        "done\n");
  write("bad.jsonl", "{\"prompt\": \"a=\"}\n{\"prompt\": \"b=\"}\n");
  write("good.jsonl", "{\"prompt\": \"c=\", \"good\": 1}\n");
  struct Case {
    std::string environment;
    std::vector<std::string> words;
  };
  const Case cases[] = {
      // before the first step
      {"command = \"false\"\ndata = \"letters.jsonl\"\n", {"evaluation: all", "exit status 1"}},
      {"command = \"sh judge.sh\"\ndata = \"bad.jsonl\"\neval_data = \"good.jsonl\"\n",
       {"rollouts in a row failed", "the backend is gone"}},
  };
  for (const Case& each : cases) {
    write("run.toml", config + "[[environment]]\nname = \"process\"\n" + each.environment);
    fs::remove_all(path("run"));
    for (const bool again : {false, true}) {
      const RunResult result =
          again
              ? resume()
              : train({"orchestrator.retry_backoff=0", "orchestrator.zero_progress_batches=0.05"});
      ASSERT_EQ(result.code, 3) << result;
      EXPECT_TRUE(contains(result.err, "leeway: the run gave up: ")) << result.err;
      for (const std::string& word : each.words) {
        EXPECT_TRUE(contains(result.err, word)) << word << ": " << result.err;
      }
      const Document summary = json_of(result.out);
      EXPECT_STREQ(summary["end"].GetString(), "gave_up");
      EXPECT_TRUE(fs::exists(path(summary["weights"].GetString()) + "/model.safetensors"));
      expect_readable();
      expect_no_leftovers();
    }
  }
}

}  // namespace
}  // namespace leeway
