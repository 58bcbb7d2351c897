#include "cli/sft_phase.h"

#include <fmt/format.h>

#include <chrono>
#include <numeric>
#include <optional>

#include "base/rng.h"
#include "cli/devices.h"
#include "cli/policy_evaluation.h"
#include "cli/trainer_learner.h"
#include "leeway/error.h"
#include "trainer/trainer.h"

namespace leeway {
namespace {

// Demonstrations one after the other, without end: of the file, in epochs of random order, or fresh
// from the environments.
class Demonstrations {
 public:
  explicit Demonstrations(const RunSetup& setup)
      : setup_(setup), rng_(static_cast<uint64_t>(setup.config.run.seed)) {
    // Other examples than RL will see, of the same training split.
    if (setup.demonstrations.empty()) {
      mix_.emplace(make_environments(setup.config.run.environments,
                                     static_cast<uint64_t>(setup.config.run.seed) + 1));
    }
  }

  Sample next() {
    const TrainingSample demonstration = mix_ ? from_environments() : from_file();
    Sample sample;
    sample.ids = demonstration.ids;
    sample.loss_mask = demonstration.loss_mask;
    sample.advantages = {1.0f};
    return sample;
  }

 private:
  const TrainingSample& from_file() {
    if (order_.empty()) {
      order_.resize(setup_.demonstrations.size());
      std::iota(order_.begin(), order_.end(), size_t{0});
      for (size_t i = order_.size(); i > 1; --i) std::swap(order_[i - 1], order_[rng_.below(i)]);
    }
    const size_t place = order_.back();
    order_.pop_back();
    return setup_.demonstrations[place];
  }
  TrainingSample from_environments() {
    const EnvironmentMix::Draw draw = mix_->draw(drawn_++);
    const EnvironmentMix::Member& member = mix_->members()[draw.member];
    const Example example = member.environment->example(Split::train, draw.example);
    if (example.demonstration.empty()) {
      throw Error(fmt::format("sft: example {} of the environment {} has no demonstration",
                              draw.example, member.id));
    }
    return setup_.conversation->demonstration(example);
  }

  const RunSetup& setup_;
  Rng rng_;
  std::optional<EnvironmentMix> mix_;
  uint64_t drawn_ = 0;
  std::vector<size_t> order_;
};

TrainerTable trainer_table(const RunConfig& run) {
  TrainerTable table = run.trainer;
  table.max_steps = run.sft.max_steps;
  table.optimizer = run.sft.optimizer;
  table.epochs = 1;
  table.minibatches = 1;
  table.optimizer_steps = "batch";
  table.entropy_bonus = 0.0;
  return table;
}

}  // namespace

SftResult run_sft(const RunSetup& setup, const Catalog& catalog, RunFiles& files,
                  RunProgress& progress, const Interrupt& interrupt) {
  const SftTable& table = setup.config.run.sft;
  const auto begin = std::chrono::steady_clock::now();
  // Cross entropy on the demonstrations' tokens: -log pi with an advantage of 1.
  Trainer trainer(setup.weights, catalog.make_spec("reinforce", {}),
                  trainer_table(setup.config.run), training_backend(setup.config.run));
  Demonstrations demonstrations(setup);
  SftResult result{setup.weights};
  double reward = -1.0;
  progress.begin();
  while (result.steps < table.max_steps) {
    if (interrupt.asked()) {
      result.stopped = true;
      break;
    }
    std::vector<Sample> batch;
    for (int64_t i = 0; i < table.batch_size; ++i) batch.push_back(demonstrations.next());
    const BatchResult trained = trainer.train_batch(batch);
    if (!trained.failure.empty()) {
      result.failure = fmt::format("sft step {}: {}", result.steps + 1, trained.failure);
      break;
    }
    ++result.steps;
    result.loss = trained.loss;
    result.tokens += trained.passes.tokens;
    MetricList metrics = {{"loss", trained.loss},
                          {"grad_norm", trained.grad_norm},
                          {"learning_rate", trained.learning_rate}};
    const int64_t since = result.steps - table.check_from;
    const bool look = table.stop_at_reward > 0.0 && since >= 0 && since % table.check_every == 0;
    if (look) {
      EvalTable check;
      check.prompts = table.check_prompts;
      check.greedy = false;
      reward = evaluate_policy(setup, trainer.parameters(), check, 0, true)
                   .metric("eval/all/reward/mean");
      metrics.emplace_back("reward", reward);
    }
    files.write_sft(result.steps, metrics);
    progress.step(result.steps, table.max_steps,
                  fmt::format("sft loss {:.3f}{}", trained.loss,
                              reward < 0 ? "" : fmt::format("  reward {:.3f}", reward)));
    if (look && reward >= table.stop_at_reward) break;
  }
  result.weights = trainer.parameters();
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  progress.note(fmt::format("sft: {} steps in {:.1f} s, loss {:.3f}{}", result.steps,
                            result.seconds, result.loss,
                            reward < 0 ? "" : fmt::format(", reward {:.3f}", reward)));
  return result;
}

}  // namespace leeway
