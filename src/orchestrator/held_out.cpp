#include "orchestrator/held_out.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "leeway/error.h"
#include "orchestrator/split.h"

namespace leeway {
namespace {

constexpr double kSlice = 0.05;           // seconds between two polls
constexpr double kLongestBackoff = 60.0;  // seconds

// How many prompts of each environment, by weight; largest remainders first.
std::vector<int64_t> shares(const EnvironmentMix& mix, int64_t prompts) {
  double total = 0.0;
  for (const auto& member : mix.members()) total += member.weight;
  std::vector<int64_t> counts;
  std::vector<std::pair<double, size_t>> rests;
  int64_t given = 0;
  for (size_t e = 0; e < mix.members().size(); ++e) {
    const double wanted = static_cast<double>(prompts) * (mix.members()[e].weight / total);
    counts.push_back(static_cast<int64_t>(wanted));
    given += counts.back();
    rests.emplace_back(static_cast<double>(counts.back()) - wanted, e);
  }
  std::sort(rests.begin(), rests.end());
  for (size_t i = 0; given < prompts; ++i, ++given) ++counts[rests[i % rests.size()].second];
  return counts;
}

class HeldOutSampling {
 public:
  HeldOutSampling(const EnvironmentMix& mix, RolloutDriver& driver, Clock& clock,
                  const EvaluationOptions& options)
      : mix_(mix), driver_(driver), clock_(clock), options_(options) {}

  HeldOutResult run(const std::function<void(size_t done, size_t total)>& progress) {
    start_all();
    result_.rollouts = static_cast<int64_t>(rollouts_.size());
    if (rollouts_.empty()) throw Error("evaluation: the environments have no held-out prompt");
    while (result_.completed + result_.failed < result_.rollouts) {
      if (options_.should_stop && options_.should_stop()) {
        stop();
        break;
      }
      start_due();
      if (driver_.running() == unscored_count() && !retries_.empty()) {
        clock_.sleep(std::min(kSlice, std::max(0.0, retries_.begin()->first - clock_.now())));
      }
      for (const RolloutOutcome& outcome : driver_.poll(kSlice)) take(outcome);
      for (int64_t rollout : driver_.take_unscored()) {
        unscored_[rollouts_[static_cast<size_t>(rollout)].prompt].push_back(rollout);
      }
      score_complete_groups();
      progress(static_cast<size_t>(result_.completed + result_.failed), rollouts_.size());
    }
    return std::move(result_);
  }

 private:
  struct Attempt {
    size_t prompt;         // in result_.prompts
    uint64_t example = 0;  // of the held-out split
    int64_t sample = 0;
    int64_t failures = 0;
  };

  void start_all() {
    const std::vector<int64_t> counts = shares(mix_, options_.prompts);
    for (size_t e = 0; e < counts.size(); ++e) {
      const Environment& environment = *mix_.members()[e].environment;
      const auto size = environment.size(Split::held_out);
      const uint64_t count = std::min<uint64_t>(static_cast<uint64_t>(counts[e]),
                                                size.value_or(static_cast<uint64_t>(counts[e])));
      for (uint64_t i = 0; i < count; ++i) {
        std::vector<int64_t> numbers(static_cast<size_t>(options_.samples));
        std::iota(numbers.begin(), numbers.end(), static_cast<int64_t>(rollouts_.size()));
        for (int64_t sample = 0; sample < options_.samples; ++sample) {
          rollouts_.push_back({.prompt = result_.prompts.size(), .example = i, .sample = sample});
        }
        result_.prompts.push_back({.environment = e});
        driver_.start(environment, environment.example(Split::held_out, i), numbers,
                      mixed_seed({options_.seed, e, i}), place_of(result_.prompts.size() - 1));
      }
    }
  }

  EpisodePlace place_of(size_t prompt, int64_t sample = 0) const {
    return {.split = Split::held_out,
            .group = static_cast<int64_t>(prompt),
            .member = sample,
            .members = options_.samples};
  }

