// The sampler against the definition in double: which tokens can occur, how often, and with which
// logprob.

#include "engine/sampler.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/rows.h"
#include "leeway/error.h"

namespace leeway {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<float> random_logits(size_t count, uint64_t seed, double scale = 2.0) {
  Rng rng(seed);
  std::vector<float> logits(count);
  for (float& z : logits) z = static_cast<float>(scale * rng.normal());
  return logits;
}

// The distribution by its definition: one filter after another, each on what the previous one left.
std::vector<double> definition(const std::vector<float>& logits, const SamplingSettings& settings) {
  const size_t n = logits.size();
  std::vector<size_t> order(n);
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return logits[a] > logits[b]; });
  std::vector<double> p(n, 0.0);
  if (settings.temperature == 0.0f) {
    p[order[0]] = 1.0;
    return p;
  }
  const auto normalise = [&] {
    const double sum = std::accumulate(p.begin(), p.end(), 0.0);
    for (double& x : p) x /= sum;
  };
  for (size_t i = 0; i < n; ++i) {
    p[i] = std::exp((static_cast<double>(logits[i]) - static_cast<double>(logits[order[0]])) /
                    static_cast<double>(settings.temperature));
  }
  normalise();
  if (settings.top_k > 0 && settings.top_k < static_cast<int64_t>(n)) {
    const float kth = logits[order[static_cast<size_t>(settings.top_k) - 1]];
    for (size_t i = 0; i < n; ++i) p[i] = logits[i] < kth ? 0.0 : p[i];
    normalise();
  }
  if (settings.top_p < 1.0f) {
    double before = 0.0;
    for (size_t i : order) {
      const double own = p[i];
      if (before >= static_cast<double>(settings.top_p)) p[i] = 0.0;
      before += own;
    }
    normalise();
  }
  const double least = static_cast<double>(settings.min_p) * p[order[0]];
  for (double& x : p) x = x < least ? 0.0 : x;
  normalise();
  return p;
}

std::string in_words(const SamplingSettings& s) {
  return fmt::format("temperature {} top_k {} top_p {} min_p {}", s.temperature, s.top_k, s.top_p,
                     s.min_p);
}

// Each filter alone and all combinations, at several temperatures.
std::vector<SamplingSettings> all_settings() {
  std::vector<SamplingSettings> list;
  for (float temperature : {0.0f, 0.3f, 1.0f, 1.7f}) {
    for (int64_t top_k : {0, 1, 7, 1000}) {
      for (float top_p : {1.0f, 0.85f, 0.2f}) {
        for (float min_p : {0.0f, 0.05f, 0.6f}) list.push_back({temperature, top_k, top_p, min_p});
      }
    }
  }
  return list;
}

// A row whose first and later calls use one uniform number each.
SampledToken sample_at(const std::vector<float>& logits, const SamplingSettings& settings,
                       uint64_t seed) {
  TokenSampler sampler;
  Rng rng(seed);
  return sampler.sample(logits, settings, rng);
}

TEST(Sampler, DrawsEachTokenAsOftenAsItsProbabilitySays) {
  constexpr int kDraws = 8000;
  const std::vector<float> logits = random_logits(24, 5);
  TokenSampler sampler;
  for (const SamplingSettings& settings : all_settings()) {
    SCOPED_TRACE(in_words(settings));
    const std::vector<double> p = definition(logits, settings);
    std::vector<int> seen(logits.size(), 0);
    Rng rng(11);
    for (int i = 0; i < kDraws; ++i) {
      ++seen[static_cast<size_t>(sampler.sample(logits, settings, rng).id)];
    }
    // Pearson's statistic; tokens expected fewer than five times share a bin.
    double statistic = 0.0, rare_expected = 0.0, rare_seen = 0.0;
    int bins = 0;
    const auto add = [&](double expected, double count) {
      statistic += (count - expected) * (count - expected) / expected, ++bins;
    };
    for (size_t i = 0; i < p.size(); ++i) {
      if (p[i] == 0.0) {
        ASSERT_EQ(seen[i], 0) << "token " << i << " is filtered out";
      } else if (p[i] * kDraws < 5.0) {
        rare_expected += p[i] * kDraws, rare_seen += seen[i];
      } else {
        add(p[i] * kDraws, seen[i]);
      }
    }
    if (rare_expected > 0.0) add(rare_expected, rare_seen);
    const double freedom = bins - 1;
    EXPECT_LE(statistic, freedom + 4.5 * std::sqrt(2.0 * freedom) + 1e-9);
  }
}

