#include "run/sft_phase.h"

#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <memory>
#include <numeric>
#include <optional>

#include "base/checked_files.h"
#include "base/files.h"
#include "base/rng.h"
#include "leeway/error.h"
#include "run/devices.h"
#include "run/durations.h"
#include "run/policy_card.h"
#include "run/trainer_learner.h"
#include "trainer/state_files.h"
#include "trainer/trainer.h"

namespace leeway {
namespace {

// Demonstrations one after the other, without end: of the file, in epochs of random order, or fresh
// from the environments. The n-th depends on n and the seed alone, so that their number is all that
// a checkpoint has to know.
class Demonstrations {
 public:
  // `drawn` were drawn before.
  Demonstrations(const RunSetup& setup, uint64_t drawn)
      : setup_(setup), rng_(static_cast<uint64_t>(setup.config.run.seed)), drawn_(drawn) {
    // Other examples than RL will see, of the same training split.
    if (setup.demonstrations.empty()) {
      mix_.emplace(make_environments(setup.config.run.environments,
                                     static_cast<uint64_t>(setup.config.run.seed) + 1));
    } else {
      for (uint64_t n = 0; n < drawn; ++n) from_file();
    }
  }

  Sample next() {
    Sample sample = mix_ ? from_environments() : from_file();
    sample.advantages = {1.0f};
    return sample;
  }

 private:
  const Sample& from_file() {
    if (order_.empty()) {
      order_.resize(setup_.demonstrations.size());
      std::iota(order_.begin(), order_.end(), size_t{0});
      for (size_t i = order_.size(); i > 1; --i) std::swap(order_[i - 1], order_[rng_.below(i)]);
    }
    const size_t place = order_.back();
    order_.pop_back();
    return setup_.demonstrations[place];
  }
  Sample from_environments() {
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
  uint64_t drawn_;
  std::vector<size_t> order_;
};

TrainerTable trainer_table(const RunConfig& run) {
  TrainerTable table = run.trainer;
  table.max_steps = run.sft.max_steps;
  table.optimizer = run.sft.optimizer;
  table.epochs = 1;
  table.minibatches = 1;
  table.optimizer_steps = OptimizerSteps::batch;
  table.entropy_bonus = 0.0;
  return table;
}

// A checkpoint that cannot be written is reported and left out; the one before is still there.
void save_checkpoint(const SftRun& run, const Trainer& trainer, const SftState& state) {
  run.files.sync();
  try {
    const TrainingState trained = trainer.state();
    if (const std::string bad = not_finite_text(trained); !bad.empty()) throw Error(bad);
    refuse_full_disk(run.files.path("checkpoints"),
                     3 * sizeof(float) * static_cast<uint64_t>(trained.policy.count()));
    run.checkpoints.save(Phase::sft, state.steps, [&](const std::string& folder) {
      FileSums sums = save_state(folder, trained.policy, trained.optimizer);
      sums["leeway.json"] = write_policy_card(folder, run.setup.card);
      sums["sft.json"] = write_file_atomically(folder + "/sft.json", sft_state_json(state));
      return sums;
    });
  } catch (const Error& error) {
    run.progress.note(
        fmt::format("warning: no checkpoint of supervised step {}: {}; the one before stays, and "
                    "the run goes on",
                    state.steps, error.what()));
  }
}

}  // namespace

void check_sft_checkpoint(const Checkpoint& checkpoint) {
  const std::string name = checkpoint.folder + "/sft.json";
  parse_sft_state(name, read_file(name));
  load_state(checkpoint.folder);
}

SftResult run_sft(const SftRun& run, const Checkpoint* from) {
  const RunSetup& setup = run.setup;
  const SftTable& table = setup.config.run.sft;
  const auto begin = std::chrono::steady_clock::now();
  // Cross entropy on the demonstrations' tokens: -log pi with an advantage of 1.
  Trainer trainer(setup.weights, run.catalog.make_spec("reinforce", {}),
                  trainer_table(setup.config.run), training_backend(setup.config.run));
  SftResult result{setup.weights};
  SftState& state = result.state;
  if (from != nullptr) {
    const std::string name = from->folder + "/sft.json";
    state = parse_sft_state(name, read_file(name));
    trainer.load(from->folder);
  }
  const double seconds_before = state.seconds;
  const auto since_begin = [&] {
    return seconds_before +
           std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  int64_t saved = from != nullptr ? state.steps : -1;  // the step of the last checkpoint
  Demonstrations demonstrations(setup, static_cast<uint64_t>(state.steps * table.batch_size));
  run.progress.begin_steps(state.steps);
  while (state.steps < table.max_steps && !state.reached_reward) {
    if (run.should_stop()) {
      result.stopped = true;
      break;
    }
    std::vector<Sample> batch;
    for (int64_t i = 0; i < table.batch_size; ++i) batch.push_back(demonstrations.next());
    const BatchResult trained = trainer.train_batch(batch);
    if (!trained.failure.empty()) {
      result.failure = fmt::format("sft step {}: {}", state.steps + 1, trained.failure);
      break;
    }
    ++state.steps;
    state.loss = trained.loss;
    state.tokens += trained.passes.tokens;
    Metrics metrics = {{"loss", trained.loss},
                       {"grad_norm", trained.grad_norm},
                       {"learning_rate", trained.learning_rate}};
    const int64_t since = state.steps - table.check_from;
    const bool look = table.stop_at_reward > 0.0 && since >= 0 && since % table.check_every == 0;
    if (look) {
      EvalTable check;
      check.prompts = table.check_prompts;
      check.greedy = false;
      EvaluationEvents events;
      events.should_stop = run.should_stop;
      const EvaluationResult evaluated = run.evaluator.evaluate(
          trainer.snapshot(static_cast<PolicyVersion>(state.steps)), check, events);
      if (evaluated.failed > 0) run.progress.note("sft check: " + failures_text(evaluated));
      const double mean = evaluated.metric("eval/all/reward/mean");
      if (!std::isnan(mean)) {
        state.reward = mean;
        metrics.emplace_back("reward", state.reward);
        state.reached_reward = state.reward >= table.stop_at_reward;
      }
    }
    run.files.write_sft(state.steps, metrics);
    run.progress.step(
        state.steps, table.max_steps,
        fmt::format("sft loss {:.3f}{}", trained.loss,
                    state.reward < 0 ? "" : fmt::format("  reward {:.3f}", state.reward)));
    state.seconds = since_begin();
    if (run.checkpoints.wanted(state.steps)) {
      save_checkpoint(run, trainer, state);
      saved = state.steps;
    }
  }
  state.seconds = since_begin();
  if (const std::string bad = not_finite_text(trainer.parameters()); bad.empty()) {
    result.weights = trainer.parameters();
  } else {
    const std::string said = fmt::format("the weights are not finite: {}", bad);
    result.failure = result.failure.empty() ? fmt::format("sft step {}: {}", state.steps, said)
                                            : result.failure + "; " + said;
  }
  if (saved != state.steps && result.failure.empty()) save_checkpoint(run, trainer, state);
  run.progress.note(fmt::format(
      "sft: {} steps in {}, loss {:.3f}{}", state.steps, duration_text(state.seconds), state.loss,
      state.reward < 0 ? "" : fmt::format(", reward {:.3f}", state.reward)));
  return result;
}

}  // namespace leeway
