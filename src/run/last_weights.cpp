#include "run/last_weights.h"

#include <fmt/format.h>

#include <utility>

namespace leeway {

void LastWeights::set(std::shared_ptr<const PolicySnapshot> weights) {
  if (weights->is_rounded()) note_rounding();
  weights_ = weights->is_rounded() ? nullptr : std::move(weights);
}

void LastWeights::take_from(const Trainer& trainer, const TrainerLearner& learner) {
  if (weights_) return;
  const std::optional<PolicyVersion> version = learner.version();
  changed_ = !version;
  if (changed_) return;
  weights_ = std::make_shared<const PolicySnapshot>(Parameters(trainer.parameters()), *version);
}

void LastWeights::tell_if_changed(int64_t step) {
  if (weights_ && weights_->version() != step) {
    progress_.note(fmt::format(
        "note: the weights that are written as the last ones are of step {}, which was trained "
        "when the run ended after step {}; the GPU had no room for a float32 copy of those of "
        "step {}",
        weights_->version(), step, step));
  }
  if (!changed_) return;
  progress_.note(fmt::format(
      "note: the weights of step {} are not written as the last ones: the GPU had no room for a "
      "float32 copy of them beside training, and the next update had changed them; {}",
      step,
      checkpoints_.any()
          ? "--resume goes on from the last checkpoint"
          : "there is no checkpoint either: checkpoint.every sets how often one is written"));
}

void LastWeights::note_rounding() {
  if (std::exchange(noted_, true)) return;
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
