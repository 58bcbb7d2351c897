#include "run/last_weights.h"

#include <fmt/format.h>

#include <utility>

#include "run/failure.h"

namespace leeway {

void LastWeights::set(std::shared_ptr<const PolicySnapshot> weights) {
  const bool rounded = weights->is_rounded();
  weights_ = rounded ? nullptr : std::move(weights);
  if (rounded) note_rounding();
}

std::optional<std::string> LastWeights::take_from(const Trainer& trainer,
                                                  const TrainerLearner& learner) {
  if (weights_) return std::nullopt;
  const std::optional<PolicyVersion> version = learner.version();
  if (!version) {
    why_missing_ =
        "the GPU had no room for a float32 copy of them beside training, and the next update had "
        "changed them";
    return std::nullopt;
  }
  const auto failure = failure_in([&] {
    weights_ = std::make_shared<const PolicySnapshot>(Parameters(trainer.parameters()), *version);
  });
  if (failure) why_missing_ = *failure;
  return failure;
}

void LastWeights::tell_what_is_written(int64_t step) {
  if (weights_ && weights_->version() != step) {
    progress_.note(fmt::format(
        "note: the weights that are written as the last ones are of step {}, which was trained "
        "when the run ended after step {}; the GPU had no room for a float32 copy of those of "
        "step {}",
        weights_->version(), step, step));
  }
  if (why_missing_.empty()) return;
  progress_.note(fmt::format(
      "note: the weights of step {} are not written as the last ones: {}; {}", step, why_missing_,
      checkpoints_.any()
          ? "--resume goes on from the last checkpoint"
          : "there is no checkpoint either: checkpoint.every sets how often one is written"));
}

void LastWeights::note_rounding() {
  if (std::exchange(told_of_rounding_, true)) return;
  std::string consequences;
  if (rollout_precision(run_) == Precision::float32) {
    consequences += "; rollouts are sampled with these, in float32";
  }
  if (run_.output.weights_every > 0) {
    consequences += "; output.weights_every writes these, but for the last step";
  }
  if (consequences.empty()) return;  // passes in bf16 and fp8 read no more digits
  progress_.note(
      "note: the GPU has no room for a float32 copy of the weights beside training, so that "
      "copies of them are rounded to bf16" +
      consequences + ". Checkpoints and the last weights have all digits");
}

}  // namespace leeway
