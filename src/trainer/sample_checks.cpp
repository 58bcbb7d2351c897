#include "trainer/sample_checks.h"

#include <fmt/format.h>

#include <cmath>

#include "leeway/error.h"

namespace leeway {
namespace {

void check_sample(const ModelConfig& config, size_t number, const Sample& sample) {
  auto refuse = [&](const std::string& problem) {
    throw Error(fmt::format("sample {}: {}", number, problem));
  };
  const size_t n = sample.ids.size();
  if (n == 0) refuse("has no ids");
  if (static_cast<int64_t>(n) > config.max_position_embeddings) {
    refuse(
        fmt::format("has {} ids; the model has {} positions", n, config.max_position_embeddings));
  }
  auto check_length = [&](const char* list, size_t size, bool may_be_other) {
    if (size == n || may_be_other) return;
    refuse(fmt::format("{} has {} entries for {} ids", list, size, n));
  };
  check_length("loss_mask", sample.loss_mask.size(), false);
  check_length("advantages", sample.advantages.size(), sample.advantages.size() == 1);
  check_length("rollout", sample.rollout.size(), sample.rollout.empty());
  check_length("versions", sample.versions.size(), sample.versions.empty());
  if (sample.loss_mask[0] != 0) refuse("loss_mask[0] is 1: nothing predicts the first token");
  if (!(sample.temperature > 0.0f) || !std::isfinite(sample.temperature) ||
      !std::isfinite(1.0f / sample.temperature)) {
    refuse(fmt::format("temperature {} is not positive and finite, with a finite inverse",
                       sample.temperature));
  }
  for (size_t t = 0; t < n; ++t) {
    if (sample.ids[t] < 0 || sample.ids[t] >= config.vocab_size) {
      refuse(fmt::format("ids[{}] = {} is outside the vocabulary of {}", t, sample.ids[t],
                         config.vocab_size));
    }
    if (sample.loss_mask[t] == 0) continue;
    if (sample.loss_mask[t] != 1) {
      refuse(fmt::format("loss_mask[{}] = {} is neither 0 nor 1", t, sample.loss_mask[t]));
    }
    if (!std::isfinite(sample.advantage(t))) {
      refuse(fmt::format("advantages[{}] = {} is not finite", t, sample.advantage(t)));
    }
    if (!sample.rollout.empty() && !std::isfinite(sample.rollout[t])) {
      refuse(fmt::format("rollout[{}] = {} is not finite", t, sample.rollout[t]));
    }
  }
}

}  // namespace

void check_samples(const ModelConfig& config, std::span<const Sample> samples) {
  const auto check_given = [&](size_t i, const char* list, bool has, bool first_has) {
    if (has == first_has) return;
    throw Error(fmt::format("sample {}: {} {}, sample 0's {}; give it for all samples or for none",
                            i, list, has ? "is given" : "is empty", first_has ? "is not" : "is"));
  };
  for (size_t i = 0; i < samples.size(); ++i) {
    check_sample(config, i, samples[i]);
    check_given(i, "rollout", !samples[i].rollout.empty(), !samples[0].rollout.empty());
    check_given(i, "versions", !samples[i].versions.empty(), !samples[0].versions.empty());
  }
}

}  // namespace leeway