TEST(Sampler, TakesTheTokenInWhoseShareTheUniformNumberFalls) {
  TokenSampler sampler;
  for (size_t vocabulary : {1u, 2u, 15u, 16u, 17u, 127u, 128u, 129u, 1000u, 5003u}) {
    const std::vector<float> logits = random_logits(vocabulary, vocabulary);
    for (const SamplingSettings& settings : all_settings()) {
      SCOPED_TRACE(fmt::format("vocabulary {} {}", vocabulary, in_words(settings)));
      const std::vector<double> p = definition(logits, settings);
      Rng rng(3), same(3);
      for (int draw = 0; draw < 12; ++draw) {
        const SampledToken token = sampler.sample(logits, settings, rng);
        const double u = same.uniform();
        const size_t id = static_cast<size_t>(token.id);
        ASSERT_LT(id, vocabulary);
        ASSERT_GT(p[id], 0.0);
        const double before = std::accumulate(p.begin(), p.begin() + token.id, 0.0);
        ASSERT_LE(before, u + 2e-6);
        ASSERT_GE(before + p[id], u - 2e-6);
        ASSERT_NEAR(token.processed_logprob, std::log(p[id]), 4e-6);
      }
    }
  }
}

// A generator whose next uniform number is this one: inverts SplitMix64.
Rng generator_of(double uniform) {
  const auto unshift = [](uint64_t z, int bits) {
    uint64_t x = z;
    for (int known = bits; known < 64; known += bits) x = z ^ (x >> bits);
    return x;
  };
  const auto undo = [](uint64_t z, uint64_t factor) {
    uint64_t inverse = factor;  // modulo 2^64, by Newton's rule
    for (int i = 0; i < 6; ++i) inverse *= 2 - factor * inverse;
    return z * inverse;
  };
  uint64_t z = static_cast<uint64_t>(uniform * 0x1p53) << 11;
  z = undo(unshift(z, 31), 0x94d049bb133111ebu);
  z = undo(unshift(z, 27), 0xbf58476d1ce4e5b9u);
  return Rng(unshift(z, 30) - 0x9e3779b97f4a7c15u);
}

TEST(Sampler, AUniformNumberExactlyAtABoundBelongsToTheNextToken) {
  constexpr double kLast = 1.0 - 0x1p-53;
  const auto drawn = [](const std::vector<float>& logits, double uniform) {
    Rng check = generator_of(uniform), rng = check;
    EXPECT_EQ(check.uniform(), uniform);
    TokenSampler sampler;
    return sampler.sample(logits, {}, rng).id;
  };
  for (size_t count : {4u, 256u, 1024u}) {
    const std::vector<float> equal(count, 2.5f);
    for (size_t i = 0; i < count; ++i) {
      const double bound = static_cast<double>(i) / static_cast<double>(count);
      ASSERT_EQ(drawn(equal, bound), static_cast<int32_t>(i));
      if (i == 0) continue;
      ASSERT_EQ(drawn(equal, bound - 0x1p-53), static_cast<int32_t>(i) - 1);
    }
    ASSERT_EQ(drawn(equal, kLast), static_cast<int32_t>(count) - 1);
  }
  // Impossible tokens at both ends, more than are summed together.
  for (size_t count : {1u, 3u, 200u}) {
    std::vector<float> logits(1000, -kInfinity);
    for (size_t i = 0; i < count; ++i) logits[400 + i] = 0.1f * static_cast<float>(i % 7);
    EXPECT_EQ(drawn(logits, 0.0), 400);
    EXPECT_EQ(drawn(logits, kLast), 399 + static_cast<int32_t>(count));
  }
}

