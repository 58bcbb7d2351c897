// A custom training loop built from the trainer's primitives:
//
//   ref_forward -> prox_forward -> N x forward_backward -> optim_step
//
// A small model learns to prefer one token, by GRPO with truncated importance sampling and a
// penalty that holds it near where it began. `Trainer::train_batch` does the same from a
// configuration.
//   trainer_loop [folder to save to]
#include <fmt/format.h>

#include "base/rng.h"
#include "leeway/presets.h"
#include "trainer/trainer.h"

using namespace leeway;

// Made-up completions of a prompt in which token 7 is good and every other token slightly bad.
// Rollout logprobs are the policy's own, with the noise of a less precise sampler.
std::vector<Sample> make_samples(Trainer& trainer, uint64_t seed) {
  Rng rng(seed);
  std::vector<Sample> samples(8, {.ids = {1, 2, 3}, .loss_mask = {0, 0, 0}});
  for (Sample& sample : samples) {
    sample.advantages = {0, 0, 0};  // for the prompt, which is not trained
    for (int t = 0; t < 8; ++t) {
      sample.ids.push_back(rng.uniform() < 0.3 ? 7 : static_cast<int32_t>(rng.below(32)));
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
  ModelConfig config{.family = Family::llama, .vocab_size = 32, .hidden_size = 32};
  config.intermediate_size = 64, config.num_hidden_layers = 2, config.num_attention_heads = 4;
  config.num_key_value_heads = 2, config.head_dim = 8, config.max_position_embeddings = 64;
  Parameters policy(config);
  initialise(policy, 1);
  // The penalty against the reference (the policy as it is now) makes the loss read `ref`.
  Trainer trainer(policy, Catalog().make_spec("grpo+tis", {{"ref_kl", 0.02, ""}}), {});

  for (uint64_t batch = 0; batch < 5; ++batch) {
    struct Part {
      std::vector<Sample> samples;
      PolicyStreams streams;
    } parts[2];
    double denominator = 0.0;  // over all samples of a step
    for (Part& part : parts) {
      part.samples = make_samples(trainer, 2 * batch + (&part == parts ? 0 : 1));
      part.streams.ref = trainer.ref_forward(part.samples);
      part.streams.prox = trainer.forward(part.samples);  // fixed while the policy moves on
      denominator += trainer.denominator_of_samples(part.samples);
    }
    for (int step = 0; step < 3; ++step) {
      PassResult passes;
      for (const Part& part : parts) {  // gradients accumulate
        passes.merge(trainer.forward_backward(part.samples, part.streams, denominator));
      }
      const OptimResult optim = trainer.optim_step();  // clips, steps, and zeroes the gradients
      if (!optim.failure.empty()) return fmt::print(stderr, "{}\n", optim.failure), 1;
      fmt::print("batch {} step {}  loss {:8.4f}  ratio {:.4f}  grad_norm {:.4f}\n", batch, step,
                 passes.loss, passes.metrics[Slot::ratio] / passes.metrics[Slot::tokens],
                 optim.grad_norm);
    }
  }
  if (argc > 1) trainer.save(argv[1]);  // a Hugging Face folder and the optimizer state
}
