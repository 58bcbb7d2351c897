// The engines of several ranks against one engine: the same results, bit for bit.
#include "run/ranks_sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "engine/test_support.h"
#include "run/engine_sampler.h"
#include "run/sampling_group.h"

namespace leeway {
namespace {

using namespace leeway::testing;

constexpr int kMostPolls = 1000000;  // a sampler that does not come to an end

using Snapshot = std::shared_ptr<const PolicySnapshot>;

Snapshot snapshot_of(uint64_t seed, PolicyVersion version) {
  return std::make_shared<const PolicySnapshot>(tiny_weights(Family::qwen3, seed), version);
}

// Those of the engine's tests, some with likely tokens.
std::vector<Request> requests_of(int count, uint64_t seed) {
  std::vector<Request> requests = assorted(count, seed);
  for (size_t i = 0; i < requests.size(); i += 5) requests[i].top_logprobs = 3;
  return requests;
}

void expect_equal(const SampledSequence& got, const SampledSequence& expected) {
  expect_same(got, expected);
  EXPECT_EQ(got.versions, expected.versions);
  EXPECT_EQ(got.failure, expected.failure);
  ASSERT_EQ(got.top.size(), expected.top.size());
  for (size_t i = 0; i < got.top.size(); ++i) {
    EXPECT_EQ(got.top[i].id, expected.top[i].id);
    EXPECT_EQ(bits({got.top[i].logprob}), bits({expected.top[i].logprob}));
  }
}

// A sampler with the results that it gave, by the place of a request in the test's own list.
class Collected {
 public:
  explicit Collected(Sampler& sampler) : sampler_(sampler) {}

  int64_t submit(int64_t place, const Request& request) {
    const int64_t number = sampler_.submit(request);
    EXPECT_TRUE(places_.emplace(number, place).second) << "a number twice";
    left_ += request.samples;
    return number;
  }
  void cancel(int64_t number, int64_t samples) {
    sampler_.cancel(number);
    const int64_t place = places_.at(number);
    left_ -= samples - given_[place];
    places_.erase(number);
  }
  void poll(double seconds) {
    for (SampledSequence& result : sampler_.poll(seconds)) {
      const auto found = places_.find(result.request);
      ASSERT_NE(found, places_.end()) << "a result of a request that was cancelled or never made";
      --left_;
      ++given_[found->second];
      const std::pair key(found->second, result.sample);
      ASSERT_TRUE(results.emplace(key, std::move(result)).second) << "a sample ended twice";
    }
  }
  void finish() {
    for (int polls = 0; left_ > 0; ++polls) {
      ASSERT_LT(polls, kMostPolls);
      poll(0.01);
      if (::testing::Test::HasFatalFailure()) return;
    }
    poll(0.0);
  }
  int64_t given(int64_t place) { return given_[place]; }

  Results results;

