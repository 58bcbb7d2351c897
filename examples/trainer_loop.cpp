// A training loop of one's own, from the trainer's primitives:
//
//   ref_forward -> prox_forward -> N x forward_backward -> optim_step
//
// A small model from scratch learns to prefer one token. Its loss is GRPO with truncated importance
// sampling and a penalty that holds the policy near where it began. `Trainer::train_batch` does the
// same as the body of this loop, from a run's configuration.
//
//   trainer_loop [folder to save to]

#include <fmt/format.h>

#include "base/rng.h"
#include "leeway/presets.h"
#include "trainer/trainer.h"

using namespace leeway;

// Completions of a short prompt, from nowhere but a random generator. `advantages` says that token
// 7 is good and every other one a little bad. Rollout log-probabilities come from whatever sampled
// them; here it is the policy itself, with a little noise for a sampler of lower precision.
std::vector<Sample> make_samples(Trainer& trainer, uint64_t seed) {
  Rng rng(seed);
  std::vector<Sample> samples(16);
  for (Sample& sample : samples) {
    sample.ids = {1, 2, 3};         // the prompt
    sample.loss_mask = {0, 0, 0};   // is not trained
    sample.advantages = {0, 0, 0};  // so that these are not looked at
    for (int t = 0; t < 8; ++t) {
      const bool good = rng.uniform() < 0.3;
      sample.ids.push_back(good ? 7 : static_cast<int32_t>(rng.below(32)));
      sample.loss_mask.push_back(1);
      sample.advantages.push_back(sample.ids.back() == 7 ? 1.0f : -0.2f);
    }
  }
  const TokenValues logprobs = trainer.forward(samples);
  for (size_t i = 0; i < samples.size(); ++i) {
    samples[i].rollout = logprobs[i];
    for (float& value : samples[i].rollout) value += static_cast<float>(0.02 * rng.normal());
  }
  return samples;
}

int main(int argc, char** argv) {
  ModelConfig config;
  config.family = Family::llama;
  config.vocab_size = 32;
  config.hidden_size = 32, config.intermediate_size = 64, config.num_hidden_layers = 2;
  config.num_attention_heads = 4, config.num_key_value_heads = 2, config.head_dim = 8;
  config.max_position_embeddings = 64;
  Parameters policy(config);
  initialise(policy, 1);

  // The penalty against the reference (the policy as it is now) is what makes the loss read `ref`.
  const LossSpec spec = Catalog().make_spec("grpo+tis", {{"ref_kl", 0.02, ""}});
  TrainerTable table;
  table.optimizer.learning_rate = 1e-3;
  Trainer trainer(policy, spec, table);

  for (uint64_t batch = 0; batch < 5; ++batch) {
    const std::vector<Sample> samples = make_samples(trainer, batch);
    PolicyStreams streams;
    streams.ref = trainer.ref_forward(samples);
    // Before the first step, prox is the policy itself. It stays while the policy moves: after the
    // first step of a batch, pi/prox is no longer one and the clip has something to do.
    streams.prox = trainer.forward(samples);

    for (int step = 0; step < 3; ++step) {
      // Gradients add up over calls, so a step's samples may come in parts: the denominator is that
      // of all of them. Streams hold one list per sample and are cut alike.
      const double denominator = trainer.denominator_of_samples(samples);
      const size_t half = samples.size() / 2;
      PassResult passes;
      for (const size_t first : {size_t{0}, half}) {
        const auto part = [&](const TokenValues& values) {
          return TokenValues(values.begin() + static_cast<std::ptrdiff_t>(first),
                             values.begin() + static_cast<std::ptrdiff_t>(first + half));
        };
        passes.merge(trainer.forward_backward(std::span(samples).subspan(first, half),
                                              {part(streams.prox), part(streams.ref), {}},
                                              denominator));
      }
      // Clips, steps and sets gradients to zero. After a pass that was not finite it changes no
      // weight.
      const OptimResult optim = trainer.optim_step();
      if (!optim.failure.empty()) {
        fmt::print(stderr, "batch {} step {}: {}\n", batch, step, optim.failure);
        return 1;
      }
      const double ratio = passes.metrics[Slot::ratio] / passes.metrics[Slot::tokens];
      fmt::print("batch {} step {}  loss {:8.4f}  ratio {:.4f}  grad_norm {:.4f}\n", batch, step,
                 passes.loss, ratio, optim.grad_norm);
    }
  }
  if (argc > 1) trainer.save(argv[1]);  // a Hugging Face folder, and the optimizer's state
}
