// The engine against a loop without a KV cache, which recomputes the whole sequence in one pass for
// each token. Tokens and logprobs must agree bit for bit, whatever else is running.

#include "engine/engine.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <thread>

#include "engine/test_support.h"

namespace leeway {
namespace {

using namespace testing;

// ---------------------------------------------------------------------------------------------
// Tokens

TEST(Engine, GivesTheTokensAndBitsOfALoopWithoutCache) {
  for (const Family family : kFamilies) {
    const Parameters weights = tiny_weights(family, 3);
    for (const Precision precision : kPrecisions) {
      SCOPED_TRACE(fmt::format("{} {}", name_of(family), name_of(precision)));
      WholePass whole(weights, precision);
      const std::vector<Request> requests = assorted(8, 5);
      EngineOptions options = options_of(11, 2);
      options.precision = precision;
      const Results results = run_all(weights, options, requests);
      for (const auto& [key, result] : results) {
        const Request& request = requests[static_cast<size_t>(key.first)];
        expect_same(result, whole.sample(request, key.second));
        EXPECT_EQ(bits(result.raw_logprobs), bits(whole.logprobs(request, result, 0)));
        ASSERT_FALSE(HasFailure());
      }
    }
  }
}

TEST(Engine, GivesTheSameTokensInAnyCompany) {
  const std::vector<Request> requests = assorted(10, 17);
  for (const Family family : kFamilies) {
    const Parameters weights = tiny_weights(family, 8);
    std::vector<Results> alone;
    for (const Request& request : requests) {
      alone.push_back(run_all(weights, options_of(64), {request}));
    }
    Rng rng(1);
    const std::vector<std::pair<int64_t, int>> rows_and_threads{
        {1, 1}, {2, 1}, {3, 1}, {7, 1}, {16, 1}, {33, 1}, {64, 1}, {5, 2}, {40, 2}, {64, 3}};
    for (const auto& [rows, threads] : rows_and_threads) {
      SCOPED_TRACE(fmt::format("{} rows {} threads {}", name_of(family), rows, threads));
      EngineOptions options = options_of(rows, threads);
      options.max_sequences = 3 + static_cast<int64_t>(rng.below(20));
      options.kv_bytes = bytes_of(weights, 12 + static_cast<int64_t>(rng.below(60)));
      std::vector<size_t> order(requests.size());
      std::iota(order.begin(), order.end(), size_t{0});
      for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[rng.below(i)]);
      Engine engine(weights, 0, options);
      for (const size_t i : order) engine.submit(requests[i]);
      for (const auto& [key, result] : run_to_the_end(engine)) {
        const size_t request = order[static_cast<size_t>(key.first)];
        expect_same(result, alone[request].at({0, key.second}));
        ASSERT_FALSE(HasFailure());
      }
    }
  }
}

TEST(Engine, TheMostLikelyTokensComeBesideTheSampledOnesAndChangeNothing) {
  const Parameters weights = tiny_weights(Family::qwen3, 3);
  std::vector<Request> requests = assorted(12, 5);
  const Results plain = run_all(weights, options_of(64), requests);
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i].top_logprobs = static_cast<int64_t>(i % 4) * 6;
  }
  const Results results = run_all(weights, options_of(64), requests);
  for (const auto& [key, result] : results) {
    expect_same(result, plain.at(key));
    const auto count = static_cast<size_t>(requests[static_cast<size_t>(key.first)].top_logprobs);
    ASSERT_EQ(result.top.size(), count * result.ids.size());
    for (size_t i = 0; i < result.top.size(); ++i) {
      if (i % count > 0) {
        EXPECT_LE(result.top[i].logprob, result.top[i - 1].logprob);
      }
      if (result.top[i].id == result.ids[i / count]) {
        EXPECT_EQ(result.top[i].logprob, result.raw_logprobs[i / count]);
      }
    }
  }
  Request request = requests.front();
  for (const int64_t count : {int64_t{-1}, kMostTopLogprobs + 1}) {
    request.top_logprobs = count;
    EXPECT_NE(
        refusal([&] { Engine(weights, 0, options_of(8)).check(request); }).find("top_logprobs"),
        std::string::npos);
  }
}

