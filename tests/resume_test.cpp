// `leeway train --resume`: runs that are killed, stopped or give up continue as if nothing had
// happened.

#include <gtest/gtest.h>

#include "base/rng.h"
#include "resume_support.h"

namespace leeway {
namespace {

using Seconds = std::chrono::duration<double>;
using SteadyTime = std::chrono::steady_clock;

class ResumeTest : public ResumeFixture {
 protected:
  // Runs training repeatedly, each time killed at random moments and resumed until it ends, with
  // `kills` kills in total; calls `check` on each run.
  void survive(int kills, uint64_t seed, const std::vector<std::string>& sets,
               const std::function<void()>& check) const {
    Rng rng(seed);
    int runs = 0, from_checkpoint = 0;
    double longest = 0.05;  // seconds until a kill
    for (int killed = 0; killed < kills; ++runs) {
      fs::remove_all(path("run"));
      const auto begin = SteadyTime::now();
      for (int code = -1; code != 0;) {
        // The first run is not killed, and is timed.
        const bool spare = runs == 0 || killed >= kills;
        const bool begun = fs::exists(path("run/config.toml"));
        // Killed between identity.json and config.toml, the folder counts as a run, and a new one
        // would take another name.
        if (!begun) fs::remove_all(path("run"));
        Started run(begun ? arguments({"--resume", "run"}, {}) : arguments({"run.toml"}, sets),
                    directory());
        if (!spare) {
          std::this_thread::sleep_for(Seconds(rng.uniform() * 0.8 * longest));
          run.send(SIGKILL);
        }
        code = run.wait();
        // A run killed before its first checkpoint has nothing to resume from and is started again.
        if (code == 2 && contains(read_file(path("err.txt")), "there is no checkpoint")) {
          fs::remove_all(path("run"));
          continue;
        }
        ASSERT_TRUE(code == 0 || code == -SIGKILL) << code << read_file(path("err.txt"));
        killed += code == -SIGKILL ? 1 : 0;
        longest *= code == -SIGKILL ? 1.05 : 0.85;  // about three kills per completed run
        from_checkpoint += contains(read_file(path("err.txt")), "resumed from ") ? 1 : 0;
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
};

TEST_F(ResumeTest, AHundredKillsChangeNothing) {
  const std::vector<std::string> sets = {"output.rollouts_every=4"};
  const Outcome wanted = undisturbed(sets);
  const auto check = [&] {
    expect_same(outcome(), wanted);
    expect_no_leftovers();
  };
  // On a disk most kills hit a file sync, in memory most hit training.
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

TEST_F(ResumeTest, WithoutACheckpointTheRunIsRefusedAndNothingIsTouched) {
  // Killed before its first checkpoint.
  {
    Started run(arguments({"run.toml"}, {"checkpoint.every=0", "sft.max_steps=100000"}),
                directory());
    wait_until([&] {
      return fs::exists(path("run/sft.jsonl")) &&
             lines_of(read_file(path("run/sft.jsonl"))).size() > 3;
    });
    run.send(SIGKILL);
    ASSERT_EQ(run.wait(), -SIGKILL);
  }
  auto before = content_of(path("run"));
  expect_mistake(resume(), {"--resume run: there is no checkpoint to continue from",
                            "nothing was changed", "leeway train run/config.toml"});
  EXPECT_TRUE(content_of(path("run")) == before);
  // All of its checkpoints damaged.
  fs::remove_all(path("run"));
  ASSERT_EQ(train().code, 0);
  fs::remove(path("run/end.json"));
  for (const std::string& step : checkpoints()) {
    fs::resize_file(path("run/checkpoints/" + step + "/optimizer.safetensors"), 100);
  }
  before = content_of(path("run"));
  expect_mistake(resume(), {"checkpoint of step 12 is skipped", "optimizer.safetensors",
                            "checkpoint of step 10 is skipped", "leeway train --from run"});
  EXPECT_TRUE(content_of(path("run")) == before);
}

TEST_F(ResumeTest, HowFailuresAreMetMayChange) {
  ASSERT_EQ(train().code, 0);
  const RunResult result = resume({"trainer.max_steps=13", "orchestrator.retry_backoff=0.5",
                                   "orchestrator.max_error_reschedule_attempts=9",
                                   "orchestrator.max_prompt_failures=7"});
  EXPECT_EQ(result.code, 0) << result;
  EXPECT_TRUE(contains(read_file(path("run/config.toml")), "retry_backoff = 0.5"));
  EXPECT_EQ(resume({"trainer.max_steps=14"}).code, 0) << "its configuration is that from now on";
}

TEST_F(ResumeTest, WhatAResumeSupersedesIsMovedAside) {
  ASSERT_EQ(train({"checkpoint.keep_last=3", "output.weights_every=1"}).code, 0);
  const Outcome wanted = outcome();
  fs::remove(path("run/end.json"));
  const auto before = content_of(path("run"));
  fs::resize_file(path("run/checkpoints/step_10/optimizer.safetensors"), 100);
  fs::resize_file(path("run/checkpoints/step_12/optimizer.safetensors"), 100);
  // Damaged checkpoints of later steps do not count among those to be kept.
  const RunResult result = resume({"checkpoint.keep_last=1"});
  ASSERT_EQ(result.code, 0) << result;
  EXPECT_TRUE(contains(result.err, "resumed from step 8")) << result.err;
  EXPECT_TRUE(contains(result.err, "what came after step 8 was moved to run/superseded_1"))
      << result.err;
  expect_same(outcome(), wanted);
  EXPECT_EQ(checkpoints(), std::set<std::string>{"step_12"});
  const std::string aside = "run/superseded_1/";
  std::string lines;
  for (const std::string& line : lines_of(before.at("metrics.jsonl"))) {
    if (json_of(line)["step"].GetInt() > 8) lines += line + "\n";
  }
  EXPECT_EQ(read_file(path(aside + "metrics.jsonl")), lines);
  for (const char* name :
       {"report.html", "eval.jsonl", "rollouts/step_9.jsonl", "rollouts/step_12.jsonl",
        "weights/step_9/model.safetensors", "weights/step_12/model.safetensors",
        "checkpoints/step_10/model.safetensors", "checkpoints/step_12/manifest.json"}) {
    EXPECT_TRUE(fs::exists(path(aside + name))) << name;
  }
  EXPECT_EQ(read_file(path(aside + "rollouts/step_12.jsonl")), before.at("rollouts/step_12.jsonl"));
  EXPECT_FALSE(fs::exists(path(aside + "weights/step_8")));
  EXPECT_FALSE(fs::exists(path(aside + "rollouts/step_8.jsonl")));
  // Nothing to supersede, so no second folder. A run that is resumed again gets its own.
  EXPECT_EQ(resume().code, 0);
  EXPECT_FALSE(fs::exists(path("run/superseded_2")));
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
  // A second signal stops at once. If it comes too late, the run has already ended properly.
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

TEST_F(ResumeTest, ARunThatGaveUpCanBeReadAndResumed) {
  std::string config = kResumeConfig;
  config.erase(config.find("[sft]"), config.find("[trainer]") - config.find("[sft]"));
  config.erase(config.find("[[environment]]"));
  // A judge that rewards evaluation prompts and nothing that is trained on.
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
    bool warm = false;  // with a warm start, which has a checkpoint
  };
  const Case cases[] = {
      {"command = \"sh judge.sh\"\ndata = \"bad.jsonl\"\neval_data = \"good.jsonl\"\n",
       {"rollouts in a row failed", "the backend is gone"}},
      {"command = \"sh judge.sh\"\ndata = \"bad.jsonl\"\neval_data = \"good.jsonl\"\n",
       {"rollouts in a row failed", "the backend is gone"},
       true},
  };
  for (const Case& each : cases) {
    const std::string sft =
        each.warm ? "[sft]\nmax_steps = 2\nbatch_size = 4\ndata = \"letters.jsonl\"\n" : "";
    write("run.toml", config + sft + "[[environment]]\nname = \"process\"\n" + each.environment);
    fs::remove_all(path("run"));
    for (const bool again : {false, true}) {
      if (again && !each.warm) {
        expect_mistake(resume(), {"there is no checkpoint to continue from"});
        break;
      }
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
