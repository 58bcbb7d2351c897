#include "engine/sampler.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "kernels/rows.h"
#include "leeway/error.h"

namespace leeway {
namespace {

// Below this, dividing logits by the temperature would lose the digits that distinguish tokens.
constexpr float kLeastTemperature = 1e-4f;

// Weights are summed in runs of this length, each as kLanes parallel sums: a fixed order that suits
// vector code.
constexpr size_t kRun = 128;
constexpr size_t kLanes = 16;

// Top-p sums tokens by how far their logits, divided by the temperature, are below the largest.
constexpr size_t kBins = 1024;
constexpr float kBinsPerUnit = 16.0f;

float sum_of_run(const float* weights, size_t count) {
  float lanes[kLanes] = {};
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (size_t j = 0; j < kLanes; ++j) lanes[j] += weights[i + j];
  }
  for (; i < count; ++i) lanes[i % kLanes] += weights[i];
  for (size_t width = kLanes / 2; width > 0; width /= 2) {
    for (size_t j = 0; j < width; ++j) lanes[j] += lanes[j + width];
  }
  return lanes[0];
}

// Minus infinity is a valid logit: a token that cannot be drawn.
void check_logits(std::span<const float> logits) {
  constexpr float kMost = std::numeric_limits<float>::max();
  int bad = 0;
  for (const float z : logits) bad |= static_cast<int>(!(z <= kMost));
  if (bad == 0) return;
  const auto at = std::find_if(logits.begin(), logits.end(), [](float z) { return !(z <= kMost); });
  // The sign of a NaN is meaningless and differs between devices.
  throw Error(fmt::format("the logit of token {} is {}: the weights give no distribution",
                          at - logits.begin(), std::isnan(*at) ? "nan" : fmt::format("{}", *at)));
}

}  // namespace

void check_sampling(const SamplingSettings& settings) {
  if (!(settings.temperature == 0.0f ||
        (settings.temperature >= kLeastTemperature && std::isfinite(settings.temperature)))) {
    throw Error(fmt::format(
        "temperature is {}: it must be 0 (the most likely token) or a finite number of at least {}",
        settings.temperature, kLeastTemperature));
  }
  if (settings.top_k < 0) {
    throw Error(fmt::format("top_k is {}: it must be positive, or 0 for off", settings.top_k));
  }
  if (!(settings.top_p > 0.0f && settings.top_p <= 1.0f)) {
    throw Error(
        fmt::format("top_p is {}: it must be above 0 and at most 1 (off); for the most likely "
                    "token alone set temperature to 0",
                    settings.top_p));
  }
  if (!(settings.min_p >= 0.0f && settings.min_p <= 1.0f)) {
    throw Error(
        fmt::format("min_p is {}: it must be at least 0 (off) and at most 1", settings.min_p));
  }
}

// Mixed twice, so that the streams of neighbouring seeds and samples start far apart.
Rng sample_stream(uint64_t seed, int64_t sample) {
  return Rng(Rng(Rng(seed).next() + static_cast<uint64_t>(sample)).next());
}

void most_likely(std::span<const float> logits, int64_t count, std::vector<TokenLogprob>& top) {
  const auto vocabulary = static_cast<int64_t>(logits.size());
  const size_t wanted = static_cast<size_t>(std::min(count, vocabulary));
  const auto before = [](const TokenLogprob& a, const TokenLogprob& b) {
    return a.logprob > b.logprob || (a.logprob == b.logprob && a.id < b.id);
  };
  // A heap with the least of the largest in front: most logits are below it and cost a comparison.
  top.clear();
  for (int64_t id = 0; id < vocabulary; ++id) {
    if (top.size() == wanted) {
      if (wanted == 0 || !(logits[id] > top.front().logprob)) continue;
      std::pop_heap(top.begin(), top.end(), before);
      top.pop_back();
    }
    top.push_back({static_cast<int32_t>(id), logits[id]});
    std::push_heap(top.begin(), top.end(), before);
  }
  std::sort_heap(top.begin(), top.end(), before);
  if (top.empty()) return;
  // Of the largest logit the log-probability is minus the logarithm of the sum of weights.
  const float largest = top.front().logprob;
  const float log_total =
      -row_softmax(logits.data(), vocabulary, 1.0f, top.front().id, false).logprob;
  for (TokenLogprob& token : top) token.logprob = (token.logprob - largest) - log_total;
}

// The k-th largest logit, or minus infinity if there are fewer. Reads each logit once: most are
// below the k-th largest of those before them.
float TokenSampler::kth_largest(std::span<const float> logits, int64_t k) {
  const size_t full = 2 * static_cast<size_t>(k) + 64;
  const auto kth = [&] {
    const auto place = largest_.begin() + (k - 1);
    std::nth_element(largest_.begin(), place, largest_.end(), std::greater<>());
    return *place;
  };
  float bound = -std::numeric_limits<float>::infinity();
  largest_.clear();
  for (const float z : logits) {
    if (!(z > bound)) continue;
    largest_.push_back(z);
    if (largest_.size() < full) continue;
    bound = kth();
    largest_.resize(static_cast<size_t>(k));
  }
  return largest_.size() < static_cast<size_t>(k) ? bound : kth();
}

