// The splitter: properties on random trajectories, and the sample counts of compacting agents.

#include "text/trajectory.h"

#include <gtest/gtest.h>

#include "base/rng.h"
#include "leeway/error.h"

namespace leeway {
namespace {

using Ids = std::vector<int32_t>;

TrajectoryStep make_step(Ids prompt, Ids completion, int32_t version = 3) {
  TrajectoryStep step;
  step.prompt = std::move(prompt);
  step.completion = std::move(completion);
  for (size_t t = 0; t < step.completion.size(); ++t) {
    step.logprobs.push_back(-0.5f - static_cast<float>(step.completion[t]));
    step.versions.push_back(version);
  }
  return step;
}

Ids join(const Ids& a, const Ids& b) {
  Ids out = a;
  out.insert(out.end(), b.begin(), b.end());
  return out;
}

TEST(Splitter, StepsThatExtendBecomeOneSample) {
  const auto split =
      split_trajectory({make_step({1, 2}, {3, 4}, 7), make_step({1, 2, 3, 4, 5}, {6}, 8)});
  ASSERT_EQ(split.samples.size(), 1u);
  EXPECT_TRUE(split.breaks.empty());
  const Sample& s = split.samples[0];
  EXPECT_EQ(s.ids, (Ids{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(s.loss_mask, (std::vector<uint8_t>{0, 0, 1, 1, 0, 1}));
  EXPECT_EQ(s.rollout, (std::vector<float>{0, 0, -3.5f, -4.5f, 0, -6.5f}));
  EXPECT_EQ(s.versions, (Ids{-1, -1, 7, 7, -1, 8}));
  EXPECT_EQ(s.step, (Ids{-1, -1, 0, 0, -1, 1}));
}

TEST(Splitter, ABreakSaysWhereAndWhy) {
  auto split = split_trajectory({make_step({1, 2}, {3, 4}), make_step({1, 2, 3, 9, 5}, {6})});
  ASSERT_EQ(split.breaks.size(), 1u);
  EXPECT_EQ(split.breaks[0].reason, BreakReason::sampled_tokens_changed);
  EXPECT_EQ(split.breaks[0].position, 3u);
  EXPECT_EQ(split.breaks[0].expected, 4);
  EXPECT_EQ(split.breaks[0].found, 9);
  split = split_trajectory({make_step({1, 2}, {3, 4}), make_step({1, 8, 3, 4}, {6})});
  EXPECT_EQ(split.breaks[0].reason, BreakReason::context_changed);
  split = split_trajectory({make_step({1, 2}, {3, 4}), make_step({1, 2, 3}, {6})});
  EXPECT_EQ(split.breaks[0].reason, BreakReason::context_shortened);
  EXPECT_EQ(split.breaks[0].found, -1);
}

TEST(Splitter, InterleavedAgentsKeepASampleEach) {
  const auto split = split_trajectory({make_step({1}, {2}), make_step({50}, {51}),
                                       make_step({1, 2, 3}, {4}), make_step({50, 51, 52}, {53})});
  ASSERT_EQ(split.samples.size(), 2u);
  EXPECT_EQ(split.samples[0].ids, (Ids{1, 2, 3, 4}));
  EXPECT_EQ(split.samples[1].ids, (Ids{50, 51, 52, 53}));
  EXPECT_EQ(split.sample_of_step, (std::vector<size_t>{0, 1, 0, 1}));
  // A break is explained against the sample of its own agent, not against the previous step.
  const auto broken =
      split_trajectory({make_step({1, 5}, {2}), make_step({50}, {51}), make_step({1, 5, 3}, {4})});
  ASSERT_EQ(broken.breaks.size(), 2u);
  EXPECT_EQ(broken.breaks[1].earlier_step, 0u);
  EXPECT_EQ(broken.breaks[1].reason, BreakReason::sampled_tokens_changed);
}

// A fork: two continuations of one step. The shared tokens are trained only in the first.
TEST(Splitter, ASampledTokenIsTrainedOnceWhateverHoldsIt) {
  const auto split = split_trajectory(
      {make_step({1}, {2, 3}), make_step({1, 2, 3, 4}, {5}), make_step({1, 2, 3, 6}, {7})});
  ASSERT_EQ(split.samples.size(), 2u);
  EXPECT_EQ(split.samples[1].loss_mask, (std::vector<uint8_t>{0, 0, 0, 0, 1}));
  EXPECT_EQ(split.breaks[0].reason, BreakReason::forked);
  EXPECT_EQ(split.breaks[0].position, 3u);
}

TEST(Splitter, TheLongestLivePrefixIsExtended) {
  // Both samples are prefixes of the last prompt.
  const auto split =
      split_trajectory({make_step({1}, {2}), make_step({1}, {2, 3}), make_step({1, 2, 3, 4}, {5})});
  EXPECT_EQ(split.sample_of_step, (std::vector<size_t>{0, 1, 1}));
}

TEST(Splitter, MasksAndMissingVersionsAreKept) {
  TrajectoryStep step = make_step({1}, {2, 3});
  step.versions.clear();
  step.loss_mask = {0, 1};
  const auto split = split_trajectory({step});
  EXPECT_EQ(split.samples[0].loss_mask, (std::vector<uint8_t>{0, 0, 1}));
  EXPECT_EQ(split.samples[0].versions, (Ids{-1, -1, -1}));
}

TEST(Splitter, LengthsThatDisagreeNameTheStep) {
  TrajectoryStep bad = make_step({1, 2, 3}, {4});
  bad.logprobs.push_back(0.0f);
  try {
    split_trajectory({make_step({1}, {2}), bad});
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("step 1"), std::string::npos) << error.what();
  }
}

TEST(Splitter, EmptyTrajectoriesAndCompletionsAreFine) {
  EXPECT_TRUE(split_trajectory({}).samples.empty());
  const auto split = split_trajectory({make_step({1, 2}, {}), make_step({1, 2}, {3})});
  ASSERT_EQ(split.samples.size(), 1u);
  EXPECT_EQ(split.samples[0].ids, (Ids{1, 2, 3}));
}

// Against the obvious quadratic splitter, on random trees of prompts.
TEST(Splitter, AgreesWithTheQuadraticOneOnRandomTrajectories) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Rng rng(seed);
    std::vector<TrajectoryStep> steps;
    std::vector<Ids> prefixes;
    for (int t = 0; t < 12; ++t) {
      Ids prompt;
      if (!prefixes.empty() && rng.uniform() < 0.8) prompt = prefixes[rng.below(prefixes.size())];
      if (!prompt.empty() && rng.uniform() < 0.2) prompt[rng.below(prompt.size())] ^= 1;
      for (uint64_t k = rng.below(4); k > 0; --k)
        prompt.push_back(static_cast<int32_t>(rng.below(3)));
      Ids completion;
      for (uint64_t k = rng.below(4); k > 0; --k)
        completion.push_back(static_cast<int32_t>(rng.below(3)));
      prefixes.push_back(join(prompt, completion));
      steps.push_back(make_step(prompt, completion));
    }
    // Among samples with equal tokens the last one written stays live, as in the splitter.
    std::vector<Ids> active;
    std::vector<bool> live;
    std::vector<size_t> expected;
    for (const TrajectoryStep& step : steps) {
      size_t best = active.size(), best_length = 0;
      for (size_t k = 0; k < active.size(); ++k) {
        const Ids& p = active[k];
        if (live[k] && p.size() <= step.prompt.size() && p.size() > best_length &&
            std::equal(p.begin(), p.end(), step.prompt.begin())) {
          best = k, best_length = p.size();
        }
      }
      if (best == active.size()) active.emplace_back(), live.push_back(true);
      expected.push_back(best);
      active[best] = join(step.prompt, step.completion);
      for (size_t k = 0; k < active.size(); ++k) {
        if (k != best && active[k] == active[best]) live[k] = false;
      }
    }
    const auto split = split_trajectory(steps);
    size_t sampled = 0, trained = 0;
    for (const TrajectoryStep& step : steps) sampled += step.completion.size();
    for (const Sample& s : split.samples) {
      ASSERT_EQ(s.ids.size(), s.loss_mask.size());
      ASSERT_EQ(s.ids.size(), s.rollout.size());
      ASSERT_EQ(s.ids.size(), s.versions.size());
      for (size_t i = 0; i < s.ids.size(); ++i) {
        trained += s.loss_mask[i];
        if (s.loss_mask[i]) {
          EXPECT_FLOAT_EQ(s.rollout[i], -0.5f - static_cast<float>(s.ids[i]));
        }
      }
    }
    EXPECT_EQ(trained, sampled) << "seed " << seed;
    EXPECT_EQ(split.breaks.size() + 1, split.samples.size());
    EXPECT_EQ(split.sample_of_step, expected) << "seed " << seed;
    ASSERT_EQ(split.samples.size(), active.size()) << "seed " << seed;
    for (size_t k = 0; k < active.size(); ++k) {
      EXPECT_EQ(split.samples[k].ids, active[k]) << "seed " << seed << " sample " << k;
    }
  }
}

// An agent with tools and c compactions: after every segment a user turn asks for a summary, and
// the context is rebuilt from it. `strips`: the template removes earlier thinking after a new user
// turn.
std::vector<TrajectoryStep> compacting_agent(int compactions, bool strips) {
  constexpr int32_t kThink = 900, kUser = 1, kTool = 2, kSummarize = 3;
  std::vector<TrajectoryStep> steps;
  int32_t next = 1000;
  for (int segment = 0; segment <= compactions; ++segment) {
    Ids history{kUser, static_cast<int32_t>(10 + segment)};  // rebuilt for every segment
    for (int turn = 0; turn < 4; ++turn) {
      const Ids completion{kThink, next++, next++};
      steps.push_back(make_step(history, completion));
      history = join(history, completion);
      history = join(history, {kTool, next++});
    }
    if (segment == compactions) break;
    Ids asked = history;
    if (strips) std::erase(asked, kThink);
    asked = join(asked, {kSummarize});
    steps.push_back(make_step(asked, {next++, next++}));
  }
  return steps;
}

TEST(Splitter, CompactionsCostOneSampleEachWhenThinkingIsKeptAndTwoWhenItIsStripped) {
  for (int c = 0; c <= 5; ++c) {
    EXPECT_EQ(split_trajectory(compacting_agent(c, false)).samples.size(),
              static_cast<size_t>(1 + c));
    const auto stripped = split_trajectory(compacting_agent(c, true));
    EXPECT_EQ(stripped.samples.size(), static_cast<size_t>(1 + 2 * c));
    size_t sampled_changed = 0;
    for (const PrefixBreak& b : stripped.breaks) {
      sampled_changed += b.reason == BreakReason::sampled_tokens_changed;
    }
    EXPECT_EQ(sampled_changed, static_cast<size_t>(c));
  }
}

TEST(Splitter, FourHundredGrowingStepsStayOneSample) {
  std::vector<TrajectoryStep> steps;
  Ids history;
  for (int t = 0; t < 400; ++t) {
    history = join(history, Ids(20, t));
    steps.push_back(make_step(history, Ids(30, t + 1)));
    history = join(history, Ids(30, t + 1));
  }
  EXPECT_EQ(split_trajectory(steps).samples.size(), 1u);
}

}  // namespace
}  // namespace leeway