 private:
  Sampler& sampler_;
  std::map<int64_t, int64_t> places_;  // by the sampler's number
  std::map<int64_t, int64_t> given_;   // results, by place
  int64_t left_ = 0;
};

void expect_results(const Results& got, const Results& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (const auto& [key, result] : expected) {
    SCOPED_TRACE("request " + std::to_string(key.first) + " sample " + std::to_string(key.second));
    ASSERT_TRUE(got.contains(key));
    expect_equal(got.at(key), result);
  }
}

constexpr int kPhases = 4;

// Each phase samples its requests in an order of its own, some while others already run, and with
// weights of its own.
Results in_phases(Sampler& sampler, const std::vector<Request>& requests, uint64_t order) {
  Rng rng(order);
  Collected collected(sampler);
  const size_t each = requests.size() / kPhases;
  for (int phase = 0; phase < kPhases; ++phase) {
    if (phase > 0)
      sampler.update_weights(snapshot_of(50 + static_cast<uint64_t>(phase), phase), phase);
    std::vector<size_t> places(each);
    for (size_t i = 0; i < each; ++i) places[i] = static_cast<size_t>(phase) * each + i;
    for (size_t i = each; i > 1 && order > 0; --i) std::swap(places[i - 1], places[rng.below(i)]);
    for (const size_t place : places) {
      collected.submit(static_cast<int64_t>(place), requests[place]);
      if (order > 0 && rng.below(4) == 0) collected.poll(rng.below(2) == 0 ? 0.0 : 0.001);
    }
    collected.finish();
  }
  return collected.results;
}

TEST(RanksSampler, GivesWhatOneEngineGives) {
  const std::vector<Request> requests = requests_of(400, 11);
  const Snapshot first = snapshot_of(50, 0);
  Results expected;
  {
    EngineSampler one(*first, options_of(64));
    expected = in_phases(one, requests, 0);
  }
  for (int size = 1; size <= 4; ++size) {
    SCOPED_TRACE(std::to_string(size) + " ranks");
    // Other ranks have the weights of odd versions, as if they trained.
    SamplingGroup group(size, first->host(), {options_of(64), [](PolicyVersion version) {
                                                EXPECT_EQ(version % 2, 1);
                                                return snapshot_of(
                                                    50 + static_cast<uint64_t>(version), version);
                                              }});
    RanksSampler sampler(group.at(0), *first,
                         {options_of(64), [](PolicyVersion version) { return version % 2 == 1; }});
    expect_results(in_phases(sampler, requests, static_cast<uint64_t>(size)), expected);
    const Metrics metrics = sampler.take_metrics();
    double counted = 0.0, tokens = 0.0, expected_tokens = 0.0;
    for (int rank = 0; rank < size; ++rank) {
      counted += metric_of(metrics, "ranks/requests/" + std::to_string(rank));
      tokens += metric_of(metrics, "ranks/sampled_tokens/" + std::to_string(rank));
    }
    EXPECT_EQ(counted, 400.0);
    for (const auto& [key, result] : expected) {
      expected_tokens += static_cast<double>(result.ids.size());
    }
    EXPECT_EQ(tokens, expected_tokens);
  }
}

TEST(RanksSampler, ARequestGoesToTheRankWithTheFewestSamples) {
  const Snapshot weights = snapshot_of(50, 0);
  SamplingGroup group(4, weights->host(), {options_of(64), {}});
  RanksSampler sampler(group.at(0), *weights, {options_of(64), {}});
  const auto request_counts = [&](const Metrics& metrics) {
    std::vector<double> counts;
    for (int rank = 0; rank < 4; ++rank) {
      counts.push_back(metric_of(metrics, "ranks/requests/" + std::to_string(rank)));
    }
    return counts;
  };
  Collected collected(sampler);
  int64_t place = 0;
  const auto submit = [&](int64_t samples) {
    return collected.submit(place++, make_request(4, 6, samples, 1));
  };
  const int64_t large = submit(6);        // rank 0
  for (int i = 0; i < 9; ++i) submit(1);  // three for each of the others
  submit(4);                              // rank 1
  for (int i = 0; i < 4; ++i) submit(1);  // two each for ranks 2 and 3
  collected.cancel(large, 6);             // rank 0 has nothing
  for (int i = 0; i < 5; ++i) submit(1);  // rank 0
  submit(1);                              // ranks 0, 2 and 3 have five: rank 0,
  submit(1);                              // then rank 2
  collected.finish();
  const Metrics metrics = sampler.take_metrics();
  EXPECT_EQ(request_counts(metrics), (std::vector<double>{7, 4, 6, 5}));
  // 6, 7, 6 and 5 samples that have ended, of six tokens each.
  EXPECT_EQ(metric_of(metrics, "ranks/sampled_tokens/1"), 42.0);
  EXPECT_EQ(metric_of(metrics, "ranks/sampled_tokens/3"), 30.0);
  EXPECT_EQ(metric_of(metrics, "ranks/sampling_imbalance"), 42.0 / 36.0);
  EXPECT_EQ(request_counts(sampler.take_metrics()), (std::vector<double>{0, 0, 0, 0}));
  EXPECT_EQ(metric_of(sampler.take_metrics(), "ranks/sampling_imbalance"), 1.0);
}

// With weights that are the same under every version, what has come when does not show in tokens.
TEST(RanksSampler, NewWeightsReachWhatIsInFlight) {
  const std::vector<Request> requests = requests_of(120, 12);
  const Snapshot first = snapshot_of(60, 0);
  const Results expected = run_all(first->host(), options_of(64), requests);
  for (const int size : {1, 2, 3}) {
    SCOPED_TRACE(std::to_string(size) + " ranks");
    SamplingGroup group(size, first->host(), {options_of(64), {}});
    RanksSampler sampler(group.at(0), *first, {options_of(64), {}});
    Collected collected(sampler);
    std::vector<PolicyVersion> submitted;
    PolicyVersion version = 0;
    for (size_t i = 0; i < requests.size(); ++i) {
      collected.submit(static_cast<int64_t>(i), requests[i]);
      submitted.push_back(version);
      if (i % 8 == 0) {
        ++version;
        sampler.update_weights(snapshot_of(60, version), version);
      }
      collected.poll(0.0);
    }
    collected.finish();
    ASSERT_EQ(collected.results.size(), expected.size());
    for (const auto& [key, result] : collected.results) {
      expect_same(result, expected.at(key));
      ASSERT_EQ(result.versions.size(), result.ids.size());
      EXPECT_TRUE(std::is_sorted(result.versions.begin(), result.versions.end()));
      EXPECT_GE(result.versions.front(), submitted[static_cast<size_t>(key.first)])
          << "older than the request";
      EXPECT_LE(result.versions.back(), version);
    }
  }
}

TEST(RanksSampler, RequestsAfterNewWeightsAreSampledFromThemAlone) {
  const std::vector<Request> requests = requests_of(60, 13);
  const Snapshot before = snapshot_of(61, 0), after = snapshot_of(62, 1);
  EngineSampler one(*after, options_of(64));
  Collected alone(one);
  for (size_t i = 0; i < requests.size(); ++i) {
    alone.submit(static_cast<int64_t>(i), requests[i]);
  }
  alone.finish();
  SamplingGroup group(3, before->host(), {options_of(64), {}});
  RanksSampler sampler(group.at(0), *before, {options_of(64), {}});
  Collected collected(sampler);
  for (int64_t i = 0; i < 12; ++i) collected.submit(1000 + i, make_request(8, 60, 2, 5));
  collected.poll(0.0);
  sampler.update_weights(after, 1);
  for (size_t i = 0; i < requests.size(); ++i) {
    collected.submit(static_cast<int64_t>(i), requests[i]);
  }
  collected.finish();
  for (const auto& [key, result] : alone.results) expect_equal(collected.results.at(key), result);
}

TEST(RanksSampler, CancelledRequestsGiveNothingAndOthersAllTheirSamples) {
  const Snapshot weights = snapshot_of(63, 0);
  const std::vector<Request> requests = requests_of(300, 14);
  const Results expected = run_all(weights->host(), options_of(64), requests);
  for (const int size : {1, 2, 4}) {
    SCOPED_TRACE(std::to_string(size) + " ranks");
    SamplingGroup group(size, weights->host(), {options_of(64), {}});
    RanksSampler sampler(group.at(0), *weights, {options_of(64), {}});
    Collected collected(sampler);
    Rng rng(static_cast<uint64_t>(size));
    std::map<int64_t, int64_t> running;  // place: number
    std::set<int64_t> cancelled;
    for (size_t i = 0; i < requests.size(); ++i) {
      const auto place = static_cast<int64_t>(i);
      running[place] = collected.submit(place, requests[i]);
      if (rng.below(2) == 0) collected.poll(rng.below(2) == 0 ? 0.0 : 0.001);
      if (rng.below(3) > 0) continue;
      const auto chosen =
          std::next(running.begin(), static_cast<int64_t>(rng.below(running.size())));
      collected.cancel(chosen->second, requests[static_cast<size_t>(chosen->first)].samples);
      cancelled.insert(chosen->first);
      running.erase(chosen);
    }
    collected.finish();
    EXPECT_TRUE(sampler.poll(3600.0).empty()) << "returns at once when nothing is in flight";
    for (const auto& [key, result] : expected) {
      ASSERT_TRUE(cancelled.contains(key.first) || collected.results.contains(key));
    }
    for (const auto& [key, result] : collected.results) expect_equal(result, expected.at(key));
    EXPECT_GT(cancelled.size(), 50u);
  }
}

TEST(RanksSampler, AdaptersTravelWithoutTheirBase) {
  auto base = std::make_shared<const Parameters>(tiny_weights(Family::qwen3, 70));
  const auto adapter = [&](uint64_t seed, PolicyVersion version) {
    Parameters weights(base,
                       LoraSettings{.rank = 4, .alpha = 8.0, .targets = {"q_proj", "down_proj"}});
    Rng rng(seed);
    for (size_t i = 0; i < weights.table().size(); ++i) {
      for (float& value : weights.of(i)) value = static_cast<float>(0.2 * rng.normal());
    }
    return std::make_shared<const PolicySnapshot>(std::move(weights), version);
  };
  EngineOptions options = options_of(64);
  options.frozen = FrozenWeights::in_place;
  const std::vector<Request> requests = requests_of(40, 15);
  const auto run = [&](Sampler& sampler) {
    Collected collected(sampler);
    for (size_t i = 0; i < requests.size(); ++i) {
      if (i == requests.size() / 2) {
        collected.finish();
        sampler.update_weights(adapter(2, 1), 1);
      }
      collected.submit(static_cast<int64_t>(i), requests[i]);
    }
    collected.finish();
    return collected.results;
  };
  EngineSampler one(*adapter(1, 0), options);
  const Results expected = run(one);
  // A base of their own, as processes have.
  const Parameters like(std::make_shared<const Parameters>(*base), *adapter(3, 0)->host().lora());
  EXPECT_LT(like.flat().size(), base->flat().size());
  SamplingGroup group(3, like, {options, {}});
  RanksSampler sampler(group.at(0), *adapter(1, 0), {options, {}});
  expect_results(run(sampler), expected);
}

TEST(RanksSampler, SamplersFollowOneAnotherOnTheSameRanks) {
  const Snapshot weights = snapshot_of(64, 0);
  const std::vector<Request> requests = requests_of(40, 16);
  const Results expected = run_all(weights->host(), options_of(64), requests);
  SamplingGroup group(3, weights->host(), {options_of(64), {}});
  for (int round = 0; round < 4; ++round) {
    RanksSampler sampler(group.at(0), *weights, {options_of(64), {}});
    Collected collected(sampler);
    for (size_t i = 0; i < requests.size(); ++i) {
      collected.submit(static_cast<int64_t>(i), requests[i]);
    }
    if (round % 2 == 0) {
      collected.poll(0.0);  // the sampler goes with all of these in flight
    } else {
      collected.finish();
      expect_results(collected.results, expected);
    }
  }
}

}  // namespace
}  // namespace leeway
