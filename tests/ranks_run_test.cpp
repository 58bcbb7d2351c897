// Runs of several processes: the bits of one, whatever their number; what happens when one is lost.
#include <gtest/gtest.h>

#include <chrono>
#include <random>
#include <thread>

#include "live_program.h"
#include "pool_run_support.h"

namespace leeway {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// So many matrices that each of eight ranks saves some.
const std::vector<std::string> kEightParts = {"--set", "model.intermediate_size=300",
                                              "--set", "model.num_hidden_layers=6",
                                              "--set", "trainer.gradient_slots=8"};

class RanksRunTest : public PoolRunTest {
 protected:
  static std::vector<std::string> with(std::vector<std::string> args,
                                       const std::vector<std::string>& more) {
    args.insert(args.end(), more.begin(), more.end());
    return args;
  }
  // Every number after the first one is what `leeway train --ranks N` gives.
  void expect_same_for_all(const std::string& name, const std::vector<std::string>& sets) {
    ASSERT_EQ(train(name + "_1", sets).code, 0) << name;
    for (const char* count : {"2", "4"}) {
      const std::string run = name + "_" + count;
      const RunResult result = train(run, with(sets, {"--ranks", count}));
      ASSERT_EQ(result.code, 0) << result;
      expect_same_run(name + "_1", run);
    }
  }
  std::string newest_checkpoint(const std::string& run) const {
    int newest = -1;
    for (const auto& entry : std::filesystem::directory_iterator(path(run + "/checkpoints"))) {
      const std::string name = entry.path().filename().string();
      if (name.starts_with("step_")) newest = std::max(newest, std::stoi(name.substr(5)));
    }
    return path(run + "/checkpoints/step_" + std::to_string(newest));
  }
  static std::string part(const std::string& stem, int number, int of) {
    return stem + "-0000" + std::to_string(number) + "-of-0000" + std::to_string(of) +
           ".safetensors";
  }
  // Of N ranks each has written a file of weights and one of moments; one process writes one.
  static void expect_parts(const std::string& checkpoint, int ranks) {
    for (const std::string stem : {"model", "optimizer"}) {
      const std::string single = checkpoint + "/" + stem + ".safetensors";
      EXPECT_EQ(std::filesystem::exists(single), ranks == 1) << single;
      EXPECT_EQ(std::filesystem::exists(single + ".index.json"), ranks > 1) << single;
      const std::string manifest = read_file(checkpoint + "/manifest.json");
      for (int r = 1; ranks > 1 && r <= ranks; ++r) {
        EXPECT_TRUE(std::filesystem::exists(checkpoint + "/" + part(stem, r, ranks))) << r;
        EXPECT_TRUE(contains(manifest, part(stem, r, ranks))) << manifest;
      }
    }
  }
  // The processes that this one has started.
  static std::vector<pid_t> children_of(pid_t process) {
    std::vector<pid_t> children;
    const std::string tasks = "/proc/" + std::to_string(process) + "/task";
    std::error_code gone;
    for (const auto& task : std::filesystem::directory_iterator(tasks, gone)) {
      std::ifstream file(task.path() / "children");
      for (pid_t child = 0; file >> child;) children.push_back(child);
    }
    return children;
  }
};

// Each loss of the seeds, on-policy and off, several steps per batch, across a batch.
TEST_F(RanksRunTest, ALossHasTheSameBitsForAnyNumberOfRanks) {
  for (const char* preset : {"icepop", "ipo_kl", "dppo_tv", "cispo", "ppo+tis", "grpo+tis",
                             "reinforce", "gspo", "m2po"}) {
    std::vector<std::string> sets = {"--set", "trainer.loss.preset=" + std::string(preset)};
    expect_same_for_all("loss_" + std::string(preset), sets);
  }
}

TEST_F(RanksRunTest, SoHaveLagReuseAndTheSupervisedPhase) {
  expect_same_for_all("lag", {"--set", "orchestrator.max_off_policy_steps=4"});
  expect_same_for_all("reuse", {"--set", "trainer.epochs=3", "--set", "trainer.minibatches=2",
                                "--set", "trainer.optimizer_steps=minibatch"});
  expect_same_for_all("int8", {"--set", "rollout.precision=int8"});
}

// Rank 0 alone speaks to the servers; these answer on vLLM's and SGLang's routes too, whose
// requests draw other tokens than ours.
TEST_F(RanksRunTest, SoHasAPoolOfServersInEveryDialect) {
  start_servers(2);
  for (const char* dialect : {"leeway", "vllm", "sglang"}) {
    const std::string one = std::string(dialect) + "_1", two = std::string(dialect) + "_2";
    const std::vector<std::string> args =
        with(pool_of(2), {"--set", std::string("inference.dialect=") + dialect});
    ASSERT_EQ(train(one, args).code, 0) << dialect;
    const RunResult result = train(two, with(args, {"--ranks", "2"}));
    ASSERT_EQ(result.code, 0) << result;
    expect_same_run(one, two);
  }
}

TEST_F(RanksRunTest, CheckpointsAreLoadedByAnyNumber) {
  // On-policy: what a longer run has begun to sample when the shorter one ends is no difference.
  const std::vector<std::string> sets =
      with(kEightParts, {"--set", "orchestrator.max_off_policy_steps=0"});
  ASSERT_EQ(train("whole", with(sets, {"--set", "trainer.max_steps=12"})).code, 0);
  for (const auto& [first, second] : std::vector<std::pair<const char*, const char*>>{
           {"4", "2"}, {"1", "4"}, {"2", "1"}, {"8", "4"}}) {
    const std::string run = std::string("from_") + first;
    ASSERT_EQ(train(run, with(sets, {"--ranks", first})).code, 0);
    expect_parts(newest_checkpoint(run), std::stoi(first));
    const RunResult more =
        run_program({"train", "--resume", run, "--set", "trainer.max_steps=12", "--ranks", second},
                    {.directory = folder_.path().string()});
    ASSERT_EQ(more.code, 0) << more;
    expect_same_run("whole", run, 12);
  }
}

// What is missing, damaged or of another checkpoint is named, and the checkpoint before is used.
TEST_F(RanksRunTest, APartThatIsNotWhatWasWrittenIsNamedAndNotLoaded) {
  const std::vector<std::string> sets =
      with(kEightParts, {"--set", "orchestrator.max_off_policy_steps=0", "--set",
                         "checkpoint.every=2", "--set", "checkpoint.keep_last=3"});
  ASSERT_EQ(train("whole", with(sets, {"--set", "trainer.max_steps=8"})).code, 0);
  ASSERT_EQ(train("saved", with(sets, {"--ranks", "4"})).code, 0);
  const auto file = [&](const std::string& run, int step, const std::string& name) {
    return path(run + "/checkpoints/step_" + std::to_string(step) + "/" + name);
  };
  const std::string weights = part("model", 3, 4), moments = part("optimizer", 2, 4);
  const std::vector<std::pair<std::string, std::function<void(const std::string&)>>> cases = {
      {weights, [&](const std::string& run) { std::filesystem::remove(file(run, 6, weights)); }},
      {weights,
       [&](const std::string& run) {
         std::string bytes = read_file(file(run, 6, weights));
         bytes[bytes.size() / 2] ^= 1;
         std::ofstream(file(run, 6, weights), std::ios::binary) << bytes;
       }},
      {weights,
       [&](const std::string& run) {
         std::filesystem::copy_file(file(run, 4, weights), file(run, 6, weights),
                                    std::filesystem::copy_options::overwrite_existing);
       }},
      {moments,
       [&](const std::string& run) { std::filesystem::resize_file(file(run, 6, moments), 999); }},
      {"model.safetensors.index.json", [&](const std::string& run) {
         std::filesystem::remove(file(run, 6, "model.safetensors.index.json"));
       }}};
  for (size_t i = 0; i < cases.size(); ++i) {
    const std::string run = "damaged_" + std::to_string(i);
    std::filesystem::copy(path("saved"), path(run), std::filesystem::copy_options::recursive);
    cases[i].second(run);
    const RunResult more = run_program({"train", "--resume", run, "--set", "trainer.max_steps=8",
                                        "--ranks", i % 2 == 0 ? "2" : "1"},
                                       {.directory = folder_.path().string()});
    ASSERT_EQ(more.code, 0) << more;
    EXPECT_TRUE(contains(more.err, "checkpoint of step 6 is skipped")) << more;
    EXPECT_TRUE(contains(more.err, cases[i].first)) << more;
    EXPECT_TRUE(contains(more.err, "resumed from step 4")) << more;
    expect_same_run("whole", run, 8);
  }
}

// A folder of weights in parts is a model for every command, and what another run starts from.
TEST_F(RanksRunTest, ACheckpointInPartsIsAModel) {
  ASSERT_EQ(train("run", with(kEightParts, {"--ranks", "4"})).code, 0);
  const auto said = [&](const std::string& folder) {
    const RunResult result = run_program({"generate", folder, "--prompt", "a=", "--temperature",
                                          "0", "--max-new-tokens", "6", "--json"},
                                         {.directory = folder_.path().string()});
    EXPECT_EQ(result.code, 0) << result;
    return result.out;
  };
  const std::string checkpoint = newest_checkpoint("run");
  expect_parts(checkpoint, 4);
  EXPECT_EQ(said(checkpoint), said("run/weights/step_6"));
  // From its weights in parts: those of users are gone.
  std::filesystem::remove_all(path("run/weights"));
  for (const char* ranks : {"1", "2"}) {
    const RunResult from =
        run_program({"train", "--from", "run", "--keep-optimizer", "--set", "trainer.max_steps=2",
                     "--set", "output_dir=next_" + std::string(ranks), "--ranks", ranks},
                    {.directory = folder_.path().string()});
    ASSERT_EQ(from.code, 0) << from;
  }
  expect_same_run("next_1", "next_2", 2);
}

// At random moments: the others end, the rank is named, and what goes on has the bits of a run that
// was not disturbed.
TEST_F(RanksRunTest, AKilledRankEndsTheRunAndAnotherGoesOnWithItsBits) {
  const std::vector<std::string> steps = {"--set", "trainer.max_steps=400", "--set",
                                          "checkpoint.every=10"};
  ASSERT_EQ(train("whole", steps).code, 0);
  std::mt19937 random(3);
  double longest = 0.0;
  for (int round = 0; round < 4; ++round) {
    const std::string run = "killed_" + std::to_string(round);
    LiveProgram program(
        with(with(live("run.toml", run), steps),
             {"--ranks", "4", "--set", "environment.data=" + path("letters.jsonl")}),
        LiveProgram::Streams::pipes);
    ASSERT_TRUE(program.wait_until([&](const std::string&) {
      return steps_made(run) >= 12 + random() % 40;
    })) << program.printed();
    const std::vector<pid_t> workers = children_of(program.process());
    ASSERT_EQ(workers.size(), 3u);
    const size_t victim = random() % 3;
    const auto begin = Clock::now();
    ::kill(workers[victim], SIGKILL);
    EXPECT_EQ(program.wait(), 3) << program.printed();
    longest = std::max(longest, seconds_since(begin));
    const std::string name = "rank " + std::to_string(victim + 1) + " (";
    EXPECT_TRUE(contains(program.printed(), name)) << program.printed();
    EXPECT_TRUE(contains(program.printed(), "--resume")) << program.printed();
    for (pid_t worker : workers) EXPECT_NE(::kill(worker, 0), 0) << "rank left behind";
    const RunResult more = run_program({"train", "--resume", run, "--ranks", "2"},
                                       {.directory = folder_.path().string()});
    ASSERT_EQ(more.code, 0) << more;
    expect_same_run("whole", run, 400);
  }
  std::cout << "a killed rank ended the run within " << longest << " s\n";
}

// A checkpoint after each step, so that one is being written when a rank or the leader is killed:
// the newest whole one is there, and the run goes on from it with any number of ranks.
TEST_F(RanksRunTest, AKillWhileRanksSaveLeavesAWholeCheckpoint) {
  const std::vector<std::string> steps =
      with(kEightParts, {"--set", "trainer.max_steps=60", "--set", "checkpoint.every=1"});
  ASSERT_EQ(train("whole", steps).code, 0);
  std::mt19937 random(5);
  for (int round = 0; round < 6; ++round) {
    const std::string run = "saving_" + std::to_string(round);
    LiveProgram program(
        with(with(live("run.toml", run), steps),
             {"--ranks", "4", "--set", "environment.data=" + path("letters.jsonl")}),
        LiveProgram::Streams::pipes);
    ASSERT_TRUE(program.wait_until([&](const std::string&) {
      return steps_made(run) >= 3 + random() % 20;
    })) << program.printed();
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 20000));
    const std::vector<pid_t> workers = children_of(program.process());
    ASSERT_EQ(workers.size(), 3u);
    if (round % 3 == 0) {
      program.send(SIGKILL);
    } else {
      ::kill(workers[random() % 3], SIGKILL);
    }
    program.wait();
    expect_parts(newest_checkpoint(run), 4);
    const RunResult more =
        run_program({"train", "--resume", run, "--ranks", round % 2 == 0 ? "2" : "1"},
                    {.directory = folder_.path().string()});
    ASSERT_EQ(more.code, 0) << more;
    EXPECT_FALSE(contains(more.err, "is skipped")) << more;
    expect_same_run("whole", run, 60);
  }
}