TEST(Sampler, GivesTheLogProbabilitiesOfTheKernelBitForBit) {
  TokenSampler sampler;
  for (size_t vocabulary : {1u, 31u, 320u, 4099u}) {
    const std::vector<float> logits = random_logits(vocabulary, vocabulary + 1, 3.0);
    const auto kernel = [&](float it, int32_t id) {
      return row_softmax(logits.data(), static_cast<int64_t>(vocabulary), it, id, false).logprob;
    };
    for (const SamplingSettings& settings : all_settings()) {
      SCOPED_TRACE(in_words(settings));
      Rng rng(17);
      for (int draw = 0; draw < 5; ++draw) {
        const SampledToken token = sampler.sample(logits, settings, rng);
        ASSERT_EQ(std::bit_cast<uint32_t>(token.raw_logprob),
                  std::bit_cast<uint32_t>(kernel(1.0f, token.id)));
        if (settings.temperature == 0.0f) {
          ASSERT_EQ(token.processed_logprob, 0.0f);
        } else if (!settings.truncates()) {
          ASSERT_EQ(std::bit_cast<uint32_t>(token.processed_logprob),
                    std::bit_cast<uint32_t>(kernel(1.0f / settings.temperature, token.id)));
        }
      }
    }
  }
}

TEST(Sampler, TheMostLikelyTokensAreTheFirstOfTheSortedRow) {
  for (const size_t vocabulary : {1u, 2u, 7u, 300u, 5000u}) {
    std::vector<float> logits = random_logits(vocabulary, vocabulary);
    if (vocabulary > 10) {  // equals, and one that cannot be drawn
      logits[3] = logits[8] = *std::max_element(logits.begin(), logits.end());
      logits[5] = -kInfinity;
    }
    std::vector<int32_t> order(vocabulary);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
    for (const int64_t count : {0, 1, 2, 5, 20}) {
      std::vector<TokenLogprob> top = {{7, 7.0f}};
      most_likely(logits, count, top);
      ASSERT_EQ(top.size(), std::min(static_cast<size_t>(count), vocabulary));
      for (size_t i = 0; i < top.size(); ++i) {
        EXPECT_EQ(top[i].id, order[i]);
        const float own =
            row_softmax(logits.data(), static_cast<int64_t>(vocabulary), 1.0f, order[i], false)
                .logprob;
        EXPECT_EQ(std::bit_cast<uint32_t>(top[i].logprob), std::bit_cast<uint32_t>(own));
      }
    }
  }
}

TEST(Sampler, UsesOneRandomNumberPerTokenWhateverTheSettings) {
  const std::vector<float> logits = random_logits(50, 2);
  TokenSampler sampler;
  for (const SamplingSettings& settings : all_settings()) {
    SCOPED_TRACE(in_words(settings));
    Rng rng(23), counted(23);
    for (int draw = 0; draw < 3; ++draw) {
      sampler.sample(logits, settings, rng);
      counted.next();
    }
    ASSERT_EQ(rng.next(), counted.next());
  }
}

TEST(Sampler, GivesTheSameTokenWhateverItSampledBefore) {
  const std::vector<float> logits = random_logits(300, 8), larger = random_logits(900, 9);
  TokenSampler used;
  for (const SamplingSettings& settings : all_settings()) {
    for (uint64_t seed = 0; seed < 4; ++seed) {
      Rng rng(seed), other(seed + 1);
      used.sample(larger, settings, other);
      const SampledToken token = used.sample(logits, settings, rng);
      const SampledToken fresh = sample_at(logits, settings, seed);
      ASSERT_EQ(token.id, fresh.id) << in_words(settings);
      ASSERT_EQ(token.processed_logprob, fresh.processed_logprob) << in_words(settings);
    }
  }
}

TEST(Sampler, GreedyTakesTheFirstOfEquals) {
  const std::vector<float> logits{1.0f, 3.0f, -2.0f, 3.0f, 3.0f};
  const SampledToken token = sample_at(logits, {.temperature = 0.0f}, 1);
  EXPECT_EQ(token.id, 1);
  EXPECT_NEAR(token.raw_logprob, -std::log(3.0 + std::exp(-2.0) + std::exp(-5.0)), 1e-6);
  EXPECT_EQ(token.processed_logprob, 0.0f);
}

