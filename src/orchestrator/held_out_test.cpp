#include "orchestrator/held_out.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "orchestrator/environment_test_support.h"
#include "orchestrator/evaluation.h"
#include "orchestrator/fake_system.h"

namespace leeway {
namespace {

using namespace leeway::testing;

// Environments a, b, c of weights 3, 2, 1; b has few held-out prompts.
struct HeldOut {
  explicit HeldOut(const FakeSystem::MakePolicy& policy, bool rendered = false)
      : system({.rendered = rendered, .members = members()}, policy) {}

  static std::vector<EnvironmentMix::Member> members() {
    std::vector<EnvironmentMix::Member> all;
    for (const auto& [id, weight] :
         std::vector<std::pair<std::string, double>>{{"a", 3.0}, {"b", 2.0}, {"c", 1.0}}) {
      auto environment = std::make_unique<FakeEnvironment>(id, respond_by_letter);
      if (id == "b") environment->held_out_size = 4;
      all.push_back({id, weight, std::move(environment)});
    }
    return all;
  }
  HeldOutResult sample(const EvaluationOptions& options) {
    return sample_held_out(system.mix, system.driver, system.clock, options,
                           [&](size_t done, size_t total) {
                             EXPECT_LE(last_done, done);
                             EXPECT_LE(done, total);
                             last_done = done;
                           });
  }

