// The engine under requests, weights and histories that are wrong or random: it refuses or ends
// what it must, and goes on with the rest.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <map>
#include <set>
#include <thread>

#include "engine/engine.h"
#include "engine/test_support.h"

namespace leeway {
namespace {

using namespace testing;

// ---------------------------------------------------------------------------------------------
// Refusals

TEST(Engine, RefusesARequestAtOnceAndGoesOn) {
  const Parameters weights = tiny_weights(Family::llama, 1);
  EngineOptions options = options_of(64);
  options.kv_bytes = bytes_of(weights, 5);
  options.max_sequences = 3;
  Engine engine(weights, 1, options);
  EXPECT_NE(refusal([&] { engine.submit(make_request(0, 4, 1, 1)); }).find("empty"),
            std::string::npos);
  EXPECT_NE(refusal([&] { engine.submit(make_request(4, 4, 4, 1)); }).find("max_sequences is 3"),
            std::string::npos);
  EXPECT_NE(refusal([&] { engine.submit(make_request(90, 7, 1, 1)); }).find("is 96"),
            std::string::npos);
  EXPECT_NE(refusal([&] { engine.submit(make_request(80, 9, 1, 1)); }).find("6 KV-cache blocks"),
            std::string::npos);
  EXPECT_TRUE(engine.idle());
  EXPECT_EQ(engine.submit(make_request(4, 4, 3, 1)), 0);
  EXPECT_EQ(run_to_the_end(engine).size(), 3u);
}

TEST(Engine, RemovesARequestWithoutADistributionAndGoesOnWithTheOthers) {
  Parameters weights = tiny_weights(Family::llama, 1);
  const std::vector<Request> requests{make_request(6, 12, 1, 1), make_request(7, 12, 3, 2),
                                      make_request(8, 12, 2, 3)};
  const Results undisturbed = run_all(weights, options_of(64), requests);
  // A token that occurs in none of the others has a non-finite embedding.
  std::set<int32_t> met;
  for (const Request& request : requests) met.insert(request.prompt.begin(), request.prompt.end());
  for (const auto& [key, result] : undisturbed) met.insert(result.ids.begin(), result.ids.end());
  int32_t bad = 0;
  while (met.contains(bad)) ++bad;
  ASSERT_LT(bad, 50);
  float* row = weights.find("model.embed_tokens.weight") + bad * weights.config().hidden_size;
  row[3] = std::numeric_limits<float>::quiet_NaN();

  Engine engine(weights, 6, options_of(64));
  engine.submit(requests[0]);
  engine.submit(requests[1]);
  for (int i = 0; i < 4; ++i) engine.step();
  Request poisoned = make_request(5, 9, 2, 4);
  poisoned.prompt[4] = bad;
  EXPECT_EQ(engine.submit(poisoned), 2);
  engine.submit(requests[2]);
  const std::string message = refusal([&] { engine.step(); });
  for (const char* words : {"request 2", "sample 0", "token 0", "version 6", "nan"}) {
    EXPECT_NE(message.find(words), std::string::npos) << message << "; expected: " << words;
  }
  EXPECT_FALSE(engine.cancel(2)) << "it is gone";
  Results results = run_to_the_end(engine);
  for (int64_t sample : {0, 1}) {
    EXPECT_EQ(results.at({2, sample}).finish, Finish::cancelled);
    EXPECT_TRUE(results.at({2, sample}).ids.empty());
  }
  for (const auto& [key, result] : results) {
    if (key.first == 2) continue;
    expect_same(result, undisturbed.at({key.first == 3 ? 2 : key.first, key.second}));
  }
}

TEST(Engine, SurvivesWeightsOfNaN) {
  const Parameters good = tiny_weights(Family::qwen3, 1);
  auto bad = std::make_shared<Parameters>(good);
  std::fill(bad->flat().begin(), bad->flat().end(), std::numeric_limits<float>::quiet_NaN());
  Engine engine(good, 1, options_of(64, 2));
  const Request request = make_request(6, 12, 3, 1);
  for (int i = 0; i < 3; ++i) engine.submit(request);
  for (int i = 0; i < 5; ++i) engine.step();
  engine.update_weights(std::make_shared<const PolicySnapshot>(bad, 2));
  const std::string message = refusal([&] { engine.step(); });
  EXPECT_NE(message.find("request 0"), std::string::npos) << message;
  EXPECT_NE(message.find("2 others"), std::string::npos) << message;
  EXPECT_TRUE(engine.idle());
  EXPECT_EQ(engine.take_finished().size(), 9u);
  engine.update_weights(std::make_shared<const PolicySnapshot>(good, 3));
  engine.submit(request);
  const Results results = run_to_the_end(engine);
  EXPECT_EQ(results.size(), 3u);
  EXPECT_EQ(results.at({3, 0}).finish, Finish::length);
}

// ---------------------------------------------------------------------------------------------
// Histories and threads

TEST(Engine, EndsEverySampleOnceThroughRandomHistories) {
  const Parameters weights = tiny_weights(Family::qwen3, 1);
  const std::vector<std::shared_ptr<const Parameters>> others{
      std::make_shared<Parameters>(tiny_weights(Family::qwen3, 2)),
      std::make_shared<Parameters>(tiny_weights(Family::qwen3, 3))};
  for (uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(fmt::format("history {}", seed));
    Rng rng(seed);
    EngineOptions options = options_of(1 + static_cast<int64_t>(rng.below(30)));
    options.max_sequences = 3 + static_cast<int64_t>(rng.below(6));
    options.kv_bytes = bytes_of(weights, 14 + static_cast<int64_t>(rng.below(20)));
    options.kv_after_swap = rng.below(2) == 0 ? KvAfterSwap::keep : KvAfterSwap::recompute;
    Engine engine(weights, 0, options);
    std::vector<Request> requests;
    std::set<int64_t> cancelled;
    Results results;
    PolicyVersion version = 0;
    for (int action = 0; action < 60; ++action) {
      const uint64_t kind = rng.below(10);
      if (kind < 3) {
        requests.push_back(assorted(1, rng.next())[0]);
        ASSERT_EQ(engine.submit(requests.back()), static_cast<int64_t>(requests.size()) - 1);
      } else if (kind == 3) {
        const auto id = static_cast<int64_t>(rng.below(requests.size() + 1));
        if (engine.cancel(id)) cancelled.insert(id);
      } else if (kind == 4) {
        engine.update_weights(
            std::make_shared<const PolicySnapshot>(others[rng.below(2)], ++version));
      } else {
        const StepReport report = engine.step();
        ASSERT_EQ(report.version, version);
        ASSERT_LE(report.running, options.max_sequences);
        ASSERT_LE(report.prompt_rows + report.decode_rows, options.max_rows_per_step);
        ASSERT_GE(report.free_blocks, 0);
        collect(engine, results);
      }
    }
    for (const auto& [key, result] : run_to_the_end(engine)) {
      ASSERT_TRUE(results.emplace(key, result).second);
    }
    size_t expected = 0;
    for (const Request& request : requests) expected += static_cast<size_t>(request.samples);
    ASSERT_EQ(results.size(), expected);
    for (const auto& [key, result] : results) {
      const Request& request = requests[static_cast<size_t>(key.first)];
      const auto tokens = static_cast<int64_t>(result.ids.size());
      ASSERT_TRUE(std::is_sorted(result.versions.begin(), result.versions.end()));
      ASSERT_EQ(result.versions.size(), result.ids.size());
      ASSERT_EQ(result.raw_logprobs.size(), result.ids.size());
      ASSERT_EQ(result.processed_logprobs.size(), result.ids.size());
      ASSERT_LE(tokens, request.max_new_tokens);
      if (result.finish == Finish::cancelled) {
        ASSERT_TRUE(cancelled.contains(key.first));
      } else if (result.finish == Finish::length) {
        ASSERT_EQ(tokens, request.max_new_tokens);
      } else {
        const auto& stops = request.stop_ids;
        ASSERT_GT(std::count(stops.begin(), stops.end(), result.ids.back()), 0);
      }
    }
  }
}

TEST(Engine, TakesRequestsCancellationsAndWeightsFromOtherThreads) {
  const Parameters weights = tiny_weights(Family::qwen3, 1);
  EngineOptions options = options_of(24, 2);
  options.max_sequences = 8;
  options.kv_after_swap = KvAfterSwap::recompute;
  Engine engine(weights, 0, options);
  constexpr int kThreads = 3, kEach = 12;
  std::atomic<int> busy{kThreads + 1};
  std::atomic<int64_t> samples{0};
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      Rng rng(t);
      for (const Request& request : assorted(kEach, t)) {
        const int64_t id = engine.submit(request);
        samples += request.samples;
        if (rng.below(3) == 0) engine.cancel(id);
        std::this_thread::yield();
      }
      --busy;
    });
  }
  threads.emplace_back([&] {
    for (int64_t version = 1; version <= 5; ++version) {
      engine.update_weights(std::make_shared<const PolicySnapshot>(weights, version));
      std::this_thread::yield();
    }
    --busy;
  });
  Results results;
  while (busy > 0 || !engine.idle()) {
    engine.step();
    collect(engine, results);
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(static_cast<int64_t>(results.size()), samples.load());
  const StepReport report = engine.step();
  EXPECT_EQ(report.free_blocks, engine.blocks());
  EXPECT_EQ(report.version, 5);
  EXPECT_EQ(report.running + report.queued + report.sampled, 0);
}

}  // namespace
}  // namespace leeway
