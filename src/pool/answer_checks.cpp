#include "pool/answer_checks.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "leeway/error.h"

namespace leeway {
namespace {

// What rounding may leave of a probability of 1.
constexpr float kMostLogprob = 1e-4f;

void check_logprobs(const SampledSequence& sample, const std::vector<float>& values,
                    const char* name) {
  for (size_t t = 0; t < values.size(); ++t) {
    if (std::isfinite(values[t]) && values[t] <= kMostLogprob) continue;
    throw Error(fmt::format("choice {} has the {} log-probability {} at place {}", sample.sample,
                            name, values[t], t));
  }
}

void check_tokens(const Request& request, const SampledSequence& sample,
                  const AnswerBounds& bounds) {
  const auto stops = [&](int32_t id) {
    return std::find(request.stop_ids.begin(), request.stop_ids.end(), id) !=
           request.stop_ids.end();
  };
  for (size_t t = 0; t < sample.ids.size(); ++t) {
    const int32_t id = sample.ids[t];
    if (id < 0 || id >= bounds.vocab_size) {
      throw Error(fmt::format("choice {} has the token {} at place {}; the vocabulary has {}",
                              sample.sample, id, t, bounds.vocab_size));
    }
    if (stops(id) && t + 1 < sample.ids.size()) {
      throw Error(fmt::format("choice {} goes on after the stop token {} at place {}",
                              sample.sample, id, t));
    }
    const PolicyVersion version = sample.versions[t];
    const bool falls = t > 0 && version < sample.versions[t - 1];
    if (version < bounds.oldest || version > bounds.newest || falls) {
      throw Error(
          fmt::format("choice {} has a token of version {} at place {}; it can only be of "
                      "{} to {}",
                      sample.sample, version, t, falls ? sample.versions[t - 1] : bounds.oldest,
                      bounds.newest));
    }
  }
  const bool stopped = stops(sample.ids.back());
  if (sample.finish == Finish::stop && !stopped && bounds.stops_as_asked) {
    throw Error(fmt::format("choice {} stopped with the token {}, which is no stop token",
                            sample.sample, sample.ids.back()));
  }
  const auto length = static_cast<int64_t>(sample.ids.size());
  if (sample.finish == Finish::length && length != request.max_new_tokens) {
    throw Error(fmt::format("choice {} ended by its length after {} of {} tokens", sample.sample,
                            length, request.max_new_tokens));
  }
}

}  // namespace

void check_samples(const Request& request, const std::vector<SampledSequence>& samples,
                   const AnswerBounds& bounds) {
  if (static_cast<int64_t>(samples.size()) != request.samples) {
    throw Error(fmt::format("has {} choices, {} were asked for", samples.size(), request.samples));
  }
  for (const SampledSequence& sample : samples) {
    if (sample.finish == Finish::cancelled) continue;
    const size_t size = sample.ids.size();
    if (sample.raw_logprobs.size() != size || sample.processed_logprobs.size() != size ||
        sample.versions.size() != size) {
      throw Error(
          fmt::format("choice {} has {} tokens, but {} and {} log-probabilities and {} "
                      "versions",
                      sample.sample, size, sample.raw_logprobs.size(),
                      sample.processed_logprobs.size(), sample.versions.size()));
    }
    if (size == 0) throw Error(fmt::format("choice {} has no token", sample.sample));
    if (static_cast<int64_t>(size) > request.max_new_tokens) {
      throw Error(fmt::format("choice {} has {} tokens, more than {}", sample.sample, size,
                              request.max_new_tokens));
    }
    check_logprobs(sample, sample.raw_logprobs, "raw");
    check_logprobs(sample, sample.processed_logprobs, "processed");
    check_tokens(request, sample, bounds);
  }
}

}  // namespace leeway