// The point at which the most likely tokens, down to the logit `least`, first reach their share
// top_p. Only the tokens of the bin in which that happens are sorted.
TokenSampler::Cut TokenSampler::nucleus(std::span<const float> logits, float least, float inverse,
                                        float shift, float top_p) {
  const int64_t vocabulary = static_cast<int64_t>(logits.size());
  // Increases as the logit falls, so that no token of a bin precedes one of an earlier bin.
  const auto bin_of = [&](int64_t id) {
    const float below = (shift - logits[id] * inverse) * kBinsPerUnit;
    return below < static_cast<float>(kBins) ? static_cast<size_t>(below) : kBins - 1;
  };
  bins_.assign(kBins, 0.0);
  double total = 0.0;
  for (int64_t i = 0; i < vocabulary; ++i) {
    if (logits[i] >= least) bins_[bin_of(i)] += static_cast<double>(weights_[i]);
  }
  for (const double sum : bins_) total += sum;
  const double target = static_cast<double>(top_p) * total;
  size_t bin = 0;
  double reached = 0.0;
  for (; reached + bins_[bin] < target; ++bin) reached += bins_[bin];

  order_.clear();
  for (int64_t i = 0; i < vocabulary; ++i) {
    if (logits[i] >= least && bin_of(i) == bin) order_.push_back(static_cast<int32_t>(i));
  }
  const auto before = [&](int32_t a, int32_t b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
  };
  auto next = order_.begin();
  for (int64_t take = 64; next != order_.end(); take *= 4) {
    const auto end = next + std::min<int64_t>(take, order_.end() - next);
    if (end != order_.end()) std::nth_element(next, end, order_.end(), before);
    std::sort(next, end, before);
    for (; next != end; ++next) {
      reached += static_cast<double>(weights_[*next]);
      if (reached >= target) return {logits[*next], *next};
    }
  }
  // In this order the sum of the bin may miss its total by rounding: then all of it is kept.
  return {logits[order_.back()], order_.back()};
}

// Sets the weights of filtered tokens to 0.
void TokenSampler::filter(std::span<const float> logits, const SamplingSettings& settings,
                          int64_t largest) {
  const int64_t vocabulary = static_cast<int64_t>(logits.size());
  Cut cut{-std::numeric_limits<float>::infinity(), vocabulary};
  if (settings.top_k > 0 && settings.top_k < vocabulary) {
    cut.logit = kth_largest(logits, settings.top_k);
  }
  if (settings.top_p < 1.0f) {
    const float inverse = 1.0f / settings.temperature;
    cut = nucleus(logits, cut.logit, inverse, logits[largest] * inverse, settings.top_p);
  }
  const double least = static_cast<double>(settings.min_p) * static_cast<double>(weights_[largest]);
  for (int64_t i = 0; i < vocabulary; ++i) {
    const bool out = logits[i] < cut.logit || (logits[i] == cut.logit && i > cut.id) ||
                     static_cast<double>(weights_[i]) < least;
    weights_[i] = out ? 0.0f : weights_[i];
  }
}

// The first token at which the cumulative weight exceeds uniform * total. A weight of 0 is never
// selected, since it does not increase the sum.
int64_t TokenSampler::draw(double uniform) {
  sums_.clear();
  total_ = 0.0;
  for (size_t begin = 0; begin < weights_.size(); begin += kRun) {
    sums_.push_back(sum_of_run(&weights_[begin], std::min(kRun, weights_.size() - begin)));
    total_ += static_cast<double>(sums_.back());
  }
  // If rounding keeps the sum below its target, the last run and its last token with a positive
  // weight are used.
  const double target = uniform * total_;
  double before = 0.0;
  size_t run = 0;
  double reached = 0.0;
  for (size_t r = 0; r < sums_.size() && reached <= target; ++r) {
    if (sums_[r] == 0.0f) continue;
    run = r;
    before = reached;
    reached += static_cast<double>(sums_[r]);
  }
  size_t last = run * kRun;
  const size_t end = std::min(last + kRun, weights_.size());
  for (size_t i = last; i < end && before <= target; ++i) {
    if (weights_[i] == 0.0f) continue;
    last = i;
    before += static_cast<double>(weights_[i]);
  }
  return static_cast<int64_t>(last);
}

SampledToken TokenSampler::sample(std::span<const float> logits, const SamplingSettings& settings,
                                  Rng& rng) {
  const double uniform = rng.uniform();
  const int64_t vocabulary = static_cast<int64_t>(logits.size());
  check_logits(logits);
  const RowMax largest = row_max(logits.data(), vocabulary);
  if (!std::isfinite(largest.value)) {
    throw Error(fmt::format("all {} logits are minus infinity: no token can be drawn", vocabulary));
  }
  const auto logprob = [&](int64_t id, float inverse_temperature) {
    return row_softmax(logits.data(), vocabulary, inverse_temperature, id, false).logprob;
  };
  if (settings.temperature == 0.0f) {
    return {static_cast<int32_t>(largest.index), logprob(largest.index, 1.0f), 0.0f};
  }
  const float inverse = 1.0f / settings.temperature;
  if (!std::isfinite(largest.value * inverse)) {
    throw Error(fmt::format("the logit of token {} is {}: too large for temperature {}",
                            largest.index, largest.value, settings.temperature));
  }
  weights_.resize(logits.size());
  row_exp(logits.data(), vocabulary, inverse, largest.value * inverse, weights_.data());
  if (settings.truncates()) filter(logits, settings, largest.index);
  const int64_t id = draw(uniform);
  SampledToken token{static_cast<int32_t>(id), logprob(id, 1.0f), 0.0f};
  if (settings.truncates()) {
    const float relative = logits[id] * inverse - largest.value * inverse;
    token.processed_logprob = static_cast<float>(static_cast<double>(relative) - std::log(total_));
  } else {
    token.processed_logprob = inverse == 1.0f ? token.raw_logprob : logprob(id, inverse);
  }
  return token;
}

}  // namespace leeway