// The tokens that occur in many draws.
std::vector<int32_t> support(const std::vector<float>& logits, const SamplingSettings& settings) {
  std::vector<int32_t> ids;
  TokenSampler sampler;
  Rng rng(31);
  for (int draw = 0; draw < 3000; ++draw) ids.push_back(sampler.sample(logits, settings, rng).id);
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}
using Ids = std::vector<int32_t>;

TEST(Sampler, TopKKeepsAllTiesAtTheKthPlace) {
  const std::vector<float> logits{0.5f, 1.0f, 0.5f, 2.0f, 0.5f, 0.25f};
  EXPECT_EQ(support(logits, {.top_k = 1}), (Ids{3}));
  EXPECT_EQ(support(logits, {.top_k = 2}), (Ids{1, 3}));
  EXPECT_EQ(support(logits, {.top_k = 3}), (Ids{0, 1, 2, 3, 4}));
  EXPECT_EQ(support(logits, {.top_k = 5}), (Ids{0, 1, 2, 3, 4}));
  EXPECT_EQ(support(logits, {.top_k = 6}), (Ids{0, 1, 2, 3, 4, 5}));
}

TEST(Sampler, TopPStopsWhereTheShareIsReachedExactlyAndTakesLowerIdsFirst) {
  const std::vector<float> equal(8, 1.5f);
  EXPECT_EQ(support(equal, {.top_p = 0.5f}), (Ids{0, 1, 2, 3}));
  EXPECT_EQ(support(equal, {.top_p = 0.50001f}), (Ids{0, 1, 2, 3, 4}));
  EXPECT_EQ(support(equal, {.top_p = 0.125f}), (Ids{0}));
  EXPECT_EQ(support(equal, {.top_p = 1e-6f}), (Ids{0}));
  EXPECT_EQ(support(equal, {.top_p = std::nextafter(1.0f, 0.0f)}).size(), 8u);
  // The share refers to what top-k has left: half of four.
  const std::vector<float> steps{0.0f, 9.0f, 9.0f, 0.0f, 9.0f, 9.0f};
  EXPECT_EQ(support(steps, {.top_k = 4, .top_p = 0.5f}), (Ids{1, 2}));
}

TEST(Sampler, MinPKeepsATokenExactlyAtTheBound) {
  const std::vector<float> logits{0.0f, -1.0f, -1.0f, -3.0f};
  float at_bound = 0.0f;
  const float below = -1.0f;
  row_exp(&below, 1, 1.0f, 0.0f, &at_bound);
  EXPECT_EQ(support(logits, {.min_p = at_bound}), (Ids{0, 1, 2}));
  EXPECT_EQ(support(logits, {.min_p = std::nextafter(at_bound, 1.0f)}), (Ids{0}));
  EXPECT_EQ(support({2.0f, 2.0f, 1.9f}, {.min_p = 1.0f}), (Ids{0, 1}));
}

TEST(Sampler, ASingleTokenLeftIsCertain) {
  const std::vector<float> logits = random_logits(40, 77);
  for (const SamplingSettings& settings :
       {SamplingSettings{.top_k = 1}, {.top_p = 1e-5f}, {.min_p = 1.0f}}) {
    const SampledToken token = sample_at(logits, settings, 6);
    EXPECT_EQ(token.id, row_max(logits.data(), 40).index);
    EXPECT_EQ(token.processed_logprob, 0.0f);
    EXPECT_LT(token.raw_logprob, 0.0f);
  }
}

TEST(Sampler, AVocabularyOfOneGivesItsToken) {
  for (const SamplingSettings& settings : all_settings()) {
    const SampledToken token = sample_at({-4.0f}, settings, 9);
    EXPECT_EQ(token.id, 0);
    EXPECT_EQ(token.raw_logprob, 0.0f);
    EXPECT_EQ(token.processed_logprob, 0.0f);
  }
}

TEST(Sampler, LowTemperatureIsGreedyAndHighTemperatureIsUniform) {
  const std::vector<float> logits{1.0f, 1.5f, -30.0f, 0.0f};
  EXPECT_EQ(support(logits, {.temperature = 1e-4f}), (Ids{1}));
  EXPECT_NEAR(sample_at(logits, {.temperature = 1e-4f}, 1).processed_logprob, 0.0, 1e-6);
  EXPECT_EQ(support(logits, {.temperature = 100.0f}), (Ids{0, 1, 2, 3}));
  const SampledToken token = sample_at(logits, {.temperature = 1e6f}, 4);
  EXPECT_NEAR(token.processed_logprob, std::log(0.25), 1e-4);
}