TEST_F(RanksRunTest, RanksEndWithTheirLeader) {
  LiveProgram program(
      with(live("run.toml", "led"), {"--ranks", "2", "--set", "trainer.max_steps=100000", "--set",
                                     "environment.data=" + path("letters.jsonl")}),
      LiveProgram::Streams::pipes);
  ASSERT_TRUE(program.wait_for("mismatch_kl")) << program.printed();
  const std::vector<pid_t> workers = children_of(program.process());
  ASSERT_EQ(workers.size(), 1u);
  program.send(SIGKILL);
  const auto begin = Clock::now();
  while (::kill(workers[0], 0) == 0 && seconds_since(begin) < 30.0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  EXPECT_NE(::kill(workers[0], 0), 0);
  program.wait();
}

TEST_F(RanksRunTest, CtrlCSavesAndAllEnd) {
  LiveProgram program(
      with(live("run.toml", "stopped"), {"--ranks", "2", "--set", "trainer.max_steps=100000",
                                         "--set", "environment.data=" + path("letters.jsonl")}),
      LiveProgram::Streams::pipes);
  ASSERT_TRUE(program.wait_until([&](const std::string&) { return steps_made("stopped") >= 3; }));
  const std::vector<pid_t> workers = children_of(program.process());
  for (pid_t worker : workers) ::kill(worker, SIGINT);  // as a terminal would
  program.send(SIGINT);
  EXPECT_EQ(program.wait(), 0) << program.printed();
  EXPECT_TRUE(contains(program.printed(), "was stopped after")) << program.printed();
  for (pid_t worker : workers) EXPECT_NE(::kill(worker, 0), 0);
}

TEST_F(RanksRunTest, WhatCannotBeSharedIsRefused) {
  const RunResult three = train("three", {"--ranks", "3"});
  EXPECT_EQ(three.code, 2);
  EXPECT_TRUE(contains(three.err, "3 ranks cannot share the 4 slots")) << three;
  EXPECT_TRUE(contains(three.err, "use 1, 2, 4 ranks")) << three;
  EXPECT_FALSE(std::filesystem::exists(path("three")));
  for (const char* count : {"0", "-1", "two", "100000"}) {
    EXPECT_EQ(train("none", {"--ranks", count}).code, 2) << count;
  }
  const RunResult wrong = train("wrong", {"--ranks", "2", "--set", "trainer.max_stepz=3"});
  EXPECT_EQ(wrong.code, 2);
  EXPECT_TRUE(contains(wrong.err, "max_stepz")) << wrong;
}

}  // namespace
}  // namespace leeway