  size_t last_done = 0;
  FakeSystem system;
};

FakeSystem::MakePolicy random_policy(double trouble, double more = 0.0) {
  return [=](const FakeTalk& talk) { return RandomPolicy{talk, 3, trouble, more}; };
}

TEST(HeldOut, PromptsAreSharedOutByWeight) {
  HeldOut held_out(random_policy(0.0));
  const auto results = held_out.sample({.prompts = 33, .samples = 2, .seed = 9}).prompts;
  std::map<size_t, int> prompts;
  for (const PromptResult& result : results) {
    ++prompts[result.environment];
    EXPECT_EQ(result.rewards.size(), 2u);
    EXPECT_EQ(result.failures, 0);
    EXPECT_GE(result.tokens, 4);
    double sum = 0.0;
    for (double reward : result.rewards) sum += reward;
    EXPECT_EQ(static_cast<double>(result.successes), sum);
  }
  // 16.5, 11 and 5.5 are asked for; b has no more than 4.
  EXPECT_EQ(prompts, (std::map<size_t, int>{{0, 17}, {1, 4}, {2, 5}}));
  EXPECT_EQ(held_out.last_done, 52u);
  std::set<std::string> seen;
  for (const auto& sent : held_out.system.sampler.sent()) {
    const std::string prompt = held_out.system.talk.text_of(sent.request.prompt);
    EXPECT_NE(prompt.find(" held_out "), std::string::npos) << prompt;
    EXPECT_TRUE(seen.insert(prompt).second) << prompt;
  }
}

TEST(HeldOut, EveryFailedAttemptIsToldAtOnce) {
  HeldOut held_out(random_policy(0.5));
  int64_t told = 0;
  const HeldOutResult result = held_out.sample(
      {.prompts = 30,
       .seed = 9,
       .on_failure = [&](size_t environment, uint64_t, FailureKind, const std::string& message) {
         EXPECT_LT(environment, 3u);
         EXPECT_FALSE(message.empty());
         ++told;
       }});
  EXPECT_GT(told, 0);
  EXPECT_EQ(told, result.failed) << "there is one attempt";
}

TEST(HeldOut, RolloutsHaveSeedsOfTheirOwn) {
  HeldOut held_out(random_policy(0.0, 0.5), true);
  held_out.sample({.prompts = 30, .samples = 4, .seed = 9});
  std::set<uint64_t> seeds;
  for (const auto& sent : held_out.system.sampler.sent()) seeds.insert(sent.request.seed);
  EXPECT_GT(seeds.size(), 60u) << "there are second turns";
  EXPECT_EQ(seeds.size(), held_out.system.sampler.sent().size());
}

TEST(HeldOut, FailuresAreCountedAndInNoAverage) {
  HeldOut held_out(random_policy(0.08));
  const auto results = held_out.sample({.prompts = 60, .samples = 4}).prompts;
  int64_t failures = 0;
  for (const PromptResult& result : results) {
    EXPECT_EQ(static_cast<int64_t>(result.rewards.size()) + result.failures, 4);
    failures += result.failures;
  }
  EXPECT_GT(failures, 10);
  double counted = 0.0;
  for (const auto& [name, value] : evaluation_metrics(results, held_out.system.ids(), false)) {
    if (name == "eval/all/failed_rollouts") counted = value;
  }
  EXPECT_EQ(counted, static_cast<double>(failures));
}

// Fails until `until` seconds have passed.
FakeSystem::MakePolicy outage(const HeldOut*& held_out, double until) {
  return [&held_out, until](const FakeTalk& talk) {
    return [&held_out, until, policy = RandomPolicy{talk, 3, 0.0, 0.0}](
               const Request& request, int64_t number, int64_t sample) mutable {
      if (held_out->system.clock.now() < until) return FakeReply{.failure = "the server is gone"};
      return policy(request, number, sample);
    };
  };
}

TEST(HeldOut, AnOutageIsRetriedUntilItIsOver) {
  const HeldOut* own = nullptr;
  HeldOut held_out(outage(own, 1.0));
  own = &held_out;
  const HeldOutResult result =
      held_out.sample({.prompts = 12, .samples = 2, .max_attempts = 6, .retry_backoff = 0.1});
  EXPECT_EQ(result.completed, result.rollouts);
  EXPECT_EQ(result.failed, 0);
  EXPECT_FALSE(result.stopped);
  EXPECT_NE(result.last_failure.find("sampler_error: the server is gone"), std::string::npos)
      << result.last_failure;
  // 0.1, 0.2, 0.4, 0.8: the fifth attempt, at 1.5 s, is the first after the outage.
  EXPECT_EQ(held_out.system.sampler.sent().size(),
            result.prompts.size() + 4 * static_cast<size_t>(result.rollouts));
  // No two attempts draw the same tokens.
  std::set<uint64_t> seeds;
  for (const auto& sent : held_out.system.sampler.sent()) seeds.insert(sent.request.seed);
  EXPECT_EQ(seeds.size(), held_out.system.sampler.sent().size());
}

TEST(HeldOut, WhatStaysFailedIsCountedAndNamed) {
  const HeldOut* own = nullptr;
  HeldOut held_out(outage(own, 1e9));
  own = &held_out;
  const HeldOutResult result = held_out.sample({.prompts = 6, .samples = 2, .max_attempts = 3});
  EXPECT_EQ(result.completed, 0);
  EXPECT_EQ(result.failed, result.rollouts);
  EXPECT_EQ(result.rollouts, 12);
  int64_t failures = 0;
  for (const PromptResult& prompt : result.prompts) failures += prompt.failures;
  EXPECT_EQ(failures, 12);
  EXPECT_NE(result.last_failure.find("the server is gone"), std::string::npos);
  EXPECT_EQ(held_out.system.sampler.sent().size(), 6u + 2 * 12);
}

TEST(HeldOut, WithoutALimitOfAttemptsFailuresInARowAreTheLimit) {
  const HeldOut* own = nullptr;
  HeldOut held_out(outage(own, 1e9));
  own = &held_out;
  const HeldOutResult result = held_out.sample({.prompts = 6,
                                                .max_attempts = std::nullopt,
                                                .retry_backoff = 0.0,
                                                .most_failures_in_a_row = 40});
  EXPECT_EQ(result.failed, 6);
  EXPECT_EQ(held_out.system.driver.running(), 0);
  EXPECT_LE(held_out.system.sampler.sent().size(), 50u);
}

TEST(HeldOut, EndsAtOnceWhenAskedToStop) {
  HeldOut held_out([](const FakeTalk&) {
    return [](const Request&, int64_t, int64_t) { return FakeReply{.wait = 1e6}; };
  });
  int asked = 0;
  const HeldOutResult result =
      held_out.sample({.prompts = 6, .samples = 2, .should_stop = [&] { return ++asked > 3; }});
  EXPECT_TRUE(result.stopped);
  EXPECT_EQ(result.completed + result.failed, 0);
  EXPECT_EQ(held_out.system.driver.running(), 0);
  EXPECT_LT(held_out.system.clock.now(), 1.0);
}

TEST(HeldOut, HugeWeightsShareOutTheSamePrompts) {
  std::vector<EnvironmentMix::Member> members;
  for (const char* id : {"a", "b"}) {
    members.push_back({id, 1e14, std::make_unique<FakeEnvironment>(id, respond_by_letter)});
  }
  FakeSystem system({.members = std::move(members)}, random_policy(0.0));
  const HeldOutResult result =
      sample_held_out(system.mix, system.driver, system.clock, {.prompts = 256}, [](auto...) {});
  EXPECT_EQ(result.completed, 256);
}

}  // namespace
}  // namespace leeway
