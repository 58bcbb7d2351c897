#include "run/run_warnings.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace leeway {
namespace {

constexpr size_t kSteps = 3;            // averaged over, since one batch says little
constexpr double kNearlyAll = 0.9;      // of the groups
constexpr double kMost = 0.5;           // of the rollouts
constexpr double kMaskedJump = 0.2;     // of the tokens, above that of the first step
constexpr double kMismatch = 0.1;       // k3, in nats per token, below which there is no warning
constexpr double kMismatchJump = 10.0;  // times the first step's
constexpr uint64_t kSaves = 3;          // saves that should still fit
constexpr uint64_t kLeastFree = uint64_t{64} << 20;

// The limit that has cut off most, and what to do about it.
std::string cut_text(const CutRollouts& cut) {
  if (cut.by_positions > std::max(cut.by_new_tokens, cut.by_turns)) {
    return fmt::format(
        "by the model's {} positions, which prompt and answer share; use shorter prompts or a "
        "model with more positions",
        cut.positions);
  }
  if (cut.by_turns > cut.by_new_tokens) {
    return fmt::format(
        "by orchestrator.max_turns = {}; raise it, or let the environment end episodes before",
        cut.max_turns);
  }
  return fmt::format("by rollout.max_new_tokens = {}; raise it", cut.max_new_tokens);
}

}  // namespace

std::optional<double> RunWarnings::Window::add(double value) {
  values.push_back(value);
  if (values.size() > kSteps) values.pop_front();
  if (values.size() < kSteps) return std::nullopt;
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(kSteps);
}

void RunWarnings::warn(std::vector<std::string>& out, const char* name, const std::string& text) {
  if (said_.insert(name).second) out.push_back("warning: " + text);
}

void RunWarnings::compare_with(const Metrics& first) {
  const auto known = [&](const char* name) -> std::optional<double> {
    const double value = metric_of(first, name);
    return std::isnan(value) ? std::nullopt : std::optional(value);
  };
  first_masked_ = known("is_masked");
  first_mismatch_ = known("mismatch_kl/all/mean");
}

std::vector<std::string> RunWarnings::on_step(const Metrics& metrics, const CutRollouts& cut) {
  std::vector<std::string> out;
  const auto flat = flat_.add(metric_of(metrics, "zero_advantage_groups") /
                              static_cast<double>(std::max<int64_t>(1, groups_)));
  if (flat && *flat >= kNearlyAll) {
    warn(out, "flat",
         fmt::format("{:.0f} % of the groups of the last {} steps have equal rewards and provide "
                     "no signal; use easier or harder prompts, a finer reward, a larger "
                     "orchestrator.group_size or a higher rollout.temperature",
                     100 * *flat, kSteps));
  }
  const auto truncated = truncated_.add(metric_of(metrics, "is_truncated/all"));
  if (truncated && *truncated > kMost) {
    warn(out, "truncated",
         fmt::format("{:.0f} % of the rollouts of the last {} steps were cut off, most of them {}, "
                     "or check that rollout.stop is what ends a reply",
                     100 * *truncated, kSteps, cut_text(cut)));
  }
  if (metric_of(metrics, "batch/samples") > 0 && metric_of(metrics, "batch/trained_tokens") == 0) {
    warn(out, "untrained",
         "a whole batch had no token to train on: its environment asked for every sample with "
         "\"train\": false, or with another \"temperature\" than rollout.temperature "
         "(docs/environments.md)");
  }
  const double masked = metric_of(metrics, "is_masked");
  if (!std::isnan(masked)) {
    if (!first_masked_) first_masked_ = masked;
    if (masked >= *first_masked_ + kMaskedJump) {
      warn(out, "masked",
           fmt::format("the loss masks {:.0f} % of the tokens, up from {:.0f} % in the first "
                       "step; lower trainer.learning_rate or orchestrator.max_off_policy_steps",
                       100 * masked, 100 * *first_masked_));
    }
  }
  const double mismatch = metric_of(metrics, "mismatch_kl/all/mean");
  if (!std::isnan(mismatch)) {
    if (!first_mismatch_) first_mismatch_ = mismatch;
    if (mismatch >= kMismatch && mismatch >= kMismatchJump * *first_mismatch_) {
      warn(out, "mismatch",
           fmt::format("mismatch_kl is {:.2g}, up from {:.2g} in the first step: the policy moves "
                       "away from the rollouts it trains on; lower trainer.learning_rate, "
                       "trainer.epochs or orchestrator.max_off_policy_steps",
                       mismatch, *first_mismatch_));
    }
  }
  return out;
}

std::vector<std::string> RunWarnings::on_evaluation(int64_t step, const Metrics& before,
                                                    const Metrics& now) {
  std::vector<std::string> out;
  const double low = metric_of(before, "eval/all/reward/low");
  const double high = metric_of(now, "eval/all/reward/high");
  if (high < low) {
    warn(out, "worse",
         fmt::format(
             "the held-out reward at step {} is {:.3f}, significantly below the {:.3f} at the "
             "start; lower trainer.learning_rate, or use earlier weights "
             "(output.weights_every keeps them)",
             step, metric_of(now, "eval/all/reward/mean"),
             metric_of(before, "eval/all/reward/mean")));
  }
  return out;
}

std::vector<std::string> RunWarnings::on_disk(uint64_t free_bytes) {
  std::vector<std::string> out;
  if (free_bytes < std::max(kLeastFree, kSaves * save_bytes_)) {
    warn(
        out, "disk",
        fmt::format("{:.1f} MB are free where the run is written, and a checkpoint with its "
                    "weights takes {:.1f} MB; make room, or lower checkpoint.keep_last",
                    static_cast<double>(free_bytes) / 1e6, static_cast<double>(save_bytes_) / 1e6));
  }
  return out;
}

}  // namespace leeway