TEST(Sampler, NeverDrawsATokenOfMinusInfinity) {
  std::vector<float> logits = random_logits(200, 12);
  for (size_t i = 0; i < logits.size(); ++i) {
    if (i % 3 != 1) logits[i] = -kInfinity;
  }
  for (const SamplingSettings& settings : all_settings()) {
    for (int32_t id : support(logits, settings)) ASSERT_EQ(id % 3, 1) << in_words(settings);
  }
  std::vector<float> one(500, -kInfinity);
  one[300] = -7.0f;
  for (const SamplingSettings& settings : all_settings()) {
    const SampledToken token = sample_at(one, settings, 3);
    ASSERT_EQ(token.id, 300) << in_words(settings);
    ASSERT_EQ(token.raw_logprob, 0.0f) << in_words(settings);
  }
}

template <class Function>
std::string refusal(Function&& function) {
  try {
    function();
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Sampler, RefusesLogitsThatAreNoDistribution) {
  for (size_t place : {0u, 7u, 130u, 199u}) {
    for (const SamplingSettings& settings : all_settings()) {
      for (float bad : {std::nanf(""), kInfinity}) {
        std::vector<float> logits = random_logits(200, 1);
        logits[place] = bad;
        const std::string message = refusal([&] { sample_at(logits, settings, 1); });
        ASSERT_NE(message.find(fmt::format("token {} is {}", place, bad)), std::string::npos)
            << message << " " << in_words(settings);
      }
    }
  }
  const std::vector<float> nothing(20, -kInfinity);
  EXPECT_NE(refusal([&] { sample_at(nothing, {}, 1); }).find("minus infinity"), std::string::npos);
  EXPECT_NE(refusal([&] {
              sample_at({3e38f, 1.0f}, {.temperature = 0.01f}, 1);
            }).find("too large"),
            std::string::npos);
}

TEST(Sampler, RefusesSettingsOutOfRangeByTheirName) {
  const float nan = std::nanf("");
  const std::vector<std::pair<SamplingSettings, std::string>> bad{
      {{.temperature = -0.5f}, "temperature is -0.5"},
      {{.temperature = nan}, "temperature is nan"},
      {{.temperature = kInfinity}, "temperature is inf"},
      {{.temperature = 5e-5f}, "temperature is 5e-05"},
      {{.top_k = -1}, "top_k is -1"},
      {{.top_p = 0.0f}, "top_p is 0"},
      {{.top_p = 1.01f}, "top_p is 1.01"},
      {{.top_p = nan}, "top_p is nan"},
      {{.min_p = -0.1f}, "min_p is -0.1"},
      {{.min_p = 1.5f}, "min_p is 1.5"},
      {{.min_p = nan}, "min_p is nan"}};
  for (const auto& [settings, words] : bad) {
    const std::string message = refusal([&, &s = settings] { check_sampling(s); });
    EXPECT_NE(message.find(words), std::string::npos) << message << " instead of " << words;
  }
  for (const SamplingSettings& settings : all_settings()) EXPECT_NO_THROW(check_sampling(settings));
  EXPECT_NO_THROW(check_sampling({.temperature = 1e-4f, .top_p = 1e-6f, .min_p = 1.0f}));
}

TEST(Sampler, StreamsOfSeedsAndSamplesDiffer) {
  std::vector<uint64_t> first;
  for (uint64_t seed = 0; seed < 50; ++seed) {
    for (int64_t sample = 0; sample < 50; ++sample) {
      Rng stream = sample_stream(seed, sample);
      for (int n = 0; n < 4; ++n) first.push_back(stream.next());
    }
  }
  const size_t count = first.size();
  std::sort(first.begin(), first.end());
  first.erase(std::unique(first.begin(), first.end()), first.end());
  EXPECT_EQ(first.size(), count);
}

}  // namespace
}  // namespace leeway
