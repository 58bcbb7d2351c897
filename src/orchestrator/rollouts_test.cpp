#include "orchestrator/rollouts.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>

#include "orchestrator/fake_system.h"
#include "text/trajectory.h"

namespace leeway {
namespace {

using namespace leeway::testing;

// A driver with one environment; replies are scripted by turn, or by a policy.
struct Table {
  explicit Table(bool rendered, FakePolicy policy, RolloutSettings settings = {.max_length = 512})
      : talk(rendered),
        sampler(clock, std::move(policy)),
        environment("letters", respond_by_letter),
        driver(talk.conversation, sampler, clock, settings) {}

  std::vector<RolloutOutcome> run_out() {
    std::vector<RolloutOutcome> all;
    for (int i = 0; i < 10000; ++i) {
      for (RolloutOutcome& outcome : driver.poll(0.1)) all.push_back(std::move(outcome));
      if (driver.running() == 0) break;
    }
    for (RolloutOutcome& outcome : driver.poll(0.0)) all.push_back(std::move(outcome));
    EXPECT_EQ(driver.running(), 0);
    return all;
  }
  void start(const std::vector<int64_t>& rollouts, uint64_t seed = 1) {
    driver.start(environment, environment.example(Split::train, 0), rollouts, seed);
  }

  VirtualClock clock;
  FakeTalk talk;
  FakeSampler sampler;
  FakeEnvironment environment;
  RolloutDriver driver;
};

// Says the words one after the other, one per request.
FakePolicy in_turn(const FakeTalk& talk, std::vector<std::string> words) {
  return [&talk, words](const Request&, int64_t number, int64_t) {
    return FakeReply{talk.reply_of(words.at(static_cast<size_t>(number) % words.size()))};
  };
}

void expect_well_formed(const RolloutOutcome& outcome) {
  if (outcome.outcome != Outcome::completed) {
    EXPECT_FALSE(outcome.message.empty());
    return;
  }
  EXPECT_TRUE(std::isfinite(outcome.result.reward));
  EXPECT_GT(outcome.result.sampled_tokens(), 0);
  for (const TrajectoryStep& step : outcome.result.steps) {
    EXPECT_FALSE(step.prompt.empty());
    EXPECT_EQ(step.logprobs.size(), step.completion.size());
    EXPECT_EQ(step.versions.size(), step.completion.size());
  }
}

TEST(Rollouts, EveryOneThatIsStartedHasOneOutcome) {
  std::map<Outcome, int> seen;
  std::set<FailureKind> kinds;
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Rng rng(mixed_seed({seed, 1}));
    const bool rendered = seed % 2 == 0;
    const FakeTalk talk(rendered);
    Table table(rendered, RandomPolicy{talk, seed, 0.06, rendered ? 0.3 : 0.0});
    table.sampler.on_submit = [&](const Request&) {
      if (rng.uniform() < 0.05) throw Error("the request can never be served");
    };
    table.environment.on_start = [&](const Example&) {
      if (rng.uniform() < 0.02) throw std::runtime_error("no room for an episode");
    };
    std::map<int64_t, int> outcomes;
    int64_t next = 0;
    const auto take = [&](const std::vector<RolloutOutcome>& taken) {
      for (const RolloutOutcome& outcome : taken) {
        EXPECT_EQ(++outcomes[outcome.rollout], 1) << "seed " << seed;
        ++seen[outcome.outcome];
        if (outcome.outcome == Outcome::failed) kinds.insert(outcome.kind);
        expect_well_formed(outcome);
      }
    };
    for (int move = 0; move < 30; ++move) {
      const uint64_t what = rng.below(4);
      if (what == 0) {
        std::vector<int64_t> rollouts(1 + rng.below(5));
        for (int64_t& rollout : rollouts) rollout = next++;
        table.start(rollouts, rng.next());
      } else if (what == 1 && next > 0) {
        const auto victim = static_cast<int64_t>(rng.below(static_cast<uint64_t>(next)));
        const int64_t running = table.driver.running();
        const bool ended = table.driver.cancel(victim, "not wanted");
        EXPECT_EQ(table.driver.running(), running - (ended ? 1 : 0));
        EXPECT_FALSE(table.driver.cancel(victim, "twice"));
      } else {
        take(table.driver.poll(0.1 * rng.uniform()));
      }
    }
    take(table.run_out());
    EXPECT_EQ(static_cast<int64_t>(outcomes.size()), next) << "seed " << seed;
  }
  EXPECT_EQ(seen.size(), 3u) << "the histories are too tame";
  EXPECT_EQ(kinds.size(), 5u) << "the histories are too tame";
}

TEST(Rollouts, KeepTheKindAndTheMessageOfAFailure) {
  const FakeTalk talk(false);
  struct Case {
    FakeReply reply;
    FailureKind kind;
    std::string message;
  };
  const std::vector<Case> cases = {
      {{talk.reply_of("Fa")}, FailureKind::environment_error, "the judge is away"},
      {{talk.reply_of("Xa")}, FailureKind::exception, "the judge broke"},
      {{talk.reply_of("Na")}, FailureKind::bad_answer, "the reward is nan"},
      {{talk.reply_of("Ba")}, FailureKind::bad_answer, "the reward is 1e+39"},
      {{.failure = "no route"}, FailureKind::sampler_error, "no route"},
      {{}, FailureKind::empty, "no token"},
  };
  for (const Case& c : cases) {
    Table table(false, [&](const Request&, int64_t, int64_t) { return c.reply; });
    table.start({5, 7});
    const auto outcomes = table.run_out();
    ASSERT_EQ(outcomes.size(), 2u);
    for (const RolloutOutcome& outcome : outcomes) {
      EXPECT_EQ(outcome.outcome, Outcome::failed);
      EXPECT_EQ(outcome.kind, c.kind) << name_of(outcome.kind);
      EXPECT_NE(outcome.message.find(c.message), std::string::npos) << outcome.message;
    }
  }
}

TEST(Rollouts, FailWhereTheStartFails) {
  const FakeTalk talk(false);
  const auto expect_failed = [](Table& table, const std::string& message) {
    table.start({1, 2, 3});
    EXPECT_EQ(table.driver.running(), 0);
    const auto outcomes = table.run_out();
    ASSERT_EQ(outcomes.size(), 3u);
    for (const RolloutOutcome& outcome : outcomes) {
      EXPECT_EQ(outcome.kind, FailureKind::exception);
      EXPECT_NE(outcome.message.find(message), std::string::npos) << outcome.message;
    }
  };
  Table no_episode(false, in_turn(talk, {"a"}));
  int started = 0;
  no_episode.environment.on_start = [&](const Example&) {
    if (++started == 2) throw std::runtime_error("no room");
  };
  expect_failed(no_episode, "no room");
  EXPECT_TRUE(no_episode.sampler.sent().empty());

  Table refused(false, in_turn(talk, {"a"}));
  refused.sampler.on_submit = [](const Request&) { throw Error("too long for me"); };
  expect_failed(refused, "too long for me");

  // "letters train 0=" has 16 tokens.
  Table too_long(false, in_turn(talk, {"a"}), {.max_length = 16});
  expect_failed(too_long, "16 tokens");
}

TEST(Rollouts, AskForNoMoreTokensThanThereIsRoomFor) {
  const FakeTalk talk(false);
  Table table(false, in_turn(talk, {"aaaaaaaaaa"}), {.max_new_tokens = 64, .max_length = 20});
  table.start({1});
  const auto outcomes = table.run_out();
  EXPECT_EQ(table.sampler.sent()[0].request.max_new_tokens, 4);
  ASSERT_EQ(outcomes.size(), 1u);
  EXPECT_EQ(outcomes[0].result.text, "aaaa");
  EXPECT_TRUE(outcomes[0].result.truncated);
  EXPECT_EQ(outcomes[0].result.reward, 1.0);
}

TEST(Rollouts, OfSeveralTurnsAreOneTrainingSample) {
  const FakeTalk talk(true);
  Table table(true, in_turn(talk, {"T one", "T two", "abc"}));
  table.start({4});
  const auto outcomes = table.run_out();
  ASSERT_EQ(outcomes.size(), 1u);
  const Rollout& rollout = outcomes[0].result;
  EXPECT_EQ(outcomes[0].outcome, Outcome::completed) << outcomes[0].message;
  ASSERT_EQ(rollout.steps.size(), 3u);
  EXPECT_FALSE(rollout.truncated);
  EXPECT_EQ(rollout.reward, 1.0);
  EXPECT_EQ(rollout.text, "abc<|im_end|>");
  const SplitTrajectory split = split_trajectory(rollout.steps);
  EXPECT_EQ(split.samples.size(), 1u);
  EXPECT_TRUE(split.breaks.empty());
  const std::string last = table.talk.text_of(rollout.steps[2].prompt);
  size_t place = 0;
  for (const char* words : {"letters train 0=", "T one", "more 1", "T two", "more 2"}) {
    place = last.find(words, place);
    ASSERT_NE(place, std::string::npos) << words << " in " << last;
  }
}

TEST(Rollouts, AreRenderedAnewWhereATurnCannotBeExtended) {
  const FakeTalk talk(true);
  // Thinking that was cut off cannot be closed for the policy.
  const auto policy = [&](const Request&, int64_t number, int64_t) {
    return FakeReply{number == 0 ? talk.ids_of("T<think>hm") : talk.reply_of("abc")};
  };
  Table table(true, policy);
  table.start({4});
  const auto outcomes = table.run_out();
  ASSERT_EQ(outcomes.size(), 1u);
  EXPECT_EQ(outcomes[0].outcome, Outcome::completed) << outcomes[0].message;
  const auto& steps = outcomes[0].result.steps;
  ASSERT_EQ(steps.size(), 2u);
  const SplitTrajectory split = split_trajectory(steps);
  EXPECT_EQ(split.samples.size(), 2u);
  EXPECT_NE(table.talk.text_of(steps[1].prompt).find("more 1"), std::string::npos);
}

TEST(Rollouts, ThatRunOutOfTurnsOrRoomAreTruncatedWithoutAReward) {
  const FakeTalk talk(true);
  for (int64_t turns = 1; turns <= 4; ++turns) {
    Table table(true, in_turn(talk, {"Taa"}), {.max_turns = turns, .max_length = 4096});
    table.start({4});
    const auto outcomes = table.run_out();
    ASSERT_EQ(outcomes.size(), 1u);
    EXPECT_EQ(outcomes[0].outcome, Outcome::completed);
    EXPECT_EQ(static_cast<int64_t>(outcomes[0].result.steps.size()), turns);
    EXPECT_TRUE(outcomes[0].result.truncated);
    EXPECT_TRUE(outcomes[0].result.rewards.empty());
    EXPECT_EQ(outcomes[0].result.reward, 0.0);
  }
  for (int64_t length = 60; length <= 240; length += 7) {
    Table table(true, in_turn(talk, {"Taa"}), {.max_turns = 100, .max_length = length});
    table.start({4});
    const auto outcomes = table.run_out();
    ASSERT_EQ(outcomes.size(), 1u);
    EXPECT_EQ(outcomes[0].outcome, Outcome::completed) << outcomes[0].message;
    EXPECT_TRUE(outcomes[0].result.truncated);
    EXPECT_TRUE(outcomes[0].result.rewards.empty());
    const TrajectoryStep& last = outcomes[0].result.steps.back();
    EXPECT_LE(static_cast<int64_t>(last.prompt.size() + last.completion.size()), length);
  }
}

TEST(Rollouts, OfTheSameSeedAskForTheSame) {
  const FakeTalk talk(true);
  const auto history = [&](uint64_t seed, uint64_t delays) {
    Table table(true, RandomPolicy{talk, delays, 0.0, 0.6});
    table.start({1, 2, 3, 4}, seed);
    table.run_out();
    std::multimap<uint64_t, std::vector<int32_t>> asked;
    for (const auto& sent : table.sampler.sent()) {
      asked.emplace(sent.request.seed, sent.request.prompt);
    }
    return asked;
  };
  for (uint64_t seed = 0; seed < 30; ++seed) {
    const auto asked = history(seed, 1);
    EXPECT_EQ(asked, history(seed, 2)) << "delays decide nothing";
    EXPECT_NE(asked, history(seed + 1, 1));
    std::set<uint64_t> seeds;
    for (const auto& [own, prompt] : asked) seeds.insert(own);
    EXPECT_EQ(seeds.size(), asked.size()) << "no two requests share a seed";
  }
}

TEST(Rollouts, ThatAreCancelledLeaveTheOthersAlone) {
  const FakeTalk talk(false);
  Table table(false, in_turn(talk, {"abc"}));
  table.start({1, 2, 3});
  EXPECT_TRUE(table.driver.cancel(2, "stale"));
  EXPECT_FALSE(table.sampler.sent()[0].cancelled) << "others still use the request";
  EXPECT_EQ(table.driver.running(), 2);
  std::map<int64_t, Outcome> ended;
  for (const RolloutOutcome& outcome : table.run_out()) ended[outcome.rollout] = outcome.outcome;
  EXPECT_EQ(ended, (std::map<int64_t, Outcome>{
                       {1, Outcome::completed}, {2, Outcome::cancelled}, {3, Outcome::completed}}));

  table.start({1, 2}, 9);
  EXPECT_TRUE(table.driver.cancel(1, "stale"));
  EXPECT_TRUE(table.driver.cancel(2, "stale"));
  EXPECT_TRUE(table.sampler.sent()[1].cancelled) << "nobody wants it any more";
  EXPECT_EQ(table.sampler.in_flight(), 0);
  for (const RolloutOutcome& outcome : table.run_out()) EXPECT_EQ(outcome.message, "stale");
}

TEST(Rollouts, KnowTheVersionOfEachToken) {
  const FakeTalk talk(false);
  Table table(false, in_turn(talk, {"abc"}));
  table.start({1});
  table.driver.poll(0.025);
  table.sampler.update_weights(nullptr, 3);
  const auto outcomes = table.run_out();
  ASSERT_EQ(outcomes.size(), 1u);
  EXPECT_EQ(outcomes[0].result.steps[0].versions, (std::vector<int32_t>{0, 0, 3, 3}));
  EXPECT_EQ(outcomes[0].result.oldest_version(), 0);
  EXPECT_EQ(outcomes[0].result.sampled_tokens(), 4);
}

}  // namespace
}  // namespace leeway