  void start_due() {
    while (!retries_.empty() && retries_.begin()->first <= clock_.now()) {
      const int64_t rollout = retries_.begin()->second;
      retries_.erase(retries_.begin());
      const Attempt& attempt = rollouts_[static_cast<size_t>(rollout)];
      const size_t e = result_.prompts[attempt.prompt].environment;
      const Environment& environment = *mix_.members()[e].environment;
      // Each attempt has its own seed, whichever others failed with it.
      driver_.start(
          environment, environment.example(Split::held_out, attempt.example), {rollout},
          mixed_seed({options_.seed, e, attempt.example, static_cast<uint64_t>(attempt.failures),
                      static_cast<uint64_t>(attempt.sample)}),
          place_of(attempt.prompt, attempt.sample));
    }
  }

  void take(const RolloutOutcome& outcome) {
    PromptResult& prompt = result_.prompts[rollouts_[static_cast<size_t>(outcome.rollout)].prompt];
    if (outcome.outcome != Outcome::completed) return fail(outcome, prompt);
    failures_in_a_row_ = 0;
    ++result_.completed;
    const Rollout& finished = outcome.result;
    prompt.rewards.push_back(finished.reward);
    prompt.tokens += finished.sampled_tokens();
    const bool success = !finished.rewards.empty() && finished.rewards.front().value >= 1.0;
    prompt.successes += success ? 1 : 0;
  }

  int64_t unscored_count() const {
    int64_t count = 0;
    for (const auto& [prompt, rollouts] : unscored_) count += static_cast<int64_t>(rollouts.size());
    return count;
  }

  // A prompt's rollouts that ended without a reward wait until all the others have ended for good.
  void score_complete_groups() {
    std::erase_if(unscored_, [&](const auto& group) {
      std::vector<int64_t> rollouts = group.second;
      const PromptResult& prompt = result_.prompts[group.first];
      const auto ended = static_cast<int64_t>(prompt.rewards.size()) + prompt.failures;
      if (static_cast<int64_t>(rollouts.size()) + ended < options_.samples) return false;
      std::sort(rollouts.begin(), rollouts.end());  // by sample
      driver_.score(rollouts);
      return true;
    });
  }

  void fail(const RolloutOutcome& outcome, PromptResult& prompt) {
    Attempt& attempt = rollouts_[static_cast<size_t>(outcome.rollout)];
    result_.last_failure =
        fmt::format("{}, held-out example {}: {}: {}", mix_.members()[prompt.environment].id,
                    attempt.example, name_of(outcome.kind), outcome.message);
    if (options_.on_failure) {
      options_.on_failure(prompt.environment, attempt.example, outcome.kind, outcome.message);
    }
    ++attempt.failures;
    ++failures_in_a_row_;
    const bool spent = options_.max_attempts && attempt.failures >= *options_.max_attempts;
    if (spent || too_many_failures()) {
      ++result_.failed;
      ++prompt.failures;
    } else {
      const auto doublings = static_cast<int>(std::min<int64_t>(attempt.failures, 32)) - 1;
      const double wait = std::ldexp(options_.retry_backoff, doublings);
      retries_.emplace(clock_.now() + std::min(wait, kLongestBackoff), outcome.rollout);
    }
    if (too_many_failures()) give_up_retries();
  }

  bool too_many_failures() const {
    const double most =
        std::max(options_.most_failures_in_a_row, static_cast<double>(rollouts_.size()));
    return static_cast<double>(failures_in_a_row_) > most;
  }

  void give_up_retries() {
    for (const auto& [time, rollout] : retries_) {
      ++result_.failed;
      ++result_.prompts[rollouts_[static_cast<size_t>(rollout)].prompt].failures;
    }
    retries_.clear();
  }

  void stop() {
    result_.stopped = true;
    for (size_t i = 0; i < rollouts_.size(); ++i) {
      driver_.cancel(static_cast<int64_t>(i), "stopped");
    }
    driver_.poll(0.0);
  }

  const EnvironmentMix& mix_;
  RolloutDriver& driver_;
  Clock& clock_;
  const EvaluationOptions& options_;
  std::vector<Attempt> rollouts_;                    // by number
  std::multimap<double, int64_t> retries_;           // when, which rollout
  std::map<size_t, std::vector<int64_t>> unscored_;  // rollouts by prompt
  int64_t failures_in_a_row_ = 0;
  HeldOutResult result_;
};

}  // namespace

HeldOutResult sample_held_out(const EnvironmentMix& mix, RolloutDriver& driver, Clock& clock,
                              const EvaluationOptions& options,
                              const std::function<void(size_t done, size_t total)>& progress) {
  return HeldOutSampling(mix, driver, clock, options).run(progress);
}

}  // namespace leeway