TEST(Engine, SampleNumberIIsTheSameHoweverManyAreAskedFor) {
  const Parameters weights = tiny_weights(Family::qwen3, 2);
  for (int64_t prompt : {1, 15, 16, 17, 31, 32}) {
    Request request = make_request(prompt, 20, 6, 99);
    const Results six = run_all(weights, options_of(64), {request});
    ASSERT_EQ(six.size(), 6u);
    EXPECT_NE(six.at({0, 0}).ids, six.at({0, 1}).ids);
    for (int64_t samples = 1; samples < 6; ++samples) {
      request.samples = samples;
      const Results fewer = run_all(weights, options_of(64), {request});
      ASSERT_EQ(fewer.size(), static_cast<size_t>(samples));
      for (const auto& [key, result] : fewer) expect_same(result, six.at(key));
    }
  }
}

TEST(Engine, PrefillsAPromptOnceForAllSamples) {
  const Parameters weights = tiny_weights(Family::llama, 2);
  Engine engine(weights, 4, options_of(10));
  engine.submit(make_request(25, 5, 4, 1));
  StepReport report = engine.step();
  EXPECT_EQ(report.prompt_rows, 10);
  EXPECT_EQ(report.sampled, 0);
  EXPECT_EQ(report.running, 4);
  EXPECT_EQ(report.version, 4);
  engine.step();
  report = engine.step();
  EXPECT_EQ(report.prompt_rows, 5);
  EXPECT_EQ(report.sampled, 4);
  for (int i = 0; i < 4; ++i) {
    report = engine.step();
    EXPECT_EQ(report.prompt_rows, 0);
    EXPECT_EQ(report.decode_rows, 4);
    EXPECT_EQ(report.sampled, 4);
  }
  EXPECT_EQ(report.running, 0);
  EXPECT_EQ(engine.take_finished().size(), 4u);
}

TEST(Engine, StopsAtStopIdsAndKeepsThem) {
  const Parameters weights = tiny_weights(Family::qwen2, 6);
  Request request = make_request(5, 30, 1, 12);
  const SampledSequence whole = run_all(weights, options_of(64), {request}).at({0, 0});
  EXPECT_EQ(whole.finish, Finish::length);
  ASSERT_EQ(whole.ids.size(), 30u);
  for (const size_t at : {0u, 1u, 12u, 29u}) {
    request.stop_ids = {whole.ids[at]};
    const size_t first =
        std::find(whole.ids.begin(), whole.ids.end(), whole.ids[at]) - whole.ids.begin();
    const SampledSequence cut = run_all(weights, options_of(64), {request}).at({0, 0});
    EXPECT_EQ(cut.finish, Finish::stop);
    EXPECT_EQ(cut.ids, std::vector(whole.ids.begin(), whole.ids.begin() + first + 1));
    EXPECT_EQ(cut.versions.size(), first + 1);
  }
}

