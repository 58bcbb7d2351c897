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
  const std::vector<std::string> sets = {"--set", "orchestrator.max_off_policy_steps=0"};
  ASSERT_EQ(train("whole", with(sets, {"--set", "trainer.max_steps=12"})).code, 0);
  for (const auto& [first, second] :
       std::vector<std::pair<const char*, const char*>>{{"4", "2"}, {"1", "4"}, {"2", "1"}}) {
    const std::string run = std::string("from_") + first;
    ASSERT_EQ(train(run, with(sets, {"--ranks", first})).code, 0);
    const RunResult more =
        run_program({"train", "--resume", run, "--set", "trainer.max_steps=12", "--ranks", second},
                    {.directory = folder_.path().string()});
    ASSERT_EQ(more.code, 0) << more;
    expect_same_run("whole", run, 12);
  }
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
  const std::vector<std::string> steps = {"--set", "trainer.max_steps=60", "--set",
                                          "checkpoint.every=1"};
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
