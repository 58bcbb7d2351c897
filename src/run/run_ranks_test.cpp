// Whole runs whose ranks are threads of this process: the files do not depend on their number.
#include "run/run_ranks.h"

#include <gtest/gtest.h>

#include <fmt/format.h>
#include <rapidjson/stringbuffer.h>
#include <rapidjson/writer.h>

#include <algorithm>
#include <thread>

#include "base/crc32c.h"
#include "base/json.h"
#include "base/rng.h"
#include "ranks/local_ranks.h"
#include "run/run_start.h"
#include "run/test_support.h"
#include "run/training_run.h"

namespace leeway {
namespace {

bool never() { return false; }

// Rank 0 does `work` with the group while the others serve it; their failures by rank.
template <class Work>
std::vector<std::string> with_ranks(int size, const Work& work) {
  auto ranks = make_local_ranks(size);
  const Catalog catalog;
  std::vector<std::string> failures(static_cast<size_t>(size));
  std::vector<std::thread> others;
  for (int r = 1; r < size; ++r) {
    others.emplace_back([&, r] {
      try {
        serve_run(*ranks[static_cast<size_t>(r)], size, catalog);
      } catch (const Error& error) {
        failures[static_cast<size_t>(r)] = error.what();
      }
    });
  }
  {
    RunRanks group(*ranks[0], size);
    work(group);
  }
  for (std::thread& other : others) other.join();
  return failures;
}

// `last`: the step after which it is asked to stop.
RunSummary train(const Config& config, RunRanks* group, int64_t last = 1000) {
  const Catalog catalog;
  RecordingProgress progress;
  RunSetup setup(config);
  setup.ranks = group;
  const StopCondition stop = [&] { return progress.last_step >= last; };
  return run_training(setup, catalog, {}, progress, stop);
}

std::string text_of(const rapidjson::Value& value) {
  rapidjson::StringBuffer buffer;
  rapidjson::Writer<rapidjson::StringBuffer> writer(buffer);
  value.Accept(writer);
  return buffer.GetString();
}

// What depends on when something happened, not on what was learned.
const std::vector<const char*> kTimed = {
    "time", "perf/", "ranks/", "account/", "progress/rollouts", "progress/sampled_tokens"};

// What a run has learned: metrics without times, evaluations, the last weights.
std::vector<std::string> learned(const std::string& folder) {
  std::vector<std::string> all;
  for (const char* name : {"metrics.jsonl", "eval.jsonl", "sft.jsonl"}) {
    if (!std::filesystem::exists(folder + "/" + name)) continue;
    std::istringstream lines(read_file(folder + "/" + name));
    for (std::string line; std::getline(lines, line);) {
      const auto json = parse_json(name, line);
      for (const auto& member : json.GetObject()) {
        const std::string key = member.name.GetString();
        const bool of_time = std::any_of(kTimed.begin(), kTimed.end(), [&](const char* prefix) {
          return key.starts_with(prefix);
        });
        if (!of_time) all.push_back(key + " " + text_of(member.value));
      }
    }
  }
  all.push_back(
      fmt::format("weights {}", crc32c(read_file(folder + "/weights/step_6/model.safetensors"))));
  return all;
}

TEST(RunRanks, ARunDoesNotDependOnTheNumberOfRanks) {
  const TestFolder folder;
  const Catalog catalog;
  const std::vector<std::vector<std::string>> cases = {
      {},
      {"orchestrator.max_off_policy_steps=0", "trainer.loss.preset=icepop"},
      {"orchestrator.max_off_policy_steps=3", "trainer.epochs=2", "trainer.loss.preset=m2po"},
      {"sft.max_steps=3", "sft.batch_size=6", "trainer.loss.preset=grpo+tis",
       "trainer.loss.ref_kl=0.1"},
      {"trainer.gradient_slots=8", "trainer.minibatches=2", "trainer.optimizer_steps=minibatch",
       "trainer.loss.preset=cispo"},
  };
  for (size_t k = 0; k < cases.size(); ++k) {
    const std::string base = folder / ("case_" + std::to_string(k));
    const RunSummary alone = train(tiny_config(catalog, base + "_1", cases[k]), nullptr);
    ASSERT_EQ(alone.end, RunSummary::End::finished) << alone.reason;
    const std::vector<std::string> expected = learned(base + "_1");
    for (const int size : {2, 4}) {
      const std::string run = base + "_" + std::to_string(size);
      const auto failures = with_ranks(size, [&](RunRanks& group) {
        const RunSummary summary = train(tiny_config(catalog, run, cases[k]), &group);
        EXPECT_EQ(summary.end, RunSummary::End::finished) << summary.reason;
      });
      EXPECT_EQ(failures, std::vector<std::string>(static_cast<size_t>(size)));
      EXPECT_EQ(learned(run), expected) << "case " << k << ", " << size << " ranks";
    }
  }
}

TEST(RunRanks, ARunIsResumedByAnotherNumberOfRanks) {
  const TestFolder folder;
  const Catalog catalog;
  ASSERT_EQ(train(tiny_config(catalog, folder / "whole"), nullptr).end, RunSummary::End::finished);
  const std::vector<std::string> expected = learned(folder / "whole");
  for (const auto& [first, second] : std::vector<std::pair<int, int>>{{2, 4}, {4, 1}, {1, 2}}) {
    const std::string run = folder / ("run_" + std::to_string(first) + std::to_string(second));
    with_ranks(first, [&](RunRanks& group) {
      const RunSummary summary = train(tiny_config(catalog, run), &group, 3);
      EXPECT_EQ(summary.end, RunSummary::End::stopped) << summary.reason;
    });
    with_ranks(second, [&](RunRanks& group) {
      RecordingProgress progress;
      ConfigSource source;
      source.ranks = &group;
      const auto summary = std::get<RunSummary>(resume_run(catalog, run, source, progress, never));
      EXPECT_EQ(summary.end, RunSummary::End::finished) << summary.reason;
    });
    EXPECT_EQ(learned(run), expected) << first << " to " << second;
  }
}

TEST(RunRanks, WhatCannotBeSharedIsRefusedAndTheOthersEnd) {
  const TestFolder folder;
  const Catalog catalog;
  const auto failures = with_ranks(3, [&](RunRanks& group) {
    try {
      train(tiny_config(catalog, folder / "run"), &group);
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("3 ranks cannot share the 4 slots"),
                std::string::npos)
          << error.what();
    }
  });
  EXPECT_FALSE(std::filesystem::exists(folder / "run"));
  EXPECT_NE(failures[1], "");
  EXPECT_NE(failures[2], "");
}

// At any moment, by a seed: the run gives up with the reason, every rank ends, and what goes on
// from its last checkpoint has the bits of a run that was not disturbed.
TEST(RunRanks, ALossAtAnyMomentEndsTheRunAndAllRanks) {
  const TestFolder folder;
  const Catalog catalog;
  const std::vector<std::string> sets = {"checkpoint.every=1", "trainer.max_steps=6"};
  ASSERT_EQ(train(tiny_config(catalog, folder / "whole", sets), nullptr).end,
            RunSummary::End::finished);
  const std::vector<std::string> expected = learned(folder / "whole");
  Rng random(11);
  int lost = 0;
  for (int round = 0; round < 40; ++round) {
    const std::string run = folder / ("run_" + std::to_string(round));
    auto ranks = make_local_ranks(4);
    std::vector<std::thread> others;
    for (size_t r = 1; r < 4; ++r) {
      others.emplace_back([&, r] {
        try {
          serve_run(*ranks[r], 4, catalog);
        } catch (const Error&) {
        }
      });
    }
    const size_t victim = 1 + random.below(3);
    const auto delay = std::chrono::microseconds(random.below(120000));
    std::thread killer([&] {
      std::this_thread::sleep_for(delay);
      ranks[victim]->abort("a test ended this rank");
    });
    {
      RunRanks group(*ranks[0], 4);
      try {
        const RunSummary summary = train(tiny_config(catalog, run, sets), &group);
        if (summary.end == RunSummary::End::gave_up) {
          ++lost;
          EXPECT_NE(summary.reason.find("a test ended this rank"), std::string::npos)
              << summary.reason;
        }
      } catch (const Lost&) {  // before there was a run
      }
    }
    killer.join();
    for (std::thread& other : others) other.join();
    const std::string checkpoints = run + "/checkpoints";
    if (!std::filesystem::exists(checkpoints) || std::filesystem::is_empty(checkpoints)) continue;
    if (round % 4 != 0) continue;
    RecordingProgress progress;
    const auto summary = std::get<RunSummary>(resume_run(catalog, run, {}, progress, never));
    EXPECT_EQ(summary.end, RunSummary::End::finished) << summary.reason;
    EXPECT_EQ(learned(run), expected) << round;
  }
  EXPECT_GT(lost, 5);
  std::cout << "40 runs, " << lost << " lost a rank while they trained\n";
}

}  // namespace
}  // namespace leeway