TEST(Engine, FillsTheModelToItsLastPosition) {
  const Parameters weights = tiny_weights(Family::llama, 6);
  WholePass whole(weights, Precision::float32);
  for (int64_t tokens : {1, 2, 16, 17}) {
    const std::vector<Request> requests{make_request(kPositions - tokens, tokens, 2, 3)};
    const Results results = run_all(weights, options_of(40), requests);
    for (const auto& [key, result] : results) {
      EXPECT_EQ(result.ids.size(), static_cast<size_t>(tokens));
      expect_same(result, whole.sample(requests[0], key.second));
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Memory

TEST(Engine, FinishesALongQueueWithLittleMemory) {
  const Parameters weights = tiny_weights(Family::qwen3, 4);
  const std::vector<Request> requests = assorted(120, 23);
  int64_t largest = 0;
  size_t samples = 0;
  for (const Request& request : requests) {
    largest = std::max(largest, block_need(request).of(request.samples));
    samples += static_cast<size_t>(request.samples);
  }
  EngineOptions options = options_of(16);
  options.kv_bytes = bytes_of(weights, largest) + 100;
  Engine engine(weights, 0, options);
  ASSERT_EQ(engine.blocks(), largest);
  for (const Request& request : requests) engine.submit(request);
  EXPECT_EQ(run_to_the_end(engine).size(), samples);
}

TEST(Engine, MakesNoMoreBlocksThanItCanUse) {
  const Parameters weights = tiny_weights(Family::qwen3, 4);
  EngineOptions options = options_of(16);
  options.kv_bytes = int64_t{1} << 40;
  options.max_sequences = 5;
  EXPECT_EQ(Engine(weights, 0, options).blocks(), 5 * kPositions / kBlockKeys);
}

// ---------------------------------------------------------------------------------------------
// Cancellation

TEST(Engine, CancelledSamplesKeepTheTokensTheyHave) {
  const Parameters weights = tiny_weights(Family::qwen2, 9);
  std::vector<Request> requests{make_request(9, 25, 2, 1), make_request(5, 25, 3, 2),
                                make_request(20, 25, 1, 3)};
  const Results whole = run_all(weights, options_of(64), requests);
  EngineOptions options = options_of(64);
  options.max_sequences = 5;  // the third one waits
  Engine engine(weights, 0, options);
  for (const Request& request : requests) engine.submit(request);
  EXPECT_FALSE(engine.cancel(3));
  EXPECT_FALSE(engine.cancel(-1));
  for (int i = 0; i < 10; ++i) engine.step();
  EXPECT_TRUE(engine.cancel(1));
  EXPECT_TRUE(engine.cancel(2));
  EXPECT_TRUE(engine.cancel(2));
  EXPECT_TRUE(engine.take_finished().empty()) << "a cancellation takes effect with a step";
  Results results = run_to_the_end(engine);
  ASSERT_EQ(results.size(), 6u);
  for (const auto& [key, result] : results) {
    const SampledSequence& expected = whole.at(key);
    const size_t tokens = key.first == 0 ? 25u : key.first == 1 ? 10u : 0u;
    EXPECT_EQ(result.finish, key.first == 0 ? Finish::length : Finish::cancelled);
    EXPECT_EQ(result.ids, std::vector(expected.ids.begin(), expected.ids.begin() + tokens));
  }
  EXPECT_FALSE(engine.cancel(0)) << "it has finished";
  EXPECT_FALSE(engine.cancel(1));
}

// One sample is cut after `cut` tokens (0: while the prompt is computed, by the leader); the others
// have the tokens they have without that.
TEST(Engine, ASampleIsCancelledAloneAndItsTokensAreSeenWhileItRuns) {
  const Parameters weights = tiny_weights(Family::qwen3, 5);
  const Request request = make_request(9, 12, 3, 5);
  Engine whole(weights, 0, options_of(4));
  whole.submit(request);
  std::map<int64_t, std::vector<int32_t>> expected;
  while (!whole.idle()) whole.step();
  for (const SampledSequence& result : whole.take_finished()) expected[result.sample] = result.ids;
  for (const int64_t sample : {0, 1, 2}) {
    for (const size_t cut : {size_t{0}, size_t{3}}) {
      SCOPED_TRACE(::testing::Message() << "sample " << sample << " after " << cut);
      Engine engine(weights, 0, options_of(4));
      const int64_t id = engine.submit(request);
      EXPECT_FALSE(engine.cancel_sample(id, sample)) << "it waits";
      bool done = false;
      while (!engine.idle()) {
        engine.step();
        const auto seen = engine.sampled(id, sample);
        EXPECT_TRUE(!done || seen.empty());
        ASSERT_TRUE(std::equal(seen.begin(), seen.end(), expected[sample].begin()));
        if (!done && seen.size() >= cut) done = engine.cancel_sample(id, sample);
      }
      EXPECT_TRUE(done);
      EXPECT_FALSE(engine.cancel_sample(id, sample)) << "it has ended";
      EXPECT_FALSE(engine.cancel_sample(id, 3)) << "there is none";
      const std::vector<SampledSequence> results = engine.take_finished();
      ASSERT_EQ(results.size(), 3u);
      for (const SampledSequence& result : results) {
        if (result.sample != sample) {
          EXPECT_EQ(result.ids, expected[result.sample]);
          EXPECT_EQ(result.finish, Finish::length);
        } else {
          EXPECT_EQ(result.finish, Finish::cancelled);
          EXPECT_EQ(result.ids.size(), cut);
        }
      }
    }
  }
}

TEST(Engine, CancelLeavesFinishedSamplesOfTheRequestAlone) {
  const Parameters weights = tiny_weights(Family::qwen2, 9);
  Request request = make_request(9, 25, 4, 1);
  const Results whole = run_all(weights, options_of(64), {request});
  request.stop_ids = {whole.at({0, 2}).ids[3]};
  Engine engine(weights, 0, options_of(64));
  engine.submit(request);
  Results results;
  while (results.empty()) {
    engine.step();
    collect(engine, results);
  }
  const size_t stopped = results.size();
  ASSERT_LT(stopped, 4u);
  EXPECT_TRUE(engine.cancel(0));
  engine.step();
  collect(engine, results);
  EXPECT_EQ(results.size(), 4u);
  EXPECT_EQ(std::count_if(results.begin(), results.end(),
                          [](const auto& r) { return r.second.finish == Finish::cancelled; }),
            static_cast<int64_t>(4 - stopped));
  EXPECT_TRUE(engine.idle());
}

// ---------------------------------------------------------------------------------------------
// Weights

// Runs with a swap to `next` after some steps.
Results with_swap(const Parameters& weights, std::shared_ptr<const Parameters> next, int steps,
                  const std::vector<Request>& requests, EngineOptions options) {
  Engine engine(weights, 100, options);
  for (const Request& request : requests) engine.submit(request);
  Results results;
  for (int i = 0; i < steps; ++i) {
    engine.step();
    collect(engine, results);
  }
  engine.update_weights(std::make_shared<const PolicySnapshot>(std::move(next), 101));
  EXPECT_FALSE(engine.idle());
  for (const auto& [key, result] : run_to_the_end(engine)) results.emplace(key, result);
  return results;
}

size_t count_of_old(const SampledSequence& result) {
  return static_cast<size_t>(std::count(result.versions.begin(), result.versions.end(), 100));
}

TEST(Engine, RecomputedTokensHaveTheBitsOfTheNewWeights) {
  const std::vector<Request> requests = assorted(9, 31);
  for (const Family family : kFamilies) {
    const Parameters old_weights = tiny_weights(family, 1);
    const auto new_weights = std::make_shared<Parameters>(tiny_weights(family, 2));
    for (const Precision precision : kPrecisions) {
      WholePass old_pass(old_weights, precision), new_pass(*new_weights, precision);
      for (int steps : {1, 3, 9, 14, 30}) {
        SCOPED_TRACE(fmt::format("{} {} steps {}", name_of(family), name_of(precision), steps));
        EngineOptions options = options_of(13);
        options.precision = precision;
        options.kv_after_swap = KvAfterSwap::recompute;
        const Results results = with_swap(old_weights, new_weights, steps, requests, options);
        for (const auto& [key, result] : results) {
          const Request& request = requests[static_cast<size_t>(key.first)];
          ASSERT_TRUE(std::is_sorted(result.versions.begin(), result.versions.end()));
          const size_t old = count_of_old(result);
          std::vector<float> expected = old_pass.logprobs(request, result, 0);
          expected.resize(old);
          const std::vector<float> fresh = new_pass.logprobs(request, result, old);
          expected.insert(expected.end(), fresh.begin(), fresh.end());
          ASSERT_EQ(bits(result.raw_logprobs), bits(expected));
        }
      }
    }
  }
}

TEST(Engine, ASwapToEqualWeightsChangesNothingButTheVersions) {
  const std::vector<Request> requests = assorted(9, 37);
  const Parameters weights = tiny_weights(Family::qwen3, 1);
  const auto same = std::make_shared<Parameters>(weights);
  const Results undisturbed = run_all(weights, options_of(13), requests);
  for (const KvAfterSwap after : {KvAfterSwap::keep, KvAfterSwap::recompute}) {
    for (int steps = 0; steps < 40; steps += 3) {
      EngineOptions options = options_of(13);
      options.kv_after_swap = after;
      const Results results = with_swap(weights, same, steps, requests, options);
      ASSERT_EQ(results.size(), undisturbed.size());
      for (const auto& [key, result] : results) expect_same(result, undisturbed.at(key));
      ASSERT_FALSE(HasFailure()) << "after " << steps << " steps";
    }
  }
}

TEST(Engine, KeptStatesGoOnWithTheNewWeights) {
  const std::vector<Request> requests{make_request(20, 30, 3, 5)};
  const Parameters old_weights = tiny_weights(Family::qwen2, 1);
  const auto new_weights = std::make_shared<Parameters>(tiny_weights(Family::qwen2, 2));
  const Results kept = with_swap(old_weights, new_weights, 10, requests, options_of(64));
  WholePass old_pass(old_weights, Precision::float32), new_pass(*new_weights, Precision::float32);
  for (const auto& [key, result] : kept) {
    ASSERT_EQ(count_of_old(result), 10u);
    ASSERT_EQ(result.ids.size(), 30u);
    const std::vector<float> by_old = old_pass.logprobs(requests[0], result, 0);
    const std::vector<float> by_new = new_pass.logprobs(requests[0], result, 0);
    for (size_t i = 0; i < 30; ++i) {
      // After the swap neither policy alone gives the logits: the states come from both.
      EXPECT_EQ(result.raw_logprobs[i] == by_old[i], i < 10) << i;
      EXPECT_NE(result.raw_logprobs[i], by_new[i]) << i;
    }
  }
}

TEST(Engine, TheLastOfSeveralUpdatesCountsAndForeignOnesAreRefused) {
  const Parameters first = tiny_weights(Family::llama, 1);
  const auto second = std::make_shared<Parameters>(tiny_weights(Family::llama, 2));
  const auto third = std::make_shared<Parameters>(tiny_weights(Family::llama, 3));
  Engine engine(first, 1, options_of(64));
  engine.update_weights(std::make_shared<const PolicySnapshot>(second, 2));
  engine.update_weights(std::make_shared<const PolicySnapshot>(third, 3));
  EXPECT_EQ(second.use_count(), 1) << "replaced weights are let go";
  EXPECT_EQ(engine.step().version, 3);
  EXPECT_EQ(third.use_count(), 1) << "packed weights need their source no more";
  EXPECT_TRUE(engine.idle());
  const auto foreign = std::make_shared<PolicySnapshot>(tiny_weights(Family::qwen2, 1), 4);
  EXPECT_NE(refusal([&] { engine.update_weights(foreign); }).find("model_type is qwen2"),
            std::string::npos);
  const Request request = make_request(5, 6, 1, 1);
  engine.submit(request);
  WholePass whole(*third, Precision::float32);
  const SampledSequence result = run_to_the_end(engine).at({0, 0});
  expect_same(result, whole.sample(request, 0));
  EXPECT_EQ(result.versions, std::vector<PolicyVersion>(6, 3));
}

}  // namespace
}  // namespace leeway
