// Requests and weights that engines refuse, workers that fail, ranks that are lost.
#include <gtest/gtest.h>
#include <time.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <mutex>
#include <thread>

#include "engine/test_support.h"
#include "run/engine_sampler.h"
#include "run/sampling_group.h"

namespace leeway {
namespace {

using namespace leeway::testing;
using Time = std::chrono::steady_clock;

constexpr auto kLimit = std::chrono::minutes(5);  // for what hangs

// Polls until `sampler` throws; the message, and whether it was Lost.
std::pair<std::string, bool> failure_of(Sampler& sampler, double slice) {
  const auto end = Time::now() + kLimit;
  while (Time::now() < end) {
    try {
      sampler.poll(slice);
    } catch (const Lost& lost) {
      return {lost.what(), true};
    } catch (const Error& error) {
      return {error.what(), false};
    }
  }
  return {"nothing", false};
}

std::vector<SampledSequence> results_of(Sampler& sampler, size_t count) {
  std::vector<SampledSequence> results;
  const auto end = Time::now() + kLimit;
  while (results.size() < count && Time::now() < end) {
    for (SampledSequence& result : sampler.poll(0.01)) results.push_back(std::move(result));
  }
  return results;
}

TEST(RanksSamplerTrouble, RefusesWhatOneEngineRefusesAndGoesOn) {
  const Parameters weights = tiny_weights(Family::qwen3, 1);
  const PolicySnapshot first = PolicySnapshot::view_of(weights, 0);
  EngineSampler one(first, options_of(64));
  std::vector<Request> bad(5, make_request(8, 8, 1, 1));
  bad[0].max_new_tokens = kPositions;
  bad[1].prompt = {};
  bad[2].prompt[3] = 1 << 20;
  bad[3].samples = 100000;
  bad[4].sampling.temperature = -1.0f;
  for (const int size : {1, 3}) {
    SamplingGroup group(size, weights, {options_of(64), {}});
    RanksSampler sampler(group.at(0), first, {options_of(64), {}});
    int64_t submitted = 0;
    for (int round = 0; round < 2 * size; ++round) {  // whichever rank is next
      for (const Request& request : bad) {
        const std::string expected = refusal([&] { one.submit(request); });
        EXPECT_NE(expected, "accepted");
        EXPECT_EQ(refusal([&] { sampler.submit(request); }), expected);
      }
      sampler.submit(make_request(8, 8, 1, 1));
      ++submitted;
    }
    EXPECT_EQ(results_of(sampler, static_cast<size_t>(submitted)).size(),
              static_cast<size_t>(submitted));
  }
}

TEST(RanksSamplerTrouble, SamplesOfWeightsThatAreNotNumbersFail) {
  const Parameters weights = tiny_weights(Family::qwen3, 2);
  const PolicySnapshot first = PolicySnapshot::view_of(weights, 0);
  SamplingGroup group(2, weights, {options_of(64), {}});
  RanksSampler sampler(group.at(0), first, {options_of(64), {}});
  Parameters broken = weights;
  for (float& value : broken.flat()) value = std::numeric_limits<float>::quiet_NaN();
  sampler.update_weights(std::make_shared<const PolicySnapshot>(broken, 1), 1);
  for (int i = 0; i < 4; ++i) sampler.submit(make_request(4, 4, 2, 1));
  bool other = false;
  const auto failed = results_of(sampler, 8);
  ASSERT_EQ(failed.size(), 8u);
  for (const SampledSequence& result : failed) {
    EXPECT_EQ(result.finish, Finish::failed);
    EXPECT_NE(result.failure, "");
    other = other || result.failure.starts_with("rank 1: ");
  }
  EXPECT_TRUE(other);
  sampler.update_weights(std::make_shared<const PolicySnapshot>(weights, 2), 2);
  for (int i = 0; i < 4; ++i) sampler.submit(make_request(4, 4, 2, 1));
  for (const SampledSequence& result : results_of(sampler, 8)) {
    EXPECT_EQ(result.finish, Finish::length);
  }
}

TEST(RanksSamplerTrouble, WhatFailsOnAnotherRankIsThrown) {
  const Parameters weights = tiny_weights(Family::qwen3, 3);
  const PolicySnapshot first = PolicySnapshot::view_of(weights, 0);
  SamplingGroup group(3, weights, {options_of(64), [](PolicyVersion) { return nullptr; }});
  for (const double slice : {0.0, 60.0}) {
    RanksSampler sampler(group.at(0), first,
                         {options_of(64), [](PolicyVersion version) { return version > 0; }});
    for (int i = 0; i < 9; ++i) sampler.submit(make_request(4, 4, 1, 1));
    EXPECT_EQ(results_of(sampler, 9).size(), 9u);
    for (int i = 0; i < 9; ++i) sampler.submit(make_request(4, 60, 1, 1));
    sampler.update_weights(std::make_shared<const PolicySnapshot>(weights, 1), 1);
    const auto [text, lost] = failure_of(sampler, slice);
    EXPECT_FALSE(lost);
    EXPECT_TRUE(text.ends_with(": there are no weights of version 1 here")) << text;
    EXPECT_TRUE(text.starts_with("rank ")) << text;
    EXPECT_EQ(refusal([&] { sampler.submit(make_request(4, 4, 1, 1)); }), text);
    // The next one on the same ranks works.
  }
  // An engine that another rank cannot make, and one that this rank cannot.
  EngineOptions none = options_of(64);
  none.kv_bytes = 0;
  EXPECT_THROW(RanksSampler(group.at(0), first, {none, {}}), Error);
  RanksSampler sampler(group.at(0), first, {options_of(64), [](PolicyVersion) { return true; }});
  EXPECT_NE(failure_of(sampler, 0.0).first.find("there are no weights of version 0 here"),
            std::string::npos);
}

// Tokens that other ranks sample for as long as the test needs.
Request long_request() { return make_request(4, kPositions - 4, 8, 9); }

TEST(RanksSamplerTrouble, ALostRankEndsAWaitAndAllThatFollows) {
  const Parameters weights = tiny_weights(Family::qwen3, 4);
  const PolicySnapshot first = PolicySnapshot::view_of(weights, 0);
  for (const bool idle : {false, true}) {
    // With `idle` the engines of others cannot be made before the wait has begun, so that this
    // rank has nothing to do but wait.
    std::mutex held;
    std::unique_lock hold(held);
    SamplingGroup group(3, weights, {options_of(64), [&](PolicyVersion version) {
                                       const std::lock_guard lock(held);
                                       return std::make_shared<const PolicySnapshot>(weights,
                                                                                     version);
                                     }});
    {
      RanksSampler sampler(group.at(0), first,
                           {options_of(64), [&](PolicyVersion) { return idle; }});
      if (!idle) hold.unlock();
      for (int i = 0; i < (idle ? 3 : 30); ++i) sampler.submit(long_request());
      if (idle) results_of(sampler, 8);  // those of this rank
      std::thread aborting([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        group.at(2).abort("rank 2 on host b: out of luck");
      });
      const auto [text, lost] = failure_of(sampler, idle ? 3600.0 : 0.0);
      aborting.join();
      EXPECT_TRUE(lost);
      EXPECT_EQ(text, "rank 2 on host b: out of luck");
      EXPECT_THROW(sampler.submit(long_request()), Lost);
      EXPECT_THROW(sampler.poll(0.0), Lost);
      EXPECT_THROW(sampler.update_weights(std::make_shared<const PolicySnapshot>(weights, 1), 1),
                   Lost);
      if (idle) hold.unlock();
    }
    EXPECT_THROW(RanksSampler(group.at(0), first, {options_of(64), {}}), Lost);
  }
}

// Nobody turns in circles: neither the workers without work nor a poll that waits for them.
TEST(RanksSamplerTrouble, WaitingTakesNoTimeOfTheProcessor) {
  const Parameters weights = tiny_weights(Family::qwen3, 5);
  const PolicySnapshot first = PolicySnapshot::view_of(weights, 0);
  std::mutex held;
  std::unique_lock hold(held);
  SamplingGroup group(3, weights, {options_of(64), [&](PolicyVersion version) {
                                     if (version == 1) const std::lock_guard lock(held);
                                     return std::make_shared<const PolicySnapshot>(weights,
                                                                                   version);
                                   }});
  RanksSampler sampler(group.at(0), first, {options_of(64), [](PolicyVersion) { return true; }});
  sampler.update_weights(std::make_shared<const PolicySnapshot>(weights, 1), 1);
  sampler.poll(0.0);
  for (int i = 0; i < 3; ++i) sampler.submit(make_request(4, 1, 1, 1));
  EXPECT_EQ(results_of(sampler, 1).size(), 1u);
  const auto processor_seconds = [] {
    timespec time{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  };
  const double before = processor_seconds();
  EXPECT_TRUE(sampler.poll(0.5).empty());  // the others wait for their weights
  EXPECT_LT(processor_seconds() - before, 0.25);
  hold.unlock();
  EXPECT_EQ(results_of(sampler, 2).size(), 2u);
}

}  // namespace
}  // namespace leeway
